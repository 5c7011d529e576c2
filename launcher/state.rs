//! What is known of running worlds: one small file each, in a directory of this user alone.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use ipc::ProcessId;
use serde::{Deserialize, Serialize};

/// What a launcher is doing with its world.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Phase {
    /// Processes run and do not serve yet.
    Loading,
    /// It has served; whether it does now, its health says.
    Serving,
    /// It was asked to end.
    Ending,
    /// It died, and is started again after a pause.
    Waiting,
}

/// A world as its launcher wrote it down.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct WorldState {
    pub(crate) launcher_pid: u32,
    pub(crate) launcher_start_time: u64,
    /// `mpirun`, or the one rank; None between two starts.
    pub(crate) world_pid: Option<u32>,
    pub(crate) rank_0_pid: Option<u32>,
    pub(crate) world_size: u32,
    pub(crate) model_repository: PathBuf,
    pub(crate) grpc_port: u16,
    pub(crate) http_port: u16,
    /// Where it answers HTTP, as seen from this machine.
    pub(crate) http_host: String,
    pub(crate) metrics_port: u16,
    /// Where rank 0 tells how it is.
    pub(crate) control: Option<PathBuf>,
    /// Then that can perhaps not be reached, and HTTP is asked.
    pub(crate) rank_0_may_be_elsewhere: bool,
    pub(crate) shm_prefix: String,
    pub(crate) exit_timeout_secs: u64,
    /// Starts after the first, asked for or not.
    pub(crate) num_restarts: u32,
    /// Counts the times it came to serve.
    pub(crate) times_served: u32,
    pub(crate) phase: Phase,
    /// How the last run of it ended that did not end well.
    pub(crate) last_failure: Option<String>,
    /// Why the last `restart --rolling` left the old world in place.
    pub(crate) rolling_failure: Option<String>,
    /// Where launcher and ranks log.
    pub(crate) log: PathBuf,
    /// Where reports of crashes are.
    pub(crate) crash_dir: PathBuf,
}

impl WorldState {
    pub(crate) fn launcher(&self) -> ProcessId {
        ProcessId { pid: self.launcher_pid, start_time: self.launcher_start_time }
    }
}

/// The run directory, and with it all worlds of this user on this machine.
#[derive(Debug, Clone)]
pub(crate) struct RunDir(PathBuf);

impl RunDir {
    /// `$XDG_RUNTIME_DIR/trireme`, or `/tmp/trireme-<uid>`; made when missing.
    pub(crate) fn open() -> Result<Self> {
        let uid = nix::unistd::getuid().as_raw();
        let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|dir| dir.is_dir());
        let dir = runtime.map_or_else(|| PathBuf::from(format!("/tmp/trireme-{uid}")), |dir| dir.join("trireme"));
        match fs::DirBuilder::new().mode(0o700).create(&dir) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(error).with_context(|| format!("cannot make the run directory {}", dir.display()));
            }
            _ => {}
        }
        // In /tmp another user may have been there first.
        let meta = fs::symlink_metadata(&dir).with_context(|| format!("cannot look at {}", dir.display()))?;
        if !meta.is_dir() || meta.uid() != uid {
            bail!("{} is not a directory of this user; remove it, or set XDG_RUNTIME_DIR", dir.display());
        }
        Ok(Self(dir))
    }

    /// The directory itself.
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// Where the launcher of this HTTP port logs when detached.
    pub(crate) fn log_file(&self, http_port: u16) -> PathBuf {
        self.0.join(format!("world-{http_port}.log"))
    }

    /// Where reports of crashes go; made when missing.
    pub(crate) fn crash_dir(&self) -> Result<PathBuf> {
        let dir = self.0.join("crashes");
        fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        Ok(dir)
    }

    /// Where start number `start` of the launcher `pid` hands its ports over.
    pub(crate) fn hand_over_socket(&self, pid: u32, start: u32) -> PathBuf {
        self.0.join(format!("world-{pid}-{start}.sock"))
    }

    /// Where rank 0 of that start tells how it is.
    pub(crate) fn control_socket(&self, pid: u32, start: u32) -> PathBuf {
        self.0.join(format!("world-{pid}-{start}-control.sock"))
    }

    /// Where ranks of that start say why their world ends.
    pub(crate) fn cause_file(&self, pid: u32, start: u32) -> PathBuf {
        self.0.join(format!("world-{pid}-{start}.cause"))
    }

    /// Removes sockets, and files like them, of launchers that are gone.
    pub(crate) fn remove_dead_sockets(&self) {
        for path in fs::read_dir(&self.0).into_iter().flatten().flatten().map(|entry| entry.path()) {
            let owner = || -> Option<u32> {
                let name = path.file_name()?.to_str()?.strip_prefix("world-")?;
                let name = name.strip_suffix(".sock").or_else(|| name.strip_suffix(".cause"))?;
                name.split('-').next()?.parse().ok()
            };
            if owner().is_some_and(|pid| ProcessId::of(pid).is_none()) {
                // Gone already is as good.
                let _ = fs::remove_file(path);
            }
        }
    }

    fn state_file(&self, http_port: u16) -> PathBuf {
        self.0.join(format!("world-{http_port}.json"))
    }

    /// Writes `state` down, whole or not at all.
    pub(crate) fn write(&self, state: &WorldState) -> Result<()> {
        let file = self.state_file(state.http_port);
        let unfinished = file.with_extension("json.tmp");
        let write =
            || fs::write(&unfinished, serde_json::to_vec_pretty(state)?).and_then(|()| fs::rename(&unfinished, &file));
        write().with_context(|| format!("cannot write {}", file.display()))
    }

    /// Forgets the world of `http_port`, if it is the one of this launcher.
    pub(crate) fn remove(&self, http_port: u16) {
        let file = self.state_file(http_port);
        if read(&file).is_some_and(|state| state.launcher_pid == std::process::id()) {
            // Gone already is as good.
            let _ = fs::remove_file(file);
        }
    }

    /// Worlds whose launcher runs, by HTTP port; what dead launchers left is removed.
    pub(crate) fn worlds(&self) -> Vec<WorldState> {
        let entries = fs::read_dir(&self.0).into_iter().flatten().flatten().map(|entry| entry.path());
        let files = entries.filter(|path| path.extension().is_some_and(|extension| extension == "json"));
        let mut worlds: Vec<_> = files.filter_map(|file| live(&file)).collect();
        worlds.sort_by_key(|world| world.http_port);
        worlds
    }
}

fn live(file: &Path) -> Option<WorldState> {
    let state = read(file).filter(|state| state.launcher().is_alive());
    if state.is_none() {
        // Its launcher was killed, or it is of another version: of no use to anybody.
        let _ = fs::remove_file(file);
    }
    state
}

fn read(file: &Path) -> Option<WorldState> {
    serde_json::from_slice(&fs::read(file).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worlds_of_dead_launchers_are_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        let run_dir = RunDir(dir.path().to_owned());
        let me = ProcessId::current();
        let mut state = WorldState {
            launcher_pid: me.pid,
            launcher_start_time: me.start_time,
            world_pid: None,
            rank_0_pid: None,
            world_size: 2,
            model_repository: "/models".into(),
            grpc_port: 1,
            http_port: 2,
            http_host: "127.0.0.1".into(),
            metrics_port: 3,
            control: None,
            rank_0_may_be_elsewhere: false,
            shm_prefix: "prefix".into(),
            exit_timeout_secs: 30,
            num_restarts: 0,
            times_served: 0,
            phase: Phase::Loading,
            last_failure: None,
            rolling_failure: None,
            log: "/tmp/log".into(),
            crash_dir: "/tmp".into(),
        };
        run_dir.write(&state).unwrap();
        assert_eq!(run_dir.worlds(), [state.clone()]);

        state.http_port = 4;
        state.launcher_start_time += 1;
        run_dir.write(&state).unwrap();
        fs::write(dir.path().join("world-5.json"), "not a state").unwrap();
        assert_eq!(run_dir.worlds().len(), 1);

        let (mine, dead) = (run_dir.hand_over_socket(me.pid, 1), run_dir.hand_over_socket(u32::MAX, 1));
        fs::write(&mine, "").unwrap();
        fs::write(&dead, "").unwrap();
        run_dir.remove_dead_sockets();
        assert!(mine.exists() && !dead.exists());
        fs::remove_file(mine).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        run_dir.remove(2);
        assert_eq!(run_dir.worlds(), []);
    }
}
