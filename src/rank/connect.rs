//! Connects rank 0 to the agents of all ranks.

use std::sync::Arc;
use std::sync::mpsc::Receiver;

use comm::World;
use supervision::{Agents, FromAgent, Nodes, WorkerSupervisor};

use crate::heartbeat::{self, Heartbeat};
use crate::relay;

/// Connects the agents of all ranks, this one's included.
pub(crate) fn connect(
    world: &Arc<World>,
    supervisor: &Arc<WorkerSupervisor>,
    events: Receiver<FromAgent>,
    heartbeat: Arc<Heartbeat>,
) -> std::io::Result<Arc<Agents>> {
    let (sender, own) = (Arc::clone(world), Arc::clone(supervisor));
    let agents = Arc::new(Agents::new(world.size(), nodes(world), move |ranks, message| match ranks {
        [0] => own.handle(message),
        ranks => relay::send(&sender, ranks, &message),
    }));
    let (local, remote) = (Arc::clone(&agents), Arc::clone(&agents));
    let replying = Arc::clone(world);
    ipc::essential_thread("own-events", move || events.into_iter().for_each(|event| local.deliver(event)))?;
    let incoming = world.incoming().expect("only this function takes the receiver");
    ipc::essential_thread("events", move || {
        for (from, bytes) in incoming {
            if remote.loss_of(from).is_some() {
                continue;
            }
            heartbeat.received(from);
            if bytes == heartbeat::BEAT {
                continue;
            }
            if bytes == relay::LIVENESS_CHECK {
                relay::send_bytes(&replying, &[from], bytes);
                continue;
            }
            match postcard::from_bytes(&bytes) {
                Ok(event) => remote.deliver(event),
                Err(error) => {
                    tracing::error!(from, %error, "a message between ranks does not decode; are all ranks one build?")
                }
            }
        }
    })?;
    Ok(agents)
}

/// The node of each rank. Ranks of one node can share memory.
fn nodes(world: &World) -> Nodes {
    let is_first = |&rank: &u32| world.node_ranks(rank)[0] == rank;
    Nodes::new((0..world.size()).filter(is_first).map(|rank| (world.hostname(rank).to_owned(), world.node_ranks(rank))))
}
