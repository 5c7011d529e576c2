//! The one queue before a model's replicas, and the choice of a replica for each request.
//!
//! A replica takes as many sequences as it has rows; what is more waits here, in the order in which an engine's queue serves.
//! The choice weighs load against the part of the prompt that a replica has computed before: [`Router`] remembers which
//! prompts it sent where, and forgets them when the replica's workers were lost.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use engine::TokenId;
use tokio::sync::oneshot;

use super::inbox::Inbox;
use super::replica_state::ReplicaState;
use super::sent_prefixes::{self, PrefixHash, SentPrefixes};

/// Cached prompt tokens that weigh as much as one sequence more to run beside: about the time in which a device prefills
/// them, and by which one row lengthens the steps of an answer of 200 tokens.
const TOKENS_PER_SEQUENCE: usize = 256;

/// One copy of the model: its step thread's inbox and state.
#[derive(Clone)]
pub(crate) struct Replica {
    pub(crate) inbox: Inbox,
    pub(crate) shared: Arc<ReplicaState>,
}

/// Shares requests out to the replicas of one model.
pub(crate) struct Router {
    replicas: Vec<Replica>,
    /// Sequences that a replica takes at once.
    max_rows: usize,
    /// Sequences that wait here at most.
    max_queue: usize,
    block_size: usize,
    state: Mutex<State>,
}

struct State {
    loads: Vec<Load>,
    queue: BTreeMap<Turn, Waiting>,
    num_arrived: u64,
}

/// The order of service: higher priority first, then those that are not delayed, then arrival.
type Turn = (Reverse<u32>, bool, u64);

/// What was sent to one replica.
struct Load {
    num_sequences: usize,
    prefixes: SentPrefixes,
    /// The start of the workers for which `prefixes` holds.
    start: u64,
    /// When a request came last, in arrivals.
    last_used: u64,
}

/// A request that waits for a replica.
struct Waiting {
    num_sequences: usize,
    hashes: Vec<PrefixHash>,
    reservation: oneshot::Sender<Reservation>,
}

/// What came of a request.
pub(crate) enum Admission {
    /// A replica takes it now.
    Assigned(Reservation),
    /// It waits its turn.
    Queued(Ticket),
}

/// As many sequences wait as may.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct QueueFull {
    pub(crate) max: usize,
}

/// Room for a request's sequences on one replica, given back when dropped.
pub(crate) struct Reservation {
    router: Arc<Router>,
    replica: usize,
    num_sequences: usize,
}

impl Reservation {
    /// Where the room is.
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

/// A turn in the queue, given up when dropped.
pub(crate) struct Ticket {
    router: Arc<Router>,
    turn: Turn,
    reservation: oneshot::Receiver<Reservation>,
}

impl Ticket {
    /// Waits for the turn. May be called again when it was not waited for to the end.
    pub(crate) async fn reservation(&mut self) -> Reservation {
        (&mut self.reservation).await.expect("the queue keeps each ticket until it is dropped")
    }

    /// Lets others of its priority be served before.
    pub(crate) fn delay(&mut self) {
        let later = (self.turn.0, true, self.turn.2);
        let mut state = ipc::lock(&self.router.state);
        if let Some(waiting) = state.queue.remove(&self.turn) {
            state.queue.insert(later, waiting);
            self.turn = later;
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let waited = ipc::lock(&self.router.state).queue.remove(&self.turn);
        if waited.is_some() {
            // It may have been the one that others wait behind.
            self.router.dispatch();
        }
    }
}

impl Router {
    /// A router to `replicas`, each with `max_rows` rows and blocks of `block_size` tokens.
    pub(crate) fn new(replicas: Vec<Replica>, max_rows: usize, max_queue: usize, block_size: usize) -> Self {
        let load = |_: &Replica| Load { num_sequences: 0, prefixes: SentPrefixes::default(), start: 0, last_used: 0 };
        let loads = replicas.iter().map(load).collect();
        let state = Mutex::new(State { loads, queue: BTreeMap::new(), num_arrived: 0 });
        Self { replicas, max_rows, max_queue, block_size, state }
    }

    pub(crate) fn replicas(&self) -> &[Replica] {
        &self.replicas
    }

    /// Whether a step can run now.
    pub(crate) fn is_ready(&self) -> bool {
        self.replicas.iter().any(|replica| replica.shared.is_ready())
    }

    /// Why the model was given up: the reason of the first replica, if all of them were.
    pub(crate) fn failure(&self) -> Option<String> {
        let reasons: Option<Vec<String>> = self.replicas.iter().map(|replica| replica.shared.failure()).collect();
        reasons?.into_iter().next()
    }

    /// Sequences that wait here.
    pub(crate) fn num_waiting(&self) -> usize {
        ipc::lock(&self.state).num_waiting()
    }

    /// Finds a replica for `num_sequences` that start with `prompt`, or a reservation in the queue. A replica that is the only
    /// one takes all: its engine has a queue too.
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
        let turn = (Reverse(priority), false, state.num_arrived);
        let (sender, reservation) = oneshot::channel();
        state.queue.insert(turn, Waiting { num_sequences, hashes, reservation: sender });
        Ok(Admission::Queued(Ticket { router: Arc::clone(self), turn, reservation }))
    }

    /// Sends those who wait to replicas that have room. To be called when a replica has come back, too.
    pub(crate) fn dispatch(self: &Arc<Self>) {
        while let Some((replica, waiting)) = self.next_turn() {
            let reservation = Reservation { router: Arc::clone(self), replica, num_sequences: waiting.num_sequences };
            // One that has just given up leaves the reservation to the next.
            let _ = waiting.reservation.send(reservation);
        }
    }

    fn next_turn(&self) -> Option<(usize, Waiting)> {
        let state = &mut *ipc::lock(&self.state);
        let (turn, first) = state.queue.pop_first()?;
        let Some(replica) = self.choose(state, first.num_sequences, &first.hashes) else {
            state.queue.insert(turn, first);
            return None;
        };
        self.take(state, replica, first.num_sequences, &first.hashes);
        Some((replica, first))
    }

    /// The replica to which so many sequences go best, if one has room. One that loads again gets none while another runs.
    fn choose(&self, state: &mut State, num_sequences: usize, hashes: &[PrefixHash]) -> Option<usize> {
        let healths: Vec<u8> = self.replicas.iter().map(|replica| replica.shared.health()).collect();
        let best = healths.iter().max()?;
        let mut chosen = None;
        for (index, load) in state.loads.iter_mut().enumerate().filter(|(index, _)| healths[*index] == *best) {
            let has_room = load.num_sequences == 0 || load.num_sequences + num_sequences <= self.max_rows;
            load.forget_before(self.replicas[index].shared.restarts.load(Ordering::Relaxed));
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
    fn num_waiting(&self) -> usize {
        self.queue.values().map(|waiting| waiting.num_sequences).sum()
    }
}

impl Load {
    /// What lost workers had computed is gone with them.
    fn forget_before(&mut self, start: u64) {
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
    fn load_is_shared_and_the_longest_known_prefix_draws_where_loads_are_alike() {
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
        assert_eq!(_third.replica, 0, "loads are alike");
        assert_eq!(assigned(&router, &short).replica, 1, "which has fewer to run");
        let _more = [assigned(&router, &long), assigned(&router, &long)];
        assert_eq!(
            _more.each_ref().map(|reservation| reservation.replica),
            [1, 1],
            "one more beside is less than the prefix"
        );
    }

    #[test]
    fn what_no_replica_has_room_for_waits_by_priority_and_arrival_up_to_the_bound() {
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
        let reservation = second.reservation().now_or_never().expect("the first lets it go before");
        assert!(first.reservation().now_or_never().is_none());
        drop(reservation);
        let reservation = first.reservation().now_or_never().expect("its turn");
        drop((first, reservation));
        assert_eq!(router.num_waiting(), 0);
        assert!(matches!(router.admit(&prompt(0, 3), 1, 0), Ok(Admission::Assigned(_))));
    }

    #[test]
    fn those_who_give_up_leave_their_turn_and_their_place_to_others() {
        let router = router(2, 9);
        let mut reservations: Vec<_> = (0..8).map(|_| assigned(&router, &prompt(0, 3))).collect();
        let [first, second, mut third] = [0, 0, 0].map(|priority| queued(&router, priority));
        drop(first);
        reservations.pop();
        drop(second); // The reservation was sent to it, and it never looked.
        assert!(third.reservation().now_or_never().is_some());
        drop((third, reservations));
        assert_eq!(router.state.lock().unwrap().loads.iter().map(|load| load.num_sequences).sum::<usize>(), 0);
    }

    #[test]
    fn a_replica_that_loads_again_gets_nothing_while_another_runs_and_has_forgotten_its_prefixes() {
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
    fn a_request_of_more_sequences_than_rows_runs_where_nothing_else_does() {
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
