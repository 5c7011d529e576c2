//! What the hub says about a model: the commit of a revision, and its files with their hashes.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Deserialize;
use ureq::http::HeaderMap;
use ureq::http::header::{CONTENT_LENGTH, ETAG};

use crate::HubError;
use crate::digest::Digest;
use crate::http::{Client, Failure, Refusal};
use crate::name::{ModelName, is_commit};

/// Characters of a path that stay as they are.
const PATH: AsciiSet = NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// Longest name of a file.
const MAX_NAME_BYTES: usize = 255;

/// The files of a model at a commit.
#[derive(Debug)]
pub(crate) struct Listing {
    pub(crate) commit: String,
    pub(crate) files: Vec<Listed>,
}

/// A file, as a listing names it.
#[derive(Debug, Clone)]
pub(crate) struct Listed {
    pub(crate) name: String,
    /// Size and hash; some mirrors leave them out.
    known: Option<(u64, Digest)>,
}

/// A file to download.
#[derive(Debug, Clone)]
pub(crate) struct RemoteFile {
    pub(crate) name: String,
    pub(crate) size: u64,
    pub(crate) digest: Digest,
    pub(crate) url: String,
}

/// The answer of `/api/models/ORG/NAME/revision/REVISION?blobs=true`.
#[derive(Deserialize)]
struct Info {
    sha: String,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    blob_id: Option<String>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    sha256: Option<String>,
    size: Option<u64>,
}

impl Listing {
    /// Requests the listing from the hub.
    ///
    /// # Errors
    /// When the hub cannot be reached, does not show the model, or answers with something else.
    pub(crate) fn of(client: &Client, name: &ModelName) -> Result<Self, HubError> {
        let revision = utf8_percent_encode(name.revision(), &PATH);
        let url = format!("{}/api/models/{}/revision/{revision}?blobs=true", client.endpoint(), name.id());
        let info: Info = client.json(&url).map_err(|failure| explained(failure, client, name, &url))?;
        let wrong = |reason: String| HubError::Answer { url: url.clone(), reason };
        if !is_commit(&info.sha) {
            return Err(wrong("its `sha` is not that of a commit".to_owned()));
        }
        let files = info.siblings.into_iter().map(|sibling| match is_safe(&sibling.rfilename) {
            true => Ok(Listed { known: sibling.known(), name: sibling.rfilename }),
            false => Err(wrong(format!("{:?} cannot be the name of a file", sibling.rfilename))),
        });
        Ok(Self { files: files.collect::<Result<_, _>>()?, commit: info.sha })
    }

    /// Where a file is, with its size and hash.
    ///
    /// # Errors
    /// When the hub must be queried for them, and does not return them.
    pub(crate) fn locate(&self, client: &Client, name: &ModelName, file: &Listed) -> Result<RemoteFile, HubError> {
        let path: Vec<String> = file.name.split('/').map(|part| utf8_percent_encode(part, &PATH).to_string()).collect();
        let url = format!("{}/{}/resolve/{}/{}", client.endpoint(), name.id(), self.commit, path.join("/"));
        let (size, digest) = match &file.known {
            Some(known) => known.clone(),
            None => {
                let headers = client.head(&url).map_err(|failure| explained(failure, client, name, &url))?;
                of_headers(&headers).ok_or_else(|| HubError::Answer {
                    url: url.clone(),
                    reason: "it has no size, or no ETag that is a hash, so the file could not be checked".to_owned(),
                })?
            }
        };
        Ok(RemoteFile { name: file.name.clone(), size, digest, url })
    }
}

impl Sibling {
    fn known(&self) -> Option<(u64, Digest)> {
        match &self.lfs {
            Some(lfs) => Some((lfs.size.or(self.size)?, Digest::of_hex(lfs.sha256.as_deref()?)?)),
            None => Some((self.size?, Digest::of_hex(self.blob_id.as_deref()?)?)),
        }
    }
}

/// Size and hash of the file behind an answer.
fn of_headers(headers: &HeaderMap) -> Option<(u64, Digest)> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let etag = text("x-linked-etag").or_else(|| text(ETAG.as_str()))?;
    let size = text("x-linked-size").or_else(|| text(CONTENT_LENGTH.as_str()))?;
    Some((size.parse().ok()?, Digest::of_hex(etag.trim_start_matches("W/").trim_matches('"'))?))
}

/// Whether a name stays inside the directory that it is joined to.
pub(crate) fn is_safe(name: &str) -> bool {
    let is_plain = |part: &str| !part.is_empty() && part != "." && part != "..";
    name.len() <= MAX_NAME_BYTES
        && name.split('/').all(is_plain)
        && !name.contains(['\\', '\0'])
        && !name.chars().any(char::is_control)
}

/// The error for a refusal of a request about a model.
pub(crate) fn explained(failure: Failure, client: &Client, name: &ModelName, url: &str) -> HubError {
    let Failure::Status(Refusal { status, code, message, .. }) = failure else { return failure.into_error(url) };
    let (model, endpoint) = (name.id().to_owned(), client.endpoint().to_owned());
    match (status, code.as_str()) {
        (401 | 403, "GatedRepo") | (403, _) => HubError::Gated { model, endpoint, message },
        (404, "RevisionNotFound") => HubError::NoRevision { model, revision: name.revision().to_owned(), endpoint },
        (401, "") if client.has_token() => HubError::Token { endpoint, message },
        (401 | 404, _) => {
            let token = if client.has_token() { "to this token" } else { "without a token" };
            HubError::NoModel { model, endpoint, token }
        }
        _ => HubError::Status { url: url.to_owned(), status, message },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_files_stay_in_their_directory() {
        assert!(["config.json", "a/b.jinja", "..a", "ä"].iter().all(|name| is_safe(name)));
        for name in ["", "/etc/passwd", "../a", "a/../b", "a//b", "a/", ".", "a\\b", "a\0", "a\nb"] {
            assert!(!is_safe(name), "{name:?}");
        }
    }
}
