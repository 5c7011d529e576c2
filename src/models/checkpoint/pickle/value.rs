//! The values that a pickle may build.

/// Maximum length of the name of a tensor or storage, in bytes.
pub(super) const MAX_NAME: usize = 4096;

/// Index of a value in the list.
pub(super) type Id = usize;

/// A global name that a pickle may refer to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Global {
    /// Builds a dict.
    OrderedDict,
    /// Builds a tensor from its storage.
    RebuildTensor,
    /// Returns its first argument.
    RebuildParameter,
    /// Builds a tuple.
    Size,
    /// The element type of a storage, as a safetensors name.
    Storage(&'static str),
}

/// All names that are allowed: module, name, meaning.
pub(super) const GLOBALS: &[(&str, &str, Global)] = &[
    ("collections", "OrderedDict", Global::OrderedDict),
    ("torch._utils", "_rebuild_tensor_v2", Global::RebuildTensor),
    ("torch._utils", "_rebuild_parameter", Global::RebuildParameter),
    ("torch", "Size", Global::Size),
    ("torch", "BFloat16Storage", Global::Storage("BF16")),
    ("torch", "HalfStorage", Global::Storage("F16")),
    ("torch", "FloatStorage", Global::Storage("F32")),
    ("torch", "DoubleStorage", Global::Storage("F64")),
    ("torch", "LongStorage", Global::Storage("I64")),
    ("torch", "IntStorage", Global::Storage("I32")),
    ("torch", "ShortStorage", Global::Storage("I16")),
    ("torch", "CharStorage", Global::Storage("I8")),
    ("torch", "ByteStorage", Global::Storage("U8")),
    ("torch", "BoolStorage", Global::Storage("BOOL")),
];

/// The description of a tensor in a pickle.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::checkpoint) struct TensorRecord {
    /// Key of its storage.
    pub(in crate::checkpoint) key: String,
    /// The safetensors name.
    pub(in crate::checkpoint) dtype: &'static str,
    /// Number of elements in its storage.
    pub(in crate::checkpoint) storage_len: usize,
    /// Index of its first element in the storage.
    pub(in crate::checkpoint) offset: usize,
    pub(in crate::checkpoint) shape: Vec<usize>,
    /// Distance in elements from one index to the next, for each dimension.
    pub(in crate::checkpoint) strides: Vec<usize>,
}

/// A value built by a pickle.
#[derive(Debug, Clone)]
pub(super) enum Value<'a> {
    Nothing, // None, a fractional number, bytes: values that no tensor needs
    Bool,
    Int(i64),
    Text(&'a str),
    Tuple(Vec<Id>),
    List(Vec<Id>),
    Dict(Vec<(Id, Id)>),
    Global(Global),
    Storage { key: &'a str, dtype: &'static str, len: usize },
    Tensor(TensorRecord),
}

/// Refuses a name that is too long.
pub(super) fn short(name: &str) -> Result<&str, String> {
    match name.len() {
        0..=MAX_NAME => Ok(name),
        len => Err(format!("it has a name of {len} bytes; at most {MAX_NAME} are read")),
    }
}
