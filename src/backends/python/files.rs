//! A temporary directory with the Python sources that model processes run, and with unpacked environments.
//!
//! It is made for the first Python model and removed when the server ends. A shell waits for the end of the server, so that the
//! directory is removed even if the server is killed.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, SystemTime};

use ipc::{ProcessId, ProcessWatch, close_descriptors, lock, withhold_secrets};
use serving::InferError;
use tempfile::TempDir;

macro_rules! sources {
    ($($path:literal)*) => { [$(($path, include_str!(concat!("../../../python/", $path)))),*] };
}

const SOURCES: [(&str, &str); 14] = sources! {
    "stub.py"
    "triton_python_backend_utils/__init__.py"
    "triton_python_backend_utils/_calls.py"
    "triton_python_backend_utils/_channel.py"
    "triton_python_backend_utils/_datatypes.py"
    "triton_python_backend_utils/_errors.py"
    "triton_python_backend_utils/_inference.py"
    "triton_python_backend_utils/_memory.py"
    "triton_python_backend_utils/_model_config.py"
    "triton_python_backend_utils/_response.py"
    "triton_python_backend_utils/_runner.py"
    "triton_python_backend_utils/_runtime.py"
    "triton_python_backend_utils/_services.py"
    "triton_python_backend_utils/_tensor.py"
};

const NAME: &str = "trireme-python-";

/// How long the server waits for the removal of the directory when it ends.
const CLEANER_TIMEOUT: Duration = Duration::from_secs(10);

/// The program that each model process runs.
pub(super) const STUB: &str = "stub.py";

/// The directory, after the first use.
#[derive(Debug, Default)]
pub(super) struct Files {
    scratch: Mutex<Option<Scratch>>,
}

/// The directory. Dropping it removes the directory; the next server removes one that remains.
#[derive(Debug)]
struct Scratch {
    dir: TempDir,
    environments: Vec<Environment>,
    cleaner: Option<Child>,
}

/// An unpacked archive.
#[derive(Debug)]
struct Environment {
    archive: PathBuf,
    modified: Option<SystemTime>,
    dir: PathBuf,
}

impl Files {
    /// The directory with the sources.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn dir(&self) -> Result<PathBuf, InferError> {
        Ok(self.scratch()?.as_ref().expect("it was made").dir.path().to_owned())
    }

    fn scratch(&self) -> Result<MutexGuard<'_, Option<Scratch>>, InferError> {
        let mut scratch = lock(&self.scratch);
        if scratch.is_none() {
            let root = std::env::temp_dir();
            *scratch = Some(Scratch::create(&root).map_err(|error| {
                InferError::unavailable(format!("cannot write the Python module to {}: {error}", root.display()))
            })?);
        }
        Ok(scratch)
    }

    /// The interpreter of an environment. The environment is a directory, an activation script in one, or an archive, which is
    /// unpacked once. Blocks.
    ///
    /// # Errors
    /// When the environment has no interpreter, or the archive cannot be unpacked.
    pub fn interpreter(&self, environment: &Path) -> Result<PathBuf, InferError> {
        let dir = if environment.is_dir() {
            environment.to_owned()
        } else if environment.file_name().is_some_and(|name| name == "activate") {
            root_of(environment)
        } else {
            self.scratch()?.as_mut().expect("it was made").unpacked(environment)?
        };
        let programs = ["bin/python3", "bin/python"].map(|program| dir.join(program));
        programs.into_iter().find(|program| program.is_file()).ok_or_else(|| {
            InferError::invalid(format!("EXECUTION_ENV_PATH {} holds no `bin/python3`", environment.display()))
        })
    }
}

impl Scratch {
    fn create(root: &Path) -> io::Result<Self> {
        sweep(root);
        let me = ProcessId::current();
        let dir = tempfile::Builder::new().prefix(&format!("{NAME}{}-{}-", me.pid, me.start_time)).tempdir_in(root)?;
        for (path, text) in SOURCES {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().expect("it is below the directory"))?;
            fs::write(path, text)?;
        }
        // Without a shell, the next server removes the directory.
        let cleaner = cleaner(dir.path()).ok();
        Ok(Self { dir, environments: Vec::new(), cleaner })
    }

    fn unpacked(&mut self, archive: &Path) -> Result<PathBuf, InferError> {
        let modified = fs::metadata(archive).and_then(|metadata| metadata.modified()).ok();
        let is_known = |known: &&Environment| known.archive == archive && known.modified == modified;
        if let Some(known) = self.environments.iter().find(is_known) {
            return Ok(known.dir.clone());
        }
        let failed =
            |why: String| InferError::invalid(format!("cannot unpack EXECUTION_ENV_PATH {}: {why}", archive.display()));
        let dir = self.dir.path().join(format!("environment{}", self.environments.len()));
        fs::create_dir_all(&dir).map_err(|error| failed(error.to_string()))?;
        let mut tar = Command::new("tar");
        tar.arg("-xf").arg(archive).arg("-C").arg(&dir);
        let tar = close_descriptors(withhold_secrets(&mut tar, &[])).output();
        let tar = tar.map_err(|error| failed(format!("cannot run `tar`: {error}")))?;
        if !tar.status.success() {
            return Err(failed(String::from_utf8_lossy(&tar.stderr).trim().to_owned()));
        }
        self.environments.push(Environment { archive: archive.to_owned(), modified, dir: dir.clone() });
        Ok(dir)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Some(mut cleaner) = self.cleaner.take() {
            // Closing its input makes it remove the directory. If the disk hangs, the shell continues after the server has ended.
            drop(cleaner.stdin.take());
            let _ = ProcessWatch::new(cleaner.id()).map(|watch| watch.wait(CLEANER_TIMEOUT));
            let _ = cleaner.try_wait();
        }
    }
}

/// The environment of an activation script: the first directory above it with an interpreter.
fn root_of(script: &Path) -> PathBuf {
    let has_interpreter = |dir: &&Path| dir.join("bin/python3").is_file() || dir.join("bin/python").is_file();
    script.ancestors().skip(1).find(has_interpreter).unwrap_or(script).to_owned()
}

/// Starts a shell that removes `dir` when this process ends in any way, which closes the input of the shell.
fn cleaner(dir: &Path) -> io::Result<Child> {
    let mut command = Command::new("sh");
    command.args(["-c", "trap '' INT TERM HUP; read -r _; rm -rf -- \"$0\""]).arg(dir).process_group(0);
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
    close_descriptors(withhold_secrets(&mut command, &[])).spawn()
}

/// Removes directories of servers of this user that have ended.
fn sweep(root: &Path) {
    let own = rustix::process::geteuid().as_raw();
    for entry in fs::read_dir(root).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let owner = name.to_str().and_then(|name| name.strip_prefix(NAME)).and_then(|rest| {
            let mut parts = rest.split('-');
            Some(ProcessId { pid: parts.next()?.parse().ok()?, start_time: parts.next()?.parse().ok()? })
        });
        // Directories of other users stay, because anyone can choose such a name.
        let is_own = || fs::symlink_metadata(entry.path()).is_ok_and(|found| found.is_dir() && found.uid() == own);
        if owner.is_some_and(|owner| !owner.is_alive()) && is_own() {
            // A directory that cannot be removed does no harm.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_source_is_embedded_and_removed_with_the_server() {
        let files = Files::default();
        let dir = files.dir().unwrap();
        let package = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../python/triton_python_backend_utils");
        let sources = fs::read_dir(package).unwrap().flatten().map(|entry| entry.file_name());
        for name in sources.filter(|name| name.to_string_lossy().ends_with(".py")) {
            assert!(dir.join("triton_python_backend_utils").join(&name).is_file(), "{name:?} is not embedded");
        }
        assert!(dir.join(STUB).is_file());
        drop(files);
        assert!(!dir.exists());
    }

    #[test]
    fn a_changed_archive_is_unpacked_again() {
        let root = tempfile::tempdir().unwrap();
        let (bin, archive) = (root.path().join("bin"), root.path().join("environment.tar"));
        fs::create_dir(&bin).unwrap();
        let files = Files::default();
        let pack = |text: &str, age: u64| {
            fs::write(bin.join("python3"), text).unwrap();
            let tar = Command::new("tar").arg("-cf").arg(&archive).arg("-C").arg(root.path()).arg("bin").status();
            assert!(tar.unwrap().success());
            let time = SystemTime::now() - std::time::Duration::from_secs(age);
            fs::File::options().write(true).open(&archive).unwrap().set_modified(time).unwrap();
            fs::read_to_string(files.interpreter(&archive).unwrap()).unwrap()
        };
        assert_eq!(pack("one", 9), "one");
        assert_eq!(pack("two", 5), "two");
    }

    #[test]
    fn directories_of_servers_that_have_ended_are_removed() {
        let root = tempfile::tempdir().unwrap();
        let dead = root.path().join(format!("{NAME}1-99-x"));
        let me = ProcessId::current();
        let alive = root.path().join(format!("{NAME}{}-{}-x", me.pid, me.start_time));
        for dir in [&dead, &alive] {
            fs::create_dir(dir).unwrap();
        }
        let (link, target) = (root.path().join(format!("{NAME}1-98-x")), root.path().join("target"));
        fs::create_dir(&target).unwrap();
        std::os::unix::fs::symlink(&target, &link).unwrap();
        // Only root can give a directory to another user.
        let foreign = root.path().join(format!("{NAME}1-97-x"));
        fs::create_dir(&foreign).unwrap();
        let is_foreign = std::os::unix::fs::chown(&foreign, Some(65_534), None).is_ok();
        sweep(root.path());
        assert!(!dead.exists() && alive.exists());
        assert!(link.is_symlink() && target.exists());
        assert_eq!(foreign.exists(), is_foreign);
    }
}
