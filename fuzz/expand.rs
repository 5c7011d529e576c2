//! Expands short inputs to long ones, so that mutations reach code with quadratic time or disproportionate memory.

/// Bytes that begin a repeated part, with the size that it is expanded to. No text protocol uses these bytes.
const BEGINS: [(u8, usize); 2] = [(1, 16 << 10), (4, 1 << 20)];
const END: u8 = 2;
/// Replaced by the number of the repetition.
const NUMBER: u8 = 3;

/// Maximum size of an expanded input.
const MAX_BYTES: usize = 1 << 20;

/// Repeats each part between bytes 1 and 2 up to 16 KiB, and each part between bytes 4 and 2 up to 1 MiB. Byte 3 is replaced by the
/// number of the repetition.
pub fn expand(input: &[u8]) -> Vec<u8> {
    let mut text = Vec::with_capacity(input.len());
    let mut rest = input;
    let begin_of = |byte: u8| BEGINS.into_iter().find(|&(begin, _)| begin == byte);
    while let Some((at, size)) = rest.iter().enumerate().find_map(|(at, &byte)| Some((at, begin_of(byte)?.1))) {
        let Some(len) = rest[at..].iter().position(|&byte| byte == END) else { break };
        text.extend_from_slice(&rest[..at]);
        let part = &rest[at + 1..at + len];
        rest = &rest[at + len + 1..];
        let end = (text.len() + size).min(MAX_BYTES.saturating_sub(rest.len() + part.len()));
        let mut number = 0;
        while !part.is_empty() && text.len() < end {
            for &byte in part {
                match byte {
                    NUMBER => text.extend_from_slice(number.to_string().as_bytes()),
                    byte => text.push(byte),
                }
            }
            number += 1;
        }
    }
    text.extend_from_slice(rest);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_repeated_with_its_number() {
        let text = expand(b"[\x01\x03,\x02end]");
        assert!(text.starts_with(b"[0,1,2,") && text.ends_with(b",end]"), "{}", String::from_utf8_lossy(&text));
        assert!((16 << 10..17 << 10).contains(&text.len()), "{}", text.len());
        assert_eq!(expand(b"\x04a\x02").len(), MAX_BYTES - 1);
        assert_eq!(expand(b"a\x01b"), b"a\x01b");
        assert_eq!(expand(b"a\x01\x02b"), b"ab");
    }
}
