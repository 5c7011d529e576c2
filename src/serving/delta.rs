//! Items of a stream of responses: a complete response, or the difference from the previous one.
//!
//! Most responses of a model that generates text differ from the previous one in a token or its text only. With deltas the
//! names, types, shapes and unchanged outputs are not built again for each token.

use std::ops::Deref;

use bytes::Bytes;
use generation::GenerateEvent;
use smallvec::SmallVec;

use crate::{InferResponse, Timestamp, byte_strings};

/// One item of a stream.
#[derive(Debug)]
pub enum StreamItem {
    /// A complete response.
    Response(Box<InferResponse>),
    /// The previous response with new values for some outputs, which are in the reader's [`OutputDelta`]. It is not final,
    /// and another delta may follow it.
    Delta(DeltaInfo),
    /// An event, in the stream of a [`crate::GenerateCall`].
    Event(Box<StreamEvent>),
}

/// An event as an item of a stream.
#[derive(Debug)]
pub struct StreamEvent {
    /// The event.
    pub event: GenerateEvent,
    /// Whether it is the last event of the request.
    pub is_last: bool,
}

/// Metadata of a response that was sent as a delta.
#[derive(Debug, Clone, Copy)]
pub struct DeltaInfo {
    /// The source has no further item now and has registered the reader's waker, so the reader need not poll it again at once.
    pub is_drained: bool,
    /// When the model had computed the response.
    pub computed: Timestamp,
    /// When the response was last observed between model and reader.
    pub observed: Timestamp,
}

/// New values for some outputs of the previous response. Types and shapes are unchanged.
#[derive(Debug, Clone, Default)]
pub struct OutputDelta(SmallVec<[Change; 2]>);

/// New elements of the output at `index` of the previous response.
#[derive(Debug, Clone)]
struct Change {
    index: u32,
    elements: Elements,
}

/// Elements of a tensor, encoded like [`crate::Tensor::data`]. A few bytes, such as a token id, need no allocation.
#[derive(Debug, Clone)]
pub struct Elements(Storage);

/// Up to this many bytes are stored inline, which is enough for a number or the text of most tokens.
const INLINE_BYTES: usize = 22;

#[derive(Debug, Clone)]
enum Storage {
    Inline(u8, [u8; INLINE_BYTES]),
    Heap(Box<Bytes>),
}

impl OutputDelta {
    /// Sets the elements of the output at `index`.
    #[inline]
    pub fn set(&mut self, index: usize, elements: impl Into<Elements>) {
        let (index, elements) = (index as u32, elements.into());
        match self.0.iter_mut().find(|change| change.index == index) {
            Some(change) => change.elements = elements,
            None => self.0.push(Change { index, elements }),
        }
    }

    /// The index and the new elements of each changed output.
    #[inline]
    pub fn iter(&self) -> impl Iterator<Item = (usize, &Elements)> {
        self.0.iter().map(|change| (change.index as usize, &change.elements))
    }

    /// Removes all changes.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// Whether nothing changed.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Elements {
    /// A tensor of type BYTES that holds one text.
    pub fn text(text: &str) -> Self {
        let (length, mut inline) = ((text.len() as u32).to_le_bytes(), [0; INLINE_BYTES]);
        match inline.get_mut(length.len()..length.len() + text.len()) {
            Some(target) => {
                target.copy_from_slice(text.as_bytes());
                inline[..length.len()].copy_from_slice(&length);
                Self(Storage::Inline((length.len() + text.len()) as u8, inline))
            }
            None => Self(Storage::Heap(Box::new(byte_strings(&[text])))),
        }
    }

    /// The elements as [`crate::Tensor::data`].
    pub fn to_data(&self) -> Bytes {
        match &self.0 {
            Storage::Inline(len, inline) => Bytes::copy_from_slice(&inline[..usize::from(*len)]),
            Storage::Heap(data) => Bytes::clone(data),
        }
    }
}

impl Deref for Elements {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        match &self.0 {
            Storage::Inline(len, inline) => &inline[..usize::from(*len)],
            Storage::Heap(data) => data,
        }
    }
}

/// A number, from its little-endian bytes.
impl<const N: usize> From<[u8; N]> for Elements {
    #[inline]
    fn from(number: [u8; N]) -> Self {
        const { assert!(N <= INLINE_BYTES) };
        let mut inline = [0; INLINE_BYTES];
        inline[..N].copy_from_slice(&number);
        Self(Storage::Inline(N as u8, inline))
    }
}

impl From<Bytes> for Elements {
    fn from(data: Bytes) -> Self {
        let mut inline = [0; INLINE_BYTES];
        match inline.get_mut(..data.len()) {
            Some(target) => {
                target.copy_from_slice(&data);
                Self(Storage::Inline(data.len() as u8, inline))
            }
            None => Self(Storage::Heap(Box::new(data))),
        }
    }
}

impl From<InferResponse> for StreamItem {
    fn from(response: InferResponse) -> Self {
        StreamItem::Response(Box::new(response))
    }
}

impl StreamItem {
    /// The response. Only for readers that accept no deltas.
    pub(crate) fn into_response(self) -> InferResponse {
        match self {
            StreamItem::Response(response) => *response,
            StreamItem::Delta(_) | StreamItem::Event(_) => {
                unreachable!("a source sends deltas and events only to readers that accept them")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_delta_holds_the_last_value_set_for_each_output() {
        let mut changes = OutputDelta::default();
        let all = |changes: &OutputDelta| -> Vec<(usize, Bytes)> {
            changes.iter().map(|(index, elements)| (index, elements.to_data())).collect()
        };
        assert!(changes.is_empty() && all(&changes).is_empty());
        changes.set(3, 7u32.to_le_bytes());
        changes.set(0, Elements::text("text"));
        changes.set(7, Bytes::new());
        let data = |data: &[u8]| Bytes::copy_from_slice(data);
        assert_eq!(all(&changes), [(3, data(&[7, 0, 0, 0])), (0, data(b"\x04\0\0\0text")), (7, Bytes::new())]);
        changes.set(3, [1]);
        assert_eq!(all(&changes)[0], (3, data(&[1])));
        for text in ["", "of eighteen letters".split_at(18).0, "of nineteen letters", &"longer ".repeat(40)] {
            changes.set(0, Elements::text(text));
            assert_eq!(all(&changes)[1], (0, byte_strings(&[text])));
        }
        changes.clear();
        assert!(changes.is_empty() && all(&changes).is_empty());
        assert!(size_of::<Change>() <= 32, "{} bytes", size_of::<Change>());
    }
}
