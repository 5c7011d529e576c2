//! Carries messages between rank 0 and the workers of another node. A plan travels to the node once and is copied to the ring
//! of each worker.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender, SyncSender};
use std::time::Duration;

use engine::plan;
use ipc::{Doorbell, IpcError, Received, RingReceiver, RingSender, essential_thread};

use crate::messages::{FromAgent, RelayedWorker, WorkerId};
use crate::protocol::{FromWorker, ShmName};

/// Most messages to workers that may be queued here; rank 0 keeps far fewer in flight.
const MAX_QUEUED: usize = 64;
/// How long the ring of a worker may stay full.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);
/// A wait that only a message or the doorbell ends.
const IDLE_WAIT: Duration = Duration::from_secs(3600);

/// The relay for the workers of one start of a model on this node. Dropping it ends its threads.
#[derive(Debug)]
pub(crate) struct NodeRelay {
    plans: SyncSender<Vec<u8>>,
    doorbells: Vec<Doorbell>,
    has_ended: Arc<AtomicBool>,
}

impl NodeRelay {
    pub(crate) fn start(workers: &[RelayedWorker], events: &Sender<FromAgent>) -> io::Result<Self> {
        let has_ended = Arc::new(AtomicBool::new(false));
        let (mut senders, mut doorbells) = (Vec::new(), Vec::new());
        for RelayedWorker { worker, plan_ring, output_ring } in workers {
            let (sender, outputs) = open(plan_ring, output_ring).map_err(io::Error::other)?;
            senders.push((*worker, sender));
            doorbells.push(outputs.doorbell());
            let (worker, events, has_ended) = (*worker, events.clone(), Arc::clone(&has_ended));
            let forward = move || forward_outputs(worker, outputs, &events, &has_ended);
            essential_thread(format!("outputs-{}", worker.tp_rank), forward)?;
        }
        let (plans, queued) = mpsc::sync_channel(MAX_QUEUED);
        let events = events.clone();
        essential_thread("plans", move || distribute(queued, senders, &events))?;
        Ok(Self { plans, doorbells, has_ended })
    }

    /// Queues a message for every worker. A full queue means that the workers hang, which rank 0's watchdog detects.
    pub(crate) fn send(&self, bytes: Vec<u8>) {
        if self.plans.try_send(bytes).is_err() {
            tracing::error!("workers of this node do not take their plans");
        }
    }
}

fn open(plans: &ShmName, outputs: &ShmName) -> Result<(RingSender, RingReceiver), IpcError> {
    let plans = RingSender::open(&plans.prefix.parse()?, &plans.name)?;
    Ok((plans, RingReceiver::open(&outputs.prefix.parse()?, &outputs.name)?))
}

impl Drop for NodeRelay {
    fn drop(&mut self) {
        self.has_ended.store(true, Ordering::Release);
        self.doorbells.iter().for_each(Doorbell::ring);
    }
}

/// Copies each message of rank 0 to the ring of every worker, until the queue closes or a ring stays full.
fn distribute(queued: Receiver<Vec<u8>>, mut senders: Vec<(WorkerId, RingSender)>, events: &Sender<FromAgent>) {
    for bytes in queued {
        for (worker, sender) in &mut senders {
            if let Err(error) = sender.send(&bytes, SEND_TIMEOUT) {
                let mut encoded = Vec::new();
                plan::encode(&FromWorker::Failed { message: format!("takes no plans: {error}") }, &mut encoded);
                let _ = events.send(FromAgent::Relayed { worker: *worker, bytes: encoded });
                return;
            }
        }
    }
}

/// Forwards the messages of one worker, until it has ended or the relay is dropped.
fn forward_outputs(worker: WorkerId, mut outputs: RingReceiver, events: &Sender<FromAgent>, has_ended: &AtomicBool) {
    let mut bytes = Vec::new();
    while !has_ended.load(Ordering::Acquire) {
        match outputs.recv(&mut bytes, IDLE_WAIT) {
            Ok(Received::Message) => {
                let _ = events.send(FromAgent::Relayed { worker, bytes: std::mem::take(&mut bytes) });
            }
            Ok(Received::Woken | Received::TimedOut) => {}
            Err(_) => return, // Its supervisor reports why.
        }
    }
}
