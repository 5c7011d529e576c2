//! The hashes by which a hub names contents: SHA-256 for large files, git's SHA-1 of a blob for the others.

use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256};

/// The hash of a file, in hexadecimal digits. It is also the name of its blob in the cache.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Digest {
    /// SHA-256 of the content.
    Sha256(String),
    /// SHA-1 of `blob SIZE\0` and the content.
    GitBlob(String),
}

impl Digest {
    /// The hash that `text` writes; `None` if it is none of both kinds.
    pub(crate) fn of_hex(text: &str) -> Option<Self> {
        let is_hex = text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        match text.len() {
            64 if is_hex => Some(Self::Sha256(text.to_owned())),
            40 if is_hex => Some(Self::GitBlob(text.to_owned())),
            _ => None,
        }
    }

    pub(crate) fn hex(&self) -> &str {
        match self {
            Self::Sha256(hex) | Self::GitBlob(hex) => hex,
        }
    }

    pub(crate) fn algorithm(&self) -> &'static str {
        match self {
            Self::Sha256(_) => "SHA-256",
            Self::GitBlob(_) => "git hash",
        }
    }

    /// A computation of the same kind of hash, for a content of `size` bytes.
    pub(crate) fn start(&self, size: u64) -> Context {
        match self {
            Self::Sha256(_) => Context::new(&SHA256),
            Self::GitBlob(_) => {
                let mut context = Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
                context.update(format!("blob {size}\0").as_bytes());
                context
            }
        }
    }
}

/// The result of a computation.
pub(crate) fn hex_of(context: &Context) -> String {
    context.clone().finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_those_of_git_and_of_sha256sum() {
        // `printf hello | git hash-object --stdin` and `printf hello | sha256sum`.
        for hex in [
            "b6fc4c620b67d95f953a5c1c1230aaab5db5a1b0",
            "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824",
        ] {
            let digest = Digest::of_hex(hex).unwrap();
            let mut context = digest.start(5);
            context.update(b"hello");
            assert_eq!((hex_of(&context).as_str(), digest.hex()), (hex, hex));
        }
        assert!(["", "xyz", &"g".repeat(40), &"a".repeat(41)].iter().all(|text| Digest::of_hex(text).is_none()));
    }
}
