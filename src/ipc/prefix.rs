use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::error::IpcError;

/// The directory of POSIX shared memory on Linux.
pub(crate) const SHM_DIR: &str = "/dev/shm";

/// The prefix of all shared-memory names of one rank, such as `prefix0_`.
///
/// Ranks of one node need different prefixes. A prefix has 1 to 64 letters, digits, `_`, `-` or `.`, not starting with `.`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Prefix(String);

impl Prefix {
    const MAX_LEN: usize = 64;

    /// The prefix as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The file that holds the region `name`.
    pub(crate) fn path(&self, name: &str) -> Result<PathBuf, IpcError> {
        check(name, 128)?;
        Ok(Path::new(SHM_DIR).join(format!("{}{name}", self.0)))
    }
}

impl FromStr for Prefix {
    type Err = IpcError;

    fn from_str(text: &str) -> Result<Self, IpcError> {
        check(text, Self::MAX_LEN)?;
        if text.starts_with('.') {
            return Err(IpcError::BadName { text: text.to_owned(), max: Self::MAX_LEN });
        }
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

fn check(text: &str, max: usize) -> Result<(), IpcError> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.');
    if text.is_empty() || text.len() > max || !text.bytes().all(allowed) {
        return Err(IpcError::BadName { text: text.to_owned(), max });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_that_could_leave_dev_shm_is_refused() {
        for text in ["", "a/b", "..", ".hidden", "a b", "ä", "a\0"] {
            assert!(text.parse::<Prefix>().is_err(), "{text:?} was accepted");
        }
        assert!("x".repeat(65).parse::<Prefix>().is_err());
        assert_eq!("prefix0_".parse::<Prefix>().unwrap().as_str(), "prefix0_");
    }
}
