//! What a stream brings: a response, or the one before it again with other elements of some outputs.
//!
//! Most responses of a model that generates text differ from the one before in a token or its text. Who takes them in this
//! form neither makes nor looks at the names, types, shapes and other outputs again.

use std::ops::Deref;

use bytes::Bytes;
use smallvec::SmallVec;

use crate::generation::Progress;
use crate::{InferError, InferResponse, Moment, byte_strings};

/// News of a stream, for who asked for them with [`crate::ResponseStream::take_updates`].
#[derive(Debug)]
pub enum Update {
    /// A response.
    Response(Box<InferResponse>),
    /// The last response as it was told until now, once more, but for what is new: that lies in the [`Changes`] of who
    /// asked. It may be repeated, and is not final.
    Again(Repeat),
}

/// What is to know of a response that is the last one again.
#[derive(Debug, Clone, Copy, Default)]
pub struct Repeat {
    /// Nothing follows it now: to ask again would bring nothing, and who asked last is woken when something comes.
    pub rests: bool,
    /// When the model had computed it, where that is known.
    pub(crate) computed: Option<Moment>,
    /// When it came by, where that was looked at while it was asked for.
    pub(crate) seen: Option<Moment>,
}

impl Repeat {
    /// Of a response that was computed at `computed`; `rests` where nothing follows it now.
    pub fn new(computed: Moment, rests: bool) -> Self {
        Self { rests, computed: Some(computed), seen: None }
    }
}

/// The same on its way from sender to stream.
#[derive(Debug)]
pub(crate) enum Letter {
    Response(Box<InferResponse>),
    Again(Box<Changes>),
}

/// That, or an error.
pub(crate) type Sent = Result<Letter, InferError>;

/// What is new in a response, or in a request: other elements of some of its tensors; types and shapes are those of before.
#[derive(Debug, Clone, Default)]
pub struct Changes(SmallVec<[Change; 2]>);

/// Other elements of the tensor at `place` among the outputs of the last response, or the inputs of the last request.
#[derive(Debug, Clone)]
struct Change {
    place: u32,
    elements: Elements,
}

/// Elements of a tensor, as in [`crate::Tensor::data`]. Few of them, as a token changes, take no memory of their own.
#[derive(Debug, Clone)]
pub struct Elements(Kept);

/// So many bytes lie in their place: a number or the text of most tokens.
const FEW_BYTES: usize = 22;

#[derive(Debug, Clone)]
enum Kept {
    Few(u8, [u8; FEW_BYTES]),
    Many(Box<Bytes>),
}

impl Changes {
    /// Takes note of the elements of the tensor at `place`, instead of those that it had here.
    #[inline]
    pub fn put(&mut self, place: usize, elements: impl Into<Elements>) {
        let (place, elements) = (place as u32, elements.into());
        match self.0.iter_mut().find(|change| change.place == place) {
            Some(change) => change.elements = elements,
            None => self.0.push(Change { place, elements }),
        }
    }

    /// Each tensor that has changed, by its place, and its elements.
    #[inline]
    pub fn iter(&self) -> impl Iterator<Item = (usize, &Elements)> {
        self.0.iter().map(|change| (change.place as usize, &change.elements))
    }

    /// Forgets all.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// Whether nothing has changed.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Elements {
    /// The one text of a tensor of type BYTES.
    pub fn text(text: &str) -> Self {
        let (length, mut few) = ((text.len() as u32).to_le_bytes(), [0; FEW_BYTES]);
        match few.get_mut(length.len()..length.len() + text.len()) {
            Some(place) => {
                place.copy_from_slice(text.as_bytes());
                few[..length.len()].copy_from_slice(&length);
                Self(Kept::Few((length.len() + text.len()) as u8, few))
            }
            None => Self(Kept::Many(Box::new(byte_strings(&[text])))),
        }
    }

    /// As a tensor holds them.
    pub fn to_data(&self) -> Bytes {
        match &self.0 {
            Kept::Few(len, few) => Bytes::copy_from_slice(&few[..usize::from(*len)]),
            Kept::Many(data) => Bytes::clone(data),
        }
    }
}

impl Deref for Elements {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        match &self.0 {
            Kept::Few(len, few) => &few[..usize::from(*len)],
            Kept::Many(data) => data,
        }
    }
}

/// A number, by its bytes.
impl<const N: usize> From<[u8; N]> for Elements {
    #[inline]
    fn from(number: [u8; N]) -> Self {
        const { assert!(N <= FEW_BYTES) };
        let mut few = [0; FEW_BYTES];
        few[..N].copy_from_slice(&number);
        Self(Kept::Few(N as u8, few))
    }
}

impl From<Bytes> for Elements {
    fn from(data: Bytes) -> Self {
        let mut few = [0; FEW_BYTES];
        match few.get_mut(..data.len()) {
            Some(place) => {
                place.copy_from_slice(&data);
                Self(Kept::Few(data.len() as u8, few))
            }
            None => Self(Kept::Many(Box::new(data))),
        }
    }
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

impl Letter {
    /// As it is read; what is new goes into `told`, and `progress` knows when it was computed.
    pub fn open(self, told: &mut Changes, progress: Option<&Progress>) -> Update {
        match self {
            Letter::Response(response) => Update::Response(response),
            Letter::Again(changes) => {
                changes.0.into_iter().for_each(|change| told.put(change.place as usize, change.elements));
                let computed = progress.and_then(Progress::take_computed).map(Moment::from);
                Update::Again(Repeat { computed, ..Repeat::default() })
            }
        }
    }
}

impl From<InferResponse> for Update {
    fn from(response: InferResponse) -> Self {
        Update::Response(Box::new(response))
    }
}

impl From<InferResponse> for Letter {
    fn from(response: InferResponse) -> Self {
        Letter::Response(Box::new(response))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_put_last_of_a_tensor_is_what_has_changed() {
        let mut changes = Changes::default();
        let all = |changes: &Changes| -> Vec<(usize, Bytes)> {
            changes.iter().map(|(place, elements)| (place, elements.to_data())).collect()
        };
        assert!(changes.is_empty() && all(&changes).is_empty());
        changes.put(3, 7u32.to_le_bytes());
        changes.put(0, Elements::text("text"));
        changes.put(7, Bytes::new());
        let data = |data: &[u8]| Bytes::copy_from_slice(data);
        assert_eq!(all(&changes), [(3, data(&[7, 0, 0, 0])), (0, data(b"\x04\0\0\0text")), (7, Bytes::new())]);
        changes.put(3, [1]);
        assert_eq!(all(&changes)[0], (3, data(&[1])));
        for text in ["", "of eighteen letters".split_at(18).0, "of nineteen letters", &"longer ".repeat(40)] {
            changes.put(0, Elements::text(text));
            assert_eq!(all(&changes)[1], (0, byte_strings(&[text])));
        }
        changes.clear();
        assert!(changes.is_empty() && all(&changes).is_empty());
        assert!(size_of::<Change>() <= 32, "{} bytes", size_of::<Change>());
    }
}
