//! A rank other than 0: carries messages between rank 0 and its own agent until the world ends.

use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use comm::World;
use supervision::{FromAgent, ToAgent, WorkerSupervisor};

use crate::error::RankError;
use crate::heartbeat;
use crate::signals::Signals;

/// The question to rank 0 whether it lives, and its answer. No other message is empty.
pub(crate) const ARE_YOU_THERE: &[u8] = &[];

/// A wait that only a message ends.
const FOREVER: Duration = Duration::from_secs(365 * 24 * 3600);

/// How long rank 0 may take for that answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// Runs until rank 0 says that the world ends.
///
/// Rank 0 asks all the time whether this one lives; when it does not for twice `silence`, this node is cut off from it, and
/// nobody else ends what runs here. Zero: for ever.
pub(crate) fn run(
    world: &Arc<World>,
    supervisor: &WorkerSupervisor,
    heard: Receiver<FromAgent>,
    silence: Duration,
) -> Result<(), RankError> {
    let (answer, answers) = mpsc::sync_channel(1);
    leave_signals_to_rank_0(world, answers).map_err(RankError::Runtime)?;
    let sender = Arc::clone(world);
    let carry = move || heard.into_iter().for_each(|news| send(&sender, &[0], &news));
    ipc::essential_thread("relay", carry).map_err(RankError::Runtime)?;
    let incoming = world.incoming().expect("nobody else reads this rank's messages");
    let silence = if silence.is_zero() { FOREVER } else { silence };
    let mut num_silences = 0;
    loop {
        let (from, bytes) = match incoming.recv_timeout(silence) {
            Ok(message) => message,
            Err(RecvTimeoutError::Disconnected) => break,
            // A rank that was stopped itself finds the question after its first wait.
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
        if bytes == ARE_YOU_THERE {
            // Full when nobody waits for it any more.
            let _ = answer.try_send(());
            continue;
        }
        if bytes == heartbeat::BEAT {
            // When there is no room for it, the next one will do.
            let _ = world.send(from, bytes);
            continue;
        }
        match postcard::from_bytes(&bytes) {
            Ok(ToAgent::Shutdown) => break,
            Ok(message) => supervisor.handle(message),
            Err(error) => {
                tracing::error!(from, %error, "a message between ranks does not decode; are all ranks one build?")
            }
        }
    }
    Ok(())
}

/// Slurm signals every rank at once, and rank 0 still needs the others while requests in flight finish. It also
/// signals those that are left of a world whose rank 0 died: then there is nothing to wait for.
fn leave_signals_to_rank_0(world: &Arc<World>, answers: Receiver<()>) -> std::io::Result<()> {
    let world = Arc::clone(world);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut signals = {
        let _inside = runtime.enter();
        Signals::new()?
    };
    ipc::essential_thread("signals", move || {
        runtime.block_on(signals.next());
        tracing::info!("this rank ends when rank 0 does, which drains if it was asked too");
        loop {
            send_bytes(&world, &[0], ARE_YOU_THERE.to_vec());
            match answers.recv_timeout(ANSWER_TIMEOUT) {
                Ok(()) => thread::sleep(ANSWER_TIMEOUT),
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => world.abort(1, "was told to end, and rank 0 does not answer"),
            }
        }
    })?;
    Ok(())
}

/// To other ranks. What cannot be sent ends the world: rank 0 would wait for an answer that never comes.
pub(crate) fn send<T: serde::Serialize>(world: &World, to: &[u32], message: &T) {
    let bytes = postcard::to_stdvec(message).expect("messages hold nothing that cannot be serialized");
    send_bytes(world, to, bytes);
}

/// As [`send`], for bytes.
pub(crate) fn send_bytes(world: &World, to: &[u32], bytes: Vec<u8>) {
    match world.send_to(to, bytes) {
        Ok(()) | Err(comm::CommError::Left) => {}
        Err(error) => world.abort(1, &format!("cannot send to rank {to:?}: {error}")),
    }
}
