//! What a stream brings: a response, or the one before it again with other elements of some outputs.
//!
//! Most responses of a model that generates text differ from the one before in a token or its text. Who takes them in this
//! form neither makes nor looks at the names, types, shapes and other outputs again.

use bytes::Bytes;
use smallvec::SmallVec;

use crate::{InferError, InferResponse};

/// News of a stream, for who asked for them with [`crate::ResponseStream::take_updates`].
#[derive(Debug)]
pub enum Update {
    /// A response.
    Response(Box<InferResponse>),
    /// The last response as it was told until now, once more, but for what is new. It may be repeated, and is not final.
    Again(Changes),
}

/// The same on its way from sender to stream, or an error.
pub(crate) type Sent = Result<Update, InferError>;

/// What is new in a response, or in a request: each tensor once.
pub type Changes = SmallVec<[Elements; 2]>;

/// Other elements of one tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Elements {
    /// The tensor's place among the outputs of the last response, or the inputs of the last request.
    pub place: usize,
    /// Its elements, as in [`crate::Tensor::data`]; type and shape are those of before.
    pub data: Bytes,
}

impl Update {
    /// The response, where nobody asked for updates.
    pub(crate) fn into_response(self) -> InferResponse {
        match self {
            Update::Response(response) => *response,
            Update::Again(_) => unreachable!("sent only to who takes updates, which asks for them"),
        }
    }
}

impl From<InferResponse> for Update {
    fn from(response: InferResponse) -> Self {
        Update::Response(Box::new(response))
    }
}
