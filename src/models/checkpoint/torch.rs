//! `pytorch_model.bin`: the files that `torch.save` writes, either a zip archive or the older format of pickles and raw
//! storages.

use std::collections::HashMap;
use std::path::Path;

use super::pickle::{Pickle, TensorRecord};
use super::{Checkpoint, Tensor, zip};
use crate::ModelError;

/// The first bytes of a file in the older format: a pickle of a magic number.
const OLD_MAGIC: &[u8] = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.";
const ZIP_MAGIC: &[u8] = b"PK\x03\x04";

impl Checkpoint {
    pub(super) fn map_torch(&mut self, path: &Path) -> Result<(), ModelError> {
        let data = ipc::map_file(path).map_err(|source| ModelError::Read { path: path.into(), source })?;
        let read = if data.starts_with(ZIP_MAGIC) {
            read_zip(data)
        } else if data.starts_with(OLD_MAGIC) {
            read_old(data)
        } else {
            Err("it starts neither as a zip archive nor as an older file of `torch.save`".into())
        };
        let (tensors, storages) = read.map_err(|reason| ModelError::TorchFile { path: path.into(), reason })?;
        for (name, record) in tensors {
            let tensor = tensor(path, &record, &storages);
            self.tensors.insert(name, tensor);
        }
        Ok(())
    }
}

type Contents = (Vec<(String, TensorRecord)>, HashMap<String, &'static [u8]>);

fn read_zip(data: &'static [u8]) -> Result<Contents, String> {
    let entries = zip::entries(data)?;
    let pickle_name = entries.keys().find(|name| *name == "data.pkl" || name.ends_with("/data.pkl"));
    let pickle_name = pickle_name.ok_or("it has no `data.pkl`: it was not written by `torch.save`")?;
    let root = pickle_name.trim_end_matches("data.pkl");
    if entries.get(&format!("{root}byteorder")).is_some_and(|order| *order != b"little") {
        return Err("its bytes are in big-endian order, which is not supported".into());
    }
    let tensors = Pickle::read(entries[pickle_name])?.tensors()?;
    let folder = format!("{root}data/");
    let storage = |(name, data): (&String, &&'static [u8])| Some((name.strip_prefix(&folder)?.to_owned(), *data));
    Ok((tensors, entries.iter().filter_map(storage).collect()))
}

/// Reads pickles of magic number, version, system, state dict and storage keys, and then the length and elements of
/// each storage.
fn read_old(data: &'static [u8]) -> Result<Contents, String> {
    let mut rest = data;
    let mut next = || -> Result<Pickle<'static>, String> {
        let pickle = Pickle::read(rest)?;
        rest = &rest[pickle.len..];
        Ok(pickle)
    };
    for _ in 0..3 {
        next()?;
    }
    let tensors = next()?.tensors()?;
    let keys = next()?.texts()?;
    let mut sizes: HashMap<&str, usize> = HashMap::new();
    for (_, record) in &tensors {
        sizes.insert(&record.key, record.storage_len.saturating_mul(element_size(record.dtype)));
    }
    let mut storages = HashMap::new();
    for key in keys {
        let size = *sizes.get(&*key).ok_or_else(|| format!("its storage `{key}` belongs to no tensor"))?;
        let (storage, after) = rest
            .split_at_checked(8)
            .and_then(|(_, rest)| rest.split_at_checked(size))
            .ok_or_else(|| format!("it is truncated in its storage `{key}` of {size} bytes; copy the file again"))?;
        rest = after;
        storages.insert(key, storage);
    }
    Ok((tensors, storages))
}

fn tensor(path: &Path, record: &TensorRecord, storages: &HashMap<String, &'static [u8]>) -> Tensor {
    let (data, fault) = match bytes(record, storages) {
        Ok(data) => (data, None),
        Err(fault) => (&[][..], Some(fault)),
    };
    Tensor { path: path.into(), dtype: record.dtype.into(), shape: record.shape.clone(), data, fault }
}

fn bytes(record: &TensorRecord, storages: &HashMap<String, &'static [u8]>) -> Result<&'static [u8], String> {
    let TensorRecord { shape, strides, .. } = record;
    let mut expected = 1usize;
    for (len, stride) in shape.iter().zip(strides).rev() {
        if *len != 1 && *stride != expected {
            return Err(format!("has strides {strides:?} for shape {shape:?}; save it contiguous"));
        }
        expected = expected.saturating_mul(*len);
    }
    let storage =
        storages.get(&record.key).ok_or_else(|| format!("is in storage `{}`, which is missing", record.key))?;
    let size = element_size(record.dtype);
    let start = record.offset.saturating_mul(size);
    let end = start.saturating_add(expected.saturating_mul(size));
    storage.get(start..end).ok_or_else(|| {
        format!(
            "needs bytes {start} to {end} of storage `{}`, which has {}; copy the file again",
            record.key,
            storage.len()
        )
    })
}

fn element_size(dtype: &str) -> usize {
    match dtype {
        "F64" | "I64" => 8,
        "F32" | "I32" => 4,
        "BF16" | "F16" | "I16" => 2,
        _ => 1,
    }
}
