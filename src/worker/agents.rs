//! Rank 0's reach to the agents of all ranks.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::agent::{FromAgent, ToAgent};

type Listener = Box<dyn Fn(FromAgent) + Send>;

/// Sends messages to any rank's agent and hands what agents say to whoever started the worker it is about.
pub struct Agents {
    world_size: u32,
    send: Box<dyn Fn(u32, ToAgent) + Send + Sync>,
    listeners: Mutex<HashMap<u64, Listener>>,
    next_instance: AtomicU64,
}

impl Agents {
    /// Agents of `world_size` ranks; `send` carries a message to the agent of a rank.
    pub fn new(world_size: u32, send: impl Fn(u32, ToAgent) + Send + Sync + 'static) -> Self {
        Self { world_size, send: Box::new(send), listeners: Mutex::default(), next_instance: AtomicU64::new(1) }
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

    /// Hands on what an agent said.
    pub fn deliver(&self, message: FromAgent) {
        let (FromAgent::Started { worker, .. } | FromAgent::Ended { worker, .. }) = &message;
        if let Some(listener) = self.listeners.lock().unwrap().get(&worker.instance) {
            listener(message);
        }
    }
}
