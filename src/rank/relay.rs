//! A rank other than 0: carries messages between rank 0 and its own agent until the world ends.

use std::sync::mpsc::Receiver;
use std::thread;

use comm::World;
use std::sync::Arc;
use worker::{Agent, FromAgent, ToAgent};

use crate::RankError;
use crate::server::Signals;

/// Runs until rank 0 says that the world ends.
pub(crate) fn run(world: &Arc<World>, agent: &Agent, heard: Receiver<FromAgent>) -> Result<(), RankError> {
    leave_signals_to_rank_0().map_err(RankError::Runtime)?;
    let sender = Arc::clone(world);
    thread::spawn(move || {
        for news in heard {
            send(&sender, 0, &news);
        }
    });
    let incoming = world.incoming().expect("nobody else reads this rank's messages");
    for (from, bytes) in incoming {
        match postcard::from_bytes(&bytes) {
            Ok(ToAgent::Shutdown) => break,
            Ok(message) => agent.handle(message),
            Err(error) => {
                tracing::error!(from, %error, "a message between ranks does not decode; are all ranks one build?")
            }
        }
    }
    Ok(())
}

/// Slurm signals every rank at once, and rank 0 still needs the others while requests in flight finish.
fn leave_signals_to_rank_0() -> std::io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut signals = {
        let _inside = runtime.enter();
        Signals::new()?
    };
    thread::spawn(move || {
        runtime.block_on(async {
            loop {
                signals.next().await;
                tracing::info!("this rank ends when rank 0 does, which drains if it was asked too");
            }
        })
    });
    Ok(())
}

/// To another rank. What cannot be sent ends the world: rank 0 would wait for an answer that never comes.
pub(crate) fn send<T: serde::Serialize>(world: &World, to: u32, message: &T) {
    let bytes = postcard::to_stdvec(message).expect("messages hold nothing that cannot be serialized");
    match world.send(to, bytes) {
        Ok(()) | Err(comm::CommError::Left) => {}
        Err(error) => world.abort(1, &format!("cannot send to rank {to}: {error}")),
    }
}
