//! Whether the other ranks still take part: a rank that is stopped or hangs ends the world, which its launcher starts
//! again. One that has died is noticed at once by MPI's launcher, and on rank 0's node by rank 0 itself.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use comm::World;

/// The question to a rank, and its answer. No other message between ranks is these bytes: none decodes from them.
pub(crate) const BEAT: &[u8] = &[0xff];

/// Questions that must stay unanswered, one after the other, before a rank counts as lost.
const MAX_MISSED: u32 = 3;

/// As if a signal had ended it: what happened need not happen again, so a launcher starts the world anew even when
/// it has not served yet.
const EXIT_CODE: u8 = 128 + 9;

/// What rank 0 knows of the others. Counted in questions, not in time: a rank 0 that was itself stopped for a while
/// must not take that for the silence of others.
pub(crate) struct Heartbeat {
    /// Questions since the last answer, of each rank.
    missed: Vec<AtomicU32>,
}

impl Heartbeat {
    /// Begins to ask every rank three times in `timeout`; never, when that is zero or there is nobody else.
    pub(crate) fn start(world: &Arc<World>, timeout: Duration) -> Arc<Self> {
        let heartbeat = Arc::new(Self { missed: (0..world.size()).map(|_| AtomicU32::new(0)).collect() });
        if world.size() > 1 && !timeout.is_zero() {
            let (own, world) = (Arc::clone(&heartbeat), Arc::clone(world));
            thread::spawn(move || own.ask(&world, timeout / MAX_MISSED));
        }
        heartbeat
    }

    /// `rank` has answered.
    pub(crate) fn heard(&self, rank: u32) {
        self.missed[rank as usize].store(0, Ordering::Relaxed);
    }

    fn ask(&self, world: &World, interval: Duration) {
        loop {
            // When this rank has left the world, nobody needs to be asked any more.
            if matches!(world.broadcast(BEAT.to_vec()), Err(comm::CommError::Left)) {
                return;
            }
            thread::sleep(interval);
            for rank in 1..world.size() {
                if self.missed[rank as usize].fetch_add(1, Ordering::Relaxed) + 1 >= MAX_MISSED {
                    end(world, rank, interval * MAX_MISSED);
                }
            }
        }
    }
}

fn end(world: &World, rank: u32, silence: Duration) -> ! {
    let node = world.hostname(rank);
    world.abort(
        EXIT_CODE,
        &format!("rank {rank} on node {node} has not answered for {silence:.1?}: it is stopped or hangs"),
    )
}
