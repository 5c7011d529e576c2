//! Replacements of characters: `precompiled_charsmap` of a SentencePiece model.
//!
//! Own code: `spm_precompiled` takes the shortest replacement instead of the longest, and panics on a damaged map.

/// A double-array trie (Aoe 1989, in the format of darts-clone) of the strings to replace, and the concatenated replacements, each
/// terminated by a zero byte.
#[derive(Debug, Default)]
pub(super) struct Charsmap {
    units: Vec<u32>,
    replacements: String,
}

impl Charsmap {
    /// Reads the format of the file: length of the array in bytes, array, replacements. `None` if it is damaged.
    pub(super) fn read(bytes: &[u8]) -> Option<Self> {
        if bytes.is_empty() {
            return Some(Self::default());
        }
        let (len, rest) = bytes.split_first_chunk::<4>()?;
        let (units, replacements) = rest.split_at_checked(u32::from_le_bytes(*len) as usize)?;
        let units = units.chunks_exact(4).map(|unit| u32::from_le_bytes([unit[0], unit[1], unit[2], unit[3]]));
        let replacements = std::str::from_utf8(replacements).ok()?.to_owned();
        Some(Self { units: units.collect(), replacements })
    }

    /// Whether the map replaces nothing.
    pub(super) fn is_empty(&self) -> bool {
        self.units.is_empty()
    }

    /// The longest prefix of `text` that the map replaces: its length and its replacement.
    pub(super) fn longest(&self, text: &[u8]) -> Option<(usize, &str)> {
        let (len, offset) = self.longest_value(text)?;
        let rest = self.replacements.get(offset..)?;
        Some((len, rest.split('\0').next().unwrap_or(rest)))
    }

    fn longest_value(&self, text: &[u8]) -> Option<(usize, usize)> {
        let mut found = None;
        let mut place = offset(*self.units.first()?);
        for (index, &byte) in text.iter().enumerate() {
            let Some(&unit) = self.units.get(place ^ usize::from(byte)) else { break };
            if label(unit) != u32::from(byte) {
                break;
            }
            place ^= usize::from(byte) ^ offset(unit);
            if has_value(unit) {
                let Some(value) = self.units.get(place) else { break };
                found = Some((index + 1, (value & 0x7fff_ffff) as usize));
            }
        }
        found
    }
}

fn has_value(unit: u32) -> bool {
    unit >> 8 & 1 == 1
}

/// The byte of the edge to a unit; no byte for a unit that holds a value.
fn label(unit: u32) -> u32 {
    unit & 0x8000_00ff
}

/// Distance from a unit to its children.
fn offset(unit: u32) -> usize {
    ((unit >> 10) as usize) << ((unit & 1 << 9) >> 6)
}
