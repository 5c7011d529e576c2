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
pub(crate) struct RunDir {
    path: PathBuf,
    /// Where worlds of this user may be, too: started when another place was right.
    others: Vec<PathBuf>,
}

impl RunDir {
    /// `$XDG_RUNTIME_DIR/trireme`, or `/tmp/trireme-<uid>` where that is not set or goes at logout; made when missing.
    pub(crate) fn open() -> Result<Self> {
        let uid = nix::unistd::getuid().as_raw();
        let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|dir| dir.is_dir());
        let (dir, others) = places(runtime.as_deref(), uid, lingers());
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
        let is_private = |dir: &PathBuf| {
            fs::symlink_metadata(dir).is_ok_and(|meta| meta.is_dir() && meta.uid() == uid && meta.mode() & 0o077 == 0)
        };
        Ok(Self { path: dir, others: others.into_iter().filter(is_private).collect() })
    }

    /// Keeps what cleans `/tmp` of old files away while the result lives: it leaves locked directories alone.
    pub(crate) fn keep(&self) -> Option<fs::File> {
        let dir = fs::File::open(&self.path).ok()?;
        dir.try_lock_shared().ok().map(|()| dir)
    }

    /// The directory itself.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Where the launcher of this HTTP port logs when detached.
    pub(crate) fn log_file(&self, http_port: u16) -> PathBuf {
        self.path.join(format!("world-{http_port}.log"))
    }

    /// Where reports of crashes go; made when missing.
    pub(crate) fn crash_dir(&self) -> Result<PathBuf> {
        let dir = self.path.join("crashes");
        fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        Ok(dir)
    }

    /// Where start number `start` of the launcher `pid` hands its ports over.
    pub(crate) fn hand_over_socket(&self, pid: u32, start: u32) -> PathBuf {
        self.path.join(format!("world-{pid}-{start}.sock"))
    }

    /// Where rank 0 of that start tells how it is.
    pub(crate) fn control_socket(&self, pid: u32, start: u32) -> PathBuf {
        self.path.join(format!("world-{pid}-{start}-control.sock"))
    }

    /// Where ranks of that start say why their world ends.
    pub(crate) fn cause_file(&self, pid: u32, start: u32) -> PathBuf {
        self.path.join(format!("world-{pid}-{start}.cause"))
    }

    /// Removes sockets, and files like them, of launchers that are gone.
    pub(crate) fn remove_dead_sockets(&self) {
        for path in fs::read_dir(&self.path).into_iter().flatten().flatten().map(|entry| entry.path()) {
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
        self.path.join(format!("world-{http_port}.json"))
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
        let dirs = std::iter::once(&self.path).chain(&self.others);
        let entries = dirs.flat_map(|dir| fs::read_dir(dir).into_iter().flatten().flatten()).map(|entry| entry.path());
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

/// The run directory, and where else worlds may be. A `$XDG_RUNTIME_DIR` other than that of the user's sessions was set on
/// purpose, to be apart from all else. That of sessions is removed at the last logout, unless the user lingers.
fn places(runtime: Option<&Path>, uid: u32, lingers: bool) -> (PathBuf, Vec<PathBuf>) {
    let (session, lasting) = (PathBuf::from(format!("/run/user/{uid}")), PathBuf::from(format!("/tmp/trireme-{uid}")));
    match runtime {
        Some(dir) if dir != session => (dir.join("trireme"), Vec::new()),
        Some(_) if lingers => (session.join("trireme"), vec![lasting]),
        _ => (lasting, vec![session.join("trireme")]),
    }
}

/// Whether this user's services outlive sessions (`loginctl enable-linger`).
fn lingers() -> bool {
    let user = nix::unistd::User::from_uid(nix::unistd::getuid()).ok().flatten();
    user.is_some_and(|user| Path::new("/var/lib/systemd/linger").join(user.name).exists())
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
    fn a_run_directory_does_not_go_at_logout() {
        let of = |runtime: Option<&str>, lingers| {
            let (dir, others) = places(runtime.map(Path::new), 7, lingers);
            [vec![dir], others].concat().iter().map(|dir| dir.display().to_string()).collect::<Vec<_>>()
        };
        let session = "/run/user/7/trireme";
        assert_eq!(of(Some("/run/user/7"), false), ["/tmp/trireme-7", session]);
        assert_eq!(of(Some("/run/user/7"), true), [session, "/tmp/trireme-7"]);
        assert_eq!(of(None, true), ["/tmp/trireme-7", session]);
        assert_eq!(of(Some("/run/trireme"), false), ["/run/trireme/trireme"], "set on purpose");
    }

    #[test]
    fn worlds_in_the_other_place_are_found() {
        let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let other = RunDir { path: there.path().to_owned(), others: Vec::new() };
        let me = ProcessId::current();
        let (launcher_pid, launcher_start_time) = (me.pid, me.start_time);
        other.write(&WorldState { launcher_pid, launcher_start_time, http_port: 9, ..Default::default() }).unwrap();
        let run_dir = RunDir { path: here.path().to_owned(), others: vec![there.path().to_owned()] };
        assert_eq!(run_dir.worlds().iter().map(|world| world.http_port).collect::<Vec<_>>(), [9]);
        let kept = run_dir.keep().unwrap();
        assert!(fs::File::open(here.path()).unwrap().try_lock().is_err(), "what cleans /tmp sees a lock");
        drop(kept);
    }

    #[test]
    fn worlds_of_dead_launchers_are_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        let run_dir = RunDir { path: dir.path().to_owned(), others: Vec::new() };
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
        let run_dir = RunDir { path: dir.path().to_owned(), others: Vec::new() };
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
