//! Content codings of HTTP: gzip and deflate.

use std::io::{Read, Write};

use bytes::Bytes;
use flate2::Compression;
use flate2::read::{DeflateDecoder, GzDecoder, ZlibDecoder};
use flate2::write::{GzEncoder, ZlibEncoder};
use serving::{ErrorKind, InferError};

use crate::transport::budget::Charge;

/// A content coding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Coding {
    /// RFC 1952.
    Gzip,
    /// RFC 1950; raw RFC 1951 is read too, as some clients send it.
    Deflate,
}

/// Why a packed body was not unpacked.
#[derive(Debug)]
pub enum Unreadable {
    /// It is not in its coding.
    NotPacked(Coding, std::io::Error),
    /// It has more bytes than these.
    TooLarge(usize),
    /// Other requests hold the memory.
    NoRoom(InferError),
}

impl From<Unreadable> for InferError {
    fn from(why: Unreadable) -> Self {
        match why {
            Unreadable::NotPacked(coding, error) => {
                InferError::invalid(format!("request body is not {}: {error}", coding.name()))
            }
            Unreadable::TooLarge(limit) => {
                InferError::invalid(format!("request body unpacks to more than the limit of {limit} bytes"))
            }
            Unreadable::NoRoom(error) => error,
        }
    }
}

/// Bytes that are unpacked before they are paid for.
const STEP_BYTES: u64 = 256 << 10;

/// Entries of an `Accept-Encoding` that are looked at.
const MAX_ENTRIES: usize = 64;

impl Coding {
    /// The name in headers.
    pub fn name(self) -> &'static str {
        match self {
            Coding::Gzip => "gzip",
            Coding::Deflate => "deflate",
        }
    }

    /// The coding that a `Content-Encoding` names; `None` for none.
    ///
    /// # Errors
    /// When it is another one.
    pub fn of_content(header: &str) -> Result<Option<Coding>, InferError> {
        match header.trim().to_ascii_lowercase().as_str() {
            "" | "identity" => Ok(None),
            "gzip" => Ok(Some(Coding::Gzip)),
            "deflate" => Ok(Some(Coding::Deflate)),
            other => Err(InferError::new(
                ErrorKind::Unsupported,
                format!("Unsupported compression type: '{other}', expected gzip or deflate"),
            )),
        }
    }

    /// The coding of ours that an `Accept-Encoding` likes best; of equals, the first.
    ///
    /// # Errors
    /// When it lists more than any client needs.
    pub fn accepted(header: &str) -> Result<Option<Coding>, InferError> {
        if header.split(',').count() > MAX_ENTRIES {
            return Err(InferError::invalid(format!("Accept-Encoding lists more than {MAX_ENTRIES} codings")));
        }
        let mut best = (0.0, None);
        for entry in header.split(',') {
            let (name, parameters) = entry.split_once(';').unwrap_or((entry, ""));
            let quality = parameters.trim().strip_prefix("q=").map_or(Ok(1.0), str::parse::<f32>).unwrap_or(0.0);
            let coding = match name.trim().to_ascii_lowercase().as_str() {
                "gzip" => Coding::Gzip,
                "deflate" => Coding::Deflate,
                _ => continue,
            };
            if quality > best.0 {
                best = (quality, Some(coding));
            }
        }
        Ok(best.1)
    }

    /// The bytes that `data` stands for, paid from `charge` as they appear.
    ///
    /// # Errors
    /// When it is not in this coding, unpacks to more than `limit`, or there is no room for what it unpacks to.
    pub fn decode(self, data: &[u8], limit: usize, charge: &Charge) -> Result<Bytes, Unreadable> {
        match self {
            Coding::Gzip => self.read_limited(GzDecoder::new(data), limit, charge),
            Coding::Deflate if is_zlib(data) => self.read_limited(ZlibDecoder::new(data), limit, charge),
            Coding::Deflate => self.read_limited(DeflateDecoder::new(data), limit, charge),
        }
    }

    fn read_limited(self, mut reader: impl Read, limit: usize, charge: &Charge) -> Result<Bytes, Unreadable> {
        let mut unpacked = Vec::new();
        loop {
            let before = unpacked.len();
            let read = reader.by_ref().take(STEP_BYTES).read_to_end(&mut unpacked);
            read.map_err(|error| Unreadable::NotPacked(self, error))?;
            if unpacked.len() > limit {
                return Err(Unreadable::TooLarge(limit));
            }
            if unpacked.len() == before {
                return Ok(unpacked.into());
            }
            charge.add(unpacked.len() - before).map_err(Unreadable::NoRoom)?;
        }
    }

    /// `data` in this coding.
    pub fn encode(self, data: &[u8]) -> std::io::Result<Vec<u8>> {
        match self {
            Coding::Gzip => {
                let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
                encoder.write_all(data)?;
                encoder.finish()
            }
            Coding::Deflate => {
                let mut encoder = ZlibEncoder::new(Vec::new(), Compression::fast());
                encoder.write_all(data)?;
                encoder.finish()
            }
        }
    }
}

/// Whether the two bytes of RFC 1950 are there: method 8, and a sum that 31 divides.
fn is_zlib(data: &[u8]) -> bool {
    matches!(data, [method, flags, ..] if method & 0x0f == 8 && u16::from_be_bytes([*method, *flags]).is_multiple_of(31))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::budget::Budget;
    use crate::transport::budget::tests::ANY_PACE;

    #[test]
    fn what_is_encoded_decodes() {
        for coding in [Coding::Gzip, Coding::Deflate] {
            let packed = coding.encode(b"stroke stroke stroke").unwrap();
            let budget = Budget::new(30, ANY_PACE);
            assert_eq!(coding.decode(&packed, 100, &budget.charge()).unwrap(), "stroke stroke stroke");
            let error = InferError::from(coding.decode(&packed, 5, &budget.charge()).unwrap_err());
            assert!(error.message.contains("limit of 5 bytes"));
            assert!(coding.decode(b"plain", 100, &budget.charge()).is_err());
            let bomb = coding.encode(&[0; 100_000]).unwrap();
            let error = InferError::from(coding.decode(&bomb, 1 << 20, &budget.charge()).unwrap_err());
            assert!(error.message.contains("all together may hold 30"));
        }
        let mut raw = flate2::write::DeflateEncoder::new(Vec::new(), Compression::fast());
        raw.write_all(b"stroke").unwrap();
        let charge = Budget::new(30, ANY_PACE).charge();
        assert_eq!(Coding::Deflate.decode(&raw.finish().unwrap(), 100, &charge).unwrap(), "stroke");
    }

    #[test]
    fn the_most_welcome_coding_is_taken() {
        assert_eq!(Coding::accepted("br, deflate;q=0, gzip;q=0.5"), Ok(Some(Coding::Gzip)));
        assert_eq!(Coding::accepted("gzip;q=0.5, deflate;q=0.8"), Ok(Some(Coding::Deflate)));
        assert_eq!(Coding::accepted("deflate, gzip"), Ok(Some(Coding::Deflate)));
        assert_eq!(Coding::accepted("br"), Ok(None));
        assert!(Coding::accepted(&"gzip,".repeat(1000)).is_err());
    }
}
