//! On rank 0: messages to and from the agents of all ranks.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use engine::DiskCopy;
use ipc::{ProcessWatch, essential_thread, lock};

use crate::disk::{DiskEvent, DiskLayout};
use crate::messages::{FromAgent, ToAgent};

type Listener = Box<dyn Fn(FromAgent) + Send>;
type DiskListener = Box<dyn Fn(DiskEvent) + Send>;
/// Sends a message to the agents of some ranks.
type SendToRanks = Box<dyn Fn(&[u32], ToAgent) + Send + Sync>;

/// Host memory of the workers of some ranks, which outlives them, with the files below it. Dropping it frees both.
pub struct HostMemoryLease {
    agents: Arc<Agents>,
    ranks: Range<u32>,
    id: u64,
}

impl HostMemoryLease {
    /// The [`PassedMemory::id`](crate::PassedMemory::id) of its parts.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The ranks.
    pub fn ranks(&self) -> Range<u32> {
        self.ranks.clone()
    }

    /// Lets each rank create a file below its memory. `layouts` are those of the ranks, in order.
    pub fn open_disk(&self, layouts: impl IntoIterator<Item = DiskLayout>) {
        for (rank, layout) in self.ranks().zip(layouts) {
            self.agents.send(rank, ToAgent::OpenDisk { id: self.id, layout });
        }
    }

    /// Lets every rank copy slots between its memory and its file, in this order.
    pub fn copy_disk(&self, copies: Vec<DiskCopy>) {
        for rank in self.ranks() {
            self.agents.send(rank, ToAgent::CopyDisk { id: self.id, copies: copies.clone() });
        }
    }
}

impl Drop for HostMemoryLease {
    fn drop(&mut self) {
        lock(&self.agents.disk_listeners).remove(&self.id);
        let ranks: Vec<u32> = self.ranks.clone().collect();
        self.agents.send_to(&ranks, ToAgent::FreeHostMemory { id: self.id });
    }
}

/// The node of each rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Nodes {
    /// `[ranks]` node of each rank; nodes are numbered from 0 in the order of their first ranks.
    of_rank: Vec<u32>,
    /// `[nodes]` host name of each node.
    names: Vec<String>,
}

impl Nodes {
    /// A world of `world_size` ranks that are all on this node.
    pub fn one(world_size: u32) -> Self {
        Self { of_rank: vec![0; world_size as usize], names: vec![String::new()] }
    }

    /// From the name and the ranks of each node. Every rank is on exactly one node.
    pub fn new(nodes: impl IntoIterator<Item = (String, Vec<u32>)>) -> Self {
        let (mut of_rank, mut names) = (Vec::new(), Vec::new());
        for (node, (name, ranks)) in nodes.into_iter().enumerate() {
            names.push(name);
            for rank in ranks {
                of_rank.resize(of_rank.len().max(rank as usize + 1), 0);
                of_rank[rank as usize] = node as u32;
            }
        }
        Self { of_rank, names }
    }

    /// The node of `rank`.
    pub fn of(&self, rank: u32) -> u32 {
        self.of_rank[rank as usize]
    }

    /// Host names, by node.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// The index of `rank` among the ranks of its node.
    pub fn local_rank(&self, rank: u32) -> u32 {
        (0..rank).filter(|&other| self.of(other) == self.of(rank)).count() as u32
    }

    /// The largest number of ranks on one node.
    pub fn max_ranks(&self) -> usize {
        let count = |node: usize| self.of_rank.iter().filter(|&&its| its as usize == node).count();
        (0..self.names.len()).map(count).max().unwrap_or(0)
    }
}

/// Called with the reason when a rank is lost.
type RankLost = Box<dyn Fn(&str) + Send + Sync>;

/// Called with a rank that is lost, and all ranks that are lost with it. Returns whether the world goes on without them.
type GoesOn = Box<dyn Fn(u32, &[u32]) -> bool + Send + Sync>;

/// Sends messages to the agents of ranks, and delivers their messages to the listener of the worker concerned.
pub struct Agents {
    world_size: u32,
    nodes: Nodes,
    send: SendToRanks,
    listeners: Mutex<HashMap<u64, Listener>>,
    /// By the ids of host memory.
    disk_listeners: Mutex<HashMap<u64, DiskListener>>,
    next_instance: AtomicU64,
    next_host_memory: AtomicU64,
    /// Process ids of the ranks that are watched.
    watched: Mutex<HashSet<u32>>,
    /// Called first when a rank is lost.
    rank_lost: OnceLock<RankLost>,
    goes_on: OnceLock<GoesOn>,
    /// Ranks that the world goes on without, with the reasons.
    lost: Mutex<BTreeMap<u32, String>>,
}

impl Agents {
    /// The agents of `world_size` ranks on `nodes`. `send` sends a message to the agents of some ranks.
    pub fn new(world_size: u32, nodes: Nodes, send: impl Fn(&[u32], ToAgent) + Send + Sync + 'static) -> Self {
        Self {
            world_size,
            nodes,
            send: Box::new(send),
            listeners: Mutex::default(),
            disk_listeners: Mutex::default(),
            next_instance: AtomicU64::new(1),
            next_host_memory: AtomicU64::new(1),
            watched: Mutex::default(),
            rank_lost: OnceLock::new(),
            goes_on: OnceLock::new(),
            lost: Mutex::default(),
        }
    }

    /// The nodes of the ranks.
    pub fn nodes(&self) -> &Nodes {
        &self.nodes
    }

    /// Number of ranks in the world.
    pub fn world_size(&self) -> u32 {
        self.world_size
    }

    /// The number of a new instance. `listener` gets the messages about its workers until [`Agents::forget`].
    pub fn new_instance(&self, listener: impl Fn(FromAgent) + Send + 'static) -> u64 {
        let instance = self.next_instance.fetch_add(1, Ordering::Relaxed);
        lock(&self.listeners).insert(instance, Box::new(listener));
        instance
    }

    /// Removes the listener of `instance`.
    pub fn forget(&self, instance: u64) {
        lock(&self.listeners).remove(&instance);
    }

    /// Host memory for the workers of these ranks. Each rank allocates its part with the first worker that has the id in its spec.
    /// `listener` gets what the ranks say of the files below it.
    pub fn lease_host_memory(
        self: &Arc<Self>,
        ranks: Range<u32>,
        listener: impl Fn(DiskEvent) + Send + 'static,
    ) -> HostMemoryLease {
        let id = self.next_host_memory.fetch_add(1, Ordering::Relaxed);
        lock(&self.disk_listeners).insert(id, Box::new(listener));
        HostMemoryLease { agents: Arc::clone(self), ranks, id }
    }

    /// Sends a message to the agent of `rank`, unless it is lost.
    pub fn send(&self, rank: u32, message: ToAgent) {
        self.send_to(&[rank], message);
    }

    /// Sends the same message to the agents of `ranks`. Those that are lost get none.
    pub fn send_to(&self, ranks: &[u32], message: ToAgent) {
        let lost = lock(&self.lost);
        if lost.is_empty() {
            drop(lost);
            return (self.send)(ranks, message);
        }
        let left: Vec<u32> = ranks.iter().copied().filter(|rank| !lost.contains_key(rank)).collect();
        drop(lost);
        if !left.is_empty() {
            (self.send)(&left, message);
        }
    }

    /// Calls `lost` with the reason when a rank is lost and the world ends, before the loss is delivered. Only the first call has an effect.
    pub fn on_rank_loss(&self, lost: impl Fn(&str) + Send + Sync + 'static) {
        let _ = self.rank_lost.set(Box::new(lost));
    }

    /// Lets the world go on without a rank for which `goes_on` returns true; by default it ends. It gets the rank, and all that are lost
    /// then. Only the first call has an effect.
    pub fn spare(&self, goes_on: impl Fn(u32, &[u32]) -> bool + Send + Sync + 'static) {
        let _ = self.goes_on.set(Box::new(goes_on));
    }

    /// The ranks that the world goes on without.
    pub fn lost_ranks(&self) -> Vec<u32> {
        lock(&self.lost).keys().copied().collect()
    }

    /// Why the world goes on without `rank`, if it does.
    pub fn loss_of(&self, rank: u32) -> Option<String> {
        lock(&self.lost).get(&rank).cloned()
    }

    /// A rank has ended or hangs. Returns whether the world goes on without it.
    pub fn lose(&self, rank: u32, reason: String) -> bool {
        let mut lost = lock(&self.lost);
        if lost.contains_key(&rank) {
            return true;
        }
        let all: Vec<u32> = lost.keys().copied().chain([rank]).collect();
        if !self.goes_on.get().is_some_and(|goes_on| goes_on(rank, &all)) {
            drop(lost);
            self.deliver(FromAgent::RankLost { reason });
            return false;
        }
        lost.insert(rank, reason.clone());
        drop(lost);
        let others: Vec<u32> = (1..self.world_size).filter(|other| !all.contains(other)).collect();
        self.send_to(&others, ToAgent::RankLost(rank));
        self.deliver(FromAgent::ReplicaLost { rank, reason });
        true
    }

    /// Delivers a message of an agent to the listener of its instance. The loss of a rank goes to all listeners.
    pub fn deliver(&self, message: FromAgent) {
        if let (FromAgent::RankLost { reason }, Some(lost)) = (&message, self.rank_lost.get()) {
            lost(reason);
        }
        let listeners = lock(&self.listeners);
        let worker = match &message {
            FromAgent::Started { worker, .. }
            | FromAgent::Relayed { worker, .. }
            | FromAgent::Ended { worker, .. }
            | FromAgent::Stacks { worker, .. }
            | FromAgent::Activity { worker, .. } => worker,
            FromAgent::Disk { id, event } => {
                if let Some(listener) = lock(&self.disk_listeners).get(id) {
                    listener(event.clone());
                }
                return;
            }
            FromAgent::RankLost { .. } | FromAgent::ReplicaLost { .. } => {
                return listeners.values().for_each(|listener| listener(message.clone()));
            }
        };
        if let Some(listener) = listeners.get(&worker.instance) {
            listener(message);
        }
    }

    /// Watches the process `pid` of `rank` on this node. Its end is delivered to every listener.
    pub fn watch_rank(self: &Arc<Self>, rank: u32, pid: u32) {
        if !lock(&self.watched).insert(pid) {
            return;
        }
        let agents = Arc::downgrade(self);
        let watch = move || {
            // A process that has already ended cannot be watched, and its end is delivered at once.
            if let Ok(watch) = ProcessWatch::new(pid) {
                watch.wait(Duration::MAX);
            }
            if let Some(agents) = agents.upgrade() {
                agents.lose(rank, format!("rank {rank} (process {pid}) has ended"));
            }
        };
        if let Err(error) = essential_thread(format!("watch-{rank}"), watch) {
            tracing::warn!(rank, "its end will be noticed late, for no thread can be started: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_counted_on_their_node() {
        let nodes = Nodes::new([("a".to_owned(), vec![0, 1, 4]), ("b".to_owned(), vec![2, 3])]);
        assert_eq!((0..5).map(|rank| nodes.of(rank)).collect::<Vec<_>>(), [0, 0, 1, 1, 0]);
        assert_eq!((0..5).map(|rank| nodes.local_rank(rank)).collect::<Vec<_>>(), [0, 1, 0, 1, 2]);
        assert_eq!((nodes.max_ranks(), nodes.names()), (3, &["a".to_owned(), "b".to_owned()][..]));
    }
}
