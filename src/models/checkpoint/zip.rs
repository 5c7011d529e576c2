//! Zip archives with uncompressed entries, as `torch.save` writes them (PKWARE APPNOTE 6.3, sections 4.3 and 4.5.3).
//!
//! The crate `zip` copies what it reads; weights must stay mapped, so only the position of each entry is needed.

use std::collections::HashMap;

const END: [u8; 4] = *b"PK\x05\x06";
const END_64_LOCATOR: [u8; 4] = *b"PK\x06\x07";
const END_64: [u8; 4] = *b"PK\x06\x06";
const CENTRAL: [u8; 4] = *b"PK\x01\x02";
const LOCAL: [u8; 4] = *b"PK\x03\x04";

/// The end record followed by the longest possible comment.
const MAX_END_BYTES: usize = 22 + 0xffff;

/// The name and bytes of every entry.
///
/// # Errors
/// Returns a message if the archive is damaged or an entry is compressed.
pub(super) fn entries(data: &'static [u8]) -> Result<HashMap<String, &'static [u8]>, String> {
    let (mut at, count) = central_directory(data)?;
    let mut entries = HashMap::new();
    for _ in 0..count {
        let record = at;
        if bytes(data, record, 4)? != CENTRAL {
            return Err(format!("its directory is damaged at byte {record}"));
        }
        let name_bytes = usize::from(u16_at(data, record + 28)?);
        let extra_bytes = usize::from(u16_at(data, record + 30)?);
        let comment_bytes = usize::from(u16_at(data, record + 32)?);
        let name = String::from_utf8_lossy(bytes(data, record + 46, name_bytes)?).into_owned();
        if u16_at(data, record + 10)? != 0 {
            return Err(format!("its entry `{name}` is compressed; save the file with `torch.save` again"));
        }
        let mut zip64 = Zip64Fields::find(bytes(data, record + 46 + name_bytes, extra_bytes)?);
        // The order of the 64-bit fields is: size, compressed size, offset of the entry.
        zip64.or_next(u32_at(data, record + 24)?)?;
        let stored = zip64.or_next(u32_at(data, record + 20)?)?;
        let local = zip64.or_next(u32_at(data, record + 42)?)?;
        entries.insert(name, contents(data, local, stored)?);
        at = record + 46 + name_bytes + extra_bytes + comment_bytes;
    }
    Ok(entries)
}

/// Offset of the central directory, and its number of entries.
fn central_directory(data: &[u8]) -> Result<(usize, u64), String> {
    let tail = data.len().saturating_sub(MAX_END_BYTES);
    let end = data[tail..].windows(4).rposition(|window| window == END).map(|at| tail + at);
    let end = end.ok_or("its end is missing: the file is truncated or no zip archive; copy it again")?;
    if let Some(locator) = end.checked_sub(20)
        && bytes(data, locator, 4)? == END_64_LOCATOR
    {
        let end = u64_at(data, locator + 8)? as usize;
        if bytes(data, end, 4)? != END_64 {
            return Err(format!("its 64-bit end record is damaged at byte {end}"));
        }
        return Ok((u64_at(data, end.saturating_add(48))? as usize, u64_at(data, end + 32)?));
    }
    Ok((u32_at(data, end + 16)? as usize, u64::from(u16_at(data, end + 10)?)))
}

fn contents(data: &'static [u8], local: u64, stored: u64) -> Result<&'static [u8], String> {
    let local = local as usize;
    if bytes(data, local, 4)? != LOCAL {
        return Err(format!("its entry is damaged at byte {local}"));
    }
    let names = usize::from(u16_at(data, local + 26)?) + usize::from(u16_at(data, local + 28)?);
    bytes(data, local + 30 + names, stored as usize)
}

/// The remaining zip64 fields of an entry.
struct Zip64Fields<'a>(&'a [u8]);

impl<'a> Zip64Fields<'a> {
    /// Finds the extra block with the zip64 fields; it is empty if no field needs one.
    fn find(mut extra: &'a [u8]) -> Self {
        while let [kind0, kind1, len0, len1, rest @ ..] = extra {
            let len = usize::from(u16::from_le_bytes([*len0, *len1])).min(rest.len());
            if u16::from_le_bytes([*kind0, *kind1]) == 1 {
                return Self(&rest[..len]);
            }
            extra = &rest[len..];
        }
        Self(&[])
    }

    /// `short`, or the next 64-bit field if all bits of `short` are set.
    fn or_next(&mut self, short: u32) -> Result<u64, String> {
        if short != u32::MAX {
            return Ok(short.into());
        }
        let (zip64, rest) = self.0.split_first_chunk::<8>().ok_or("an entry lacks its 64-bit size")?;
        self.0 = rest;
        Ok(u64::from_le_bytes(*zip64))
    }
}

fn bytes(data: &[u8], at: usize, len: usize) -> Result<&[u8], String> {
    at.checked_add(len).and_then(|end| data.get(at..end)).ok_or_else(|| {
        format!("it is truncated: {len} bytes at {at} are beyond its {}; copy the file again", data.len())
    })
}

fn u16_at(data: &[u8], at: usize) -> Result<u16, String> {
    Ok(u16::from_le_bytes(bytes(data, at, 2)?.try_into().expect("two bytes")))
}

fn u32_at(data: &[u8], at: usize) -> Result<u32, String> {
    Ok(u32::from_le_bytes(bytes(data, at, 4)?.try_into().expect("four bytes")))
}

fn u64_at(data: &[u8], at: usize) -> Result<u64, String> {
    Ok(u64::from_le_bytes(bytes(data, at, 8)?.try_into().expect("eight bytes")))
}
