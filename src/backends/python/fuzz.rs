//! Messages of model processes, for the fuzz targets.

use bytes::Bytes;

use super::memory::Block;
use super::message;
use super::wire::{Value, WireError};

/// Reads a message as each kind that contains tensors. A block of shared memory has the size that the message says, up to 1 MiB.
pub fn python_message(bytes: &Bytes) {
    let Ok(value) = Value::read(bytes) else { return };
    let mut take = |block: Block| match block.len {
        0..=0x10_0000 => Ok(Bytes::from(vec![0; block.len])),
        _ => Err(WireError::Shape { expected: "a block", found: block.len.to_string() }),
    };
    let _ = message::read_response(value.clone(), &mut take);
    if let Ok((request, _)) = message::read_request(value.clone(), &mut take) {
        for tensor in &request.inputs {
            let _ = tensor.num_elements();
        }
    }
    let _ = message::read_error(value);
}
