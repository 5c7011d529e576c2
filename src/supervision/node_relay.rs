//! Rank 0's reach to the workers of another node: a plan comes once, and goes into the ring of each.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender, SyncSender};
use std::time::Duration;

use engine::plan;
use ipc::{Doorbell, IpcError, Received, RingReceiver, RingSender, essential_thread};

use crate::messages::{FromAgent, RelayedWorker, WorkerId};
use crate::protocol::{FromWorker, ShmName};

/// Messages to workers that may wait here; rank 0 has far fewer on the way.
const MAX_WAITING: usize = 64;
/// How long a worker may leave its ring full.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);
/// A wait that only a message or the doorbell ends.
const IDLE_WAIT: Duration = Duration::from_secs(3600);

/// Carries messages between rank 0 and the workers of one start of a model on this node. Ends when dropped.
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
            let tell = move || tell_outputs(worker, outputs, &events, &has_ended);
            essential_thread(format!("outputs-{}", worker.tp_rank), tell)?;
        }
        let (plans, waiting) = mpsc::sync_channel(MAX_WAITING);
        let events = events.clone();
        essential_thread("plans", move || hand_out(waiting, senders, &events))?;
        Ok(Self { plans, doorbells, has_ended })
    }

    /// Hands a message to every worker. One too many means that they hang, which rank 0 will notice.
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

/// Until rank 0's messages end, or a worker takes none.
fn hand_out(waiting: Receiver<Vec<u8>>, mut senders: Vec<(WorkerId, RingSender)>, events: &Sender<FromAgent>) {
    for bytes in waiting {
        for (worker, sender) in &mut senders {
            if let Err(error) = sender.send(&bytes, SEND_TIMEOUT) {
                let mut words = Vec::new();
                plan::encode(&FromWorker::Failed { message: format!("takes no plans: {error}") }, &mut words);
                let _ = events.send(FromAgent::Said { worker: *worker, bytes: words });
                return;
            }
        }
    }
}

/// What one worker says, until it is gone or nobody wants to hear it.
fn tell_outputs(worker: WorkerId, mut outputs: RingReceiver, events: &Sender<FromAgent>, has_ended: &AtomicBool) {
    let mut bytes = Vec::new();
    while !has_ended.load(Ordering::Acquire) {
        match outputs.recv(&mut bytes, IDLE_WAIT) {
            Ok(Received::Message) => {
                let _ = events.send(FromAgent::Said { worker, bytes: std::mem::take(&mut bytes) });
            }
            Ok(Received::Woken | Received::TimedOut) => {}
            Err(_) => return, // Its agent says why.
        }
    }
}
