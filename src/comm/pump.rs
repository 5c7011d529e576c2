//! The one thread that calls MPI.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, TrySendError};
use std::thread;
use std::time::{Duration, Instant};

use crate::mpi::{Mpi, Pending};

/// Messages MPI works on at a time, each way: more wait in their queues.
const MAX_IN_FLIGHT: usize = 64;

/// A message to other ranks.
pub(crate) struct Outgoing {
    pub(crate) ranks: Vec<u32>,
    pub(crate) bytes: Arc<[u8]>,
}

/// Set by other threads; looked at in each round.
#[derive(Default)]
pub(crate) struct Orders {
    /// Exit code for an abort of the world, plus one; 0: none.
    pub(crate) abort: AtomicI32,
}

/// A message to this rank: whole, or on its way.
struct Arriving {
    from: u32,
    message: Result<Vec<u8>, Pending<Vec<u8>>>,
}

pub(crate) struct Pump {
    mpi: Mpi,
    outgoing: Receiver<Outgoing>,
    incoming: SyncSender<(u32, Vec<u8>)>,
    orders: Arc<Orders>,
    sending: Vec<Pending<Arc<[u8]>>>,
    /// In the order of arrival; delivered from the front, so that a long message is not overtaken.
    receiving: VecDeque<Arriving>,
    last_active: Instant,
}

impl Pump {
    pub(crate) fn new(
        mpi: Mpi,
        outgoing: Receiver<Outgoing>,
        incoming: SyncSender<(u32, Vec<u8>)>,
        orders: Arc<Orders>,
    ) -> Self {
        let (sending, receiving) = (Vec::new(), VecDeque::new());
        Self { mpi, outgoing, incoming, orders, sending, receiving, last_active: Instant::now() }
    }

    /// Works until all senders of `outgoing` are gone and every rank has come that far, then leaves MPI.
    pub(crate) fn run(mut self) {
        while self.turn() {
            self.pause();
        }
        let mut barrier = self.mpi.barrier();
        while let Err(pending) = self.mpi.finish(barrier) {
            barrier = pending;
            self.turn();
            self.pause();
        }
        // Every message to this rank has begun to arrive, as its sender has passed the barrier.
        while self.receive() || !self.receiving.is_empty() {
            thread::yield_now();
        }
        self.mpi.finalize();
    }

    /// One round; false once there is nothing to send and will not be.
    fn turn(&mut self) -> bool {
        let abort = self.orders.abort.load(Ordering::Acquire);
        if abort != 0 {
            self.mpi.abort(abort - 1);
        }
        let (sent, open) = self.send();
        let received = self.receive();
        if sent || received {
            self.last_active = Instant::now();
        }
        open || !self.sending.is_empty()
    }

    /// Starts and ends sends. Returns whether anything moved, and whether more may be asked for.
    fn send(&mut self) -> (bool, bool) {
        let before = self.sending.len();
        let pending = std::mem::take(&mut self.sending);
        self.sending.extend(pending.into_iter().filter_map(|pending| self.mpi.finish(pending).err()));
        let mut moved = self.sending.len() != before;
        while self.sending.len() < MAX_IN_FLIGHT {
            match self.outgoing.try_recv() {
                Ok(Outgoing { ranks, bytes }) => {
                    self.sending.extend(ranks.into_iter().map(|rank| self.mpi.send(rank, bytes.clone())));
                }
                Err(error) => return (moved, error == TryRecvError::Empty),
            }
            moved = true;
        }
        (moved, true)
    }

    /// Starts and ends receives; whether anything moved.
    fn receive(&mut self) -> bool {
        let mut moved = false;
        while self.receiving.len() < MAX_IN_FLIGHT {
            let Some((from, pending)) = self.mpi.receive() else { break };
            self.receiving.push_back(Arriving { from, message: Err(pending) });
            moved = true;
        }
        while let Some(arriving) = self.receiving.pop_front() {
            if let Err(kept) = self.deliver(arriving) {
                self.receiving.push_front(kept);
                break;
            }
            moved = true;
        }
        moved
    }

    /// Hands a whole message over; gives back one that is not whole, or for which there is no room.
    fn deliver(&self, Arriving { from, message }: Arriving) -> Result<(), Arriving> {
        let bytes = message
            .or_else(|pending| self.mpi.finish(pending))
            .map_err(|pending| Arriving { from, message: Err(pending) })?;
        match self.incoming.try_send((from, bytes)) {
            // Nobody listens any more: the rank is about to leave.
            Ok(()) | Err(TrySendError::Disconnected(_)) => Ok(()),
            Err(TrySendError::Full((from, bytes))) => Err(Arriving { from, message: Ok(bytes) }),
        }
    }

    /// Lets others use the core, for the longer the longer nothing has moved; a send ends it early.
    fn pause(&self) {
        let idle = self.last_active.elapsed();
        let in_flight = !self.sending.is_empty() || !self.receiving.is_empty();
        match idle.as_micros() {
            0..100 => thread::yield_now(),
            100..2_000 => thread::park_timeout(Duration::from_micros(50)),
            2_000..200_000 => thread::park_timeout(Duration::from_micros(200)),
            200_000..1_000_000 => thread::park_timeout(Duration::from_millis(1)),
            _ if in_flight => thread::park_timeout(Duration::from_millis(1)),
            _ => thread::park_timeout(Duration::from_millis(18)),
        }
    }
}
