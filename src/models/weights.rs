//! Checkpoints: memory-mapped safetensors files and the tensors in them.
//!
//! Format: 8 bytes little-endian header length, a JSON header, then the tensors' bytes
//! (<https://github.com/huggingface/safetensors>, section "Format").

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::path::{Path, PathBuf};

use device::{DType, WeightSlice};
use serde::Deserialize;

use crate::ModelError;
use crate::fields::Fields;

/// Longest header accepted, as the format's own library does.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// All tensors of a model directory. Mappings live as long as the process.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    tensors: HashMap<String, Tensor>,
}

#[derive(Debug)]
struct Tensor {
    path: PathBuf,
    dtype: String,
    shape: Vec<usize>,
    data: &'static [u8],
}

#[derive(Deserialize)]
struct HeaderEntry {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: (u64, u64),
}

impl Checkpoint {
    /// Maps `model.safetensors.index.json`'s files, or `model.safetensors`, or every `*.safetensors` of `dir`.
    ///
    /// # Errors
    /// When a file is missing, truncated or not safetensors, or a tensor of the index is not in its file.
    pub fn open(dir: &Path) -> Result<Self, ModelError> {
        let mut checkpoint = Self { dir: dir.into(), tensors: HashMap::new() };
        let index = dir.join("model.safetensors.index.json");
        if index.exists() {
            let files = index_files(&index)?;
            for path in files.values().collect::<BTreeSet<_>>() {
                checkpoint.map_file(path)?;
            }
            if let Some((tensor, path)) = files.iter().find(|(tensor, _)| !checkpoint.tensors.contains_key(*tensor)) {
                let reason = format!("tensor `{tensor}`, which {} places here, is missing", index.display());
                return Err(ModelError::Header { path: path.clone(), reason });
            }
            return Ok(checkpoint);
        }
        let single = dir.join("model.safetensors");
        let files = if single.exists() { vec![single] } else { safetensors_files(dir)? };
        if files.is_empty() {
            return Err(ModelError::NoWeights { dir: dir.into() });
        }
        for path in &files {
            checkpoint.map_file(path)?;
        }
        Ok(checkpoint)
    }

    /// Whether a tensor is there.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Rows and columns of the matrix `name`, which must be `[matrix_rows, matrix_cols]`.
    ///
    /// # Errors
    /// When the tensor is missing, or its shape or dtype is not what the model needs.
    pub fn matrix<'a>(
        &self,
        name: &'a str,
        shape: [usize; 2],
        rows: Range<usize>,
        cols: Range<usize>,
    ) -> Result<WeightSlice<'a>, ModelError> {
        let (tensor, dtype) = self.tensor(name, &shape)?;
        Ok(WeightSlice { name, data: tensor.data, dtype, matrix_cols: shape[1], rows, cols })
    }

    /// Elements `range` of the vector `name`, which must be `[len]`.
    ///
    /// # Errors
    /// As [`Checkpoint::matrix`].
    pub fn vector<'a>(&self, name: &'a str, len: usize, range: Range<usize>) -> Result<WeightSlice<'a>, ModelError> {
        let (tensor, dtype) = self.tensor(name, &[len])?;
        Ok(WeightSlice { name, data: tensor.data, dtype, matrix_cols: len, rows: 0..1, cols: range })
    }

    fn tensor(&self, name: &str, shape: &[usize]) -> Result<(&Tensor, DType), ModelError> {
        let missing = || ModelError::MissingTensor { tensor: name.into(), dir: self.dir.clone() };
        let tensor = self.tensors.get(name).ok_or_else(missing)?;
        if tensor.shape != shape {
            return Err(ModelError::Shape {
                tensor: name.into(),
                path: tensor.path.clone(),
                expected: shape.into(),
                found: tensor.shape.clone(),
            });
        }
        let dtype = match tensor.dtype.as_str() {
            "BF16" => DType::Bf16,
            "F16" => DType::F16,
            "F32" => DType::F32,
            other => {
                let (tensor, path) = (name.into(), tensor.path.clone());
                return Err(ModelError::Dtype { tensor, path, found: other.into() });
            }
        };
        let bytes = shape.iter().product::<usize>() * dtype.size();
        if tensor.data.len() != bytes {
            let reason = format!("tensor `{name}` holds {} bytes, its shape needs {bytes}", tensor.data.len());
            return Err(ModelError::Header { path: tensor.path.clone(), reason });
        }
        Ok((tensor, dtype))
    }

    fn map_file(&mut self, path: &Path) -> Result<(), ModelError> {
        let data = device::map_file(path).map_err(|source| ModelError::Read { path: path.into(), source })?;
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
            let entry = Tensor { path: path.into(), dtype: entry.dtype, shape: entry.shape, data };
            self.tensors.insert(tensor, entry);
        }
        Ok(())
    }
}

/// The bytes after the header, and the header's tensors.
fn split_header(data: &'static [u8]) -> Result<(&'static [u8], BTreeMap<String, HeaderEntry>), String> {
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

/// Tensor name to file, as the index says.
fn index_files(index: &Path) -> Result<BTreeMap<String, PathBuf>, ModelError> {
    let fields = Fields::read(index)?;
    let dir = index.parent().expect("an index file lies in a directory");
    let map = match fields.get("weight_map") {
        Some(serde_json::Value::Object(map)) => map,
        other => {
            let null = serde_json::Value::Null;
            return Err(fields.wrong("weight_map", "an object from tensor to file", other.unwrap_or(&null)));
        }
    };
    let entry = |(tensor, file): (&String, &serde_json::Value)| match file.as_str() {
        // A bare file name: an index must not lead out of its directory.
        Some(file) if Path::new(file).file_name() == Some(file.as_ref()) => Ok((tensor.clone(), dir.join(file))),
        _ => Err(fields.wrong(&format!("weight_map.{tensor}"), "a file name", file)),
    };
    map.iter().map(entry).collect()
}

fn safetensors_files(dir: &Path) -> Result<Vec<PathBuf>, ModelError> {
    let read = |source| ModelError::Read { path: dir.into(), source };
    let mut files = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(read)? {
        let path = entry.map_err(read)?.path();
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(dir: &Path, name: &str, header: &str, body: &[u8]) {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        bytes.extend_from_slice(body);
        std::fs::write(dir.join(name), bytes).unwrap();
    }

    const TWO_BY_THREE: &str = r#"{"w":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},"__metadata__":{"a":"b"}}"#;

    #[test]
    fn a_single_file_is_mapped() {
        let dir = tempfile::tempdir().unwrap();
        file(dir.path(), "model.safetensors", TWO_BY_THREE, &[1; 12]);
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        let slice = checkpoint.matrix("w", [2, 3], 1..2, 0..3).unwrap();
        assert_eq!((slice.data, slice.dtype, slice.matrix_cols), (&[1u8; 12][..], DType::Bf16, 3));
    }

    #[test]
    fn faults_name_tensor_and_file() {
        let dir = tempfile::tempdir().unwrap();
        let open = || Checkpoint::open(dir.path());
        assert!(matches!(open(), Err(ModelError::NoWeights { .. })));

        file(dir.path(), "model.safetensors", TWO_BY_THREE, &[1; 11]);
        let error = open().unwrap_err().to_string();
        assert!(error.contains("model.safetensors is truncated: tensor `w` ends at byte"), "{error}");

        file(dir.path(), "model.safetensors", TWO_BY_THREE, &[1; 12]);
        let checkpoint = open().unwrap();
        let error = checkpoint.matrix("w", [3, 2], 0..3, 0..2).unwrap_err().to_string();
        assert!(error.contains("tensor `w` in") && error.contains("has shape [2, 3], expected [3, 2]"), "{error}");
        let error = checkpoint.vector("b", 2, 0..2).unwrap_err().to_string();
        assert!(error.starts_with("tensor `b` is missing in"), "{error}");

        file(dir.path(), "model.safetensors", &TWO_BY_THREE.replace("BF16", "I8"), &[1; 12]);
        let error = open().unwrap().matrix("w", [2, 3], 0..2, 0..3).unwrap_err().to_string();
        assert!(error.contains("dtype `I8`, expected `BF16`"), "{error}");
    }

    #[test]
    fn an_index_names_its_files_and_must_be_true() {
        let dir = tempfile::tempdir().unwrap();
        let index = |text: &str| std::fs::write(dir.path().join("model.safetensors.index.json"), text).unwrap();
        file(dir.path(), "a.safetensors", TWO_BY_THREE, &[1; 12]);
        index(r#"{"weight_map":{"w":"a.safetensors"}}"#);
        assert!(Checkpoint::open(dir.path()).unwrap().contains("w"));
        index(r#"{"weight_map":{"v":"a.safetensors"}}"#);
        assert!(Checkpoint::open(dir.path()).unwrap_err().to_string().contains("tensor `v`"));
        index(r#"{"weight_map":{"w":"../a.safetensors"}}"#);
        assert!(Checkpoint::open(dir.path()).unwrap_err().to_string().contains("must be a file name"));
    }

    #[test]
    fn a_broken_header_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        for bytes in [&b"short"[..], &[255; 16], b"\x02\0\0\0\0\0\0\0[]"] {
            std::fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
            assert!(matches!(Checkpoint::open(dir.path()), Err(ModelError::Header { .. })));
        }
    }
}
