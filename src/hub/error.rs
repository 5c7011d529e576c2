//! Why a model could not be found, downloaded or removed.

use std::path::PathBuf;

/// An error of this room. Each says what to do.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // Fields are named in the messages.
pub enum HubError {
    /// A text that cannot be the name of a model.
    #[error("`{text}` is no name of a model on the hub: {reason}; expected ORG/NAME or ORG/NAME@REVISION")]
    Name { text: String, reason: String },
    /// An environment variable that cannot be used.
    #[error("{variable}: {reason}")]
    Setting { variable: &'static str, reason: String },
    /// No connection, or none that lasted.
    #[error("cannot reach {url}: {reason}; check the network and the proxy, or set HF_ENDPOINT to a mirror of the hub")]
    Unreachable { url: String, reason: String },
    /// The hub does not know the model, or hides it from this token.
    #[error(
        "{endpoint} has no model `{model}`, or does not show it {token}; check the name, and for a private or gated model set \
         HF_TOKEN to a token that may read it"
    )]
    NoModel { model: String, endpoint: String, token: &'static str },
    /// The model's owner grants access on request.
    #[error(
        "`{model}` is gated: accept its terms at {endpoint}/{model}, then set HF_TOKEN to a token of that account ({message})"
    )]
    Gated { model: String, endpoint: String, message: String },
    /// The token is not valid.
    #[error("{endpoint} refuses the token ({message}); set HF_TOKEN to a valid one, or remove it for public models")]
    Token { endpoint: String, message: String },
    /// The model has no such revision.
    #[error("`{model}` has no revision `{revision}`; look at {endpoint}/{model}/tree/main for its branches and tags")]
    NoRevision { model: String, revision: String, endpoint: String },
    /// Another status than expected.
    #[error("{url} answered {status}: {message}; try again later")]
    Status { url: String, status: u16, message: String },
    /// A response without the expected form.
    #[error("the answer of {url} is not that of a hub: {reason}; check HF_ENDPOINT")]
    Answer { url: String, reason: String },
    /// The network must not be used.
    #[error("`{model}` is not complete in {} and HF_HUB_OFFLINE is set; unset it, or download the model where there is a network", .cache.display())]
    Offline { model: String, cache: PathBuf },
    /// The files of a model do not suffice to serve it.
    #[error("`{model}` cannot be served: {reason}")]
    NotServable { model: String, reason: String },
    /// The disk is too small.
    #[error(
        "{} has {free} free and the download needs {needed}; free some (`trireme list`, `trireme rm`), or set HF_HUB_CACHE to a \
         directory on a larger disk", .dir.display()
    )]
    NoSpace { dir: PathBuf, needed: String, free: String },
    /// Content whose size or hash differs from the hub's.
    #[error(
        "`{file}` arrived with {what} {found}, and the hub announced {expected}; it was deleted, so download it again"
    )]
    Mismatch { file: String, what: &'static str, found: String, expected: String },
    /// The cache has no such model.
    #[error("{} has no model `{model}`; `trireme list` shows those that it has", .cache.display())]
    NotCached { model: String, cache: PathBuf },
    /// The model is in use.
    #[error("`{model}` is in use by {user}")]
    InUse { model: String, user: String },
    /// The download of another file failed.
    #[error("stopped, because another file failed")]
    Stopped,
    /// A file or directory could not be used.
    #[error("cannot {what}: {source}")]
    Io { what: String, source: std::io::Error },
}

impl HubError {
    /// For `map_err`: `what` completes "cannot …".
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }
}
