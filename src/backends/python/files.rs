//! The Python sources that model processes run, and unpacked environments: a directory that goes with the server.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use ipc::ProcessId;
use serving::InferError;
use tempfile::TempDir;

macro_rules! sources {
    ($($path:literal)*) => { [$(($path, include_str!(concat!("../../../python/", $path)))),*] };
}

const SOURCES: [(&str, &str); 12] = sources! {
    "stub.py"
    "triton_python_backend_utils/__init__.py"
    "triton_python_backend_utils/_channel.py"
    "triton_python_backend_utils/_datatypes.py"
    "triton_python_backend_utils/_errors.py"
    "triton_python_backend_utils/_inference.py"
    "triton_python_backend_utils/_memory.py"
    "triton_python_backend_utils/_model_config.py"
    "triton_python_backend_utils/_runner.py"
    "triton_python_backend_utils/_runtime.py"
    "triton_python_backend_utils/_services.py"
    "triton_python_backend_utils/_tensor.py"
};

const NAME: &str = "trireme-python-";

/// The directory, removed when dropped; what a killed server left is removed by the next one.
#[derive(Debug)]
pub(super) struct Files {
    dir: TempDir,
    /// Unpacked environments: archive and directory.
    environments: Mutex<Vec<(PathBuf, PathBuf)>>,
}

impl Files {
    /// Writes the sources.
    pub fn create() -> io::Result<Self> {
        let root = std::env::temp_dir();
        sweep(&root);
        let me = ProcessId::current();
        let dir = tempfile::Builder::new().prefix(&format!("{NAME}{}-{}-", me.pid, me.start_time)).tempdir_in(root)?;
        for (path, text) in SOURCES {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().expect("it is below the directory"))?;
            fs::write(path, text)?;
        }
        Ok(Self { dir, environments: Mutex::default() })
    }

    /// The directory that holds the module.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The program that each model process runs.
    pub fn stub(&self) -> PathBuf {
        self.dir.path().join("stub.py")
    }

    /// The interpreter of an environment: a directory, or an archive, unpacked once. Blocks.
    ///
    /// # Errors
    /// When there is none.
    pub fn interpreter(&self, environment: &Path) -> Result<PathBuf, InferError> {
        let dir = if environment.is_dir() { environment.to_owned() } else { self.unpacked(environment)? };
        let programs = ["bin/python3", "bin/python"].map(|program| dir.join(program));
        programs.into_iter().find(|program| program.is_file()).ok_or_else(|| {
            InferError::invalid(format!("EXECUTION_ENV_PATH {} holds no `bin/python3`", environment.display()))
        })
    }

    fn unpacked(&self, archive: &Path) -> Result<PathBuf, InferError> {
        let mut environments = self.environments.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some((_, dir)) = environments.iter().find(|(known, _)| known == archive) {
            return Ok(dir.clone());
        }
        let failed =
            |why: String| InferError::invalid(format!("cannot unpack EXECUTION_ENV_PATH {}: {why}", archive.display()));
        let dir = self.dir.path().join(format!("environment{}", environments.len()));
        fs::create_dir_all(&dir).map_err(|error| failed(error.to_string()))?;
        let tar = Command::new("tar").arg("-xf").arg(archive).arg("-C").arg(&dir).output();
        let tar = tar.map_err(|error| failed(format!("cannot run `tar`: {error}")))?;
        if !tar.status.success() {
            return Err(failed(String::from_utf8_lossy(&tar.stderr).trim().to_owned()));
        }
        environments.push((archive.to_owned(), dir.clone()));
        Ok(dir)
    }
}

/// Removes directories of servers that have ended.
fn sweep(root: &Path) {
    for entry in fs::read_dir(root).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let owner = name.to_str().and_then(|name| name.strip_prefix(NAME)).and_then(|rest| {
            let mut parts = rest.split('-');
            Some(ProcessId { pid: parts.next()?.parse().ok()?, start_time: parts.next()?.parse().ok()? })
        });
        if owner.is_some_and(|owner| !owner.is_alive()) {
            // Another user's stays.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_source_is_shipped_and_goes_with_the_server() {
        let files = Files::create().unwrap();
        let dir = files.dir().to_owned();
        let package = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../python/triton_python_backend_utils");
        let sources = fs::read_dir(package).unwrap().flatten().map(|entry| entry.file_name());
        for name in sources.filter(|name| name.to_string_lossy().ends_with(".py")) {
            assert!(dir.join("triton_python_backend_utils").join(&name).is_file(), "{name:?} is not embedded");
        }
        assert!(files.stub().is_file());
        drop(files);
        assert!(!dir.exists());
    }

    #[test]
    fn what_a_dead_server_left_is_removed() {
        let root = tempfile::tempdir().unwrap();
        let dead = root.path().join(format!("{NAME}1-99-x"));
        let me = ProcessId::current();
        let alive = root.path().join(format!("{NAME}{}-{}-x", me.pid, me.start_time));
        for dir in [&dead, &alive] {
            fs::create_dir(dir).unwrap();
        }
        sweep(root.path());
        assert!(!dead.exists() && alive.exists());
    }
}
