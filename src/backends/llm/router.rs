//! Routes the requests of a model to its replicas.
//!
//! A replica takes as many sequences as it has rows. Further sequences wait in one queue, with the order of an engine's queue.
//! The router weighs the load of a replica against the part of the prompt in its prefix cache. It estimates the prefix cache by the
//! prompts that it sent to the replica since the last start of its workers.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use engine::TokenId;
use tokio::sync::{Notify, oneshot};

use super::inbox::Inbox;
use super::replica_state::ReplicaState;
use super::sent_prefixes::{self, PrefixHash, SentPrefixes};

/// Number of cached prompt tokens that outweigh one more running sequence. A device prefills them in about the time by which one row
/// extends 200 decode steps.
const TOKENS_PER_SEQUENCE: usize = 256;

/// One replica of the model: its step thread's inbox and state.
#[derive(Clone)]
pub(crate) struct Replica {
    pub(crate) inbox: Inbox,
    pub(crate) shared: Arc<ReplicaState>,
}

/// Routes requests to the replicas of one model.
pub(crate) struct Router {
    replicas: Vec<Replica>,
    /// Maximum number of running sequences of a replica.
    max_rows: usize,
    /// Maximum number of waiting sequences.
    max_queue: usize,
    block_size: usize,
    state: Mutex<State>,
    /// Notified when a request arrives, or ends.
    requests: Option<Arc<Notify>>,
    /// Whether the weights of the replicas are being replaced.
    is_updating: AtomicBool,
}

/// The weights of the replicas are being replaced until this is dropped.
pub(crate) struct Update(Arc<Router>);

impl Drop for Update {
    fn drop(&mut self) {
        self.0.is_updating.store(false, Ordering::Release);
    }
}

struct State {
    loads: Vec<Load>,
    queue: BTreeMap<QueueKey, Waiting>,
    num_arrived: u64,
    /// Number of requests assigned before the one that has waited longest, since that last was assigned.
    num_overtaking: u32,
}

/// Number of requests that may be assigned before the one that has waited longest, as in an engine's queue.
const MAX_OVERTAKING: u32 = 16;

/// The order of the queue: by priority, then requests that are not delayed, then by arrival.
type QueueKey = (Reverse<u32>, bool, u64);

/// The load of one replica.
struct Load {
    num_sequences: usize,
    prefixes: SentPrefixes,
    /// The number of the workers' start for which `prefixes` is valid.
    start: u64,
    /// The arrival number of its last request.
    last_used: u64,
}

/// A request that waits for a replica.
struct Waiting {
    num_sequences: usize,
    hashes: Vec<PrefixHash>,
    reservation: oneshot::Sender<Reservation>,
}

/// The result of [`Router::admit`].
pub(crate) enum Admission {
    /// A replica has room.
    Assigned(Reservation),
    /// The request is queued.
    Queued(Ticket),
}

/// The queue is full.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct QueueFull {
    pub(crate) max: usize,
}

/// Room for a request's sequences on one replica. It is returned when dropped.
pub(crate) struct Reservation {
    router: Arc<Router>,
    replica: usize,
    num_sequences: usize,
    /// The arrival number of its request.
    number: u64,
}

impl Reservation {
    /// Queues sequences of the request, whose replica is lost, before requests that arrived later. `tokens` are those of the first one.
    pub(crate) fn move_on(&self, tokens: &[TokenId], num_sequences: usize, priority: u32) -> Ticket {
        let router = &self.router;
        let (sender, reservation) = oneshot::channel();
        let hashes = sent_prefixes::hashes(tokens, router.block_size);
        let key = (Reverse(priority), false, self.number);
        let waiting = Waiting { num_sequences, hashes, reservation: sender };
        ipc::lock(&router.state).queue.insert(key, waiting);
        router.dispatch();
        Ticket { router: Arc::clone(router), key, reservation }
    }

    /// The replica.
    pub(crate) fn replica(&self) -> &Replica {
        &self.router.replicas[self.replica]
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        ipc::lock(&self.router.state).loads[self.replica].num_sequences -= self.num_sequences;
        self.router.dispatch();
        self.router.notify();
    }
}

/// A place in the queue. The request leaves the queue when this is dropped.
pub(crate) struct Ticket {
    router: Arc<Router>,
    key: QueueKey,
    reservation: oneshot::Receiver<Reservation>,
}

impl Ticket {
    /// Waits for a replica. Cancel safe.
    pub(crate) async fn reservation(&mut self) -> Reservation {
        (&mut self.reservation).await.expect("the queue keeps each ticket until it is dropped")
    }

    /// Moves the request after others of its priority.
    pub(crate) fn delay(&mut self) {
        let later = (self.key.0, true, self.key.2);
        let mut state = ipc::lock(&self.router.state);
        if let Some(waiting) = state.queue.remove(&self.key) {
            state.queue.insert(later, waiting);
            self.key = later;
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let waited = ipc::lock(&self.router.state).queue.remove(&self.key);
        if waited.is_some() {
            // Other requests may have waited for this one.
            self.router.dispatch();
        }
    }
}

impl Router {
    /// A router to `replicas`, each with `max_rows` rows and blocks of `block_size` tokens.
    pub(crate) fn new(replicas: Vec<Replica>, max_rows: usize, max_queue: usize, block_size: usize) -> Self {
        let load = |_: &Replica| Load { num_sequences: 0, prefixes: SentPrefixes::default(), start: 0, last_used: 0 };
        let loads = replicas.iter().map(load).collect();
        let state = Mutex::new(State { loads, queue: BTreeMap::new(), num_arrived: 0, num_overtaking: 0 });
        Self { replicas, max_rows, max_queue, block_size, state, requests: None, is_updating: AtomicBool::new(false) }
    }

    /// The same, which notifies `requests` when a request arrives, or ends.
    pub(crate) fn notifying(self, requests: Option<Arc<Notify>>) -> Self {
        Self { requests, ..self }
    }

    /// Marks the weights of the replicas as being replaced; `None` if they are already.
    pub(crate) fn begin_update(self: &Arc<Self>) -> Option<Update> {
        let was_updating = self.is_updating.swap(true, Ordering::AcqRel);
        (!was_updating).then(|| Update(Arc::clone(self)))
    }

    /// Whether the weights of the replicas are being replaced.
    pub(crate) fn is_updating(&self) -> bool {
        self.is_updating.load(Ordering::Acquire)
    }

    pub(crate) fn replicas(&self) -> &[Replica] {
        &self.replicas
    }

    /// Whether a replica can run a step now.
    pub(crate) fn is_ready(&self) -> bool {
        self.replicas.iter().any(|replica| replica.shared.is_ready())
    }

    /// The error of the first replica, if no replica is in service.
    pub(crate) fn failure(&self) -> Option<String> {
        let reasons: Option<Vec<String>> = self.replicas.iter().map(|replica| replica.shared.failure()).collect();
        reasons?.into_iter().next()
    }

    /// Number of waiting sequences.
    pub(crate) fn num_waiting(&self) -> usize {
        ipc::lock(&self.state).num_waiting()
    }

    /// Number of sequences of all requests that have not ended.
    pub(crate) fn num_open(&self) -> usize {
        let state = ipc::lock(&self.state);
        state.num_waiting() + state.loads.iter().map(|load| load.num_sequences).sum::<usize>()
    }

    fn notify(&self) {
        if let Some(requests) = &self.requests {
            requests.notify_one();
        }
    }

    /// Assigns `num_sequences` with this prompt to a replica, or queues them. A single replica takes all requests, because its engine
    /// has a queue.
    pub(crate) fn admit(
        self: &Arc<Self>,
        prompt: &[TokenId],
        num_sequences: usize,
        priority: u32,
    ) -> Result<Admission, QueueFull> {
        let is_only = self.replicas.len() == 1;
        let hashes = if is_only { Vec::new() } else { sent_prefixes::hashes(prompt, self.block_size) };
        let mut state = ipc::lock(&self.state);
        state.num_arrived += 1;
        self.notify();
        // Later requests do not overtake earlier ones.
        let chosen = match is_only {
            true => Some(0),
            false if state.queue.is_empty() => self.choose(&mut state, num_sequences, &hashes),
            false => None,
        };
        if let Some(replica) = chosen {
            self.take(&mut state, replica, num_sequences, &hashes);
            let (router, number) = (Arc::clone(self), state.num_arrived);
            return Ok(Admission::Assigned(Reservation { router, replica, num_sequences, number }));
        }
        if state.num_waiting() + num_sequences > self.max_queue {
            return Err(QueueFull { max: self.max_queue });
        }
        let key = (Reverse(priority), false, state.num_arrived);
        let (sender, reservation) = oneshot::channel();
        state.queue.insert(key, Waiting { num_sequences, hashes, reservation: sender });
        Ok(Admission::Queued(Ticket { router: Arc::clone(self), key, reservation }))
    }

    /// Assigns waiting requests to replicas with room. Call it also when a replica becomes ready.
    pub(crate) fn dispatch(self: &Arc<Self>) {
        while let Some((replica, number, waiting)) = self.next_assignment() {
            let (router, num_sequences) = (Arc::clone(self), waiting.num_sequences);
            let reservation = Reservation { router, replica, num_sequences, number };
            // A ticket that was just dropped returns the reservation.
            let _ = waiting.reservation.send(reservation);
        }
    }

    /// The next replica, with the arrival number of its request.
    fn next_assignment(&self) -> Option<(usize, u64, Waiting)> {
        let state = &mut *ipc::lock(&self.state);
        let (key, overtakes) = state.next_key()?;
        let first = state.queue.remove(&key).expect("the key is in the queue");
        let Some(replica) = self.choose(state, first.num_sequences, &first.hashes) else {
            state.queue.insert(key, first);
            return None;
        };
        state.num_overtaking = if overtakes { state.num_overtaking + 1 } else { 0 };
        self.take(state, replica, first.num_sequences, &first.hashes);
        Some((replica, key.2, first))
    }

    /// The best replica for `num_sequences`, if one has room. Replicas whose workers load get requests only if none is ready, and lost ones
    /// get none.
    fn choose(&self, state: &mut State, num_sequences: usize, hashes: &[PrefixHash]) -> Option<usize> {
        let healths: Vec<u8> = self.replicas.iter().map(|replica| replica.shared.health()).collect();
        let best = healths.iter().max().filter(|best| **best > 0)?;
        let mut chosen = None;
        for (index, load) in state.loads.iter_mut().enumerate().filter(|(index, _)| healths[*index] == *best) {
            let has_room = load.num_sequences == 0 || load.num_sequences + num_sequences <= self.max_rows;
            load.reset_if_restarted(self.replicas[index].shared.restarts.load(Ordering::Relaxed));
            let cached = load.prefixes.num_known(hashes) * self.block_size;
            let cost = (load.num_sequences * TOKENS_PER_SEQUENCE) as i64 - cached as i64;
            let key = (cost, load.num_sequences, load.last_used);
            if has_room && chosen.is_none_or(|(least, _)| key < least) {
                chosen = Some((key, index));
            }
        }
        chosen.map(|(_, index)| index)
    }

    fn take(&self, state: &mut State, replica: usize, num_sequences: usize, hashes: &[PrefixHash]) {
        let max_prefixes = ipc::lock(&self.replicas[replica].shared.stats).num_blocks;
        let load = &mut state.loads[replica];
        load.num_sequences += num_sequences;
        load.last_used = state.num_arrived;
        load.prefixes.note(hashes, max_prefixes);
    }
}

impl State {
    /// The request to assign next, and whether it overtakes the one that has waited longest. As in an engine's queue, this one comes
    /// first after [`MAX_OVERTAKING`] others.
    fn next_key(&self) -> Option<(QueueKey, bool)> {
        let first = *self.queue.first_key_value()?.0;
        let oldest = self.oldest().filter(|oldest| *oldest != first);
        Some(match oldest {
            Some(oldest) if self.num_overtaking >= MAX_OVERTAKING => (oldest, false),
            oldest => (first, oldest.is_some()),
        })
    }

    /// The request that has waited longest, of those that are not to wait for others of their priority.
    fn oldest(&self) -> Option<QueueKey> {
        let mut next = self.queue.first_key_value().map(|(key, _)| *key);
        let mut oldest: Option<QueueKey> = None;
        while let Some(first @ (Reverse(priority), is_delayed, number)) = next {
            if !is_delayed && oldest.is_none_or(|oldest| number < oldest.2) {
                oldest = Some(first);
            }
            let Some(lower) = priority.checked_sub(1) else { break };
            next = self.queue.range((Reverse(lower), false, 0)..).next().map(|(key, _)| *key);
        }
        oldest
    }

    fn num_waiting(&self) -> usize {
        self.queue.values().map(|waiting| waiting.num_sequences).sum()
    }
}

impl Load {
    /// Clears the prefixes if the workers were started again.
    fn reset_if_restarted(&mut self, start: u64) {
        if std::mem::replace(&mut self.start, start) != start {
            self.prefixes = SentPrefixes::default();
        }
    }
}

#[cfg(test)]
mod tests;
