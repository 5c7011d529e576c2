//! The compression of a call's messages.

use http::{HeaderMap, HeaderValue};
use tonic::Status;

use crate::config::Compression;
use crate::transport::content_coding::Coding;

/// The codings of a call's messages; `None` for uncompressed ones.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Codings {
    /// Of the client's messages with the compression flag.
    pub requests: Option<Coding>,
    /// Of all replies.
    pub replies: Option<Coding>,
}

impl Codings {
    /// The codings of a call with these headers. Replies are compressed as configured, if the client accepts it.
    ///
    /// # Errors
    /// When the requests have an unsupported coding. The error has the supported ones, as gRPC requires.
    pub fn of(headers: &HeaderMap, replies: Compression) -> Result<Self, Status> {
        let text = |value: &HeaderValue| String::from_utf8_lossy(value.as_bytes()).trim().to_ascii_lowercase();
        let requests = match headers.get("grpc-encoding").map(text).as_deref() {
            None | Some("identity") => None,
            Some("gzip") => Some(Coding::Gzip),
            Some("deflate") => Some(Coding::Deflate),
            Some(other) => {
                let mut status =
                    Status::unimplemented(format!("Content is compressed with `{other}` which isn't supported"));
                let supported = tonic::metadata::MetadataValue::from_static("gzip,deflate,identity");
                status.metadata_mut().insert("grpc-accept-encoding", supported);
                return Err(status);
            }
        };
        let replies = match replies {
            Compression::None => None,
            Compression::Gzip => Some(Coding::Gzip),
            Compression::Deflate => Some(Coding::Deflate),
        };
        let accepted = headers.get_all("grpc-accept-encoding").iter().map(text).collect::<Vec<_>>().join(",");
        let is_accepted = |coding: &Coding| accepted.split(',').any(|name| name.trim() == coding.name());
        Ok(Self { requests, replies: replies.filter(is_accepted) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(headers: &[(&'static str, &'static str)], replies: Compression) -> Result<Codings, String> {
        let headers = headers.iter().map(|&(name, value)| (name.parse().unwrap(), HeaderValue::from_static(value)));
        Codings::of(&headers.collect(), replies).map_err(|status| status.message().to_owned())
    }

    #[test]
    fn replies_are_compressed_only_if_configured_and_accepted() {
        let accepts = ("grpc-accept-encoding", "identity, deflate, gzip");
        assert_eq!(of(&[accepts], Compression::None), Ok(Codings::default()));
        assert_eq!(of(&[], Compression::Gzip), Ok(Codings::default()));
        assert_eq!(of(&[accepts], Compression::Gzip).unwrap().replies, Some(Coding::Gzip));
        let found = of(&[("grpc-encoding", "deflate"), accepts], Compression::Deflate);
        assert_eq!(found, Ok(Codings { requests: Some(Coding::Deflate), replies: Some(Coding::Deflate) }));
    }

    #[test]
    fn an_unknown_coding_is_refused_by_name() {
        let found = of(&[("grpc-encoding", "snappy")], Compression::None);
        assert_eq!(found, Err("Content is compressed with `snappy` which isn't supported".to_owned()));
    }
}
