//! Checkpoints: memory-mapped files of weights, and the tensors in them.

mod computed;
mod form;
mod pickle;
mod quantized;
mod rows;
mod safetensors;
mod stored;
mod torch;
mod value;
mod zip;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

use bytes::Bytes;
pub(crate) use computed::RowOrder;
pub(crate) use form::{TensorForm, tensor_forms};
use ops::{DType, WeightData, WeightSlice};
pub use rows::rounded;
pub(crate) use rows::{HeadPadding, padded_cols, padded_rows, padded_vector};
pub(crate) use safetensors::{HeaderEntry, split_header};
pub use stored::StoredTensor;
#[cfg(test)]
pub(crate) use value::e4m3;

use crate::ModelError;
use crate::fields::Fields;

/// All tensors of a model directory. The files stay mapped until the process ends.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    tensors: HashMap<String, Tensor>,
    /// The names of tensors that were taken.
    used: RefCell<HashSet<String>>,
}

#[derive(Debug)]
struct Tensor {
    path: PathBuf,
    dtype: String, // safetensors name, such as `BF16`
    shape: Vec<usize>,
    data: &'static [u8],
    fault: Option<String>, // why it cannot be used
}

impl Tensor {
    fn stored(&self) -> WeightData {
        WeightData::Stored(Bytes::from_static(self.data))
    }
}

/// Whether a tensor of this name holds constants, which models do not read.
pub(crate) fn is_constant(name: &str) -> bool {
    const CONSTANTS: [&str; 9] = [
        "inv_freq",
        "attn.bias",
        "masked_bias",
        "attention.bias",
        "embed_positions",
        // Scales of a quantized KV cache.
        ".k_scale",
        ".v_scale",
        ".kv_scale",
        ".output_scale",
    ];
    CONSTANTS.iter().any(|constant| name.ends_with(constant))
}

/// A file format that contains tensors.
struct Format {
    index: &'static str,
    single: &'static str,
    /// Prefix and suffix of the file names to use if neither of the two exists.
    pattern: (&'static str, &'static str),
    map: fn(&mut Checkpoint, &Path) -> Result<(), ModelError>,
}

/// In the order in which they are searched for.
const FORMATS: [Format; 2] = [
    Format {
        index: "model.safetensors.index.json",
        single: "model.safetensors",
        pattern: ("", ".safetensors"),
        map: Checkpoint::map_safetensors,
    },
    Format {
        index: "pytorch_model.bin.index.json",
        single: "pytorch_model.bin",
        pattern: ("pytorch_model", ".bin"),
        map: Checkpoint::map_torch,
    },
];

impl Checkpoint {
    /// Maps the files named by `model.safetensors.index.json`, or `model.safetensors`, or every `*.safetensors` in
    /// `dir`. If there are none, does the same for `pytorch_model.bin`.
    ///
    /// # Errors
    /// Returns an error if a file is missing, truncated or of another format, or if a tensor of the index is not in its
    /// file.
    pub fn open(dir: &Path) -> Result<Self, ModelError> {
        let mut checkpoint = Self { dir: dir.into(), tensors: HashMap::new(), used: RefCell::default() };
        for format in &FORMATS {
            let index = dir.join(format.index);
            if index.exists() {
                checkpoint.map_indexed(&index, format)?;
                return Ok(checkpoint);
            }
            let single = dir.join(format.single);
            let files = if single.exists() { vec![single] } else { matching_files(dir, format.pattern)? };
            for path in &files {
                (format.map)(&mut checkpoint, path)?;
            }
            if !files.is_empty() {
                return Ok(checkpoint);
            }
        }
        Err(ModelError::NoWeights { dir: dir.into() })
    }

    fn map_indexed(&mut self, index: &Path, format: &Format) -> Result<(), ModelError> {
        let files = index_files(index)?;
        for path in files.values().collect::<BTreeSet<_>>() {
            (format.map)(self, path)?;
        }
        match files.iter().find(|(tensor, _)| !self.tensors.contains_key(*tensor)) {
            Some((tensor, path)) => {
                let reason = format!("tensor `{tensor}`, which {} places here, is missing", index.display());
                Err(ModelError::Header { path: path.clone(), reason })
            }
            None => Ok(()),
        }
    }

    /// Whether the checkpoint contains this tensor.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Whether the checkpoint contains this tensor with this shape.
    pub(crate) fn has_shape(&self, name: &str, shape: &[usize]) -> bool {
        self.tensors.get(name).is_some_and(|tensor| tensor.shape == shape)
    }

    /// The names of tensors that were not taken, in order, without those that hold constants.
    pub(crate) fn unused(&self) -> Vec<String> {
        let used = self.used.borrow();
        let unused = self.tensors.keys().filter(|name| !used.contains(*name) && !is_constant(name));
        let mut unused: Vec<String> = unused.cloned().collect();
        unused.sort();
        unused
    }

    /// Whether two tensors have the same bytes; `None` if one of them is missing.
    pub(crate) fn have_equal_bytes(&self, one: &str, other: &str) -> Option<bool> {
        let (Some(first), Some(second)) = (self.tensors.get(one), self.tensors.get(other)) else { return None };
        self.used.borrow_mut().insert(one.to_owned());
        Some(first.dtype == second.dtype && first.data == second.data)
    }

    /// The given rows and columns of the matrix `name`, which must be `[matrix_rows, matrix_cols]`.
    ///
    /// # Errors
    /// Returns an error if the tensor is missing, or if its shape or dtype is not what the model needs.
    pub fn matrix<'a>(
        &self,
        name: &'a str,
        shape: [usize; 2],
        rows: Range<usize>,
        cols: Range<usize>,
    ) -> Result<WeightSlice<'a>, ModelError> {
        let (tensor, dtype) = self.tensor(name, &shape)?;
        Ok(WeightSlice { name, data: tensor.stored(), dtype, matrix_cols: shape[1], rows, cols, head_order: None })
    }

    /// Elements `range` of the vector `name`, which must be `[len]`.
    ///
    /// # Errors
    /// The same as of [`Checkpoint::matrix`].
    pub fn vector<'a>(&self, name: &'a str, len: usize, range: Range<usize>) -> Result<WeightSlice<'a>, ModelError> {
        let (tensor, dtype) = self.tensor(name, &[len])?;
        Ok(WeightSlice {
            name,
            data: tensor.stored(),
            dtype,
            matrix_cols: len,
            rows: 0..1,
            cols: range,
            head_order: None,
        })
    }

    /// The given rows of the matrix `name`, one behind the other as a vector.
    ///
    /// # Errors
    /// The same as of [`Checkpoint::matrix`].
    pub fn flattened<'a>(
        &self,
        name: &'a str,
        shape: [usize; 2],
        rows: Range<usize>,
    ) -> Result<WeightSlice<'a>, ModelError> {
        let (tensor, dtype) = self.tensor(name, &shape)?;
        let (matrix_cols, cols) = (shape[0] * shape[1], rows.start * shape[1]..rows.end * shape[1]);
        Ok(WeightSlice { name, data: tensor.stored(), dtype, matrix_cols, rows: 0..1, cols, head_order: None })
    }

    /// The given rows and columns of the matrices `name`, `[count, rows, cols]`, one below the other.
    ///
    /// # Errors
    /// The same as of [`Checkpoint::matrix`].
    pub fn stack<'a>(
        &self,
        name: &'a str,
        shape: [usize; 3],
        rows: Range<usize>,
        cols: Range<usize>,
    ) -> Result<WeightSlice<'a>, ModelError> {
        let (tensor, dtype) = self.tensor(name, &shape)?;
        Ok(WeightSlice { name, data: tensor.stored(), dtype, matrix_cols: shape[2], rows, cols, head_order: None })
    }

    /// The values `range` of the tensor `name`, counted over all its elements.
    ///
    /// # Errors
    /// The same as of [`Checkpoint::matrix`].
    pub fn values(&self, name: &str, shape: &[usize], range: Range<usize>) -> Result<Vec<f32>, ModelError> {
        let (tensor, dtype) = self.tensor(name, shape)?;
        let bytes = &tensor.data[range.start * dtype.size()..range.end * dtype.size()];
        Ok(bytes.chunks_exact(dtype.size()).map(|value| value::read(dtype, value) as f32).collect())
    }

    /// The values of the tensor `name` of 64-bit integers, which must be `[len]`.
    ///
    /// # Errors
    /// The same as of [`Checkpoint::matrix`].
    pub(crate) fn offsets(&self, name: &str, len: usize) -> Result<Vec<i64>, ModelError> {
        let bytes = self.integers(name, "I64", &[len], size_of::<i64>())?;
        let (values, _) = bytes.as_chunks();
        Ok(values.iter().map(|value| i64::from_le_bytes(*value)).collect())
    }

    /// The value of the tensor `name`, which must be `[1]` or `[]`.
    ///
    /// # Errors
    /// The same as of [`Checkpoint::matrix`].
    pub fn scalar(&self, name: &str) -> Result<f32, ModelError> {
        let has_no_dimension = self.tensors.get(name).is_some_and(|tensor| tensor.shape.is_empty());
        let (tensor, dtype) = self.tensor(name, if has_no_dimension { &[] } else { &[1] })?;
        Ok(value::read(dtype, tensor.data) as f32)
    }

    /// The bytes of the tensor `name`, whose elements have one byte and this type.
    fn bytes(&self, name: &str, dtype: &str, shape: &[usize]) -> Result<&'static [u8], ModelError> {
        self.integers(name, dtype, shape, 1)
    }

    /// The bytes of the tensor `name`, whose elements have `size` bytes and this type.
    fn integers(&self, name: &str, dtype: &str, shape: &[usize], size: usize) -> Result<&'static [u8], ModelError> {
        let tensor = self.shaped(name, shape)?;
        let (path, found) = (tensor.path.clone(), tensor.dtype.clone());
        if found != dtype || tensor.data.len() != shape.iter().product::<usize>() * size {
            return Err(ModelError::Dtype { tensor: name.into(), path, found });
        }
        Ok(tensor.data)
    }

    /// Tensors that may be meant by `name`: one with a longer name that ends alike, or the first ones.
    fn like(&self, name: &str) -> String {
        let mut names: Vec<&str> = self.tensors.keys().map(String::as_str).collect();
        names.sort_unstable();
        let is_longer = |found: &&&str| found.strip_suffix(name).is_some_and(|prefix| prefix.ends_with('.'));
        if names.is_empty() {
            return "no tensors; in a file of PyTorch the state dict must not be inside of another dict".into();
        }
        match names.iter().find(is_longer) {
            Some(longer) => format!("`{longer}`; save it without what stands before the name"),
            None => format!("other tensors ({}), such as `{}`", names.len(), names[..names.len().min(3)].join("`, `")),
        }
    }

    /// The tensor `name`, which must have this shape.
    fn shaped(&self, name: &str, shape: &[usize]) -> Result<&Tensor, ModelError> {
        let missing =
            || ModelError::MissingTensor { tensor: name.into(), dir: self.dir.clone(), found: self.like(name) };
        let tensor = self.tensors.get(name).ok_or_else(missing)?;
        self.used.borrow_mut().insert(name.to_owned());
        let path = tensor.path.clone();
        if let Some(fault) = &tensor.fault {
            return Err(ModelError::Header { path, reason: format!("tensor `{name}` {fault}") });
        }
        if tensor.shape != shape {
            let (expected, found) = (shape.into(), tensor.shape.clone());
            return Err(ModelError::Shape { tensor: name.into(), path, expected, found });
        }
        Ok(tensor)
    }

    fn tensor(&self, name: &str, shape: &[usize]) -> Result<(&Tensor, DType), ModelError> {
        let tensor = self.shaped(name, shape)?;
        let path = tensor.path.clone();
        let dtype = match tensor.dtype.as_str() {
            "BF16" => DType::Bf16,
            "F16" => DType::F16,
            "F32" => DType::F32,
            other => return Err(ModelError::Dtype { tensor: name.into(), path, found: other.into() }),
        };
        let bytes = shape.iter().product::<usize>() * dtype.size();
        if tensor.data.len() != bytes {
            let reason = format!("tensor `{name}` holds {} bytes, its shape needs {bytes}", tensor.data.len());
            return Err(ModelError::Header { path, reason });
        }
        Ok((tensor, dtype))
    }
}

/// Reads an index: maps tensor names to files.
fn index_files(index: &Path) -> Result<BTreeMap<String, PathBuf>, ModelError> {
    let fields = Fields::read(index)?;
    let dir = index.parent().expect("an index file is in a directory");
    let map = match fields.get("weight_map") {
        Some(serde_json::Value::Object(map)) => map,
        other => {
            let null = serde_json::Value::Null;
            return Err(fields.wrong("weight_map", "an object from tensor to file", other.unwrap_or(&null)));
        }
    };
    let entry = |(tensor, file): (&String, &serde_json::Value)| match file.as_str() {
        // Only a bare file name is allowed: an index must not refer to files outside its directory.
        Some(file) if Path::new(file).file_name() == Some(file.as_ref()) => Ok((tensor.clone(), dir.join(file))),
        _ => Err(fields.wrong(&format!("weight_map.{tensor}"), "a file name", file)),
    };
    map.iter().map(entry).collect()
}

fn matching_files(dir: &Path, (start, end): (&str, &str)) -> Result<Vec<PathBuf>, ModelError> {
    let read = |source| ModelError::Read { path: dir.into(), source };
    let mut files = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(read)? {
        let entry = entry.map_err(read)?;
        if entry.file_name().to_str().is_some_and(|name| name.starts_with(start) && name.ends_with(end)) {
            files.push(entry.path());
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
        let WeightData::Stored(data) = slice.data else { panic!("the matrix is stored") };
        assert_eq!((&data[..], slice.dtype, slice.matrix_cols), (&[1u8; 12][..], DType::Bf16, 3));
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
        assert!(error.ends_with("which has other tensors (1), such as `w`"), "{error}");

        let wrapped = TWO_BY_THREE.replace("\"w\"", "\"module.w\"");
        file(dir.path(), "model.safetensors", &wrapped, &[1; 12]);
        let error = open().unwrap().matrix("w", [2, 3], 0..2, 0..3).unwrap_err().to_string();
        assert!(error.ends_with("which has `module.w`; save it without what stands before the name"), "{error}");

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
        index(r#"{"weight_map":{"w":"b.safetensors"}}"#);
        let error = Checkpoint::open(dir.path()).unwrap_err().to_string();
        assert!(error.contains("b.safetensors: No such file or directory"), "{error}");
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
