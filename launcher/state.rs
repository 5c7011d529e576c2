//! State files of running worlds: one JSON file per world, in a run directory that only this user can access.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use ipc::ProcessId;
use serde::{Deserialize, Serialize};

/// The phase of a world's life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Phase {
    /// Its processes run but do not serve yet.
    Loading,
    /// It has served. A health check shows whether it serves now.
    Serving,
    /// Its end was requested.
    Ending,
    /// It died and will be restarted after a pause.
    Waiting,
    /// It has ended because no request came, and the next one starts it.
    Asleep,
    /// A phase that another version of the launcher has written.
    #[serde(other)]
    Other,
}

/// The fields that every version of a state file has and no version may change. They identify the launcher.
#[derive(Debug, Deserialize)]
struct Owner {
    launcher_pid: u32,
    launcher_start_time: u64,
}

/// Increases when fields of [`WorldState`] change their meaning; new fields do not need it.
pub(crate) const VERSION: u32 = 1;

/// The state of a world, as its launcher writes it. Fields that another version did not write have their default.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct WorldState {
    pub(crate) version: u32,
    pub(crate) launcher_pid: u32,
    pub(crate) launcher_start_time: u64,
    /// The first process: `mpirun`, `srun` or the only rank. None between two starts.
    pub(crate) world_pid: Option<u32>,
    pub(crate) rank_0_pid: Option<u32>,
    pub(crate) world_size: u32,
    pub(crate) model_repository: PathBuf,
    pub(crate) grpc_port: u16,
    pub(crate) http_port: u16,
    /// The host of its HTTP port, as seen from this machine.
    pub(crate) http_host: String,
    pub(crate) metrics_port: u16,
    /// The socket at which rank 0 reports its health.
    pub(crate) control: Option<PathBuf>,
    /// The socket may be unreachable then, and health checks use HTTP.
    pub(crate) rank_0_may_be_elsewhere: bool,
    pub(crate) shm_prefix: String,
    pub(crate) exit_timeout_secs: u64,
    /// Number of starts after the first, including those that the user requested.
    pub(crate) num_restarts: u32,
    /// Those after a failure.
    #[serde(default)]
    pub(crate) num_failures: u32,
    /// How often it has become ready.
    pub(crate) times_served: u32,
    pub(crate) phase: Phase,
    /// The exit status of the last failed run, in words.
    pub(crate) last_failure: Option<String>,
    /// Why the last `restart --rolling` failed; the old world then stays.
    pub(crate) rolling_failure: Option<String>,
    /// With `--elastic`, the hosts without which the world goes on.
    pub(crate) hosts_lost: Vec<String>,
    /// The log file of launcher and ranks.
    pub(crate) log: PathBuf,
    /// The directory of crash reports.
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
            exit_timeout_secs: 30, // The time of requests in flight without `--exit_timeout`.
            num_restarts: 0,
            num_failures: 0,
            times_served: 0,
            phase: Phase::Loading,
            last_failure: None,
            rolling_failure: None,
            hosts_lost: Vec::new(),
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

/// The run directory, with the state files, sockets and logs of this user's worlds on this machine.
#[derive(Debug, Clone)]
pub(crate) struct RunDir {
    path: PathBuf,
    /// Other directories in which launchers of this user may have written state files.
    others: Vec<PathBuf>,
}

impl RunDir {
    /// Opens or creates `$XDG_RUNTIME_DIR/trireme`, or `/tmp/trireme-<uid>` if that is not set or is removed at logout.
    pub(crate) fn open() -> Result<Self> {
        let uid = nix::unistd::getuid().as_raw();
        let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|dir| dir.is_dir());
        let (dir, others) = locations(runtime.as_deref(), uid, lingers());
        match fs::DirBuilder::new().mode(0o700).create(&dir) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(error).with_context(|| format!("cannot make the run directory {}", dir.display()));
            }
            _ => {}
        }
        // In /tmp another user may have created it.
        let meta = fs::symlink_metadata(&dir).with_context(|| format!("cannot look at {}", dir.display()))?;
        if !meta.is_dir() || meta.uid() != uid {
            bail!("{} is not a directory of this user; remove it, or set XDG_RUNTIME_DIR", dir.display());
        }
        // Only this user may use the sockets in it.
        if meta.mode() & 0o077 != 0 {
            eprintln!("launch: other users could use {}; it is now closed to them", dir.display());
            let private = fs::Permissions::from_mode(0o700);
            fs::set_permissions(&dir, private).with_context(|| format!("cannot close {} to others", dir.display()))?;
        }
        let is_private = |dir: &PathBuf| {
            fs::symlink_metadata(dir).is_ok_and(|meta| meta.is_dir() && meta.uid() == uid && meta.mode() & 0o077 == 0)
        };
        Ok(Self { path: dir, others: others.into_iter().filter(is_private).collect() })
    }

    /// Locks the directory until the result is dropped: services that clean `/tmp` do not touch locked directories.
    pub(crate) fn lock(&self) -> Option<fs::File> {
        let dir = fs::File::open(&self.path).ok()?;
        dir.try_lock_shared().ok().map(|()| dir)
    }

    /// The directory itself.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The log file of the world on this HTTP port.
    pub(crate) fn log_file(&self, http_port: u16) -> PathBuf {
        self.path.join(format!("world-{http_port}.log"))
    }

    /// The directory of crash reports, created if missing.
    pub(crate) fn crash_dir(&self) -> Result<PathBuf> {
        let dir = self.path.join("crashes");
        fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        Ok(dir)
    }

    /// The socket at which start number `start` of launcher `pid` hands over its ports.
    pub(crate) fn hand_over_socket(&self, pid: u32, start: u32) -> PathBuf {
        self.path.join(format!("world-{pid}-{start}.sock"))
    }

    /// The socket at which rank 0 of that start reports its health.
    pub(crate) fn control_socket(&self, pid: u32, start: u32) -> PathBuf {
        self.path.join(format!("world-{pid}-{start}-control.sock"))
    }

    /// The directory of the sockets on which rank 0 of that start accepts the connections of the relay.
    pub(crate) fn relay_directory(&self, pid: u32, start: u32) -> PathBuf {
        self.path.join(format!("world-{pid}-{start}.relay"))
    }

    /// The directory in which the relay of launcher `pid` keeps what the next one needs.
    pub(crate) fn journals(&self, pid: u32) -> PathBuf {
        self.path.join(format!("world-{pid}.journals"))
    }

    /// The file to which ranks of that start write why their world ends.
    pub(crate) fn cause_file(&self, pid: u32, start: u32) -> PathBuf {
        self.path.join(format!("world-{pid}-{start}.cause"))
    }

    /// Removes sockets, their directories, cause files and key files of launchers that have ended.
    pub(crate) fn remove_dead_sockets(&self) {
        for path in fs::read_dir(&self.path).into_iter().flatten().flatten().map(|entry| entry.path()) {
            let owner = || -> Option<u32> {
                let name = path.file_name()?.to_str()?;
                let of_world = |name: &'_ str| {
                    let name = name.strip_prefix("world-")?;
                    let suffixes = [".sock", ".cause", ".relay", ".journals"];
                    suffixes.iter().find_map(|suffix| name.strip_suffix(suffix)).map(str::to_owned)
                };
                let name = of_world(name).or_else(|| name.strip_prefix("keys-").map(str::to_owned))?;
                name.split('-').next()?.parse().ok()
            };
            if owner().is_some_and(|pid| ProcessId::of(pid).is_none()) {
                // It does not matter if it is gone already.
                let _ = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
            }
        }
    }

    fn state_file(&self, http_port: u16) -> PathBuf {
        self.path.join(format!("world-{http_port}.json"))
    }

    /// Writes the state file, atomically where the disk has room for a second one.
    pub(crate) fn write(&self, state: &WorldState) -> Result<()> {
        let file = self.state_file(state.http_port);
        let unfinished = file.with_extension("json.tmp");
        let text = serde_json::to_vec_pretty(state).context("cannot write the state as JSON")?;
        let replaced = fs::write(&unfinished, &text).and_then(|()| fs::rename(&unfinished, &file));
        let written = replaced.or_else(|error| {
            // It does not matter if there is none.
            let _ = fs::remove_file(&unfinished);
            overwrite(&file, &text).map_err(|_| error)
        });
        written.with_context(|| format!("cannot write {}", file.display()))
    }

    /// Removes the state file of `http_port` if this launcher wrote it.
    pub(crate) fn remove(&self, http_port: u16) {
        let file = self.state_file(http_port);
        if read(&file).is_some_and(|state| state.launcher_pid == std::process::id()) {
            // It does not matter if it is gone already.
            let _ = fs::remove_file(file);
        }
    }

    /// Worlds whose launcher runs, sorted by HTTP port. State files of dead launchers are removed.
    pub(crate) fn worlds(&self) -> Vec<WorldState> {
        self.scan().worlds
    }

    /// Like [`Self::worlds`], with the files that cannot be parsed.
    pub(crate) fn scan(&self) -> Scan {
        let dirs = std::iter::once(&self.path).chain(&self.others);
        let entries = dirs.flat_map(|dir| fs::read_dir(dir).into_iter().flatten().flatten()).map(|entry| entry.path());
        let mut scan = Scan::default();
        for file in entries.filter(|path| path.extension().is_some_and(|extension| extension == "json")) {
            let Ok(text) = fs::read(&file) else { continue };
            let Ok(owner) = serde_json::from_slice::<Owner>(&text) else {
                scan.unknown.push(file);
                continue;
            };
            let launcher = ProcessId { pid: owner.launcher_pid, start_time: owner.launcher_start_time };
            match (launcher.is_alive(), serde_json::from_slice::<WorldState>(&text)) {
                (true, Ok(mut world)) => {
                    world.http_port = if world.http_port == 0 { port_of(&file) } else { world.http_port };
                    scan.worlds.push(world);
                }
                (true, Err(_)) => {
                    // Another version wrote other fields. The launcher can be stopped nevertheless.
                    let (launcher_pid, launcher_start_time) = (owner.launcher_pid, owner.launcher_start_time);
                    let (http_port, phase) = (port_of(&file), Phase::Other);
                    let world =
                        WorldState { launcher_pid, launcher_start_time, http_port, phase, ..Default::default() };
                    scan.worlds.push(world);
                }
                // Its launcher was killed.
                (false, _) => drop(fs::remove_file(&file)),
            }
        }
        scan.worlds.sort_by_key(|world| world.http_port);
        scan.unknown.sort();
        scan
    }
}

/// The run directory, and other directories with state files. A `$XDG_RUNTIME_DIR` that is not the default of user sessions was
/// set on purpose to isolate worlds, so nothing else is searched. The default is removed at the last logout unless the user lingers.
fn locations(runtime: Option<&Path>, uid: u32, lingers: bool) -> (PathBuf, Vec<PathBuf>) {
    let (session, lasting) = (PathBuf::from(format!("/run/user/{uid}")), PathBuf::from(format!("/tmp/trireme-{uid}")));
    match runtime {
        Some(dir) if dir != session => (dir.join("trireme"), Vec::new()),
        Some(_) if lingers => (session.join("trireme"), vec![lasting]),
        _ => (lasting, vec![session.join("trireme")]),
    }
}

/// Whether this user's services outlive their sessions (`loginctl enable-linger`).
fn lingers() -> bool {
    let user = nix::unistd::User::from_uid(nix::unistd::getuid()).ok().flatten();
    user.is_some_and(|user| Path::new("/var/lib/systemd/linger").join(user.name).exists())
}

/// The contents of the run directories.
#[derive(Debug, Default)]
pub(crate) struct Scan {
    pub(crate) worlds: Vec<WorldState>,
    /// Files that cannot be parsed. They are not removed.
    pub(crate) unknown: Vec<PathBuf>,
}

/// The HTTP port in the name of a state file.
fn port_of(file: &Path) -> u16 {
    let number = || file.file_stem()?.to_str()?.strip_prefix("world-")?.parse().ok();
    number().unwrap_or(0)
}

/// Writes `text` into a file that exists, and keeps its block on the disk.
fn overwrite(file: &Path, text: &[u8]) -> io::Result<()> {
    let mut file = fs::File::options().write(true).open(file)?;
    file.write_all(text)?;
    file.set_len(text.len() as u64)
}

fn read(file: &Path) -> Option<WorldState> {
    serde_json::from_slice(&fs::read(file).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_run_directory_is_not_removed_at_logout() {
        let of = |runtime: Option<&str>, lingers| {
            let (dir, others) = locations(runtime.map(Path::new), 7, lingers);
            [vec![dir], others].concat().iter().map(|dir| dir.display().to_string()).collect::<Vec<_>>()
        };
        let session = "/run/user/7/trireme";
        assert_eq!(of(Some("/run/user/7"), false), ["/tmp/trireme-7", session]);
        assert_eq!(of(Some("/run/user/7"), true), [session, "/tmp/trireme-7"]);
        assert_eq!(of(None, true), ["/tmp/trireme-7", session]);
        assert_eq!(of(Some("/run/trireme"), false), ["/run/trireme/trireme"], "set on purpose");
    }

    #[test]
    fn worlds_in_another_run_directory_are_found() {
        let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let other = RunDir { path: there.path().to_owned(), others: Vec::new() };
        let me = ProcessId::current();
        let (launcher_pid, launcher_start_time) = (me.pid, me.start_time);
        other.write(&WorldState { launcher_pid, launcher_start_time, http_port: 9, ..Default::default() }).unwrap();
        let run_dir = RunDir { path: here.path().to_owned(), others: vec![there.path().to_owned()] };
        assert_eq!(run_dir.worlds().iter().map(|world| world.http_port).collect::<Vec<_>>(), [9]);
        let lock = run_dir.lock().unwrap();
        assert!(fs::File::open(here.path()).unwrap().try_lock().is_err(), "services that clean /tmp must see a lock");
        drop(lock);
    }

    #[test]
    fn a_state_file_is_written_again_where_there_is_no_room_for_a_second_one() {
        let dir = tempfile::tempdir().unwrap();
        let run_dir = RunDir { path: dir.path().to_owned(), others: Vec::new() };
        let state = |phase| WorldState { http_port: 2, phase, log: "/a/longer/path".into(), ..Default::default() };
        // A link to /dev/full has no room, either.
        let fill = || std::os::unix::fs::symlink("/dev/full", dir.path().join("world-2.json.tmp")).unwrap();
        fill();
        assert!(run_dir.write(&state(Phase::Loading)).is_err(), "there is none to write again");
        run_dir.write(&state(Phase::Loading)).unwrap();
        let shorter = WorldState { log: PathBuf::new(), ..state(Phase::Ending) };
        for state in [state(Phase::Serving), shorter] {
            fill();
            run_dir.write(&state).unwrap();
            assert_eq!(read(&run_dir.state_file(2)), Some(state));
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing is left beside the state file");
    }

    #[test]
    fn state_files_of_dead_launchers_are_removed() {
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
            num_failures: 0,
            times_served: 0,
            phase: Phase::Loading,
            last_failure: None,
            rolling_failure: None,
            hosts_lost: Vec::new(),
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
        // The state of the running launcher, and the file that cannot be parsed.
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
        assert_eq!(run_dir.scan().unknown, [dir.path().join("world-5.json")]);
        run_dir.remove(2);
        assert_eq!(run_dir.worlds(), []);
    }

    #[test]
    fn a_state_file_of_another_version_is_kept_and_listed() {
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
