//! base64 (RFC 4648, section 4) of files and handles in JSON bodies.

use base64::Engine as _;
use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};

/// Padding may be absent, and bits of the last digit that hold no data may be set.
const ENGINE: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new()
        .with_decode_padding_mode(DecodePaddingMode::RequireNone)
        .with_decode_allow_trailing_bits(true),
);

/// Decodes `text`; `None` if it is not base64.
pub fn decode(text: &str) -> Option<Vec<u8>> {
    ENGINE.decode(text.trim_end_matches('=')).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_vectors_of_the_rfc_decode() {
        for (text, plain) in [("", ""), ("Zg==", "f"), ("Zm8=", "fo"), ("Zm9v", "foo"), ("Zm9vYmFy", "foobar")] {
            assert_eq!(decode(text).unwrap(), plain.as_bytes());
        }
        assert_eq!(decode("Zm9v!"), None);
        assert_eq!(decode("Zm9vY"), None);
    }

    #[test]
    fn padding_and_unused_bits_are_free() {
        for text in ["Zg", "Zg=", "Zg====", "Zh=="] {
            assert_eq!(decode(text).unwrap(), b"f", "{text}");
        }
        assert_eq!(decode("Zg==Zg=="), None, "padding is at the end alone");
    }
}
