//! safetensors: 8 bytes little-endian header length, a JSON header, then the tensors' bytes
//! (<https://github.com/huggingface/safetensors>, section "Format").

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use serde::Deserialize;

use super::{Checkpoint, Tensor};
use crate::ModelError;

/// Maximum length of a header, the same as in the format's own library.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Bytes of the length of the header.
const LENGTH_BYTES: u64 = 8;

/// A tensor of the header.
#[derive(Deserialize)]
pub(crate) struct HeaderEntry {
    pub(crate) dtype: String,
    pub(crate) shape: Vec<usize>,
    /// Start and end in the bytes after the header.
    pub(crate) data_offsets: (u64, u64),
}

impl Checkpoint {
    pub(super) fn map_safetensors(&mut self, path: &Path) -> Result<(), ModelError> {
        let data = ipc::map_file(path).map_err(|source| ModelError::Read { path: path.into(), source })?;
        let bad = |reason: String| ModelError::Header { path: path.into(), reason };
        let (body, header) = split_header(data).map_err(bad)?;
        for (tensor, entry) in header {
            let (start, end) = entry.data_offsets;
            if start > end {
                return Err(bad(format!("tensor `{tensor}` ends before it starts")));
            }
            let body_start = (data.len() - body.len()) as u64;
            if end > body.len() as u64 {
                let (needed, found) = (end.saturating_add(body_start), data.len() as u64);
                return Err(ModelError::Truncated { path: path.into(), tensor, needed, found });
            }
            let data = &body[start as usize..end as usize];
            let entry = Tensor { path: path.into(), dtype: entry.dtype, shape: entry.shape, data, fault: None };
            self.tensors.insert(tensor, entry);
        }
        Ok(())
    }
}

/// The tensors of a file by its header. The file is not mapped, and the data of its tensors is not read.
///
/// # Errors
/// When the file cannot be read, its header is invalid, or the file ends before the last of its tensors.
pub(super) fn read_header(path: &Path) -> Result<BTreeMap<String, HeaderEntry>, ModelError> {
    let unreadable = |source| ModelError::Read { path: path.into(), source };
    let bad = |reason: String| ModelError::Header { path: path.into(), reason };
    let mut file = File::open(path).map_err(unreadable)?;
    let found = file.metadata().map_err(unreadable)?.len();
    let mut start = Vec::new();
    file.by_ref().take(LENGTH_BYTES).read_to_end(&mut start).map_err(unreadable)?;
    if let Some(length) = start.first_chunk::<{ LENGTH_BYTES as usize }>() {
        // `split_header` refuses a header that is longer than what was read.
        let length = u64::from_le_bytes(*length).min(MAX_HEADER_BYTES);
        file.take(length).read_to_end(&mut start).map_err(unreadable)?;
    }
    let (_, header) = split_header(&start).map_err(bad)?;
    let header_bytes = start.len() as u64;
    let is_cut = |entry: &HeaderEntry| entry.data_offsets.1 > found - header_bytes.min(found);
    match header.iter().find(|(_, entry)| is_cut(entry)) {
        Some((tensor, entry)) => {
            let needed = entry.data_offsets.1.saturating_add(header_bytes);
            Err(ModelError::Truncated { path: path.into(), tensor: tensor.clone(), needed, found })
        }
        None => Ok(header),
    }
}

/// Splits a file into the header's tensors and the bytes after the header.
pub(crate) fn split_header(data: &[u8]) -> Result<(&[u8], BTreeMap<String, HeaderEntry>), String> {
    let (length, rest) = data.split_first_chunk::<8>().ok_or("it has fewer than 8 bytes")?;
    let length = u64::from_le_bytes(*length);
    if length > MAX_HEADER_BYTES || length > rest.len() as u64 {
        return Err(format!("its header has {length} bytes by its own account, but {} follow", rest.len()));
    }
    let (header, body) = rest.split_at(length as usize);
    let mut entries: BTreeMap<String, serde_json::Value> =
        serde_json::from_slice(header).map_err(|error| format!("its header is not JSON: {error}"))?;
    entries.remove("__metadata__");
    let parse = |(name, value)| match serde_json::from_value(value) {
        Ok(entry) => Ok((name, entry)),
        Err(error) => Err(format!("header entry `{name}`: {error}")),
    };
    Ok((body, entries.into_iter().map(parse).collect::<Result<_, _>>()?))
}
