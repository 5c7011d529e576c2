//! The tensors of a checkpoint without their data.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::safetensors::read_header;
use super::{FORMATS, Format, index_files, matching_files};
use crate::ModelError;

/// The type and shape of a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TensorForm {
    /// As safetensors names it, such as `BF16`.
    pub(crate) dtype: String,
    pub(crate) shape: Vec<usize>,
}

/// The form of each tensor in a directory, by name. Only headers of safetensors files are read, and no file stays open or mapped,
/// so that it can be removed later.
///
/// # Errors
/// When the directory has no such files, or one of them is missing, truncated or invalid.
pub(crate) fn tensor_forms(dir: &Path) -> Result<BTreeMap<String, TensorForm>, ModelError> {
    let Format { index, single, pattern, .. } = &FORMATS[0];
    let (index, single) = (dir.join(index), dir.join(single));
    let indexed = if index.exists() { index_files(&index)? } else { BTreeMap::new() };
    let files: BTreeSet<PathBuf> = match () {
        () if !indexed.is_empty() => indexed.values().cloned().collect(),
        () if single.exists() => BTreeSet::from([single]),
        () => matching_files(dir, *pattern)?.into_iter().collect(),
    };
    if files.is_empty() {
        return Err(ModelError::NoSafetensors { dir: dir.into() });
    }
    let mut forms = BTreeMap::new();
    for file in &files {
        let header = read_header(file)?;
        forms.extend(
            header.into_iter().map(|(name, entry)| (name, TensorForm { dtype: entry.dtype, shape: entry.shape })),
        );
    }
    match indexed.iter().find(|(tensor, _)| !forms.contains_key(*tensor)) {
        Some((tensor, path)) => {
            let reason = format!("tensor `{tensor}`, which {} places here, is missing", index.display());
            Err(ModelError::Header { path: path.clone(), reason })
        }
        None => Ok(forms),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// A file with one tensor of `[2, 3]`.
    fn write(path: &Path, name: &str, num_bytes: usize) {
        let header = format!(r#"{{"{name}":{{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]}}}}"#);
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        bytes.extend(vec![0; num_bytes]);
        fs::write(path, bytes).unwrap();
    }

    #[test]
    fn headers_of_all_files_are_read_and_faults_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let (first, second) = (dir.path().join("a.safetensors"), dir.path().join("b.safetensors"));
        assert!(matches!(tensor_forms(dir.path()), Err(ModelError::NoSafetensors { .. })));
        write(&first, "v", 12);
        write(&second, "w", 12);
        let form = TensorForm { dtype: "BF16".to_owned(), shape: vec![2, 3] };
        let both = BTreeMap::from([("v".to_owned(), form.clone()), ("w".to_owned(), form)]);
        assert_eq!(tensor_forms(dir.path()).unwrap(), both);

        let index = dir.path().join("model.safetensors.index.json");
        fs::write(&index, r#"{"weight_map":{"v":"a.safetensors","x":"b.safetensors"}}"#).unwrap();
        assert!(tensor_forms(dir.path()).unwrap_err().to_string().contains("tensor `x`"));
        fs::remove_file(&index).unwrap();

        write(&second, "w", 11);
        let error = tensor_forms(dir.path()).unwrap_err().to_string();
        assert!(error.contains("b.safetensors is truncated: tensor `w` ends at byte"), "{error}");
        for bytes in [&b"short"[..], &[255; 16], b"\x02\0\0\0\0\0\0\0[]"] {
            fs::write(&second, bytes).unwrap();
            assert!(matches!(tensor_forms(dir.path()), Err(ModelError::Header { .. })));
        }
    }
}
