//! The world of ranks: its members, and byte messages between them, over MPI.
//!
//! [`World`] is the main type. Under `mpirun` or `srun` it loads the embedded plugin of the MPI that started the process, and runs
//! MPI on a thread of its own. Without a launcher it is a world of one rank that needs no MPI on the machine.
//! Ranks of one node should communicate through `ipc`: MPI cannot wait without using a whole core, so it is polled, less often the
//! longer nothing came. A message after a pause is announced by a datagram (UDP), so that it does not wait for the next poll; where
//! datagrams do not arrive between nodes, none are sent, and a message may take up to 18 ms after a pause.
//!
//! The content of messages is opaque here. When a rank dies, MPI's launcher ends the world, unless it was started to let the others go on
//! ([`World::lose`]).
//!
//! ```
//! use comm::{Config, World};
//! use std::time::Duration;
//!
//! let world = World::start(Config::default())?;
//! let incoming = world.incoming().expect("the first call");
//! world.send(world.rank(), b"plan".to_vec())?;
//! assert_eq!(incoming.recv_timeout(Duration::from_secs(1))?, (0, b"plan".to_vec()));
//! world.finalize(Duration::from_secs(5))?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#[allow(dead_code)] // The plugin uses the rest.
mod abi;
mod build_id;
mod error;
mod mpi;
mod node;
mod pump;
mod waker;

use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Receiver, SyncSender, TrySendError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

pub use error::CommError;
use mpi::Mpi;
pub use mpi::MpiKind;
use node::Node;
use pump::{Orders, Outgoing, Pump};
use waker::{Announcer, Waker};

/// The longest message in bytes: MPI counts them in a C `int`.
pub const MAX_MESSAGE_BYTES: usize = i32::MAX as usize;

/// Environment variable with the path of the launcher's file for the reason why the world ends.
const CAUSE_FILE: &str = "TRIREME_CAUSE_FILE";

/// How to join the world.
#[derive(Debug, Clone)]
pub struct Config {
    /// The MPI whose launcher started this process, if any; [`Config::from_env`] detects it.
    pub mpi: Option<MpiKind>,
    /// Most messages that are queued in each direction. Further sends fail with [`CommError::Overloaded`]; further messages to this
    /// rank wait at their senders.
    pub max_queued: usize,
    /// How long MPI may take to start on all ranks.
    pub start_timeout: Duration,
    /// Whether MPI's launcher keeps the world when a rank dies. The end of a rank other than 0 is then not that of the world.
    pub is_kept: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self { mpi: None, max_queued: 1024, start_timeout: Duration::from_secs(60), is_kept: false }
    }
}

impl Config {
    /// The default, with `mpi` as detected from the environment. Called once, by `main`.
    pub fn from_env() -> Self {
        Self { mpi: MpiKind::from_env(), ..Self::default() }
    }
}

/// Messages to this rank with their senders, in the order of each sender.
pub type Incoming = Receiver<(u32, Vec<u8>)>;

/// The world of ranks, as seen from one of them. Threads share it by reference.
pub struct World {
    rank: u32,
    nodes: Vec<Node>,
    incoming: Mutex<Option<Incoming>>,
    /// For messages of this rank to itself.
    loopback: SyncSender<(u32, Vec<u8>)>,
    orders: Arc<Orders>,
    /// `None` in a world without MPI, and after [`World::finalize`].
    link: Mutex<Option<Link>>,
    max_queued: usize,
    is_kept: bool,
}

/// Connection to the thread that owns MPI.
struct Link {
    outgoing: SyncSender<Outgoing>,
    thread: JoinHandle<()>,
    /// `None` if the thread never waits for datagrams.
    waker: Option<Arc<Waker>>,
}

impl Link {
    /// Ends the pause of the thread that owns MPI.
    fn wake(&self) {
        self.thread.thread().unpark();
        if let Some(waker) = &self.waker {
            waker.wake();
        }
    }
}

impl World {
    /// Joins the world. Blocks until every rank has joined or `config.start_timeout` has passed. May be called once in a process.
    pub fn start(config: Config) -> Result<Self, CommError> {
        let (deliver, incoming) = mpsc::sync_channel(config.max_queued);
        let orders = Arc::new(Orders::default());
        let (rank, nodes, link) = match config.mpi {
            Some(kind) => {
                let (rank, nodes, link) = start_mpi(kind, &config, deliver.clone(), orders.clone())?;
                (rank, nodes, Some(link))
            }
            None => (0, vec![Node::current()], None),
        };
        let (incoming, link) = (Mutex::new(Some(incoming)), Mutex::new(link));
        let Config { max_queued, is_kept, .. } = config;
        Ok(Self { rank, nodes, incoming, loopback: deliver, orders, link, max_queued, is_kept })
    }

    /// The number of this rank, from 0.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Number of ranks.
    pub fn size(&self) -> u32 {
        self.nodes.len() as u32
    }

    /// The host name of `rank`'s node. Panics when there is no such rank.
    pub fn hostname(&self, rank: u32) -> &str {
        &self.nodes[rank as usize].hostname
    }

    /// All ranks on the node of `rank`, itself included, lowest first. Panics when there is no such rank.
    pub fn node_ranks(&self, rank: u32) -> Vec<u32> {
        let node = &self.nodes[rank as usize];
        (0..self.size()).filter(|&other| self.nodes[other as usize] == *node).collect()
    }

    /// The receiver of the messages to this rank: for the first caller; `None` for later ones.
    pub fn incoming(&self) -> Option<Incoming> {
        self.incoming.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Queues `bytes` for rank `to` and returns at once. Messages to one rank arrive in order.
    pub fn send(&self, to: u32, bytes: Vec<u8>) -> Result<(), CommError> {
        self.check(to, bytes.len())?;
        if to == self.rank {
            return self.loopback.try_send((to, bytes)).map_err(|error| self.refused(&error));
        }
        self.queue(&[to], bytes.into())
    }

    /// As [`World::send`], the same to each of `ranks`, none of them this one. When one cannot be queued, none is.
    pub fn send_to(&self, ranks: &[u32], bytes: Vec<u8>) -> Result<(), CommError> {
        ranks.iter().try_for_each(|&rank| self.check(rank, bytes.len()))?;
        self.queue(ranks, bytes.into())
    }

    /// As [`World::send`], to every other rank. When one cannot be queued, none is.
    pub fn broadcast(&self, bytes: Vec<u8>) -> Result<(), CommError> {
        self.check(self.rank, bytes.len())?;
        let others: Vec<u32> = (0..self.size()).filter(|&rank| rank != self.rank).collect();
        self.queue(&others, bytes.into())
    }

    /// Ends all ranks at once, this one included, with exit code `code`, and logs `reason`. No destructor runs: release shared
    /// memory first. In a world that is [kept](Config::is_kept) it ends this rank alone, and the launcher ends the others after rank 0.
    pub fn abort(&self, code: u8, reason: &str) -> ! {
        if self.is_kept && self.rank != 0 {
            tracing::error!(rank = self.rank, code, "ends: {reason}");
        } else {
            tracing::error!(rank = self.rank, code, "ends the world: {reason}");
            note_cause(reason);
        }
        self.orders.abort.store(i32::from(code) + 1, Ordering::Release);
        if let Some(link) = &*self.link() {
            link.wake();
            // MPI ends this process. If it hangs, its launcher ends the others after this process has exited.
            thread::sleep(Duration::from_secs(2));
        }
        std::process::exit(code.into())
    }

    /// Writes for the launcher why this rank 0 ends, in a world that is [kept](Config::is_kept): MPI's launcher then returns no exit code of a
    /// rank.
    pub fn note_failure(&self, reason: &str) {
        if self.is_kept && self.rank == 0 {
            note_cause(reason);
        }
    }

    /// Goes on without `rank`. From now on no message is sent to it, and its messages are ignored. The world must be
    /// [kept](Config::is_kept) by MPI's launcher. [`World::finalize`] then neither waits for other ranks nor finalizes MPI.
    pub fn lose(&self, rank: u32) {
        self.orders.lose(rank);
        if let Some(link) = &*self.link() {
            link.wake();
        }
    }

    /// Leaves the world after all queued messages are sent and every rank has called this. Blocks up to `timeout`. After an error,
    /// end the process, because MPI may hang. Received messages stay in [`Incoming`].
    pub fn finalize(&self, timeout: Duration) -> Result<(), CommError> {
        let Some(Link { outgoing, thread, waker }) = self.link().take() else { return Ok(()) };
        drop(outgoing);
        thread.thread().unpark();
        waker.iter().for_each(|waker| waker.wake());
        let deadline = Instant::now() + timeout;
        while !thread.is_finished() {
            if Instant::now() >= deadline {
                return Err(CommError::FinalizeTimeout { waited: timeout });
            }
            thread::sleep(Duration::from_millis(1));
        }
        thread.join().map_err(|_| CommError::Left)
    }

    fn link(&self) -> MutexGuard<'_, Option<Link>> {
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check(&self, to: u32, len: usize) -> Result<(), CommError> {
        if to >= self.size() {
            return Err(CommError::NoSuchRank { to, size: self.size() });
        }
        if len > MAX_MESSAGE_BYTES {
            return Err(CommError::TooLarge { len, max: MAX_MESSAGE_BYTES });
        }
        Ok(())
    }

    fn queue(&self, ranks: &[u32], bytes: Arc<[u8]>) -> Result<(), CommError> {
        let link = self.link();
        let Some(link) = link.as_ref() else {
            return if ranks.is_empty() { Ok(()) } else { Err(CommError::Left) };
        };
        link.outgoing.try_send(Outgoing { ranks: ranks.to_vec(), bytes }).map_err(|error| self.refused(&error))?;
        link.wake();
        Ok(())
    }

    fn refused<T>(&self, error: &TrySendError<T>) -> CommError {
        match error {
            TrySendError::Full(_) => CommError::Overloaded { queued: self.max_queued },
            TrySendError::Disconnected(_) => CommError::Left,
        }
    }
}

/// Errs on every rank when the program of one differs from rank 0's. Ranks of one node run the same file.
fn check_builds(mpi: &Mpi, nodes: &[Node]) -> Result<(), CommError> {
    if nodes.iter().all(|node| *node == nodes[0]) {
        return Ok(());
    }
    let builds = mpi.allgather(&build_id::current());
    match builds.iter().position(|build| *build != builds[0]) {
        None => Ok(()),
        Some(rank) => {
            let (node, first) = (nodes[rank].hostname.clone(), nodes[0].hostname.clone());
            Err(CommError::Builds { rank, node, first })
        }
    }
}

/// Starts MPI on a new thread; returns this rank and the node of every rank.
fn start_mpi(
    kind: MpiKind,
    config: &Config,
    deliver: SyncSender<(u32, Vec<u8>)>,
    orders: Arc<Orders>,
) -> Result<(u32, Vec<Node>, Link), CommError> {
    let (outgoing, queued) = mpsc::sync_channel(config.max_queued);
    let (report, started) = mpsc::sync_channel(1);
    let is_kept = config.is_kept;
    let run = move || {
        let mpi = match Mpi::start(kind) {
            Ok(mpi) => mpi,
            Err(error) => return drop(report.send(Err(error))),
        };
        let nodes = mpi.allgather(&Node::current().to_bytes());
        let nodes: Vec<Node> = nodes.iter().map(|bytes| Node::from_bytes(bytes)).collect();
        if let Err(error) = check_builds(&mpi, &nodes) {
            return drop(report.send(Err(error)));
        }
        let announcer = Announcer::start(&mpi, &nodes);
        let waker = announcer.as_ref().map(Announcer::waker);
        // After a start timeout, the sender of `queued` is dropped too, and the pump ends at once.
        let _ = report.send(Ok((mpi.rank(), nodes, waker)));
        Pump::new(mpi, queued, deliver, orders, announcer, is_kept).run();
    };
    let thread = ipc::essential_thread("mpi", run).map_err(CommError::Thread)?;
    match started.recv_timeout(config.start_timeout) {
        Ok(Ok((rank, nodes, waker))) => Ok((rank, nodes, Link { outgoing, thread, waker })),
        Ok(Err(error)) => Err(error),
        Err(_) => Err(CommError::StartTimeout { waited: config.start_timeout }),
    }
}

/// Writes the reason why the world ends to the file that the launcher names. The launcher does not parse the log, because it contains
/// text of clients.
fn note_cause(reason: &str) {
    if let Some(path) = std::env::var_os(CAUSE_FILE) {
        note_cause_in(Path::new(&path), reason);
    }
}

fn note_cause_in(path: &Path, reason: &str) {
    let mut options = std::fs::OpenOptions::new();
    options.append(true).custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32);
    // The file exists only on the launcher's node.
    if let Ok(mut file) = options.open(path) {
        // In one write, because other ranks may write too.
        let _ = file.write_all(format!("{}\n", reason.replace('\n', " ")).as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_cause_is_one_line_and_is_written_to_no_other_file() {
        let dir = std::env::temp_dir().join(format!("trireme-cause-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let (file, link) = (dir.join("cause"), dir.join("link"));
        note_cause_in(&file, "there is no file yet");
        assert!(!file.exists(), "it is the launcher's to make");
        std::fs::write(&file, "").unwrap();
        symlink(&file, &link).unwrap();
        note_cause_in(&link, "over a link");
        note_cause_in(&file, "rank 1\nis lost");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "rank 1 is lost\n");
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
