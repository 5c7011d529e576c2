//! Keeps a world running: passes signals on, says when it serves, starts it again when it died by itself or was told to.

use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use anyhow::Result;
use nix::sys::signal::Signal;

use crate::capture::Capture;
use crate::flags::WorldFlags;
use crate::handover::Held;
use crate::plan::{self, Site};
use crate::port_holder::Doorman;
use crate::signals::{Event, RESTART, RESTART_AFTER, RESTART_ROLLING, Signals};
use crate::state::{Phase, RunDir, WorldState};
use crate::systemd::Systemd;
use crate::world::{self, Ended, Place, STUCK_AFTER, World};
use crate::{crash, health, processes};

/// How often a world that does not serve yet is asked whether it does.
const READY_POLL: Duration = Duration::from_millis(100);
/// How often a world that serves is asked whether it lives.
const LIVENESS_POLL: Duration = Duration::from_secs(1);
/// Beyond the ranks' own exit timeout, before they are told to hurry.
const EXIT_GRACE: Duration = Duration::from_secs(5);
/// For ranks that were told to hurry, before they are killed.
const HURRY_GRACE: Duration = Duration::from_secs(5);
/// A world that served this long is healthy again: earlier failures are forgotten.
const HEALTHY_AFTER: Duration = Duration::from_secs(60);
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// Exit codes from here on tell of a signal: 128 and its number.
const SIGNALLED: u8 = 128;

pub(crate) struct Supervisor {
    pub(crate) flags: WorldFlags,
    pub(crate) site: Site,
    pub(crate) state: WorldState,
    pub(crate) run_dir: RunDir,
    pub(crate) signals: Signals,
    pub(crate) capture: Capture,
    pub(crate) systemd: Systemd,
    /// Give up when the first start does not serve within this time.
    pub(crate) wait_ready: Option<Duration>,
    /// 0: never start again; None: for ever.
    pub(crate) max_restarts: Option<u32>,
    /// Counts worlds started.
    pub(crate) num_starts: u32,
    /// Where the next world gets the ports of one that has ended; connections wait on them.
    pub(crate) held: Option<PathBuf>,
    /// Answers clients while no world serves, once one has.
    pub(crate) doorman: Option<Doorman>,
}

/// How far the end of a world has come; each stage has a deadline, and a further signal skips the wait for it.
#[derive(Clone, Copy, PartialEq)]
enum Ending {
    No,
    Asked(Instant),
    Hurried(Instant),
    Killed(Instant),
}

/// How one run of the world ended.
struct Run {
    status: ExitStatus,
    was_asked: bool,
    /// It was asked to end in order to be started again.
    again: bool,
    /// None: it never did.
    served: Option<Duration>,
    gave_up: bool,
}

/// A run while it runs.
struct Running {
    world: World,
    /// The one that is to take over.
    next: Option<World>,
    started: Instant,
    give_up_at: Option<Instant>,
    serving_since: Option<Instant>,
    last_answer: Instant,
    ending: Ending,
    again: bool,
    gave_up: bool,
    /// It did not answer, and was killed for it.
    hung: bool,
}

impl Supervisor {
    /// Runs the world until it is asked to end, or has failed for good; its exit code.
    pub(crate) fn run(mut self) -> Result<u8> {
        let result = self.run_and_restart();
        self.systemd.stopping();
        self.run_dir.remove(self.state.http_port);
        result
    }

    fn run_and_restart(&mut self) -> Result<u8> {
        let mut failures = 0_u32;
        loop {
            let run = self.run_once()?;
            let code = world::exit_code(run.status);
            if run.gave_up {
                return Ok(code.max(1));
            }
            if run.again {
                self.state.num_restarts += 1;
                continue;
            }
            if run.was_asked || code == 0 {
                eprintln!("launch: the world has ended ({})", ipc::describe_exit(run.status));
                return Ok(code);
            }
            if run.served.is_none() {
                // Should it be the ports that it cannot take over, the next one binds them.
                self.doorman = None;
            }
            failures =
                if run.served.is_some_and(|time| time >= HEALTHY_AFTER) { 1 } else { failures.saturating_add(1) };
            self.note_failure(run.status);
            // One that ends with an error of its own before it ever served would do so again.
            let is_hopeless = self.state.times_served == 0 && code < SIGNALLED;
            if is_hopeless || self.max_restarts.is_some_and(|max| failures > max) {
                let why = if is_hopeless { "before it served; see the messages above" } else { "too often in a row" };
                eprintln!("launch: not started again: it died {why}");
                return Ok(code);
            }
            let pause = pause_after(failures);
            let most = self.max_restarts.map_or_else(String::new, |max| format!(", of {max} at most"));
            eprintln!("launch: starts it again in {pause:?} (death {failures} in a row{most})");
            self.state.phase = Phase::Waiting;
            self.write_state();
            match self.wait_for(pause)? {
                Event::Signal(signal) if !matches!(signal, RESTART | RESTART_ROLLING | RESTART_AFTER) => {
                    eprintln!("launch: {signal}: not started again");
                    return Ok(code);
                }
                _ => {}
            }
            self.state.num_restarts += 1;
        }
    }

    /// Waits for a signal or until `pause` has passed; systemd hears meanwhile that this process lives.
    fn wait_for(&mut self, pause: Duration) -> Result<Event> {
        let until = Instant::now() + pause;
        loop {
            self.systemd.alive();
            let left = until.saturating_duration_since(Instant::now());
            match self.signals.wait(&[], Some(left.min(LIVENESS_POLL)))? {
                Event::TimedOut if Instant::now() < until => {}
                event => return Ok(event),
            }
        }
    }

    fn note_failure(&mut self, status: ExitStatus) {
        let how = ipc::describe_exit(status);
        eprintln!("launch: the world died by itself ({how})");
        self.systemd.status(&format!("the world died by itself ({how})"));
        match crash::report(&self.state, &how) {
            Ok(report) => eprintln!("launch: what was logged before is in {}", report.display()),
            // Not worth a world.
            Err(error) => eprintln!("launch: {error:#}"),
        }
        self.state.last_failure = Some(how);
    }

    fn start_world(&mut self, take_over: Option<&World>) -> Result<World> {
        self.num_starts += 1;
        let mut site = self.site.clone();
        if self.num_starts > 1 {
            // What another world of this launcher has named is not used again.
            site.shm_prefix = format!("{}{}_", site.shm_prefix, self.num_starts);
        }
        self.state.shm_prefix = site.shm_prefix.clone();
        let plan = plan::plan(&self.flags, &site)?;
        let place = Place {
            start: self.num_starts,
            hand_over: self.run_dir.hand_over_socket(self.state.launcher_pid, self.num_starts),
            control: self.run_dir.control_socket(self.state.launcher_pid, self.num_starts),
            cause: self.run_dir.cause_file(self.state.launcher_pid, self.num_starts),
            take_over: take_over
                .map(|world| world.hand_over().clone())
                .or_else(|| self.held.clone().filter(|path| path.exists()))
                .or_else(|| self.doorman.as_ref().map(|doorman| doorman.path().to_owned())),
            crash_dir: self.state.crash_dir.clone(),
        };
        World::start(&plan, place)
    }

    fn run_once(&mut self) -> Result<Run> {
        let world = self.start_world(None)?;
        self.note_world(&world, Phase::Loading);
        let now = Instant::now();
        let served_before = self.state.times_served > 0;
        let mut running = Running {
            world,
            next: None,
            started: now,
            give_up_at: self.wait_ready.filter(|_| !served_before).map(|wait| now + wait),
            serving_since: None,
            last_answer: now,
            ending: Ending::No,
            again: false,
            gave_up: false,
            hung: false,
        };
        loop {
            let watches: Vec<_> =
                std::iter::once(running.world.watch()).chain(running.next.as_ref().map(World::watch)).collect();
            self.systemd.alive();
            let event = self.signals.wait(&watches, running.timeout())?;
            match event {
                Event::WorldEnded(0) => match running.next.take() {
                    Some(next) => self.hand_over(&mut running, next)?,
                    None => break,
                },
                Event::WorldEnded(_) => self.give_up_rolling(&mut running)?,
                Event::Signal(signal) => self.obey(&mut running, signal)?,
                Event::TimedOut if running.ending.is_overdue() => match running.ending {
                    // What is stuck in the kernel must not keep the next world from starting.
                    Ending::Killed(_) => break,
                    _ => self.end(&mut running, "too slow"),
                },
                Event::TimedOut => {}
            }
            if running.ending == Ending::No {
                self.look_after(&mut running);
            }
        }
        let Running { mut world, serving_since, ending, again, gave_up, hung, .. } = running;
        let by_itself = ending == Ending::No || hung;
        let (status, cause) = (world.status(), world.cause());
        self.refuse_clients(status, cause, by_itself);
        let Ended { status, cause } = world.finish(None, || self.systemd.alive())?;
        // By now all ranks have said why.
        self.refuse_clients(Some(status), cause, by_itself);
        self.state.world_pid = None;
        self.write_state();
        let (was_asked, served) = (ending != Ending::No && !hung, serving_since.map(|since| since.elapsed()));
        Ok(Run { status, was_asked, again: again && was_asked, served, gave_up })
    }

    /// Clients hear from now on that the world has ended, how, and that another one comes.
    fn refuse_clients(&self, status: Option<ExitStatus>, cause: Option<String>, by_itself: bool) {
        // Where ports are held for the next world, connections wait instead.
        let Some(doorman) = self.doorman.as_ref().filter(|_| self.held.is_none()) else { return };
        let reason = match (by_itself, status) {
            (false, _) => "the server is being restarted; try again later".to_owned(),
            (true, None) => "the server died and is started again; try again later".to_owned(),
            (true, Some(status)) => {
                let how = cause.unwrap_or_else(|| crash::how(status));
                format!("the server died ({how}) and is started again; try again later")
            }
        };
        doorman.refuse(reason);
    }

    fn obey(&mut self, running: &mut Running, signal: Signal) -> Result<()> {
        match signal {
            RESTART_ROLLING if running.ending == Ending::No && running.serving_since.is_some() => {
                self.start_rolling(running)?;
            }
            RESTART_AFTER if running.ending == Ending::No && running.serving_since.is_some() => {
                self.hold_ports(running)
            }
            // While it loads or ends, the other way comes to the same.
            RESTART | RESTART_ROLLING | RESTART_AFTER if running.ending != Ending::No => {}
            RESTART | RESTART_ROLLING | RESTART_AFTER => {
                running.again = true;
                self.end(running, "a restart is asked for");
            }
            _ => {
                running.again = false;
                self.end(running, signal.as_str());
            }
        }
        Ok(())
    }

    /// Starts a world beside the one that serves; it takes the ports over once it has loaded, and the old one drains.
    fn start_rolling(&mut self, running: &mut Running) -> Result<()> {
        if running.next.is_none() {
            eprintln!("launch: a rolling restart is asked for: loads a second world beside the first");
            running.next = Some(self.start_world(Some(&running.world))?);
            self.state.rolling_failure = None;
            self.write_state();
        }
        Ok(())
    }

    /// Takes the ports of the world that serves, which then drains and ends; the next one gets them.
    fn hold_ports(&mut self, running: &mut Running) {
        self.state.rolling_failure = None;
        let path = self.run_dir.hand_over_socket(self.state.launcher_pid, 0);
        let held = Held::take(running.world.hand_over()).and_then(|held| held.offer(path.clone()));
        if let Err(error) = held {
            eprintln!("launch: {error:#}; the world goes on");
            self.state.rolling_failure = Some(format!("{error:#}; the world goes on: use `launch restart`"));
            self.write_state();
            return;
        }
        eprintln!("launch: holds the ports while the world ends and is started again; connections wait");
        self.held = Some(path);
        running.again = true;
        running.ending = Ending::Asked(Instant::now() + Duration::from_secs(self.state.exit_timeout_secs) + EXIT_GRACE);
        self.state.phase = Phase::Ending;
        self.write_state();
    }

    /// The old world has ended, which it does when the new one has its ports; or it died meanwhile.
    fn hand_over(&mut self, running: &mut Running, next: World) -> Result<()> {
        let old = std::mem::replace(&mut running.world, next);
        let status = old.finish(Some(running.world.pid()), || self.systemd.alive())?.status;
        eprintln!("launch: the old world has ended ({}), the new one goes on", ipc::describe_exit(status));
        self.state.num_restarts += 1;
        (running.started, running.last_answer) = (Instant::now(), Instant::now());
        running.serving_since = None;
        self.note_world(&running.world, Phase::Loading);
        Ok(())
    }

    /// The new world has ended before it took over; the old one goes on as if nothing had been.
    fn give_up_rolling(&mut self, running: &mut Running) -> Result<()> {
        let Some(next) = running.next.take() else { return Ok(()) };
        let how = ipc::describe_exit(next.finish(Some(running.world.pid()), || self.systemd.alive())?.status);
        let words = format!(
            "the new world ended before it could take over ({how}), and the old one goes on; see the log, and where \
             memory does not allow two worlds use `launch restart --rolling --after`"
        );
        eprintln!("launch: {words}");
        self.state.rolling_failure = Some(words);
        self.write_state();
        Ok(())
    }

    /// Notices that a world has come to serve, or that it does no longer.
    fn look_after(&mut self, running: &mut Running) {
        self.systemd.alive();
        let health = health::of(&self.state);
        if running.serving_since.is_none() {
            if health.is_some_and(|health| health.is_ready) {
                (running.serving_since, running.last_answer) = (Some(Instant::now()), Instant::now());
                self.report_ready(running);
            } else if running.give_up_at.is_some_and(|at| Instant::now() >= at) {
                running.gave_up = true;
                self.end(running, "does not serve within the time of --wait-ready");
            } else if running.may_load() {
                running.last_answer = Instant::now();
            } else {
                self.kill_if_silent(running);
            }
            return;
        }
        self.capture.rotate();
        // It answers for its runtimes too: one that makes no progress answers no client.
        if let Some(progress) = health.and_then(|health| Instant::now().checked_sub(health.silent)) {
            running.last_answer = running.last_answer.max(progress);
        }
        self.kill_if_silent(running);
    }

    /// A world that has not answered for too long is killed, to be started again.
    fn kill_if_silent(&self, running: &mut Running) {
        let (allowed, silent) = (Duration::from_secs(self.flags.liveness_timeout), running.last_answer.elapsed());
        if !allowed.is_zero() && silent > allowed {
            eprintln!("launch: rank 0 has not answered for {silent:.1?}; what its processes do:");
            eprint!("{}", crash::stacks(&running.world.processes()));
            eprintln!("launch: kills the world");
            running.world.kill();
            running.hung = true;
            running.ending = Ending::Killed(Instant::now() + STUCK_AFTER);
        }
    }

    fn report_ready(&mut self, running: &mut Running) {
        self.held = None;
        self.keep_doors(&running.world);
        self.state.rank_0_pid = running.world.rank_0();
        self.state.times_served += 1;
        self.state.phase = Phase::Serving;
        self.write_state();
        let WorldState { http_port, grpc_port, metrics_port, .. } = self.state;
        let words = format!(
            "serving after {:.1} s: http {http_port}, grpc {grpc_port}, metrics {metrics_port}",
            running.started.elapsed().as_secs_f64()
        );
        eprintln!("launch: {words}");
        self.systemd.ready(&words);
    }

    /// Copies the ports of the first world that serves, and leaves them to each later one.
    fn keep_doors(&mut self, world: &World) {
        match &self.doorman {
            Some(doorman) => doorman.step_aside(),
            None => {
                let path = self.run_dir.hand_over_socket(self.state.launcher_pid, u32::MAX);
                // A rank 0 on another node has no ports here: its clients find them closed when it dies.
                self.doorman = Doorman::new(world.hand_over(), path).ok();
            }
        }
    }

    /// Takes the world's end one stage further.
    fn end(&mut self, running: &mut Running, why: &str) {
        let exit_timeout = Duration::from_secs(self.state.exit_timeout_secs);
        running.ending = match running.ending {
            Ending::No => {
                eprintln!("launch: {why}: asks the world to end, and gives it {exit_timeout:?} for requests in flight");
                self.state.phase = Phase::Ending;
                self.write_state();
                match running.again {
                    true => self.refuse_clients(None, None, false),
                    // Who comes from now on finds the ports closed, as the world closes them.
                    false => self.doorman = None,
                }
                if let Some(next) = running.next.take() {
                    next.kill();
                    // Its end is of no interest; what it leaves is.
                    let _ = next.finish(Some(running.world.pid()), || self.systemd.alive());
                }
                running.world.ask_to_end();
                Ending::Asked(Instant::now() + exit_timeout + EXIT_GRACE)
            }
            Ending::Asked(_) => {
                eprintln!("launch: {why}: tells the world to hurry");
                running.world.ask_to_end();
                Ending::Hurried(Instant::now() + HURRY_GRACE)
            }
            Ending::Hurried(_) | Ending::Killed(_) => {
                eprintln!("launch: {why}: kills the world");
                running.world.kill();
                Ending::Killed(Instant::now() + STUCK_AFTER)
            }
        };
    }

    fn note_world(&mut self, world: &World, phase: Phase) {
        self.state.world_pid = Some(world.pid());
        self.state.control = Some(world.control().clone());
        self.state.rank_0_pid = None;
        self.state.phase = phase;
        self.write_state();
    }

    /// A disk that is full is no reason to end a world; `launch status` shows what was last written.
    fn write_state(&self) {
        if let Err(error) = self.run_dir.write(&self.state) {
            eprintln!("launch: {error:#}");
        }
    }
}

/// Before the next start, after so many failures in a row.
fn pause_after(failures: u32) -> Duration {
    FIRST_PAUSE.saturating_mul(2u32.saturating_pow(failures.saturating_sub(1))).min(LONGEST_PAUSE)
}

impl Running {
    /// Whether it can come to serve as things are: how long that takes nobody knows, but a stopped rank 0 never does.
    fn may_load(&mut self) -> bool {
        let rank_0 = self.world.rank_0();
        rank_0.and_then(processes::state).is_none_or(|state| state != "stopped")
    }

    /// How long nothing need be looked at.
    fn timeout(&self) -> Option<Duration> {
        match (self.ending, self.serving_since) {
            (Ending::No, None) => Some(READY_POLL),
            (Ending::No, Some(_)) => Some(LIVENESS_POLL),
            // Systemd hears meanwhile that this process lives.
            (ending, _) => ending.left().map(|left| left.min(LIVENESS_POLL)),
        }
    }
}

impl Ending {
    /// Time left to the deadline of this stage; None when there is none.
    fn left(self) -> Option<Duration> {
        match self {
            Self::Asked(deadline) | Self::Hurried(deadline) | Self::Killed(deadline) => {
                Some(deadline.saturating_duration_since(Instant::now()))
            }
            Self::No => None,
        }
    }

    fn is_overdue(self) -> bool {
        self.left() == Some(Duration::ZERO)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_and_have_an_end() {
        assert_eq!(pause_after(1), FIRST_PAUSE);
        assert_eq!(pause_after(2), 2 * FIRST_PAUSE);
        assert_eq!([pause_after(9), pause_after(u32::MAX)], [LONGEST_PAUSE; 2]);
    }
}
