//! Routes the requests of a model to its replicas.
//!
//! A replica takes as many sequences as it has rows. Further sequences wait in one queue, with the order of an engine's queue.
//! The router weighs the load of a replica against the part of the prompt in its prefix cache. It estimates the prefix cache by the
//! prompts that it sent to the replica since the last start of its workers.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use engine::TokenId;
use tokio::sync::oneshot;

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
}

impl Reservation {
    /// The replica.
    pub(crate) fn replica(&self) -> &Replica {
        &self.router.replicas[self.replica]
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        ipc::lock(&self.router.state).loads[self.replica].num_sequences -= self.num_sequences;
        self.router.dispatch();
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
        Self { replicas, max_rows, max_queue, block_size, state }
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
        // Later requests do not overtake earlier ones.
        let chosen = match is_only {
            true => Some(0),
            false if state.queue.is_empty() => self.choose(&mut state, num_sequences, &hashes),
            false => None,
        };
        if let Some(replica) = chosen {
            self.take(&mut state, replica, num_sequences, &hashes);
            return Ok(Admission::Assigned(Reservation { router: Arc::clone(self), replica, num_sequences }));
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
        while let Some((replica, waiting)) = self.next_assignment() {
            let reservation = Reservation { router: Arc::clone(self), replica, num_sequences: waiting.num_sequences };
            // A ticket that was just dropped returns the reservation.
            let _ = waiting.reservation.send(reservation);
        }
    }

    fn next_assignment(&self) -> Option<(usize, Waiting)> {
        let state = &mut *ipc::lock(&self.state);
        let (key, overtakes) = state.next_key()?;
        let first = state.queue.remove(&key).expect("the key is in the queue");
        let Some(replica) = self.choose(state, first.num_sequences, &first.hashes) else {
            state.queue.insert(key, first);
            return None;
        };
        state.num_overtaking = if overtakes { state.num_overtaking + 1 } else { 0 };
        self.take(state, replica, first.num_sequences, &first.hashes);
        Some((replica, first))
    }

    /// The best replica for `num_sequences`, if one has room. Replicas whose workers load get requests only if none is ready.
    fn choose(&self, state: &mut State, num_sequences: usize, hashes: &[PrefixHash]) -> Option<usize> {
        let healths: Vec<u8> = self.replicas.iter().map(|replica| replica.shared.health()).collect();
        let best = healths.iter().max()?;
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
mod tests {
    use futures::FutureExt as _;

    use super::*;

    const BLOCK: usize = 4;

    /// Ready replicas of four rows and 100 blocks.
    fn router(num_replicas: usize, max_queue: usize) -> Arc<Router> {
        let replica = |_| {
            let shared = Arc::new(ReplicaState::default());
            shared.ready.store(true, Ordering::Release);
            shared.stats.lock().unwrap().num_blocks = 100;
            Replica { inbox: Inbox::new().0, shared }
        };
        Arc::new(Router::new((0..num_replicas).map(replica).collect(), 4, max_queue, BLOCK))
    }

    fn prompt(first: u32, len: usize) -> Vec<TokenId> {
        (first..).take(len).map(TokenId).collect()
    }

    fn assigned(router: &Arc<Router>, prompt: &[TokenId]) -> Reservation {
        match router.admit(prompt, 1, 0).unwrap() {
            Admission::Assigned(reservation) => reservation,
            Admission::Queued(_) => panic!("no replica has room"),
        }
    }

    fn queued(router: &Arc<Router>, priority: u32) -> Ticket {
        match router.admit(&prompt(9000, 3), 1, priority).unwrap() {
            Admission::Queued(ticket) => ticket,
            Admission::Assigned(_) => panic!("a replica has room"),
        }
    }

    #[test]
    fn requests_go_to_the_least_loaded_replica_and_at_equal_loads_to_the_longest_cached_prefix() {
        let router = router(2, 10);
        let [a, b] = [prompt(0, 40), prompt(500, 40)];
        let (one, two) = (assigned(&router, &a), assigned(&router, &b));
        assert_eq!((one.replica, two.replica), (0, 1));
        drop((one, two));
        assert_eq!(assigned(&router, &b).replica, 1);
        assert_eq!(assigned(&router, &b).replica, 1, "although it was used last");
        let mut longer = a.clone();
        longer.extend(prompt(700, 8));
        assert_eq!(assigned(&router, &longer).replica, 0);
    }

    #[test]
    fn a_long_prefix_outweighs_a_few_sequences_and_a_short_one_none() {
        let router = router(2, 10);
        let [short, long] = [prompt(0, 40), prompt(5000, 3 * TOKENS_PER_SEQUENCE - BLOCK)];
        assert_eq!(assigned(&router, &short).replica, 0);
        assert_eq!(assigned(&router, &long).replica, 1);
        assert_eq!(assigned(&router, &short).replica, 0);
        let _beside = [assigned(&router, &short), assigned(&router, &prompt(10_000, 40))];
        assert_eq!(_beside.each_ref().map(|reservation| reservation.replica), [0, 1]);
        let _third = assigned(&router, &short);
        assert_eq!(_third.replica, 0, "loads are equal");
        assert_eq!(assigned(&router, &short).replica, 1, "it runs fewer sequences");
        let _more = [assigned(&router, &long), assigned(&router, &long)];
        assert_eq!(
            _more.each_ref().map(|reservation| reservation.replica),
            [1, 1],
            "one more sequence weighs less than the prefix"
        );
    }

    #[test]
    fn requests_without_room_are_queued_by_priority_and_arrival_up_to_the_bound() {
        let router = router(2, 3);
        let mut reservations: Vec<_> = (0..8).map(|_| assigned(&router, &prompt(0, 3))).collect();
        let [mut first, mut second, mut urgent] = [0, 0, 1].map(|priority| queued(&router, priority));
        assert!(matches!(router.admit(&prompt(0, 3), 1, 9), Err(QueueFull { max: 3 })));
        assert_eq!(router.num_waiting(), 3);

        let freed = reservations.pop().unwrap().replica;
        let reservation = urgent.reservation().now_or_never().expect("its turn");
        assert_eq!(reservation.replica, freed);
        first.delay();
        drop(reservation);
        let reservation = second.reservation().now_or_never().expect("the first is delayed");
        assert!(first.reservation().now_or_never().is_none());
        drop(reservation);
        let reservation = first.reservation().now_or_never().expect("its turn");
        drop((first, reservation));
        assert_eq!(router.num_waiting(), 0);
        assert!(matches!(router.admit(&prompt(0, 3), 1, 0), Ok(Admission::Assigned(_))));
    }

    #[test]
    fn a_request_of_low_priority_is_assigned_after_sixteen_others() {
        let router = router(2, 99);
        let mut reservations: Vec<_> = (0..8).map(|_| assigned(&router, &prompt(0, 3))).collect();
        let mut low = queued(&router, 0);
        let mut urgent: Vec<_> = (0..20).map(|number| queued(&router, 1 + number % 2)).collect();
        let mut num_before = 0;
        while low.reservation().now_or_never().is_none() {
            drop(reservations.pop());
            let assigned = urgent.iter_mut().position(|ticket| ticket.reservation().now_or_never().is_some());
            if let Some(index) = assigned {
                drop(urgent.remove(index)); // Its place is free for the next one.
                num_before += 1;
            }
            assert!(num_before <= 16, "the oldest waits for {num_before} others");
        }
        assert!(num_before > 4, "priorities have no effect");
    }

    #[test]
    fn those_who_give_up_leave_their_turn_and_their_place_to_others() {
        let router = router(2, 9);
        let mut reservations: Vec<_> = (0..8).map(|_| assigned(&router, &prompt(0, 3))).collect();
        let [first, second, mut third] = [0, 0, 0].map(|priority| queued(&router, priority));
        drop(first);
        reservations.pop();
        drop(second); // It has received a reservation.
        assert!(third.reservation().now_or_never().is_some());
        drop((third, reservations));
        assert_eq!(router.state.lock().unwrap().loads.iter().map(|load| load.num_sequences).sum::<usize>(), 0);
    }

    #[test]
    fn a_replica_whose_workers_load_gets_no_requests_while_another_is_ready_and_loses_its_prefixes() {
        let router = router(2, 9);
        let a = prompt(0, 40);
        assert_eq!(assigned(&router, &a).replica, 0);
        let lost = &router.replicas[0].shared;
        lost.ready.store(false, Ordering::Release);
        lost.restarts.fetch_add(1, Ordering::Relaxed);
        let reservations: Vec<_> = (0..4).map(|_| assigned(&router, &a)).collect();
        assert!(reservations.iter().all(|reservation| reservation.replica == 1));
        let mut waits = queued(&router, 0);
        assert!(waits.reservation().now_or_never().is_none());
        lost.ready.store(true, Ordering::Release);
        router.dispatch();
        assert_eq!(waits.reservation().now_or_never().expect("there is room again").replica, 0);
        drop(reservations);
        assert_eq!(assigned(&router, &a).replica, 1);
    }

    #[test]
    fn a_request_of_more_sequences_than_rows_needs_an_idle_replica() {
        let router = router(2, 9);
        let large = |router: &Arc<Router>| match router.admit(&prompt(0, 3), 6, 0).unwrap() {
            Admission::Assigned(reservation) => Some(reservation.replica),
            Admission::Queued(_) => None,
        };
        let reservation = assigned(&router, &prompt(0, 3));
        assert_eq!(large(&router), Some(1));
        let _second = assigned(&router, &prompt(0, 3));
        assert_eq!(large(&router), None);
        drop(reservation);
        assert_eq!(large(&router), Some(0));
    }
}
