//! `--elastic`: starts the world on the hosts that are left when one is lost, and goes back when it answers again.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;

use super::running::Running;
use super::{HEALTHY_AFTER, Supervisor};
use crate::command::Starter;
use crate::elastic::{Shape, Shapes};
use crate::flags::WorldFlags;
use crate::health;
use crate::hosts;
use crate::plan::Site;
use crate::probe::{self, Probe};
use crate::signals::{Event, RESTART, RESTART_AFTER, RESTART_ROLLING};
use crate::state::Phase;

/// Time between two questions to a host.
const ASK_INTERVAL: Duration = Duration::from_secs(5);
/// How often an answer is looked for before a start.
const ANSWER_POLL: Duration = Duration::from_millis(50);
/// Starts in a row that do not serve before the world becomes smaller, though its hosts answer.
const MAX_FAILED_STARTS: u32 = 2;
/// Questions in a row without an answer after which a world that loads has lost the host.
const MAX_SILENT: u32 = 2;
/// Time in which `mpirun` must have started rank 0. It waits without limit for hosts that answered and then are lost.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// The way back to a lost host waits for this time at most, however often it was lost.
const MAX_RETURN: Duration = Duration::from_secs(3600);
/// After the whole world has served this long, earlier losses no longer count.
const STEADY_AFTER: Duration = HEALTHY_AFTER.saturating_mul(10);

/// The shape of the world, and what is known of the other hosts.
pub(crate) struct Elastic {
    shapes: Shapes,
    starter: Starter,
    /// What is run on a host to ask it.
    script: String,
    /// The shape of the world that runs, or ran last.
    shape: Option<Shape>,
    others: Vec<Other>,
    asked: Option<Instant>,
    /// How often in a row the world became smaller.
    num_losses: u32,
    /// Starts in a row of this shape that did not serve.
    num_failed_starts: u32,
    /// The world does not grow before.
    grows_after: Instant,
    /// When the world becomes larger at the latest, once a larger one is possible.
    grows_before: Option<Instant>,
    return_after: Duration,
}

/// Another host.
struct Other {
    name: String,
    probe: Option<Probe>,
    /// Since when it has answered every question.
    answers_since: Option<Instant>,
    /// Questions in a row without an answer.
    num_silent: u32,
    /// Why it cannot take ranks.
    why: String,
}

impl Elastic {
    pub(crate) fn new(shapes: Shapes, starter: Starter, flags: &WorldFlags, site: &Site) -> Self {
        let program = flags.trireme.as_ref().unwrap_or(&site.trireme);
        let program = flags.container_image.is_none().then_some(program.as_path());
        let other = |name: &str| Other {
            name: name.to_owned(),
            probe: None,
            answers_since: None,
            num_silent: 0,
            why: String::new(),
        };
        Self {
            script: probe::script(&site.work_dir, program, Path::new(&flags.model_repo)),
            others: shapes.others().map(other).collect(),
            shapes,
            starter,
            shape: None,
            asked: None,
            num_losses: 0,
            num_failed_starts: 0,
            grows_after: Instant::now(),
            grows_before: None,
            return_after: Duration::from_secs(flags.elastic_return),
        }
    }

    /// The shape of the world that runs, or ran last.
    pub(super) fn shape(&self) -> Option<&Shape> {
        self.shape.as_ref()
    }

    /// The processes of questions that are not answered yet.
    pub(super) fn pids(&self) -> impl Iterator<Item = u32> {
        self.others.iter().filter_map(|other| other.probe.as_ref().map(Probe::pid))
    }

    /// Asks the hosts for which `wanted` holds.
    fn ask(&mut self, wanted: impl Fn(&str) -> bool) {
        self.asked = Some(Instant::now());
        for other in self.others.iter_mut().filter(|other| other.probe.is_none() && wanted(&other.name)) {
            match Probe::start(&other.name, &self.script) {
                Ok(probe) => other.probe = Some(probe),
                Err(error) => other.heard(Err(format!("{error:#}"))),
            }
        }
    }

    /// Asks these hosts if that is due.
    fn ask_sometimes(&mut self, wanted: impl Fn(&str) -> bool) {
        if self.asked.is_none_or(|asked| asked.elapsed() >= ASK_INTERVAL.min(self.return_after)) {
            self.ask(wanted);
        }
    }

    /// Takes answers; returns whether all are there.
    fn hear(&mut self) -> bool {
        for other in &mut self.others {
            if let Some(answer) = other.probe.as_mut().and_then(Probe::answer) {
                other.probe = None;
                other.heard(answer);
            }
        }
        self.others.iter().all(|other| other.probe.is_none())
    }

    /// The hosts that cannot take ranks, with the reasons.
    fn lost(&self) -> Vec<String> {
        let lost = self.others.iter().filter(|other| other.answers_since.is_none());
        lost.map(|other| format!("`{}` ({})", other.name, other.why)).collect()
    }

    /// How long a host must answer before the world goes back to it.
    fn return_time(&self) -> Duration {
        let doubled = 2_u32.saturating_pow(self.num_losses.saturating_sub(1));
        self.return_after.saturating_mul(doubled).min(MAX_RETURN)
    }

    fn answers(&self, host: &str) -> bool {
        hosts::is_here(host) || self.others.iter().any(|other| other.name == host && other.answers_since.is_some())
    }

    /// A shape that is larger than that of the world, on hosts that have answered for long enough.
    fn larger(&self) -> Option<Shape> {
        let shape = self.shape.as_ref().filter(|_| Instant::now() >= self.grows_after)?;
        let (full, time) = (self.shapes.full_size(), self.return_time());
        let is_steady = |host: &str| {
            let since = self.others.iter().find(|other| other.name == host).and_then(|other| other.answers_since);
            hosts::is_here(host) || shape.has(host) || since.is_some_and(|since| since.elapsed() >= time)
        };
        let larger = self.shapes.largest(full, |host| self.answers(host) && is_steady(host))?;
        (larger.world_size > shape.world_size).then_some(larger)
    }

    /// Chooses the shape of the next start; returns whether one fits the hosts that answer.
    fn choose(&mut self) -> bool {
        let full = self.shapes.full_size();
        let size = self.shape.as_ref().map_or(full, |shape| shape.world_size);
        let fit = |limit| self.shapes.largest(limit, |host| self.answers(host));
        let next = match self.num_failed_starts >= MAX_FAILED_STARTS {
            // If there is no smaller one, this one is tried again.
            true => fit(size - 1).or_else(|| fit(size)),
            false => self.larger().or_else(|| fit(size)),
        };
        let Some(next) = next else { return false };
        if next.world_size < size {
            self.num_losses = self.num_losses.saturating_add(1);
            self.grows_after = Instant::now() + self.return_time();
        }
        if self.shape.as_ref() != Some(&next) {
            self.num_failed_starts = 0;
        }
        (self.shape, self.grows_before) = (Some(next), None);
        true
    }

    /// Notes how a run of the world ended: how long it served, and whether its end was requested.
    pub(super) fn has_run(&mut self, served: Option<Duration>, was_requested: bool) {
        let has_failed = served.is_none() && !was_requested;
        self.num_failed_starts = if has_failed { self.num_failed_starts.saturating_add(1) } else { 0 };
        let is_full = self.shape.as_ref().is_some_and(|shape| shape.world_size == self.shapes.full_size());
        if is_full && served.is_some_and(|time| time >= STEADY_AFTER) {
            self.num_losses = 0;
        }
    }
}

impl Other {
    fn heard(&mut self, answer: Result<(), String>) {
        match answer {
            Ok(()) => {
                if self.num_silent > 0 {
                    eprintln!("launch: host `{}` answers again", self.name);
                }
                self.answers_since.get_or_insert_with(Instant::now);
                (self.num_silent, self.why) = (0, String::new());
            }
            Err(why) => {
                if why != self.why {
                    eprintln!("launch: host `{}` is lost: {why}", self.name);
                }
                (self.answers_since, self.why) = (None, why);
                self.num_silent = self.num_silent.saturating_add(1);
            }
        }
    }
}

impl Supervisor {
    /// Chooses the shape of the next start from the hosts that answer, and waits while none fits. Returns false if the end of the
    /// launcher is requested meanwhile. Without `--elastic` the shape is that of the flags.
    pub(super) fn choose_shape(&mut self) -> Result<bool> {
        let Some(mut elastic) = self.elastic.take() else { return Ok(true) };
        let is_chosen = self.choose_shape_of(&mut elastic);
        self.elastic = Some(elastic);
        is_chosen
    }

    fn choose_shape_of(&mut self, elastic: &mut Elastic) -> Result<bool> {
        loop {
            elastic.ask(|_| true);
            while !elastic.hear() {
                if !self.wait_for_hosts(ANSWER_POLL)? {
                    return Ok(false);
                }
            }
            if elastic.choose() {
                self.announce(elastic);
                return Ok(true);
            }
            let message = format!(
                "no world that --elastic allows fits the hosts that are left; lost: {}",
                elastic.lost().join(", ")
            );
            eprintln!("launch: {message}; asks them again");
            self.systemd.status(&message);
            self.state.phase = Phase::Waiting;
            self.write_state();
            if !self.wait_for_hosts(ASK_INTERVAL)? {
                return Ok(false);
            }
        }
    }

    /// Waits for `time`. Returns false if the end of the launcher is requested.
    fn wait_for_hosts(&mut self, time: Duration) -> Result<bool> {
        match self.wait_for(time)? {
            Event::Signal(RESTART | RESTART_ROLLING | RESTART_AFTER) | Event::Readable(_) | Event::TimedOut => Ok(true),
            Event::Signal(signal) => {
                eprintln!("launch: {signal}: not started again");
                Ok(false)
            }
        }
    }

    /// Logs and records the shape, if it is not the one before.
    fn announce(&mut self, elastic: &Elastic) {
        let Some(shape) = &elastic.shape else { return };
        let (size, full) = (shape.world_size, elastic.shapes.full_size());
        let placed: Vec<_> = shape.hosts.iter().map(|host| (host.name.clone(), host.slots.unwrap_or(size))).collect();
        let without = elastic.shapes.others().filter(|host| !shape.has(host)).map(str::to_owned).collect();
        if (size, &without) != (self.state.world_size, &self.state.hosts_lost) {
            let lost = elastic.lost();
            let why = match (size == full, lost.is_empty()) {
                (true, _) => "all hosts answer".to_owned(),
                (false, true) => "the larger world did not serve, though its hosts answer".to_owned(),
                (false, false) => format!("lost: {}", lost.join(", ")),
            };
            eprintln!("launch: goes on with {size} of {full} ranks: {why}; placement: {}", hosts::describe(&placed));
        }
        (self.state.world_size, self.state.hosts_lost) = (size, without);
    }

    /// While the world loads, ends it if it has lost a host. While it serves with fewer ranks than it should, asks the others, and
    /// ends it to start the larger one when that is possible and no request runs.
    pub(super) fn check_hosts(&mut self, running: &mut Running) {
        let Some(elastic) = &mut self.elastic else { return };
        let Some(shape) = elastic.shape.clone() else { return };
        elastic.hear();
        if running.next.is_some() {
            return;
        }
        if running.serving_since.is_none() {
            if running.started.elapsed() >= ASK_INTERVAL {
                elastic.ask_sometimes(|host| shape.has(host));
            }
            let lost = elastic.others.iter().find(|other| shape.has(&other.name) && other.num_silent >= MAX_SILENT);
            let why = lost.map(|other| format!("host `{}` is lost while the world loads", other.name));
            let is_by_mpirun = matches!(elastic.starter, Starter::Mpirun(_));
            let is_late = is_by_mpirun && running.started.elapsed() > START_TIMEOUT && running.world.rank_0().is_none();
            let late = || format!("mpirun has not started rank 0 within {START_TIMEOUT:?}");
            if let Some(why) = why.or_else(|| is_late.then(late)) {
                eprintln!("launch: {why}: kills the world");
                running.kill();
            }
            return;
        }
        let full = elastic.shapes.full_size();
        if shape.world_size == full {
            return;
        }
        elastic.ask_sometimes(|host| !shape.has(host));
        let Some(larger) = elastic.larger() else {
            elastic.grows_before = None;
            return;
        };
        let wait = Duration::from_secs(self.flags.elastic_wait);
        let before = *elastic.grows_before.get_or_insert_with(|| {
            let size = larger.world_size;
            eprintln!("launch: a world of {size} of {full} ranks is possible again: starts it when no request runs, after {wait:?} at most");
            Instant::now() + wait
        });
        let is_quiet = health::of(&self.state).is_some_and(|health| health.num_requests == Some(0));
        if is_quiet || Instant::now() >= before {
            running.restart = true;
            let why = if is_quiet { "no request runs" } else { "it has waited long enough" };
            self.advance_shutdown(running, &format!("goes back to {} ranks, since {why}", larger.world_size));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mpi::MpiKind;

    fn elastic(sizes: &[u32]) -> Elastic {
        let here = nix::unistd::gethostname().unwrap().to_string_lossy().into_owned();
        let shapes = Shapes::of(sizes, &[(&here, 2), ("b", 2)]);
        let other = Other { name: "b".to_owned(), probe: None, answers_since: None, num_silent: 0, why: String::new() };
        Elastic {
            shapes,
            starter: Starter::Mpirun(MpiKind::OpenMpi),
            script: String::new(),
            shape: None,
            others: vec![other],
            asked: None,
            num_losses: 0,
            num_failed_starts: 0,
            grows_after: Instant::now(),
            grows_before: None,
            return_after: Duration::from_secs(30),
        }
    }

    fn lost() -> Result<(), String> {
        Err("no route".to_owned())
    }

    /// `b` has answered for so long.
    fn answers_for(elastic: &mut Elastic, seconds: u64) {
        elastic.others[0].heard(Ok(()));
        let past = |now: Instant| now.checked_sub(Duration::from_secs(seconds)).unwrap();
        elastic.others[0].answers_since = Some(past(Instant::now()));
        elastic.grows_after = past(elastic.grows_after);
    }

    fn size(elastic: &Elastic) -> u32 {
        elastic.shape().unwrap().world_size
    }

    #[test]
    fn a_world_grows_back_once_the_host_has_answered_for_long_enough() {
        let mut elastic = elastic(&[4, 2]);
        elastic.others[0].heard(Ok(()));
        assert!(elastic.choose() && size(&elastic) == 4);
        elastic.others[0].heard(lost());
        assert!(elastic.choose() && size(&elastic) == 2);
        assert_eq!(elastic.lost(), ["`b` (no route)"]);

        answers_for(&mut elastic, 29);
        // Another death of the smaller world does not bring the host back early.
        assert!(elastic.larger().is_none() && elastic.choose() && size(&elastic) == 2);
        answers_for(&mut elastic, 31);
        assert_eq!(elastic.larger().unwrap().world_size, 4);
        elastic.others[0].heard(lost());
        assert!(elastic.larger().is_none(), "it is lost again");
        answers_for(&mut elastic, 31);
        assert!(elastic.choose() && size(&elastic) == 4);

        // The next loss in a row doubles the time, and a long time with all ranks ends the row.
        elastic.others[0].heard(lost());
        assert!(elastic.choose() && elastic.return_time() == Duration::from_secs(60));
        answers_for(&mut elastic, 61);
        assert!(elastic.choose() && size(&elastic) == 4);
        elastic.has_run(Some(STEADY_AFTER), false);
        assert_eq!(elastic.return_time(), Duration::from_secs(30));
        elastic.num_losses = 1000;
        assert_eq!(elastic.return_time(), MAX_RETURN);
    }

    #[test]
    fn a_world_that_does_not_serve_becomes_smaller_though_its_hosts_answer() {
        let mut elastic = elastic(&[4, 2]);
        elastic.others[0].heard(Ok(()));
        assert!(elastic.choose() && size(&elastic) == 4);
        elastic.has_run(None, false);
        assert!(elastic.choose() && size(&elastic) == 4, "once may be chance");
        elastic.has_run(None, false);
        assert!(elastic.choose() && size(&elastic) == 2);
        answers_for(&mut elastic, 29);
        assert!(elastic.larger().is_none(), "it does not go back at once");
        // There is no smaller one, so it is tried again.
        elastic.has_run(None, false);
        elastic.has_run(None, false);
        assert!(elastic.choose() && size(&elastic) == 2);
    }

    #[test]
    fn without_a_shape_that_fits_there_is_no_start() {
        let mut elastic = elastic(&[4, 3]);
        elastic.others[0].heard(lost());
        assert!(!elastic.choose() && elastic.shape().is_none());
        elastic.others[0].heard(Ok(()));
        assert!(elastic.choose() && size(&elastic) == 4);
    }
}
