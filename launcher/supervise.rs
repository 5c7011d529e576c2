//! Keeps a world running: passes signals on, says when it serves, starts it again when it died by itself.

use std::process::ExitStatus;
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::health;
use crate::plan::Plan;
use crate::signals::{Event, Signals};
use crate::state::{RunDir, WorldState};
use crate::world::{self, World};

/// How often a world that does not serve yet is asked whether it does.
const READY_POLL: Duration = Duration::from_millis(100);
/// Beyond the ranks' own exit timeout, before they are told to hurry.
const EXIT_GRACE: Duration = Duration::from_secs(5);
/// For ranks that were told to hurry, before they are killed.
const HURRY_GRACE: Duration = Duration::from_secs(5);
/// A world that served this long is healthy again: earlier failures are forgotten.
const HEALTHY_AFTER: Duration = Duration::from_secs(60);
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

pub(crate) struct Supervisor {
    pub(crate) plan: Plan,
    pub(crate) state: WorldState,
    pub(crate) run_dir: RunDir,
    pub(crate) signals: Signals,
    /// Give up when the first start does not serve within this time.
    pub(crate) wait_ready: Option<Duration>,
    /// 0: never start again.
    pub(crate) max_restarts: u32,
}

/// How far the end of a world has come; each stage has a deadline, and a further signal skips the wait for it.
#[derive(Clone, Copy, PartialEq)]
enum Ending {
    No,
    Asked(Instant),
    Hurried(Instant),
    Killed,
}

/// How one run of the world ended.
struct Run {
    status: ExitStatus,
    was_asked: bool,
    /// None: it never did.
    served: Option<Duration>,
    gave_up: bool,
}

impl Supervisor {
    /// Runs the world until it is asked to end, or has failed for good; its exit code.
    pub(crate) fn run(mut self) -> Result<u8> {
        let result = self.run_and_restart();
        self.run_dir.remove(self.state.http_port);
        result
    }

    fn run_and_restart(&mut self) -> Result<u8> {
        let (mut ever_served, mut failures) = (false, 0);
        loop {
            let run = self.run_once(ever_served)?;
            let code = world::exit_code(run.status);
            if run.gave_up {
                return Ok(code.max(1));
            }
            if run.was_asked || code == 0 {
                eprintln!("launch: the world has ended ({})", ipc::describe_exit(run.status));
                return Ok(code);
            }
            ever_served |= run.served.is_some();
            failures = if run.served.is_some_and(|time| time >= HEALTHY_AFTER) { 1 } else { failures + 1 };
            eprintln!("launch: the world died by itself ({})", ipc::describe_exit(run.status));
            if !ever_served || failures > self.max_restarts {
                let why = if ever_served { "too often in a row" } else { "before it served; see the messages above" };
                eprintln!("launch: not started again: it died {why}");
                return Ok(code);
            }
            let pause = (FIRST_PAUSE * 2u32.saturating_pow(failures - 1)).min(LONGEST_PAUSE);
            eprintln!("launch: starts it again in {pause:?} ({failures} of {} times)", self.max_restarts);
            if let Event::Signal(name) = self.signals.wait(None, Some(pause))? {
                eprintln!("launch: {name}: not started again");
                return Ok(code);
            }
            self.state.num_restarts += 1;
        }
    }

    fn run_once(&mut self, served_before: bool) -> Result<Run> {
        let mut world = World::start(&self.plan)?;
        self.state.world_pid = Some(world.pid());
        self.state.rank_0_pid = None;
        self.run_dir.write(&self.state)?;

        let started = Instant::now();
        let give_up_at = self.wait_ready.filter(|_| !served_before).map(|wait| started + wait);
        let (mut serving_since, mut ending, mut gave_up) = (None, Ending::No, false);
        loop {
            let timeout =
                if ending == Ending::No && serving_since.is_none() { Some(READY_POLL) } else { ending.left() };
            match self.signals.wait(Some(world.watch()), timeout)? {
                Event::WorldEnded => break,
                Event::Signal(name) => ending = self.end(&mut world, ending, name),
                Event::TimedOut if ending.is_overdue() => ending = self.end(&mut world, ending, "too slow"),
                Event::TimedOut => {}
            }
            if ending != Ending::No || serving_since.is_some() {
                continue;
            }
            if health::is_ready(&self.state.http_host, self.state.http_port) {
                serving_since = Some(Instant::now());
                self.report_ready(&mut world, started.elapsed())?;
            } else if give_up_at.is_some_and(|at| Instant::now() >= at) {
                gave_up = true;
                ending = self.end(&mut world, ending, "does not serve within the time of --wait-ready");
            }
        }
        let served = serving_since.map(|since| since.elapsed());
        let status = world.finish()?;
        self.state.world_pid = None;
        self.run_dir.write(&self.state)?;
        Ok(Run { status, was_asked: ending != Ending::No, served, gave_up })
    }

    fn report_ready(&mut self, world: &mut World, after: Duration) -> Result<()> {
        self.state.rank_0_pid = world.rank_0();
        self.run_dir.write(&self.state)?;
        let WorldState { http_port, grpc_port, metrics_port, .. } = self.state;
        eprintln!(
            "launch: serving after {:.1} s: http {http_port}, grpc {grpc_port}, metrics {metrics_port}",
            after.as_secs_f64()
        );
        Ok(())
    }

    /// Takes the world's end one stage further.
    fn end(&self, world: &mut World, ending: Ending, why: &str) -> Ending {
        let exit_timeout = Duration::from_secs(self.state.exit_timeout_secs);
        match ending {
            Ending::No => {
                eprintln!("launch: {why}: asks the world to end, and gives it {exit_timeout:?} for requests in flight");
                world.ask_to_end();
                Ending::Asked(Instant::now() + exit_timeout + EXIT_GRACE)
            }
            Ending::Asked(_) => {
                eprintln!("launch: {why}: tells the world to hurry");
                world.ask_to_end();
                Ending::Hurried(Instant::now() + HURRY_GRACE)
            }
            Ending::Hurried(_) | Ending::Killed => {
                eprintln!("launch: {why}: kills the world");
                world.kill();
                Ending::Killed
            }
        }
    }
}

impl Ending {
    /// Time left to the deadline of this stage; None when there is none.
    fn left(self) -> Option<Duration> {
        match self {
            Self::Asked(deadline) | Self::Hurried(deadline) => Some(deadline.saturating_duration_since(Instant::now())),
            Self::No | Self::Killed => None,
        }
    }

    fn is_overdue(self) -> bool {
        self.left() == Some(Duration::ZERO)
    }
}
