//! Tensors in a client's shared memory, which some backends read and write in place.

use std::any::Any;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use bytes::Bytes;

use crate::{InferError, Tensor};

/// Bounds the memory for copies of clients' shared memory, because a region may be larger than any message.
pub trait CopyBudget: std::fmt::Debug + Send + Sync {
    /// Reserves `count` bytes until the returned value is dropped.
    ///
    /// # Errors
    /// When the budget has too few bytes left.
    fn hold(&self, count: u64) -> Result<Box<dyn Any + Send + Sync>, InferError>;
}

/// A copy of a client's memory, and its reservation in a budget.
struct Copy {
    data: Vec<u8>,
    _reservation: Option<Box<dyn Any + Send + Sync>>,
}

impl AsRef<[u8]> for Copy {
    fn as_ref(&self) -> &[u8] {
        &self.data
    }
}

/// Makes a buffer of `count` bytes that `fill` writes. The bytes count against `budget` until the buffer is dropped.
///
/// # Errors
/// When budget or memory has no room, or `fill` fails.
pub fn copy_within(
    budget: Option<&dyn CopyBudget>,
    count: u64,
    fill: impl FnOnce(&mut [u8]) -> Result<(), InferError>,
) -> Result<Bytes, InferError> {
    let reservation = budget.map(|budget| budget.hold(count)).transpose()?;
    let size = usize::try_from(count).map_err(|error| InferError::internal(error.to_string()))?;
    let mut data = Vec::new();
    let no_room =
        |_| InferError::unavailable(format!("there is no memory for {count} bytes of a shared memory region"));
    data.try_reserve_exact(size).map_err(no_room)?;
    data.resize(size, 0);
    fill(&mut data)?;
    Ok(Bytes::from_owner(Copy { data, _reservation: reservation }))
}

/// A part of a shared-memory object that a client registered.
///
/// The object stays alive as long as the slice, also after the client has unregistered or removed it. The client may shrink
/// the object at any time. It is therefore read and written as a file, and mapped only in processes that may fail by it.
#[derive(Debug, Clone)]
pub struct ClientSlice {
    /// The shared-memory object.
    pub file: Arc<File>,
    /// Identity of the object: its device and inode.
    pub object: (u64, u64),
    /// Offset of the part in the object, in bytes.
    pub offset: u64,
    /// Size of the part in bytes.
    pub byte_size: u64,
    /// The client's name for the region.
    pub region: String,
    /// Bounds copies of the part; `None` for no bound.
    pub budget: Option<Arc<dyn CopyBudget>>,
}

impl ClientSlice {
    /// Copies the bytes.
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

    /// The error for a registered region that cannot be used any more.
    pub fn lost(&self, error: &std::io::Error) -> InferError {
        InferError::internal(format!("shared memory region '{}' cannot be used any more: {error}", self.region))
    }
}

/// The tensors of one request that are in its client's shared memory, by name.
#[derive(Debug, Clone, Default)]
pub struct ClientMemory {
    /// Inputs; `data` of their tensors is empty. None of them is of type BYTES.
    pub inputs: Vec<(String, ClientSlice)>,
    /// Where outputs must be written. A backend that writes an output itself returns it without data. `front` writes the
    /// others.
    pub outputs: Vec<(String, ClientSlice)>,
}

impl ClientMemory {
    /// Whether no input is in client memory.
    pub fn has_no_input(&self) -> bool {
        self.inputs.is_empty()
    }

    /// The location of the input called `name`; `None` if the data is in its tensor.
    pub fn input(&self, name: &str) -> Option<&ClientSlice> {
        self.inputs.iter().find(|(input, _)| input == name).map(|(_, slice)| slice)
    }

    /// Gives an input another name.
    pub(crate) fn rename_input(&mut self, from: &str, to: &str) {
        let inputs = self.inputs.iter_mut().filter(|(input, _)| input == from);
        inputs.for_each(|(input, _)| to.clone_into(input));
    }
}

/// Ranges that outputs are written to, sorted: object, start, and the largest end among the ranges of this object up to here.
struct WrittenRanges(Vec<((u64, u64), u64, u64)>);

impl WrittenRanges {
    fn new(outputs: &[(String, ClientSlice)]) -> Self {
        let mut parts: Vec<_> = outputs.iter().map(|(_, slice)| (slice.object, slice.offset, slice.end())).collect();
        parts.sort_unstable();
        for index in 1..parts.len() {
            if parts[index].0 == parts[index - 1].0 {
                parts[index].2 = parts[index].2.max(parts[index - 1].2);
            }
        }
        Self(parts)
    }

    fn overlaps(&self, input: &ClientSlice) -> bool {
        let starts_before_end = |&(object, start, _): &_| (object, start) < (input.object, input.end());
        let count = self.0.partition_point(starts_before_end);
        self.0[..count].last().is_some_and(|&(object, _, end)| object == input.object && end > input.offset)
    }
}

impl ClientMemory {
    /// Copies all inputs to their tensors, and forgets where outputs must be written.
    ///
    /// # Errors
    /// When the memory has shrunk, or the budget has no room.
    pub(crate) fn fetch_all(&mut self, tensors: &mut [Tensor]) -> Result<(), InferError> {
        self.outputs.clear();
        self.fetch(tensors, |_| true)
    }

    /// Copies those inputs to their tensors that overlap outputs.
    ///
    /// # Errors
    /// When the memory has shrunk, or the budget has no room.
    pub(crate) fn fetch_overwritten(&mut self, tensors: &mut [Tensor]) -> Result<(), InferError> {
        let written = WrittenRanges::new(&self.outputs);
        self.fetch(tensors, |input| written.overlaps(input))
    }

    fn fetch(&mut self, tensors: &mut [Tensor], is_selected: impl Fn(&ClientSlice) -> bool) -> Result<(), InferError> {
        for (name, slice) in self.inputs.extract_if(.., |(_, slice)| is_selected(slice)) {
            if let Some(tensor) = tensors.iter_mut().find(|tensor| tensor.name == name) {
                tensor.data = slice.read()?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::InferRequest;

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
    fn only_inputs_that_overlap_outputs_are_copied() {
        for (output_at, copied) in [(0, false), (1, true), (4, true), (6, false)] {
            let mut request = request(output_at);
            request.fetch_overwritten_inputs().unwrap();
            assert_eq!(request.inputs[0].data.len(), if copied { 4 } else { 0 }, "output at {output_at}");
            assert_eq!(request.client_memory.input("IN").is_none(), copied);
        }
    }

    #[test]
    fn overlaps_are_found_among_many_outputs() {
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
        let written =
            WrittenRanges::new(&outputs.map(|(object, at, size)| ("OUT".to_owned(), slice(object, at, size))));
        for (object, at, size) in (0..5).flat_map(|object| (0..25).map(move |at| (object, at, 1 + at % 4))) {
            let overlaps = outputs.iter().any(|&(other, begin, len): &(u64, u64, u64)| {
                other == object && begin < at + size && at < begin.saturating_add(len)
            });
            assert_eq!(written.overlaps(&slice(object, at, size)), overlaps, "{object}: {at}, {size}");
        }
    }

    #[test]
    fn fetching_client_memory_copies_all_inputs() {
        let mut request = request(0);
        request.fetch_client_memory().unwrap();
        assert_eq!(request.inputs[0].data.as_ref(), [3, 4, 5, 6]);
        assert!(request.client_memory.inputs.is_empty() && request.client_memory.outputs.is_empty());
    }
}
