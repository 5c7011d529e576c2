//! Salts of the prefix cache: requests share cached prefixes with those of the same salt only.

/// Longest salt in characters.
pub const MAX_CACHE_SALT_CHARS: usize = 1024;

/// The engine's number of a salt; `None` if it is empty or longer than [`MAX_CACHE_SALT_CHARS`].
pub fn cache_salt(salt: &str) -> Option<u64> {
    if salt.is_empty() || salt.chars().count() > MAX_CACHE_SALT_CHARS {
        return None;
    }
    // Others must not find a salt with the same number, so the digest is a cryptographic one.
    let digest = ring::digest::digest(&ring::digest::SHA256, salt.as_bytes());
    let (first, _) = digest.as_ref().split_first_chunk::<8>().expect("a digest has 32 bytes");
    Some(u64::from_le_bytes(*first))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_salts_have_equal_numbers_and_others_have_others() {
        assert_eq!(cache_salt("a"), cache_salt("a"));
        assert_ne!(cache_salt("a"), cache_salt("b"));
        assert_eq!(cache_salt(""), None);
        assert!(cache_salt(&"é".repeat(MAX_CACHE_SALT_CHARS)).is_some());
        assert_eq!(cache_salt(&"é".repeat(MAX_CACHE_SALT_CHARS + 1)), None);
    }
}
