//! The loss of ranks on rank 0: whether the world goes on without them. It does if its launcher keeps it (`launch --elastic`), all models
//! are loaded, and each has a replica that has lost no rank.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::thread;

use backends::llm::LlmFactory;
use comm::World;
use supervision::Agents;

use crate::heartbeat::{EXIT_CODE, RESPONSE_TIME};

/// What decides whether the world goes on.
#[derive(Default)]
pub(crate) struct Losses {
    /// Whether the world is kept when a rank dies.
    is_kept: bool,
    /// Whether all models that are to be loaded at the start are.
    serves: AtomicBool,
    /// Whether the world ends in order: its ranks end, and none is lost.
    ends: AtomicBool,
    llm: OnceLock<Weak<LlmFactory>>,
    agents: OnceLock<Weak<Agents>>,
}

impl Losses {
    /// Of a world that ends with each of its ranks.
    #[cfg(test)]
    pub(crate) fn none() -> Arc<Self> {
        Arc::default()
    }

    /// Lets a world that is kept when a rank dies (`is_kept`) go on without ranks that it can spare, and end otherwise. Behind a relay, which
    /// sends unfinished requests again, it ends at once: their clients shall not get the error of this world.
    pub(crate) fn watch(world: &Arc<World>, agents: &Arc<Agents>, is_kept: bool, has_relay: bool) -> Arc<Self> {
        let losses = Arc::new(Self { is_kept, ..Self::default() });
        let _ = losses.agents.set(Arc::downgrade(agents));
        let (deciding, telling) = (Arc::clone(&losses), Arc::clone(world));
        agents.spare(move |rank, lost| {
            let goes_on = deciding.ends.load(Ordering::Acquire) || rank != 0 && deciding.can_spare(lost);
            if goes_on {
                telling.lose(rank);
            }
            goes_on
        });
        let world = Arc::clone(world);
        if has_relay {
            agents.on_rank_loss(move |reason| world.abort(EXIT_CODE, reason));
        } else if is_kept {
            // The launcher of MPI does not end it.
            agents.on_rank_loss(move |reason| end_soon(&world, reason));
        }
        losses
    }

    /// The models that decide.
    pub(crate) fn set_models(&self, llm: &Arc<LlmFactory>) {
        let _ = self.llm.set(Arc::downgrade(llm));
    }

    /// Notes that all models are loaded.
    pub(crate) fn serves(&self) {
        self.serves.store(true, Ordering::Release);
    }

    /// Notes that the other ranks are asked to end.
    pub(crate) fn end(&self) {
        self.ends.store(true, Ordering::Release);
    }

    /// Whether every model is served without these ranks.
    pub(crate) fn can_spare(&self, ranks: &[u32]) -> bool {
        let llm = || self.llm.get().and_then(Weak::upgrade);
        let can_lose = self.is_kept && self.serves.load(Ordering::Acquire);
        ranks.is_empty() || can_lose && llm().is_some_and(|llm| llm.serves_without(ranks))
    }

    /// The ranks that the world goes on without.
    pub(crate) fn lost(&self) -> Vec<u32> {
        self.agents.get().and_then(Weak::upgrade).map_or_else(Vec::new, |agents| agents.lost_ranks())
    }
}

/// Ends the world when clients have had time to get their errors.
fn end_soon(world: &Arc<World>, reason: &str) {
    let (ending, reason) = (Arc::clone(world), reason.to_owned());
    let end = move || {
        thread::sleep(RESPONSE_TIME);
        ending.abort(EXIT_CODE, &reason)
    };
    if let Err(error) = ipc::essential_thread("end", end) {
        world.abort(EXIT_CODE, &format!("cannot start a thread that ends the world: {error}"));
    }
}
