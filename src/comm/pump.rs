//! The one thread that calls MPI.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, TrySendError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::mpi::{Mpi, Pending};
use crate::waker::{AWAKE, Announcer};

/// Most operations of MPI in progress in each direction; further messages stay in their queues.
const MAX_IN_FLIGHT: usize = 64;

/// The same for sends, for each rank, in a world that goes on without ranks: those that take no messages must not delay the others.
const MAX_IN_FLIGHT_EACH: usize = 16;

/// A message to other ranks.
pub(crate) struct Outgoing {
    pub(crate) ranks: Vec<u32>,
    pub(crate) bytes: Arc<[u8]>,
}

/// Requests of other threads, checked in each iteration.
#[derive(Default)]
pub(crate) struct Orders {
    /// Exit code for an abort of the world, plus one; 0: no abort.
    pub(crate) abort: AtomicI32,
    /// Ranks without which this one goes on.
    lost: Mutex<Vec<u32>>,
    num_lost: AtomicUsize,
}

impl Orders {
    /// Nothing is sent to `rank` from now on, and nothing received from it.
    pub(crate) fn lose(&self, rank: u32) {
        let mut lost = self.lost.lock().unwrap_or_else(PoisonError::into_inner);
        if !lost.contains(&rank) {
            lost.push(rank);
            self.num_lost.store(lost.len(), Ordering::Release);
        }
    }

    /// The ranks without which this one goes on, if there are more than these.
    fn newly_lost(&self, known: &[u32]) -> Option<Vec<u32>> {
        let has_more = self.num_lost.load(Ordering::Acquire) > known.len();
        has_more.then(|| self.lost.lock().unwrap_or_else(PoisonError::into_inner).clone())
    }
}

/// A message to this rank: complete, or still being received.
struct Arriving {
    from: u32,
    message: Result<Vec<u8>, Pending<Vec<u8>>>,
}

pub(crate) struct Pump {
    mpi: Mpi,
    outgoing: Receiver<Outgoing>,
    incoming: SyncSender<(u32, Vec<u8>)>,
    orders: Arc<Orders>,
    /// `None` if messages are not announced.
    announcer: Option<Announcer>,
    /// Calls of the waker before the current iteration.
    num_calls: u64,
    /// With their receivers.
    sending: Vec<(u32, Pending<Arc<[u8]>>)>,
    /// In the order of arrival. Delivered from the front, so that no message overtakes a longer one.
    receiving: VecDeque<Arriving>,
    /// Most operations in `sending`, but for the receivers of one message.
    max_sending: usize,
    /// Ranks without which this one goes on.
    lost: Vec<u32>,
    last_active: Instant,
}

impl Pump {
    pub(crate) fn new(
        mpi: Mpi,
        outgoing: Receiver<Outgoing>,
        incoming: SyncSender<(u32, Vec<u8>)>,
        orders: Arc<Orders>,
        announcer: Option<Announcer>,
        is_kept: bool,
    ) -> Self {
        let max_sending = if is_kept { MAX_IN_FLIGHT.max(MAX_IN_FLIGHT_EACH * mpi.size()) } else { MAX_IN_FLIGHT };
        let (sending, receiving, num_calls) = (Vec::new(), VecDeque::new(), 0);
        let (lost, last_active) = (Vec::new(), Instant::now());
        Self {
            mpi,
            outgoing,
            incoming,
            orders,
            announcer,
            num_calls,
            sending,
            receiving,
            max_sending,
            lost,
            last_active,
        }
    }

    /// Runs until all senders of `outgoing` are dropped and every rank has reached this point, then finalizes MPI. After the loss of a
    /// rank, which MPI would wait for, it only runs until all messages are sent.
    pub(crate) fn run(mut self) {
        while self.turn() {
            self.pause(false);
        }
        if !self.lost.is_empty() {
            return;
        }
        let mut barrier = self.mpi.barrier();
        while let Err(pending) = self.mpi.finish(barrier) {
            barrier = pending;
            self.turn();
            self.pause(true);
        }
        // Every message to this rank has begun to arrive, because its sender has passed the barrier.
        while self.receive() || !self.receiving.is_empty() {
            thread::yield_now();
        }
        self.mpi.finalize();
    }

    /// One iteration; returns false once everything is sent and no sender is left.
    fn turn(&mut self) -> bool {
        self.num_calls = self.announcer.as_ref().map_or(0, Announcer::num_calls);
        let abort = self.orders.abort.load(Ordering::Acquire);
        if abort != 0 {
            self.mpi.abort(abort - 1);
        }
        self.forget_lost();
        let (sent, open) = self.send();
        let received = self.receive();
        if sent || received {
            self.last_active = Instant::now();
        }
        open || !self.sending.is_empty()
    }

    /// Forgets operations with ranks that are lost: they may never end. MPI may still use their bytes, which are leaked.
    fn forget_lost(&mut self) {
        if let Some(lost) = self.orders.newly_lost(&self.lost) {
            self.lost = lost;
            self.sending.retain(|(rank, _)| !self.lost.contains(rank));
            self.receiving.retain(|arriving| !self.lost.contains(&arriving.from));
        }
    }

    /// Starts and completes sends. Returns whether there was progress, and whether `outgoing` is still open.
    fn send(&mut self) -> (bool, bool) {
        let before = self.sending.len();
        let pending = std::mem::take(&mut self.sending);
        let unfinished = |(rank, pending)| Some((rank, self.mpi.finish(pending).err()?));
        self.sending.extend(pending.into_iter().filter_map(unfinished));
        let mut has_progress = self.sending.len() != before;
        while self.sending.len() < self.max_sending {
            match self.outgoing.try_recv() {
                Ok(Outgoing { mut ranks, bytes }) => {
                    ranks.retain(|rank| !self.lost.contains(rank));
                    self.sending.extend(ranks.iter().map(|&rank| (rank, self.mpi.send(rank, bytes.clone()))));
                    if let Some(announcer) = &self.announcer {
                        ranks.iter().for_each(|&rank| announcer.announce(rank));
                    }
                }
                Err(error) => return (has_progress, error == TryRecvError::Empty),
            }
            has_progress = true;
        }
        (has_progress, true)
    }

    /// Starts and completes receives; returns whether there was progress.
    fn receive(&mut self) -> bool {
        let mut has_progress = false;
        while self.receiving.len() < MAX_IN_FLIGHT {
            let Some((from, pending)) = self.mpi.receive() else { break };
            has_progress = true;
            if !self.lost.contains(&from) {
                self.receiving.push_back(Arriving { from, message: Err(pending) });
            }
        }
        while let Some(arriving) = self.receiving.pop_front() {
            if let Err(kept) = self.deliver(arriving) {
                self.receiving.push_front(kept);
                break;
            }
            has_progress = true;
        }
        has_progress
    }

    /// Delivers a complete message. Returns one that is incomplete or for which the queue has no room.
    fn deliver(&self, Arriving { from, message }: Arriving) -> Result<(), Arriving> {
        let bytes = message
            .or_else(|pending| self.mpi.finish(pending))
            .map_err(|pending| Arriving { from, message: Err(pending) })?;
        match self.incoming.try_send((from, bytes)) {
            // The receiver is dropped: the rank is about to leave.
            Ok(()) | Err(TrySendError::Disconnected(_)) => Ok(()),
            Err(TrySendError::Full((from, bytes))) => Err(Arriving { from, message: Ok(bytes) }),
        }
    }

    /// Pauses, longer the longer there was no progress. A send and an announced message end the pause. `is_leaving`: ranks that
    /// leave the world wait for each other without messages.
    fn pause(&mut self, is_leaving: bool) {
        let idle = self.last_active.elapsed();
        let in_flight = is_leaving || !self.sending.is_empty() || !self.receiving.is_empty();
        if let Some(announcer) = self.announcer.as_ref().filter(|_| idle > AWAKE && !in_flight) {
            if announcer.sleep(self.num_calls) {
                self.last_active = Instant::now();
            }
            return;
        }
        match idle.as_micros() {
            0..100 => thread::yield_now(),
            100..500 => thread::park_timeout(Duration::from_micros(50)),
            500..200_000 => thread::park_timeout(Duration::from_micros(200)),
            200_000..1_000_000 => thread::park_timeout(Duration::from_millis(1)),
            _ if in_flight => thread::park_timeout(Duration::from_millis(1)),
            _ => thread::park_timeout(Duration::from_millis(18)),
        }
    }
}
