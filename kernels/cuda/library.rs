//! NVIDIA's libraries other than the driver. They are found in a CUDA installation or a Python environment and loaded
//! by path.

use std::path::{Path, PathBuf};

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

use super::CudaError;

/// Directories of NVIDIA's libraries outside the loader's path.
fn usual_folders() -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> =
        ["/usr/local/cuda/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib64"].map(PathBuf::from).into();
    for prefix in ["/usr/local/lib", "/usr/lib"] {
        for python in children(Path::new(prefix)) {
            folders.extend(python_folders(&python));
        }
    }
    folders
}

/// Directories of NVIDIA's wheels under a `lib/python3.x`.
fn python_folders(python: &Path) -> Vec<PathBuf> {
    let mut folders = Vec::new();
    for packages in ["site-packages", "dist-packages"] {
        for package in children(&python.join(packages).join("nvidia")) {
            folders.push(package.join("lib"));
        }
    }
    folders
}

fn children(folder: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}

/// Loads `name` (such as `libnccl.so.2`) from the loader's path, from `folders` (a directory with libraries, or the
/// root of a Python environment), or from the usual places. It is never unloaded, and later loads by name find it.
///
/// # Errors
/// Returns an error with the searched places if it is in none of them.
pub fn load(name: &str, folders: &[PathBuf]) -> Result<Library, CudaError> {
    let mut candidates: Vec<PathBuf> = Vec::new();
    for folder in folders {
        candidates.push(folder.clone());
        children(&folder.join("lib")).iter().for_each(|python| candidates.extend(python_folders(python)));
    }
    candidates.extend(usual_folders());
    let paths = candidates.iter().map(|folder| folder.join(name)).filter(|path| path.exists());
    let mut problem = String::from("not found");
    for path in paths.chain([PathBuf::from(name)]) {
        // SAFETY: a library of NVIDIA by its versioned name; its initializers have no requirements.
        match unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_GLOBAL) } {
            Ok(library) => return Ok(library),
            Err(error) => problem = error.to_string(),
        }
    }
    let given: Vec<String> = folders.iter().map(|f| f.display().to_string()).collect();
    let reason = format!(
        "{problem}; searched [{}], CUDA's and Python's usual places and the loader's path; name its folder with `--cuda-libs`",
        given.join(", ")
    );
    Err(CudaError::Library { call: format!("loading {name}"), reason })
}
