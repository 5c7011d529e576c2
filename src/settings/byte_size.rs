//! A number of bytes on command lines.

use std::fmt;
use std::str::FromStr;

/// A number of bytes, written in digits alone or with a unit: `16GiB`, `16G` and `16384M` are the same, and `16GB` is 16 000 000 000.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ByteSize(pub u64);

/// Prefixes of units, each 1024, or 1000, times the one before.
const PREFIXES: [char; 4] = ['K', 'M', 'G', 'T'];

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("the size is `{text}`, expected a number of bytes, or one with a unit such as `16GiB`");
        let num_digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (number, unit) = text.split_at(num_digits);
        let number: u64 = number.parse().map_err(|_| wrong())?;
        let unit = unit.trim_start().to_ascii_uppercase();
        let mut letters = unit.chars();
        let power = match letters.next() {
            None | Some('B') => 0,
            Some(prefix) => 1 + PREFIXES.iter().position(|&it| it == prefix).ok_or_else(wrong)? as u32,
        };
        let base: u64 = match (power, letters.as_str()) {
            (_, "") | (1.., "IB" | "I") => 1024,
            (1.., "B") => 1000,
            _ => return Err(wrong()),
        };
        base.checked_pow(power).and_then(|unit| number.checked_mul(unit)).map(Self).ok_or_else(wrong)
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_the_usual_units() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("4096B", 4096),
            ("16GiB", 16 << 30),
            ("16G", 16 << 30),
            ("16 gib", 16 << 30),
            ("16384M", 16 << 30),
            ("3Ki", 3072),
            ("16GB", 16_000_000_000),
            ("2T", 2 << 40),
        ] {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
        assert_eq!(ByteSize(1 << 30).to_string().parse(), Ok(ByteSize(1 << 30)));
    }

    #[test]
    fn other_texts_are_refused_with_what_is_expected() {
        for text in ["", "G", "-1", "1.5G", "16X", "16GBB", "16BB", "99999999999999999999", "99999999T"] {
            assert!(text.parse::<ByteSize>().unwrap_err().contains("such as `16GiB`"), "{text}");
        }
    }
}
