//! Replacements of characters: `precompiled_charsmap` of a SentencePiece model.
//!
//! Own code: `spm_precompiled` takes the shortest replacement instead of the longest, and panics on a damaged map.

/// A double array (Aoe 1989, in the form of darts-clone) of what is replaced, and the replacements behind each other, each
/// ended by a zero byte.
#[derive(Debug, Default)]
pub(super) struct Charsmap {
    units: Vec<u32>,
    replacements: String,
}

impl Charsmap {
    /// Reads the file's form: bytes of the array, the array, the replacements. `None` when it is damaged.
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

    /// Whether nothing is replaced.
    pub(super) fn is_empty(&self) -> bool {
        self.units.is_empty()
    }

    /// The longest start of `text` that is replaced: its length, and by what.
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

/// The byte that leads to a unit; of one that holds a value, none.
fn label(unit: u32) -> u32 {
    unit & 0x8000_00ff
}

/// How far a unit's children lie from it.
fn offset(unit: u32) -> usize {
    ((unit >> 10) as usize) << ((unit & 1 << 9) >> 6)
}
