//! The directory of the new checkpoint, and the files in it that hold no weights.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tempfile::TempDir;

use crate::QuantizeError;
use crate::error::io;
use crate::plan::Plan;

/// Ends of the names of files with weights. A quantized checkpoint has its own.
const WEIGHTS: [&str; 9] =
    [".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf", ".h5", ".msgpack"];

/// A directory that gets its name when it is complete.
pub(crate) struct Target {
    out: PathBuf,
    dir: TempDir,
}

impl Target {
    /// Makes the directory beside `out`.
    ///
    /// # Errors
    /// When `out` exists, or the directory cannot be made.
    pub(crate) fn new(out: &Path) -> Result<Self, QuantizeError> {
        if out.symlink_metadata().is_ok() {
            return Err(QuantizeError::Exists(out.to_owned()));
        }
        let parent = out.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        fs::create_dir_all(parent).map_err(io("cannot create", parent))?;
        let dir =
            tempfile::Builder::new().prefix(".quantize-").tempdir_in(parent).map_err(io("cannot write in", parent))?;
        Ok(Self { out: out.to_owned(), dir })
    }

    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Gives the directory its name.
    ///
    /// # Errors
    /// When it cannot be renamed, for example because the goal exists by now.
    pub(crate) fn finish(self) -> Result<(), QuantizeError> {
        let Self { out, dir } = self;
        // A temporary directory is for its owner only.
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).map_err(io("cannot change", dir.path()))?;
        if out.symlink_metadata().is_ok() {
            return Err(QuantizeError::Exists(out));
        }
        fs::rename(dir.path(), &out).map_err(io("cannot create", &out))?;
        let _ = dir.keep();
        Ok(())
    }
}

/// Writes `config.json` with the description of the quantization.
///
/// # Errors
/// When the file cannot be read or written, or is no JSON object.
pub(crate) fn write_config(from: &Path, to: &Path, plan: &Plan<'_>) -> Result<(), QuantizeError> {
    let (source, path) = (from.join("config.json"), to.join("config.json"));
    let text = fs::read(&source).map_err(io("cannot read", &source))?;
    let Ok(Value::Object(mut config)) = models::from_python_json(&text) else {
        return Err(QuantizeError::Config(source));
    };
    config.insert("quantization_config".to_owned(), plan.form.config(&plan.ignored()));
    let config = Value::Object(config);
    fs::write(&path, format!("{config:#}\n")).map_err(io("cannot write", &path))
}

/// Copies all files but weights and `config.json`, also of directories.
///
/// # Errors
/// When a file cannot be read or written.
pub(crate) fn copy_others(from: &Path, to: &Path) -> Result<(), QuantizeError> {
    for entry in fs::read_dir(from).map_err(io("cannot read", from))? {
        let entry = entry.map_err(io("cannot read", from))?;
        let name = entry.file_name();
        let text = name.to_string_lossy();
        let (source, target) = (entry.path(), to.join(&name));
        if text.starts_with('.') || WEIGHTS.iter().any(|end| text.ends_with(end)) || target.exists() {
            continue;
        }
        // Files of a hub's cache are links.
        match fs::metadata(&source).map_err(io("cannot read", &source))?.is_dir() {
            true => {
                fs::create_dir(&target).map_err(io("cannot create", &target))?;
                copy_others(&source, &target)?;
                // Only empty ones can be removed: those that had weights alone.
                let _ = fs::remove_dir(&target);
            }
            false => drop(fs::copy(&source, &target).map_err(io("cannot copy", &source))?),
        }
    }
    Ok(())
}
