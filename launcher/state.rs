//! What is known of running worlds: one small file each, in a directory of this user alone.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
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
    /// Another version of the launcher knows what.
    #[serde(other)]
    Other,
}

/// What every version of a state file begins with, and no version may change: whose it is.
#[derive(Debug, Deserialize)]
struct Head {
    launcher_pid: u32,
    launcher_start_time: u64,
}

/// Counts changes of the meaning of [`WorldState`]'s fields; new fields need none.
pub(crate) const VERSION: u32 = 1;

/// A world as its launcher wrote it down. Another version may have written it: what is not there has its default.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct WorldState {
    pub(crate) version: u32,
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

impl Default for WorldState {
    fn default() -> Self {
        Self {
            version: 0,
            launcher_pid: 0,
            launcher_start_time: 0,
            world_pid: None,
            rank_0_pid: None,
            world_size: 1,
            model_repository: PathBuf::new(),
            grpc_port: 0,
            http_port: 0,
            http_host: "127.0.0.1".to_owned(),
            metrics_port: 0,
            control: None,
            rank_0_may_be_elsewhere: false,
            shm_prefix: String::new(),
            exit_timeout_secs: crate::DEFAULT_EXIT_TIMEOUT_SECS,
            num_restarts: 0,
            times_served: 0,
            phase: Phase::Loading,
            last_failure: None,
            rolling_failure: None,
            log: PathBuf::new(),
            crash_dir: PathBuf::new(),
        }
    }
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
        // Sockets in there are for this user alone.
        if meta.mode() & 0o077 != 0 {
            eprintln!("launch: others could use {}; from now on it is for this user alone", dir.display());
            let private = fs::Permissions::from_mode(0o700);
            fs::set_permissions(&dir, private).with_context(|| format!("cannot close {} to others", dir.display()))?;
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
                let name = path.file_name()?.to_str()?;
                let of_world = |name: &'_ str| {
                    let name = name.strip_prefix("world-")?;
                    name.strip_suffix(".sock").or_else(|| name.strip_suffix(".cause")).map(str::to_owned)
                };
                let name = of_world(name).or_else(|| name.strip_prefix("keys-").map(str::to_owned))?;
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
        self.look().worlds
    }

    /// The same, with the files that cannot be understood.
    pub(crate) fn look(&self) -> Look {
        let entries = fs::read_dir(&self.0).into_iter().flatten().flatten().map(|entry| entry.path());
        let mut look = Look::default();
        for file in entries.filter(|path| path.extension().is_some_and(|extension| extension == "json")) {
            let Ok(text) = fs::read(&file) else { continue };
            let Ok(head) = serde_json::from_slice::<Head>(&text) else {
                look.unknown.push(file);
                continue;
            };
            let launcher = ProcessId { pid: head.launcher_pid, start_time: head.launcher_start_time };
            match (launcher.is_alive(), serde_json::from_slice::<WorldState>(&text)) {
                (true, Ok(mut world)) => {
                    world.http_port = if world.http_port == 0 { port_of(&file) } else { world.http_port };
                    look.worlds.push(world);
                }
                (true, Err(_)) => {
                    // Its fields mean something else by now: its launcher can be told to end all the same.
                    let (launcher_pid, launcher_start_time) = (head.launcher_pid, head.launcher_start_time);
                    let (http_port, phase) = (port_of(&file), Phase::Other);
                    let world =
                        WorldState { launcher_pid, launcher_start_time, http_port, phase, ..Default::default() };
                    look.worlds.push(world);
                }
                // Its launcher was killed.
                (false, _) => drop(fs::remove_file(&file)),
            }
        }
        look.worlds.sort_by_key(|world| world.http_port);
        look.unknown.sort();
        look
    }
}

/// What there is in a run directory.
#[derive(Debug, Default)]
pub(crate) struct Look {
    pub(crate) worlds: Vec<WorldState>,
    /// Files of which it cannot be told whose they are; they are left alone.
    pub(crate) unknown: Vec<PathBuf>,
}

/// The HTTP port in the name of a state file.
fn port_of(file: &Path) -> u16 {
    let number = || file.file_stem()?.to_str()?.strip_prefix("world-")?.parse().ok();
    number().unwrap_or(0)
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
            version: VERSION,
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
        // The one that runs, and the one that nobody understands.
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
        assert_eq!(run_dir.look().unknown, [dir.path().join("world-5.json")]);
        run_dir.remove(2);
        assert_eq!(run_dir.worlds(), []);
    }

    #[test]
    fn a_world_of_another_version_stays_and_can_be_found() {
        let dir = tempfile::tempdir().unwrap();
        let run_dir = RunDir(dir.path().to_owned());
        let me = ProcessId::current();
        let head = format!("\"launcher_pid\": {}, \"launcher_start_time\": {}", me.pid, me.start_time);
        for rest in ["", ", \"http_port\": \"moved\"", ", \"phase\": \"dreaming\", \"new\": [1]"] {
            let file = dir.path().join("world-7.json");
            fs::write(&file, format!("{{{head}{rest}}}")).unwrap();
            let worlds = run_dir.worlds();
            assert!(file.exists() && worlds.len() == 1, "{rest}");
            assert_eq!((worlds[0].launcher(), worlds[0].http_port), (me, 7), "{rest}");
        }
    }
}
