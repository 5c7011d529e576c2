//! Rank 0's reach to the agents of all ranks.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use ipc::ProcessWatch;

use crate::agent::{FromAgent, ToAgent};

type Listener = Box<dyn Fn(FromAgent) + Send>;

/// Sends messages to any rank's agent and hands what agents say to whoever started the worker it is about.
pub struct Agents {
    world_size: u32,
    send: Box<dyn Fn(u32, ToAgent) + Send + Sync>,
    listeners: Mutex<HashMap<u64, Listener>>,
    next_instance: AtomicU64,
    /// Processes of ranks whose end is waited for.
    watched: Mutex<HashSet<u32>>,
}

impl Agents {
    /// Agents of `world_size` ranks; `send` carries a message to the agent of a rank.
    pub fn new(world_size: u32, send: impl Fn(u32, ToAgent) + Send + Sync + 'static) -> Self {
        Self {
            world_size,
            send: Box::new(send),
            listeners: Mutex::default(),
            next_instance: AtomicU64::new(1),
            watched: Mutex::default(),
        }
    }

    /// Ranks in the world.
    pub fn world_size(&self) -> u32 {
        self.world_size
    }

    /// A new instance; `listener` hears of its workers until [`Agents::forget`].
    pub fn new_instance(&self, listener: impl Fn(FromAgent) + Send + 'static) -> u64 {
        let instance = self.next_instance.fetch_add(1, Ordering::Relaxed);
        self.listeners.lock().unwrap().insert(instance, Box::new(listener));
        instance
    }

    /// Nobody wants to hear of `instance` any more.
    pub fn forget(&self, instance: u64) {
        self.listeners.lock().unwrap().remove(&instance);
    }

    /// Sends to the agent of `rank`.
    pub fn send(&self, rank: u32, message: ToAgent) {
        (self.send)(rank, message);
    }

    /// Hands on what an agent said; the end of a rank concerns everyone.
    pub fn deliver(&self, message: FromAgent) {
        let listeners = self.listeners.lock().unwrap();
        let worker = match &message {
            FromAgent::Started { worker, .. } | FromAgent::Ended { worker, .. } | FromAgent::Stacks { worker, .. } => {
                worker
            }
            FromAgent::RankEnded { .. } => return listeners.values().for_each(|listener| listener(message.clone())),
        };
        if let Some(listener) = listeners.get(&worker.instance) {
            listener(message);
        }
    }

    /// From now on the end of the process `pid` of `rank`, on this node, is told to every listener.
    pub fn watch_rank(self: &Arc<Self>, rank: u32, pid: u32) {
        if !self.watched.lock().unwrap().insert(pid) {
            return;
        }
        let agents = Arc::downgrade(self);
        thread::spawn(move || {
            // One that is gone already cannot be watched, and need not be.
            if let Ok(watch) = ProcessWatch::new(pid) {
                watch.wait(Duration::MAX);
            }
            if let Some(agents) = agents.upgrade() {
                agents.deliver(FromAgent::RankEnded { rank, pid });
            }
        });
    }
}
