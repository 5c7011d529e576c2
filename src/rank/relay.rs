//! A rank other than 0: carries messages between rank 0 and its own supervisor until the world ends.

use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use comm::World;
use supervision::{FromAgent, ToAgent, WorkerSupervisor};

use crate::error::RankError;
use crate::heartbeat;
use crate::signals::Signals;

/// The liveness check of rank 0, and its reply. No other message is empty.
pub(crate) const LIVENESS_CHECK: &[u8] = &[];

/// A timeout that never passes.
const FOREVER: Duration = Duration::from_secs(365 * 24 * 3600);

/// Timeout for that reply.
const REPLY_TIMEOUT: Duration = Duration::from_secs(2);

/// Runs until rank 0 ends the world.
///
/// Rank 0 sends heartbeats. Without any for twice `silence`, this node is cut off, and this rank must end the processes here itself.
/// Zero: no limit.
pub(crate) fn run(
    world: &Arc<World>,
    supervisor: &WorkerSupervisor,
    events: Receiver<FromAgent>,
    silence: Duration,
) -> Result<(), RankError> {
    let (reply, replies) = mpsc::sync_channel(1);
    leave_signals_to_rank_0(world, replies).map_err(RankError::Runtime)?;
    let sender = Arc::clone(world);
    let forward = move || events.into_iter().for_each(|event| send(&sender, &[0], &event));
    ipc::essential_thread("relay", forward).map_err(RankError::Runtime)?;
    let incoming = world.incoming().expect("only this function takes the receiver");
    let silence = if silence.is_zero() { FOREVER } else { silence };
    let mut num_silences = 0;
    loop {
        let (from, bytes) = match incoming.recv_timeout(silence) {
            Ok(message) => message,
            Err(RecvTimeoutError::Disconnected) => break,
            // If this rank itself was stopped, it finds the heartbeat after its first timeout.
            Err(RecvTimeoutError::Timeout) if num_silences == 0 => {
                num_silences += 1;
                continue;
            }
            Err(RecvTimeoutError::Timeout) => {
                supervisor.handle(ToAgent::Shutdown);
                world.abort(1, &format!("rank 0 on node {} was not heard for {:?}", world.hostname(0), 2 * silence))
            }
        };
        num_silences = 0;
        if bytes == LIVENESS_CHECK {
            // The channel is full when no thread waits for a reply.
            let _ = reply.try_send(());
            continue;
        }
        if bytes == heartbeat::BEAT {
            // When the queue is full, the next reply will do.
            let _ = world.send(from, bytes);
            continue;
        }
        match postcard::from_bytes(&bytes) {
            Ok(ToAgent::Shutdown) => break,
            Ok(ToAgent::RankLost(rank)) => world.lose(rank),
            Ok(message) => supervisor.handle(message),
            Err(error) => {
                tracing::error!(from, %error, "a message between ranks does not decode; are all ranks one build?")
            }
        }
    }
    Ok(())
}

/// Starts a thread that handles signals. Slurm signals all ranks at once, but rank 0 still needs the others while requests in flight
/// finish, so this rank waits for rank 0. If rank 0 has died, there is nothing to wait for, and this rank ends the world.
fn leave_signals_to_rank_0(world: &Arc<World>, replies: Receiver<()>) -> std::io::Result<()> {
    let world = Arc::clone(world);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut signals = {
        let _inside = runtime.enter();
        Signals::new()?
    };
    ipc::essential_thread("signals", move || {
        runtime.block_on(signals.next());
        tracing::info!("this rank ends when rank 0 does, which drains if it received the signal too");
        loop {
            send_bytes(&world, &[0], LIVENESS_CHECK.to_vec());
            match replies.recv_timeout(REPLY_TIMEOUT) {
                Ok(()) => thread::sleep(REPLY_TIMEOUT),
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => world.abort(1, "had to end, and rank 0 does not answer"),
            }
        }
    })?;
    Ok(())
}

/// Sends `message` to other ranks. A failure ends the world: rank 0 would wait for a reply that never comes.
pub(crate) fn send<T: serde::Serialize>(world: &World, to: &[u32], message: &T) {
    let bytes = postcard::to_stdvec(message).expect("messages hold nothing that cannot be serialized");
    send_bytes(world, to, bytes);
}

/// Like [`send`], for encoded messages.
pub(crate) fn send_bytes(world: &World, to: &[u32], bytes: Vec<u8>) {
    match world.send_to(to, bytes) {
        Ok(()) | Err(comm::CommError::Left) => {}
        Err(error) => world.abort(1, &format!("cannot send to rank {to:?}: {error}")),
    }
}
