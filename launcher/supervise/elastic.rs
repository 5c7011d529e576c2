//! `--elastic`: starts the world on the hosts that are left when one is lost, and goes back when it answers again.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;

use super::running::{Running, Shutdown};
use super::{HEALTHY_AFTER, Supervisor};
use crate::command::Starter;
use crate::elastic::{Shape, Shapes};
use crate::flags::WorldFlags;
use crate::health;
use crate::hosts::{self, Host};
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
    /// Ranks that the world has lost and goes on without.
    lost_ranks: Vec<u32>,
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
            lost_ranks: Vec::new(),
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

    /// Whether the other replicas of the world go on when one loses a rank.
    pub(super) fn has_replicas(&self) -> bool {
        self.shape.as_ref().is_some_and(|shape| self.shapes.is_replicated(shape.world_size))
    }

    /// Number of ranks of the world that runs, or ran last, without those that it has lost.
    fn size(&self) -> u32 {
        let size = self.shape.as_ref().map_or(self.shapes.full_size(), |shape| shape.world_size);
        size.saturating_sub(self.lost_ranks.len() as u32)
    }

    /// Whether all ranks of the world that are placed on this host serve.
    fn serves_on(&self, host: &str) -> bool {
        let has_lost = |shape: &Shape| self.lost_ranks.iter().any(|&rank| shape.host_of(rank) == Some(host));
        self.shape.as_ref().is_some_and(|shape| shape.has(host) && !has_lost(shape))
    }

    /// Notes the ranks that the world goes on without. Returns whether there are others than before.
    fn note_lost(&mut self, lost: &[u32]) -> bool {
        if lost == self.lost_ranks {
            return false;
        }
        self.lost_ranks = lost.to_vec();
        if lost.is_empty() {
            return true; // A rolling restart has replaced the world.
        }
        self.num_losses = self.num_losses.saturating_add(1);
        (self.grows_after, self.grows_before) = (Instant::now() + self.return_time(), None);
        let Some(shape) = &self.shape else { return true };
        for &rank in lost {
            let host = shape.host_of(rank);
            for other in self.others.iter_mut().filter(|other| Some(other.name.as_str()) == host) {
                // It must answer from now on.
                (other.answers_since, other.why) = (None, format!("rank {rank} is lost"));
            }
        }
        true
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
        self.shape.as_ref().filter(|_| Instant::now() >= self.grows_after)?;
        let (full, time) = (self.shapes.full_size(), self.return_time());
        let is_steady = |host: &str| {
            let since = self.others.iter().find(|other| other.name == host).and_then(|other| other.answers_since);
            hosts::is_here(host) || self.serves_on(host) || since.is_some_and(|since| since.elapsed() >= time)
        };
        let larger = self.shapes.largest(full, |host| self.answers(host) && is_steady(host))?;
        (larger.world_size > self.size()).then_some(larger)
    }

    /// Chooses the shape of the next start; returns whether one fits the hosts that answer.
    fn choose(&mut self) -> bool {
        let size = self.size();
        // One that went on with fewer ranks may have fewer than any allowed size.
        let before = size + self.lost_ranks.len() as u32;
        let fit = |limit| self.shapes.largest(limit, |host| self.answers(host));
        let next = match self.num_failed_starts >= MAX_FAILED_STARTS {
            // If there is no smaller one, this one is tried again.
            true => fit(size.saturating_sub(1)).or_else(|| fit(before)),
            false => self.larger().or_else(|| fit(size)).or_else(|| fit(before)),
        };
        let Some(next) = next else { return false };
        self.lost_ranks.clear();
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
        let is_full = self.size() == self.shapes.full_size();
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
        let (size, full) = (elastic.size(), elastic.shapes.full_size());
        let num_lost =
            |host: &str| elastic.lost_ranks.iter().filter(|&&rank| shape.host_of(rank) == Some(host)).count();
        let num_left = |host: &Host| host.slots.unwrap_or(size).saturating_sub(num_lost(&host.name) as u32);
        let placed = shape.hosts.iter().map(|host| (host.name.clone(), num_left(host)));
        let placed: Vec<_> = placed.filter(|(_, count)| *count > 0).collect();
        let without = elastic.shapes.others().filter(|host| !elastic.serves_on(host)).map(str::to_owned).collect();
        if (size, &without) != (self.state.world_size, &self.state.hosts_lost) {
            let lost = elastic.lost();
            let ranks: Vec<_> = elastic.lost_ranks.iter().map(u32::to_string).collect();
            let why = match (size == full, lost.is_empty()) {
                (true, _) => "all hosts answer".to_owned(),
                (false, true) if !ranks.is_empty() => format!("lost: rank {}", ranks.join(", ")),
                (false, true) => "the larger world did not serve, though its hosts answer".to_owned(),
                (false, false) => format!("lost: {}", lost.join(", ")),
            };
            eprintln!("launch: goes on with {size} of {full} ranks: {why}; placement: {}", hosts::describe(&placed));
        }
        (self.state.world_size, self.state.hosts_lost) = (size, without);
    }

    /// Announces ranks that the world has lost and goes on without.
    fn announce_losses(&mut self, running: &Running) {
        let Some(mut elastic) = self.elastic.take() else { return };
        if running.next.is_none() && running.shutdown == Shutdown::None && elastic.note_lost(&running.lost) {
            self.announce(&elastic);
            self.write_state();
        }
        self.elastic = Some(elastic);
    }

    /// While the world loads, ends it if it has lost a host. While it serves with fewer ranks than it should, asks the others, and
    /// ends it to start the larger one when that is possible and no request runs.
    pub(super) fn check_hosts(&mut self, running: &mut Running) {
        self.announce_losses(running);
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
        if elastic.size() == full {
            return;
        }
        let asked: Vec<String> =
            elastic.shapes.others().filter(|host| !elastic.serves_on(host)).map(str::to_owned).collect();
        elastic.ask_sometimes(|host| asked.iter().any(|asked| asked == host));
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
mod tests;
