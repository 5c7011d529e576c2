//! Heartbeats of the other ranks. A rank that is stopped or hangs ends the world, which its launcher starts again, unless the world can go on
//! without it (`losses`). A rank that has died is detected at once, by MPI's launcher or, on its own node, by rank 0. Where the world can
//! go on, MPI's launcher leaves it to heartbeats.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use comm::World;
use supervision::Agents;

/// The heartbeat to a rank, and its reply. No other message between ranks decodes from these bytes.
pub(crate) const BEAT: &[u8] = &[0xff];

/// Least number of consecutive heartbeats without a reply after which a rank is lost.
const MIN_MISSED: u32 = 3;

/// Longest time between two heartbeats.
const MAX_INTERVAL: Duration = Duration::from_secs(2);

/// The exit code for a death by SIGKILL. After a signal, a launcher starts the world again even if it has not served yet.
pub(crate) const EXIT_CODE: u8 = 128 + 9;

/// Time for error responses to clients before the world ends.
pub(crate) const RESPONSE_TIME: Duration = Duration::from_millis(200);

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

    /// The ranks that have not replied to the last three heartbeats, those that are lost included.
    pub(crate) fn silent(&self) -> Vec<u32> {
        let is_silent = |missed: &AtomicU32| missed.load(Ordering::Relaxed) >= MIN_MISSED;
        (0..).zip(&self.missed).filter(|(_, missed)| is_silent(missed)).map(|(rank, _)| rank).collect()
    }

    /// Starts to send heartbeats: three in each `timeout`, or more, so that a silent rank is noticed early. A rank that was silent for
    /// `timeout` ends the world; zero: never. Does nothing in a world of one rank.
    pub(crate) fn start(self: Arc<Self>, world: &Arc<World>, agents: &Arc<Agents>, timeout: Duration) {
        if world.size() > 1 {
            let (world, agents) = (Arc::clone(world), Arc::clone(agents));
            let sender = Arc::clone(&world);
            let run = move || self.run(&sender, &agents, timeout);
            if let Err(error) = ipc::essential_thread("heartbeat", run) {
                world.abort(EXIT_CODE, &format!("cannot start the thread that asks other ranks: {error}"));
            }
        }
    }

    /// Notes a reply, or any other message, of `rank`.
    pub(crate) fn received(&self, rank: u32) {
        self.missed[rank as usize].store(0, Ordering::Relaxed);
    }

    fn run(&self, world: &World, agents: &Agents, timeout: Duration) {
        let (interval, max_missed) = intervals(timeout);
        loop {
            // This rank has left the world.
            if matches!(world.broadcast(BEAT.to_vec()), Err(comm::CommError::Left)) {
                return;
            }
            thread::sleep(interval);
            let lost = agents.lost_ranks();
            for rank in (1..world.size()).filter(|rank| !lost.contains(rank)) {
                let missed = self.missed[rank as usize].fetch_add(1, Ordering::Relaxed) + 1;
                if max_missed.is_some_and(|max| missed >= max) {
                    lose(world, agents, rank, interval * missed);
                }
            }
        }
    }
}

/// The time between two heartbeats, and the number without a reply after which a rank is lost; `None`: never.
fn intervals(timeout: Duration) -> (Duration, Option<u32>) {
    if timeout.is_zero() {
        return (MAX_INTERVAL, None);
    }
    let least = timeout.as_secs_f64() / MAX_INTERVAL.as_secs_f64();
    let max_missed = MIN_MISSED.max(least.ceil() as u32);
    (timeout / max_missed, Some(max_missed))
}

/// Goes on without a rank, or fails the requests of clients and ends the world.
fn lose(world: &World, agents: &Agents, rank: u32, silence: Duration) {
    let reason = format!("rank {rank} on node {} has not answered for {silence:.1?}", world.hostname(rank));
    if !agents.lose(rank, reason.clone()) {
        thread::sleep(RESPONSE_TIME);
        world.abort(EXIT_CODE, &format!("{reason}: it is stopped or hangs"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_silent_rank_is_noticed_within_seconds_and_lost_after_the_timeout() {
        let seconds = |seconds: f64| Duration::from_secs_f64(seconds);
        assert_eq!(intervals(Duration::ZERO), (seconds(2.0), None));
        assert_eq!(intervals(seconds(15.0)), (seconds(1.875), Some(8)));
        assert_eq!(intervals(seconds(3.0)), (seconds(1.0), Some(3)));
        assert_eq!(intervals(seconds(60.0)), (seconds(2.0), Some(30)));
    }
}
