//! Heartbeats of the other ranks. A rank that is stopped or hangs ends the world, which its launcher starts again. A rank that has
//! died is detected at once, by MPI's launcher or, on its own node, by rank 0.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use comm::World;
use supervision::{Agents, FromAgent};

/// The heartbeat to a rank, and its reply. No other message between ranks decodes from these bytes.
pub(crate) const BEAT: &[u8] = &[0xff];

/// Number of consecutive heartbeats without a reply after which a rank is lost.
const MAX_MISSED: u32 = 3;

/// The exit code for a death by SIGKILL. After a signal, a launcher starts the world again even if it has not served yet.
const EXIT_CODE: u8 = 128 + 9;

/// Time for error responses to clients before the world ends.
const RESPONSE_TIME: Duration = Duration::from_millis(200);

/// Numbers of heartbeats without a reply. They are counts, not times, so that a pause of rank 0 itself does not count as a loss of others.
pub(crate) struct Heartbeat {
    /// `[ranks]` heartbeats since the last reply.
    missed: Vec<AtomicU32>,
}

impl Heartbeat {
    /// State before the first heartbeat.
    pub(crate) fn new(world: &World) -> Arc<Self> {
        Arc::new(Self { missed: (0..world.size()).map(|_| AtomicU32::new(0)).collect() })
    }

    /// Starts to send three heartbeats in each `timeout`. Does nothing when `timeout` is zero or the world has one rank.
    pub(crate) fn start(self: Arc<Self>, world: &Arc<World>, agents: &Arc<Agents>, timeout: Duration) {
        if world.size() > 1 && !timeout.is_zero() {
            let (world, agents) = (Arc::clone(world), Arc::clone(agents));
            let sender = Arc::clone(&world);
            let run = move || self.run(&sender, &agents, timeout / MAX_MISSED);
            if let Err(error) = ipc::essential_thread("heartbeat", run) {
                world.abort(EXIT_CODE, &format!("cannot start the thread that asks other ranks: {error}"));
            }
        }
    }

    /// Notes a reply, or any other message, of `rank`.
    pub(crate) fn received(&self, rank: u32) {
        self.missed[rank as usize].store(0, Ordering::Relaxed);
    }

    fn run(&self, world: &World, agents: &Agents, interval: Duration) {
        loop {
            // This rank has left the world.
            if matches!(world.broadcast(BEAT.to_vec()), Err(comm::CommError::Left)) {
                return;
            }
            thread::sleep(interval);
            for rank in 1..world.size() {
                if self.missed[rank as usize].fetch_add(1, Ordering::Relaxed) + 1 >= MAX_MISSED {
                    end(world, agents, rank, interval * MAX_MISSED);
                }
            }
        }
    }
}

/// Fails the requests of clients, then ends the world.
fn end(world: &World, agents: &Agents, rank: u32, silence: Duration) -> ! {
    let reason = format!("rank {rank} on node {} has not answered for {silence:.1?}", world.hostname(rank));
    agents.deliver(FromAgent::RankLost { reason: reason.clone() });
    thread::sleep(RESPONSE_TIME);
    world.abort(EXIT_CODE, &format!("{reason}: it is stopped or hangs"))
}
