//! A rank other than 0: carries messages between rank 0 and its own agent until the world ends.

use std::sync::mpsc::Receiver;
use std::thread;

use comm::World;
use std::sync::Arc;
use worker::{Agent, FromAgent, ToAgent};

/// Runs until rank 0 says that the world ends.
pub(crate) fn run(world: &Arc<World>, agent: &Agent, heard: Receiver<FromAgent>) {
    let sender = Arc::clone(world);
    thread::spawn(move || {
        for news in heard {
            send(&sender, 0, &news);
        }
    });
    let incoming = world.incoming().expect("nobody else reads this rank's messages");
    for (from, bytes) in incoming {
        match postcard::from_bytes(&bytes) {
            Ok(ToAgent::Shutdown) => return,
            Ok(message) => agent.handle(message),
            Err(error) => {
                tracing::error!(from, %error, "a message between ranks does not decode; are all ranks one build?")
            }
        }
    }
}

/// To another rank. What cannot be sent ends the world: rank 0 would wait for an answer that never comes.
pub(crate) fn send<T: serde::Serialize>(world: &World, to: u32, message: &T) {
    let bytes = postcard::to_stdvec(message).expect("messages hold nothing that cannot be serialized");
    match world.send(to, bytes) {
        Ok(()) | Err(comm::CommError::Left) => {}
        Err(error) => world.abort(1, &format!("cannot send to rank {to}: {error}")),
    }
}
