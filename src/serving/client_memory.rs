//! Tensors in shared memory of a client, left there for a backend that reads and writes them in place.

use std::any::Any;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use bytes::Bytes;

use crate::{InferError, InferRequest};

/// Bounds the copies that are made of clients' memory: a region may be larger than any message.
pub trait CopyBudget: std::fmt::Debug + Send + Sync {
    /// Holds `count` bytes until what is returned is dropped.
    ///
    /// # Errors
    /// When there is no room for them.
    fn hold(&self, count: u64) -> Result<Box<dyn Any + Send + Sync>, InferError>;
}

/// A copy of a client's memory, and what it holds of a budget.
struct Copy {
    data: Vec<u8>,
    _held: Option<Box<dyn Any + Send + Sync>>,
}

impl AsRef<[u8]> for Copy {
    fn as_ref(&self) -> &[u8] {
        &self.data
    }
}

/// `count` bytes as `fill` writes them, paid from `budget` while anybody has them.
///
/// # Errors
/// When there is no room for them, or `fill`'s own.
pub fn copy_within(
    budget: Option<&dyn CopyBudget>,
    count: u64,
    fill: impl FnOnce(&mut [u8]) -> Result<(), InferError>,
) -> Result<Bytes, InferError> {
    let held = budget.map(|budget| budget.hold(count)).transpose()?;
    let size = usize::try_from(count).map_err(|error| InferError::internal(error.to_string()))?;
    let mut data = Vec::new();
    let no_room =
        |_| InferError::unavailable(format!("there is no memory for {count} bytes of a shared memory region"));
    data.try_reserve_exact(size).map_err(no_room)?;
    data.resize(size, 0);
    fill(&mut data)?;
    Ok(Bytes::from_owner(Copy { data, _held: held }))
}

/// A part of an object of shared memory that a client registered.
///
/// Holding it keeps the object, also after the client has unregistered or removed it. The client may shrink it at any
/// time: it is read and written as a file, or mapped where nothing but the mapping process can come to harm.
#[derive(Debug, Clone)]
pub struct ClientSlice {
    /// The object.
    pub file: Arc<File>,
    /// What tells the object from others: its device and inode.
    pub object: (u64, u64),
    /// Where the part begins in it.
    pub offset: u64,
    /// Bytes of the part.
    pub byte_size: u64,
    /// The client's name for the region.
    pub region: String,
    /// Who pays for copies; `None` bounds nothing.
    pub budget: Option<Arc<dyn CopyBudget>>,
}

impl ClientSlice {
    /// A copy of the bytes.
    ///
    /// # Errors
    /// When the object has shrunk, or the budget has no room.
    pub fn read(&self) -> Result<Bytes, InferError> {
        copy_within(self.budget.as_deref(), self.byte_size, |data| {
            self.file.read_exact_at(data, self.offset).map_err(|error| self.lost(&error))
        })
    }

    fn end(&self) -> u64 {
        self.offset.saturating_add(self.byte_size)
    }

    /// Why a region that was registered cannot be used.
    pub fn lost(&self, error: &std::io::Error) -> InferError {
        InferError::internal(format!("shared memory region '{}' cannot be used any more: {error}", self.region))
    }
}

/// The tensors of one request that lie in shared memory of its client, by name.
#[derive(Debug, Clone, Default)]
pub struct ClientMemory {
    /// Inputs whose `data` is left empty. Never BYTES.
    pub inputs: Vec<(String, ClientSlice)>,
    /// Where outputs shall go. A backend that has written one there answers it without data; others are written by the
    /// front.
    pub outputs: Vec<(String, ClientSlice)>,
}

impl ClientMemory {
    /// Whether no input lies there.
    pub fn has_no_input(&self) -> bool {
        self.inputs.is_empty()
    }

    /// Where the input called `name` lies; `None` when its tensor has the data.
    pub fn input(&self, name: &str) -> Option<&ClientSlice> {
        self.inputs.iter().find(|(input, _)| input == name).map(|(_, slice)| slice)
    }
}

/// Bytes that outputs are written to: object, beginning, and the furthest end of any that begin no later, in this order.
struct Written(Vec<((u64, u64), u64, u64)>);

impl Written {
    fn new(outputs: &[(String, ClientSlice)]) -> Self {
        let mut parts: Vec<_> = outputs.iter().map(|(_, it)| (it.object, it.offset, it.end())).collect();
        parts.sort_unstable();
        for index in 1..parts.len() {
            if parts[index].0 == parts[index - 1].0 {
                parts[index].2 = parts[index].2.max(parts[index - 1].2);
            }
        }
        Self(parts)
    }

    fn overlaps(&self, input: &ClientSlice) -> bool {
        let begins_before_its_end = |&(object, begin, _): &_| (object, begin) < (input.object, input.end());
        let count = self.0.partition_point(begins_before_its_end);
        self.0[..count].last().is_some_and(|&(object, _, end)| object == input.object && end > input.offset)
    }
}

impl InferRequest {
    /// Copies the inputs out of the client's memory, for a model that does not look there.
    ///
    /// # Errors
    /// When the memory has shrunk.
    pub fn fetch_client_memory(&mut self) -> Result<(), InferError> {
        self.client_memory.outputs.clear();
        self.fetch(|_| true)
    }

    /// Copies those inputs that outputs shall be written over: a model may still read the one after it wrote the other.
    ///
    /// # Errors
    /// When the memory has shrunk.
    pub fn fetch_overwritten_inputs(&mut self) -> Result<(), InferError> {
        let written = Written::new(&self.client_memory.outputs);
        self.fetch(|input| written.overlaps(input))
    }

    fn fetch(&mut self, chosen: impl Fn(&ClientSlice) -> bool) -> Result<(), InferError> {
        for (name, slice) in self.client_memory.inputs.extract_if(.., |(_, slice)| chosen(slice)) {
            if let Some(tensor) = self.inputs.iter_mut().find(|tensor| tensor.name == name) {
                tensor.data = slice.read()?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Tensor;

    fn request(output_at: u64) -> InferRequest {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&[1, 2, 3, 4, 5, 6, 7, 8], 0).unwrap();
        let file = Arc::new(file);
        let slice = |offset, byte_size| ClientSlice {
            file: file.clone(),
            object: (1, 2),
            offset,
            byte_size,
            region: "r".to_owned(),
            budget: None,
        };
        let mut request = InferRequest { inputs: vec![Tensor::from_i32("IN", &[1], &[])], ..Default::default() };
        request.client_memory.inputs.push(("IN".to_owned(), slice(2, 4)));
        request.client_memory.outputs.push(("OUT".to_owned(), slice(output_at, 2)));
        request
    }

    #[test]
    fn only_inputs_that_outputs_go_over_are_copied() {
        for (output_at, copied) in [(0, false), (1, true), (4, true), (6, false)] {
            let mut request = request(output_at);
            request.fetch_overwritten_inputs().unwrap();
            assert_eq!(request.inputs[0].data.len(), if copied { 4 } else { 0 }, "output at {output_at}");
            assert_eq!(request.client_memory.input("IN").is_none(), copied);
        }
    }

    #[test]
    fn of_many_outputs_each_is_compared() {
        let file = Arc::new(tempfile::tempfile().unwrap());
        let slice = |object: u64, offset: u64, byte_size: u64| ClientSlice {
            file: file.clone(),
            object: (1, object),
            offset,
            byte_size,
            region: String::new(),
            budget: None,
        };
        let outputs = [(1, 3, 9), (1, 4, 1), (2, 0, 2), (2, 8, 2), (3, 5, u64::MAX), (1, 20, 1)];
        let written = Written::new(&outputs.map(|(object, at, size)| ("OUT".to_owned(), slice(object, at, size))));
        for (object, at, size) in (0..5).flat_map(|object| (0..25).map(move |at| (object, at, 1 + at % 4))) {
            let is_hit = outputs.iter().any(|&(other, begin, len): &(u64, u64, u64)| {
                other == object && begin < at + size && at < begin.saturating_add(len)
            });
            assert_eq!(written.overlaps(&slice(object, at, size)), is_hit, "{object}: {at}, {size}");
        }
    }

    #[test]
    fn a_model_that_looks_nowhere_else_gets_all_in_its_inputs() {
        let mut request = request(0);
        request.fetch_client_memory().unwrap();
        assert_eq!(request.inputs[0].data.as_ref(), [3, 4, 5, 6]);
        assert!(request.client_memory.inputs.is_empty() && request.client_memory.outputs.is_empty());
    }
}
