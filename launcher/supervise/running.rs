//! The state of one run of a world, and the stages of its shutdown.

use std::time::{Duration, Instant};

use crate::processes;
use crate::world::{STUCK_AFTER, World};

/// Interval of health checks while the world loads.
const READY_POLL: Duration = Duration::from_millis(100);
/// Interval of health checks while the world serves.
pub(super) const LIVENESS_POLL: Duration = Duration::from_secs(1);

/// The state of the current run.
pub(super) struct Running {
    pub(super) world: World,
    /// In a rolling restart, the world that will take the ports over.
    pub(super) next: Option<World>,
    /// Whether the relay forwards to `next` already.
    pub(super) is_switched: bool,
    pub(super) started: Instant,
    pub(super) give_up_at: Option<Instant>,
    pub(super) serving_since: Option<Instant>,
    pub(super) last_answer: Instant,
    pub(super) shutdown: Shutdown,
    pub(super) restart: bool,
    /// It ends because no request has come.
    pub(super) sleeps: bool,
    pub(super) gave_up: bool,
    /// It was killed because it did not answer health checks, or could not load.
    pub(super) hung: bool,
    /// When a rank was seen to have written why the world ends.
    pub(super) ends_since: Option<Instant>,
    /// When rank 0 was seen to have ended in a world that `mpirun` keeps.
    pub(super) without_rank_0_since: Option<Instant>,
    /// Whether the rest of the world was killed after rank 0 had ended on request.
    pub(super) is_cut_off: bool,
    /// Ranks that are lost, and without which the world goes on.
    pub(super) lost: Vec<u32>,
}

impl Running {
    /// Whether the world may still be loading. Loading has no time limit, but a stopped rank 0 makes no progress.
    pub(super) fn may_load(&mut self) -> bool {
        let rank_0 = self.world.rank_0();
        rank_0.and_then(processes::state).is_none_or(|state| state != "stopped")
    }

    /// Kills the world, which then counts as one that died.
    pub(super) fn kill(&mut self) {
        self.world.kill();
        self.hung = true;
        self.shutdown = Shutdown::Killed(Instant::now() + STUCK_AFTER);
    }

    /// Time until the next check or deadline.
    pub(super) fn timeout(&self) -> Option<Duration> {
        match (self.shutdown, self.serving_since) {
            (Shutdown::None, _) if self.next.is_some() && !self.is_switched => Some(READY_POLL),
            (Shutdown::None, None) => Some(READY_POLL),
            (Shutdown::None, Some(_)) => Some(LIVENESS_POLL),
            // Wakes up in between to send watchdog notifications.
            (shutdown, _) => shutdown.left().map(|left| left.min(LIVENESS_POLL)),
        }
    }
}

/// The stage of a shutdown, with its deadline. The next stage begins at the deadline or at a further signal.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Shutdown {
    None,
    /// Rank 0 got SIGTERM and finishes the requests in flight.
    Draining(Instant),
    /// Rank 0 got a second SIGTERM, which ends the ranks without waiting for requests.
    Immediate(Instant),
    Killed(Instant),
}

impl Shutdown {
    /// Time left until the deadline of this stage; None without a shutdown.
    fn left(self) -> Option<Duration> {
        match self {
            Self::Draining(deadline) | Self::Immediate(deadline) | Self::Killed(deadline) => {
                Some(deadline.saturating_duration_since(Instant::now()))
            }
            Self::None => None,
        }
    }

    pub(super) fn is_overdue(self) -> bool {
        self.left() == Some(Duration::ZERO)
    }
}
