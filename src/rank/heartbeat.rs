//! Whether the other ranks still take part: a rank that is stopped or hangs ends the world, which its launcher starts
//! again. One that has died is noticed at once by MPI's launcher, and on rank 0's node by rank 0 itself.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use comm::World;
use supervision::{Agents, FromAgent};

/// The question to a rank, and its answer. No other message between ranks is these bytes: none decodes from them.
pub(crate) const BEAT: &[u8] = &[0xff];

/// Questions that must stay unanswered, one after the other, before a rank counts as lost.
const MAX_MISSED: u32 = 3;

/// As if a signal had ended it: what happened need not happen again, so a launcher starts the world anew even when
/// it has not served yet.
const EXIT_CODE: u8 = 128 + 9;

/// For the words to clients about a lost rank, before the world ends.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// What rank 0 knows of the others. Counted in questions, not in time: a rank 0 that was itself stopped for a while
/// must not take that for the silence of others.
pub(crate) struct Heartbeat {
    /// Questions since the last answer, of each rank.
    missed: Vec<AtomicU32>,
}

impl Heartbeat {
    /// Nobody is asked yet.
    pub(crate) fn new(world: &World) -> Arc<Self> {
        Arc::new(Self { missed: (0..world.size()).map(|_| AtomicU32::new(0)).collect() })
    }

    /// Begins to ask every rank three times in `timeout`; never, when that is zero or there is nobody else.
    pub(crate) fn start(self: Arc<Self>, world: &Arc<World>, agents: &Arc<Agents>, timeout: Duration) {
        if world.size() > 1 && !timeout.is_zero() {
            let (world, agents) = (Arc::clone(world), Arc::clone(agents));
            let asked = Arc::clone(&world);
            let ask = move || self.ask(&asked, &agents, timeout / MAX_MISSED);
            if let Err(error) = ipc::essential_thread("heartbeat", ask) {
                world.abort(EXIT_CODE, &format!("cannot start the thread that asks other ranks: {error}"));
            }
        }
    }

    /// `rank` has answered.
    pub(crate) fn heard(&self, rank: u32) {
        self.missed[rank as usize].store(0, Ordering::Relaxed);
    }

    fn ask(&self, world: &World, agents: &Agents, interval: Duration) {
        loop {
            // When this rank has left the world, nobody needs to be asked any more.
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

/// Tells the clients, then ends the world.
fn end(world: &World, agents: &Agents, rank: u32, silence: Duration) -> ! {
    let reason = format!("rank {rank} on node {} has not answered for {silence:.1?}", world.hostname(rank));
    agents.deliver(FromAgent::RankLost { reason: reason.clone() });
    thread::sleep(LAST_WORDS);
    world.abort(EXIT_CODE, &format!("{reason}: it is stopped or hangs"))
}
