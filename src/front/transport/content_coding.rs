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
    /// RFC 1950. Raw RFC 1951, which some clients send, is also decoded.
    Deflate,
}

/// Why a compressed body cannot be decompressed.
#[derive(Debug)]
pub enum DecodeError {
    /// The bytes are not valid in the coding.
    Malformed(Coding, std::io::Error),
    /// The decompressed body is larger than this limit.
    TooLarge(usize),
    /// The memory budget is exhausted.
    OverBudget(InferError),
}

impl From<DecodeError> for InferError {
    fn from(failure: DecodeError) -> Self {
        match failure {
            DecodeError::Malformed(coding, error) => {
                InferError::invalid(format!("request body is not {}: {error}", coding.name()))
            }
            DecodeError::TooLarge(limit) => {
                InferError::invalid(format!("request body unpacks to more than the limit of {limit} bytes"))
            }
            DecodeError::OverBudget(error) => error,
        }
    }
}

/// Bytes that are decompressed before they are charged.
const STEP_BYTES: u64 = 256 << 10;

/// Maximum entries of an `Accept-Encoding`.
const MAX_ENTRIES: usize = 64;

impl Coding {
    /// The name of the coding in headers.
    pub fn name(self) -> &'static str {
        match self {
            Coding::Gzip => "gzip",
            Coding::Deflate => "deflate",
        }
    }

    /// The coding of a `Content-Encoding` header; `None` for no coding.
    ///
    /// # Errors
    /// When the coding is not supported.
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

    /// The supported coding that an `Accept-Encoding` header prefers; of equals, the first.
    ///
    /// # Errors
    /// When the header has too many entries.
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

    /// Decompresses `data` and adds the result to `charge` step by step.
    ///
    /// # Errors
    /// When the data is malformed, or the result exceeds `limit` or the budget.
    pub fn decode(self, data: &[u8], limit: usize, charge: &Charge) -> Result<Bytes, DecodeError> {
        match self {
            Coding::Gzip => self.read_limited(GzDecoder::new(data), limit, charge),
            Coding::Deflate if is_zlib(data) => self.read_limited(ZlibDecoder::new(data), limit, charge),
            Coding::Deflate => self.read_limited(DeflateDecoder::new(data), limit, charge),
        }
    }

    fn read_limited(self, mut reader: impl Read, limit: usize, charge: &Charge) -> Result<Bytes, DecodeError> {
        let mut unpacked = Vec::new();
        loop {
            let before = unpacked.len();
            let read = reader.by_ref().take(STEP_BYTES).read_to_end(&mut unpacked);
            read.map_err(|error| DecodeError::Malformed(self, error))?;
            if unpacked.len() > limit {
                return Err(DecodeError::TooLarge(limit));
            }
            if unpacked.len() == before {
                return Ok(unpacked.into());
            }
            charge.add(unpacked.len() - before).map_err(DecodeError::OverBudget)?;
        }
    }

    /// Compresses `data`.
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

/// Whether `data` starts with the header of RFC 1950: method 8, and a 16-bit value divisible by 31.
fn is_zlib(data: &[u8]) -> bool {
    matches!(data, [method, flags, ..] if method & 0x0f == 8 && u16::from_be_bytes([*method, *flags]).is_multiple_of(31))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::budget::Budget;
    use crate::transport::budget::tests::NO_PROGRESS_LIMITS;

    #[test]
    fn encoded_data_decodes() {
        for coding in [Coding::Gzip, Coding::Deflate] {
            let packed = coding.encode(b"stroke stroke stroke").unwrap();
            let budget = Budget::new(30, NO_PROGRESS_LIMITS);
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
        let charge = Budget::new(30, NO_PROGRESS_LIMITS).charge();
        assert_eq!(Coding::Deflate.decode(&raw.finish().unwrap(), 100, &charge).unwrap(), "stroke");
    }

    #[test]
    fn the_preferred_coding_is_chosen() {
        assert_eq!(Coding::accepted("br, deflate;q=0, gzip;q=0.5"), Ok(Some(Coding::Gzip)));
        assert_eq!(Coding::accepted("gzip;q=0.5, deflate;q=0.8"), Ok(Some(Coding::Deflate)));
        assert_eq!(Coding::accepted("deflate, gzip"), Ok(Some(Coding::Deflate)));
        assert_eq!(Coding::accepted("br"), Ok(None));
        assert!(Coding::accepted(&"gzip,".repeat(1000)).is_err());
    }
}
