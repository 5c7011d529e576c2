//! Keeps a world running: handles signals, reports readiness, restarts the world after a failure or on request.

mod elastic;
mod idle;
mod relay;
mod rolling;
mod running;
mod watch;

use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use anyhow::Result;
use nix::sys::signal::Signal;

pub(crate) use self::elastic::Elastic;
use self::running::{LIVENESS_POLL, Running, Shutdown};
use crate::capture::Capture;
use crate::crash;
use crate::flags::WorldFlags;
use crate::plan::{self, Site};
use crate::port_holder::PortHolder;
use crate::relay::Relay;
use crate::signals::{Event, RESTART, RESTART_AFTER, RESTART_ROLLING, Signals};
use crate::state::{Phase, RunDir, WorldState};
use crate::systemd::Systemd;
use crate::world::{self, Ended, STUCK_AFTER, World, WorldPaths};

/// Time after the ranks' own exit timeout before the second SIGTERM.
const EXIT_GRACE: Duration = Duration::from_secs(5);
/// Time after the second SIGTERM before SIGKILL.
const SECOND_GRACE: Duration = Duration::from_secs(5);
/// After a world has served this long, earlier failures no longer count.
const HEALTHY_AFTER: Duration = Duration::from_secs(60);
/// Pause before the first restart; it doubles with each failure in a row.
const MIN_PAUSE: Duration = Duration::from_millis(250);
const MAX_PAUSE: Duration = Duration::from_secs(30);
/// Exit codes from this one on stand for a signal: 128 plus its number.
const SIGNALLED: u8 = 128;

/// Starts, watches, restarts and stops the worlds of one launcher.
pub(crate) struct Supervisor {
    pub(crate) flags: WorldFlags,
    pub(crate) site: Site,
    pub(crate) state: WorldState,
    pub(crate) run_dir: RunDir,
    pub(crate) signals: Signals,
    pub(crate) capture: Capture,
    pub(crate) systemd: Systemd,
    /// When a world must have served, however often it was started until then.
    pub(crate) serve_before: Option<Instant>,
    /// Restarts after failures in a row; None: no limit.
    pub(crate) max_restarts: Option<u32>,
    /// Number of worlds started.
    pub(crate) num_starts: u32,
    /// The socket that offers the ports of an ended world to the next one, for `restart --rolling --after`.
    pub(crate) offered_ports: Option<PathBuf>,
    /// Replies to clients while no world serves; exists once a world has served.
    pub(crate) port_holder: Option<PortHolder>,
    /// Holds the connections of clients, with `--keep-connections`.
    pub(crate) relay: Option<Relay>,
    /// The shape of the world, with `--elastic`.
    pub(crate) elastic: Option<Elastic>,
}

/// How one run of the world ended.
struct Run {
    status: ExitStatus,
    /// Its end was requested.
    was_requested: bool,
    /// Its end was requested in order to restart it.
    restart: bool,
    /// It ended because no request came.
    sleeps: bool,
    /// How long it served; None if it never became ready.
    served: Option<Duration>,
    /// It did not become ready before `serve_before`.
    gave_up: bool,
}

impl Supervisor {
    /// Runs the world until its end is requested or no restart follows a failure. Returns its exit code.
    pub(crate) fn run(mut self) -> Result<u8> {
        self.start_relay()?;
        let result = self.run_and_restart();
        self.systemd.stopping();
        self.run_dir.remove(self.state.http_port);
        result
    }

    /// The processes of this launcher that the end of a world does not touch.
    fn beside(&self, world: Option<u32>) -> Vec<u32> {
        let questions = self.elastic.iter().flat_map(Elastic::pids);
        world.into_iter().chain(self.relay.as_ref().map(Relay::pid)).chain(questions).collect()
    }

    fn run_and_restart(&mut self) -> Result<u8> {
        let (mut failures, mut code) = (0_u32, 0);
        loop {
            if !self.choose_shape()? {
                return Ok(code);
            }
            let run = self.run_once()?;
            code = world::exit_code(run.status);
            self.elastic.iter_mut().for_each(|elastic| elastic.has_run(run.served, run.was_requested));
            if run.gave_up {
                return Ok(code.max(1));
            }
            if run.sleeps && !self.sleep()? {
                return Ok(0);
            }
            if run.restart || run.sleeps {
                self.state.num_restarts += 1;
                continue;
            }
            if run.was_requested || code == 0 {
                eprintln!("launch: the world has ended ({})", ipc::describe_exit(run.status));
                return Ok(code);
            }
            if run.served.is_none() {
                // It may have failed to take the ports over; the next world binds them itself.
                self.port_holder = None;
            }
            failures =
                if run.served.is_some_and(|time| time >= HEALTHY_AFTER) { 1 } else { failures.saturating_add(1) };
            self.record_failure(run.status);
            // A world that exits with an error before it ever served would fail again.
            let is_hopeless = self.state.times_served == 0 && code < SIGNALLED;
            let pause = pause_after(failures);
            let is_late =
                self.state.times_served == 0 && self.serve_before.is_some_and(|at| Instant::now() + pause >= at);
            if is_hopeless || is_late || self.max_restarts.is_some_and(|max| failures > max) {
                let why = match () {
                    () if is_hopeless => "before it served; see the messages above",
                    () if is_late => "before it served, and the time of --wait-ready ends",
                    () => "too often in a row",
                };
                eprintln!("launch: not started again: it died {why}");
                return Ok(code);
            }
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
            self.state.num_failures += 1;
        }
    }

    /// Waits for a signal or until `pause` has passed, and keeps sending watchdog notifications.
    fn wait_for(&mut self, pause: Duration) -> Result<Event> {
        let until = Instant::now() + pause;
        loop {
            self.systemd.notify_watchdog();
            let left = until.saturating_duration_since(Instant::now());
            match self.wait_and_keep_relay(&[], Some(left.min(LIVENESS_POLL)))? {
                Event::TimedOut if Instant::now() < until => {}
                event => return Ok(event),
            }
        }
    }

    fn record_failure(&mut self, status: ExitStatus) {
        let how = ipc::describe_exit(status);
        eprintln!("launch: the world died by itself ({how})");
        self.systemd.status(&format!("the world died by itself ({how})"));
        match crash::report(&self.state, &how) {
            Ok(report) => eprintln!("launch: what was logged before is in {}", report.display()),
            // A missing report must not end the launcher.
            Err(error) => eprintln!("launch: {error:#}"),
        }
        self.state.last_failure = Some(how);
    }

    fn start_world(&mut self, take_over: Option<&World>) -> Result<World> {
        self.num_starts += 1;
        let shape = self.elastic.as_ref().and_then(Elastic::shape);
        let (flags, mut site) =
            shape.map_or_else(|| (self.flags.clone(), self.site.clone()), |shape| shape.apply(&self.flags, &self.site));
        site.keeps_world = self.elastic.as_ref().is_some_and(Elastic::has_replicas);
        if self.num_starts > 1 {
            // Names of shared memory must differ from those of this launcher's other worlds.
            site.shm_prefix = format!("{}{}_", site.shm_prefix, self.num_starts);
        }
        self.state.shm_prefix = site.shm_prefix.clone();
        let plan = plan::plan(&flags, &site)?;
        let paths = WorldPaths {
            start: self.num_starts,
            // A world that takes over counts once it has the ports, which is before anyone can ask it.
            num_restarts: self.state.num_restarts + u32::from(take_over.is_some()),
            hand_over: self.run_dir.hand_over_socket(self.state.launcher_pid, self.num_starts),
            control: self.run_dir.control_socket(self.state.launcher_pid, self.num_starts),
            cause: self.run_dir.cause_file(self.state.launcher_pid, self.num_starts),
            relay: self.relay.is_some().then(|| self.run_dir.relay_directory(self.state.launcher_pid, self.num_starts)),
            take_over: take_over
                .filter(|_| self.relay.is_none())
                .map(|world| world.hand_over().clone())
                .or_else(|| self.offered_ports.clone().filter(|path| path.exists()))
                .or_else(|| self.port_holder.as_ref().map(|port_holder| port_holder.path().to_owned())),
            crash_dir: self.state.crash_dir.clone(),
        };
        World::start(&plan, paths)
    }

    fn run_once(&mut self) -> Result<Run> {
        let world = self.start_world(None)?;
        self.record_world(&world, Phase::Loading);
        let now = Instant::now();
        let served_before = self.state.times_served > 0;
        let mut running = Running {
            world,
            next: None,
            is_switched: false,
            started: now,
            give_up_at: self.serve_before.filter(|_| !served_before),
            serving_since: None,
            last_answer: now,
            shutdown: Shutdown::None,
            restart: false,
            sleeps: false,
            gave_up: false,
            hung: false,
            ends_since: None,
            without_rank_0_since: None,
            is_cut_off: false,
            lost: Vec::new(),
        };
        loop {
            let watches: Vec<_> = std::iter::once(&running.world).chain(&running.next).map(World::watch).collect();
            self.systemd.notify_watchdog();
            let event = self.wait_and_keep_relay(&watches, running.timeout())?;
            match event {
                Event::Readable(0) => match running.next.take() {
                    Some(next) => self.switch_worlds(&mut running, next)?,
                    None => break,
                },
                Event::Readable(_) => self.give_up_rolling(&mut running)?,
                Event::Signal(signal) => self.handle_signal(&mut running, signal)?,
                Event::TimedOut if running.shutdown.is_overdue() => match running.shutdown {
                    // Processes that are stuck in the kernel must not delay the next world.
                    Shutdown::Killed(_) => break,
                    _ => self.advance_shutdown(&mut running, "too slow"),
                },
                Event::TimedOut => {}
            }
            watch::end_after_rank_0(&mut running);
            if running.shutdown == Shutdown::None {
                self.check_health(&mut running);
                self.switch_relay(&mut running);
                self.end_if_idle(&mut running);
                self.check_hosts(&mut running);
            }
        }
        let Running { mut world, serving_since, shutdown, restart, sleeps, gave_up, hung, is_cut_off, .. } = running;
        let has_failed = shutdown == Shutdown::None || hung;
        let sleeps = sleeps && !has_failed;
        let (status, cause, is_kept) = (world.status(), world.cause(), world.is_kept());
        if !sleeps {
            self.refuse_clients(status, cause, has_failed);
        }
        let beside = self.beside(None);
        let Ended { status, cause } = world.finish(&beside, || self.systemd.notify_watchdog())?;
        // All ranks have ended, so the cause is complete.
        if !sleeps {
            self.refuse_clients(Some(status), cause, has_failed);
        }
        self.state.world_pid = None;
        self.write_state();
        let has_never_served = serving_since.is_none() && shutdown == Shutdown::None;
        let status = match () {
            // Its end was in order, and only the launcher of MPI would have waited for ranks that are lost.
            () if is_cut_off => ExitStatus::default(),
            () if is_kept && has_never_served && status.success() => ExitStatus::from_raw(1 << 8),
            () => status,
        };
        let (was_requested, served) = (shutdown != Shutdown::None && !hung, serving_since.map(|since| since.elapsed()));
        Ok(Run { status, was_requested, restart: restart && was_requested, sleeps, served, gave_up })
    }

    /// From now on clients get an error: the world has ended, why, and whether it restarts.
    fn refuse_clients(&mut self, status: Option<ExitStatus>, cause: Option<String>, has_failed: bool) {
        let reason = match (has_failed, status) {
            (false, _) => "the server is being restarted; try again later".to_owned(),
            (true, None) => "the server died and is started again; try again later".to_owned(),
            (true, Some(status)) => {
                let how = cause.unwrap_or_else(|| crash::how(status));
                format!("the server died ({how}) and is started again; try again later")
            }
        };
        match (&mut self.relay, &self.port_holder) {
            (Some(relay), _) => relay.away(reason),
            // If the ports are offered to the next world, connections wait instead.
            (None, Some(port_holder)) if self.offered_ports.is_none() => port_holder.refuse(reason),
            (None, _) => {}
        }
    }

    fn handle_signal(&mut self, running: &mut Running, signal: Signal) -> Result<()> {
        match signal {
            RESTART_ROLLING if running.shutdown == Shutdown::None && running.serving_since.is_some() => {
                self.start_rolling(running)?;
            }
            RESTART_AFTER
                if running.shutdown == Shutdown::None && running.serving_since.is_some() && self.relay.is_none() =>
            {
                self.take_ports(running)
            }
            RESTART | RESTART_ROLLING | RESTART_AFTER if running.sleeps => {
                (running.sleeps, running.restart) = (false, true);
            }
            // While the world loads, each kind of restart is a plain one; while it ends, none has an effect.
            RESTART | RESTART_ROLLING | RESTART_AFTER if running.shutdown != Shutdown::None => {}
            RESTART | RESTART_ROLLING | RESTART_AFTER => {
                running.restart = true;
                self.advance_shutdown(running, "a restart is requested");
            }
            _ => {
                (running.sleeps, running.restart) = (false, false);
                self.advance_shutdown(running, signal.as_str());
            }
        }
        Ok(())
    }

    /// Starts the next stage of the shutdown.
    fn advance_shutdown(&mut self, running: &mut Running, why: &str) {
        let exit_timeout = Duration::from_secs(self.state.exit_timeout_secs);
        running.shutdown = match running.shutdown {
            Shutdown::None => {
                eprintln!("launch: {why}: asks the world to end, and gives it {exit_timeout:?} for requests in flight");
                self.state.phase = Phase::Ending;
                self.write_state();
                match (running.sleeps, running.restart) {
                    // From now on a request waits for the next world.
                    (true, _) => self.relay.iter_mut().for_each(Relay::sleep),
                    (false, true) => self.refuse_clients(None, None, false),
                    // No restart follows, so new clients shall find the ports closed.
                    (false, false) => {
                        self.port_holder = None;
                        self.relay.iter_mut().for_each(Relay::end);
                    }
                }
                if let Some(next) = running.next.take() {
                    next.kill();
                    // The exit status does not matter; this removes its shared memory and files.
                    let beside = self.beside(Some(running.world.pid()));
                    let _ = next.finish(&beside, || self.systemd.notify_watchdog());
                }
                running.world.request_end();
                Shutdown::Draining(Instant::now() + exit_timeout + EXIT_GRACE)
            }
            Shutdown::Draining(_) => {
                eprintln!("launch: {why}: asks the world to end at once, without waiting for requests");
                running.world.request_end();
                Shutdown::Immediate(Instant::now() + SECOND_GRACE)
            }
            Shutdown::Immediate(_) | Shutdown::Killed(_) => {
                eprintln!("launch: {why}: kills the world");
                running.world.kill();
                Shutdown::Killed(Instant::now() + STUCK_AFTER)
            }
        };
    }

    fn record_world(&mut self, world: &World, phase: Phase) {
        self.state.world_pid = Some(world.pid());
        self.state.control = Some(world.control().clone());
        self.state.rank_0_pid = None;
        self.state.phase = phase;
        self.write_state();
    }

    /// Writes the state file. An error, such as a full disk, is only logged; `launch status` then shows the previous state.
    fn write_state(&self) {
        if let Err(error) = self.run_dir.write(&self.state) {
            eprintln!("launch: {error:#}");
        }
    }
}

/// The pause before the next start after this number of failures in a row.
fn pause_after(failures: u32) -> Duration {
    MIN_PAUSE.saturating_mul(2u32.saturating_pow(failures.saturating_sub(1))).min(MAX_PAUSE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_a_limit() {
        assert_eq!(pause_after(1), MIN_PAUSE);
        assert_eq!(pause_after(2), 2 * MIN_PAUSE);
        assert_eq!([pause_after(9), pause_after(u32::MAX)], [MAX_PAUSE; 2]);
    }
}
