//! Content codings of HTTP: gzip and deflate.

use std::io::{Read, Write};

use bytes::Bytes;
use flate2::Compression;
use flate2::read::{DeflateDecoder, GzDecoder, ZlibDecoder};
use flate2::write::{GzEncoder, ZlibEncoder};
use serving::{ErrorKind, InferError};

/// A content coding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Coding {
    /// RFC 1952.
    Gzip,
    /// RFC 1950; raw RFC 1951 is read too, as some clients send it.
    Deflate,
}

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

    /// The bytes that `data` stands for.
    ///
    /// # Errors
    /// When it is not in this coding, or unpacks to more than `limit`.
    pub fn decode(self, data: &[u8], limit: usize) -> Result<Bytes, InferError> {
        let unpacked = match self {
            Coding::Gzip => read_limited(GzDecoder::new(data), limit),
            Coding::Deflate => {
                read_limited(ZlibDecoder::new(data), limit).or_else(|_| read_limited(DeflateDecoder::new(data), limit))
            }
        };
        let unpacked =
            unpacked.map_err(|error| InferError::invalid(format!("request body is not {}: {error}", self.name())))?;
        if unpacked.len() > limit {
            return Err(InferError::invalid(format!("request body unpacks to more than the limit of {limit} bytes")));
        }
        Ok(unpacked.into())
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

fn read_limited(reader: impl Read, limit: usize) -> std::io::Result<Vec<u8>> {
    let mut unpacked = Vec::new();
    reader.take(limit as u64 + 1).read_to_end(&mut unpacked)?;
    Ok(unpacked)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_encoded_decodes() {
        for coding in [Coding::Gzip, Coding::Deflate] {
            let packed = coding.encode(b"stroke stroke stroke").unwrap();
            assert_eq!(coding.decode(&packed, 100).unwrap(), "stroke stroke stroke");
            assert!(coding.decode(&packed, 5).unwrap_err().message.contains("limit of 5 bytes"));
            assert!(coding.decode(b"plain", 100).is_err());
        }
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
