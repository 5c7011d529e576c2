//! Watches a world: whether it has become ready, and whether it still lives.

use std::time::{Duration, Instant};

use super::Supervisor;
use super::running::{Running, Shutdown};
use crate::port_holder::PortHolder;
use crate::state::{Phase, WorldState};
use crate::world::World;
use crate::{crash, health};

/// Time in which a world ends once a rank has written why. `mpirun` and `srun` wait much longer for the ranks of a host that is lost.
const END_GRACE: Duration = Duration::from_secs(3);
/// The same once rank 0 has ended, in a world that `mpirun` keeps when ranks die.
const RANK_0_GRACE: Duration = Duration::from_secs(2);

impl Supervisor {
    /// Checks whether the world has become ready, or is no longer alive.
    pub(super) fn check_health(&mut self, running: &mut Running) {
        self.systemd.notify_watchdog();
        if kill_if_unfinished(running) {
            return;
        }
        let health = health::of(&self.state);
        if let Some(health) = &health {
            running.lost.clone_from(&health.lost);
        }
        if running.serving_since.is_none() {
            if health.as_ref().is_some_and(|health| health.is_ready) {
                (running.serving_since, running.last_answer) = (Some(Instant::now()), Instant::now());
                self.report_ready(running);
            } else if running.give_up_at.is_some_and(|at| Instant::now() >= at) {
                running.gave_up = true;
                self.advance_shutdown(running, "does not serve within the time of --wait-ready");
            } else if running.may_load() {
                running.last_answer = Instant::now();
            } else {
                self.kill_if_silent(running);
            }
            return;
        }
        self.capture.rotate();
        // `silent` is the time since rank 0's runtimes last made progress.
        if let Some(progress) = health.and_then(|health| Instant::now().checked_sub(health.silent)) {
            running.last_answer = running.last_answer.max(progress);
        }
        self.kill_if_silent(running);
    }

    /// Kills the world if it has not answered for longer than `--liveness-timeout`; it is then restarted.
    fn kill_if_silent(&self, running: &mut Running) {
        let (allowed, silent) = (Duration::from_secs(self.flags.liveness_timeout), running.last_answer.elapsed());
        if !allowed.is_zero() && silent > allowed {
            eprintln!("launch: rank 0 has not answered for {silent:.1?}; what its processes do:");
            eprint!("{}", crash::stacks(&running.world.processes()));
            eprintln!("launch: kills the world");
            running.kill();
        }
    }

    fn report_ready(&mut self, running: &mut Running) {
        self.offered_ports = None;
        self.keep_ports(&running.world);
        self.state.rank_0_pid = running.world.rank_0();
        self.state.times_served += 1;
        self.state.phase = Phase::Serving;
        self.write_state();
        let WorldState { http_port, grpc_port, metrics_port, .. } = self.state;
        let message = format!(
            "serving after {:.1} s: http {http_port}, grpc {grpc_port}, metrics {metrics_port}",
            running.started.elapsed().as_secs_f64()
        );
        eprintln!("launch: {message}");
        if self.state.times_served == 1 {
            self.flags.ready_message.iter().for_each(|message| eprintln!("{message}"));
        }
        self.systemd.ready(&message);
    }

    /// Creates the port holder from the first world that serves; notifies it when a later one serves.
    fn keep_ports(&mut self, world: &World) {
        if let (Some(relay), Some(directory)) = (&mut self.relay, world.relay()) {
            return relay.serve(directory);
        }
        match &self.port_holder {
            Some(port_holder) => port_holder.stop_refusing(),
            None => {
                let path = self.run_dir.hand_over_socket(self.state.launcher_pid, u32::MAX);
                // A rank 0 on another node offers no ports here. Its clients find the ports closed when it dies.
                self.port_holder = PortHolder::new(world.hand_over(), path).ok();
            }
        }
    }
}

/// Kills what is left of a world that `mpirun` keeps although rank 0 has ended. Without lost ranks, `mpirun` ends by itself.
pub(super) fn end_after_rank_0(running: &mut Running) {
    if matches!(running.shutdown, Shutdown::Killed(_)) || !running.world.has_lost_rank_0() {
        return;
    }
    let since = *running.without_rank_0_since.get_or_insert_with(Instant::now);
    if since.elapsed() < RANK_0_GRACE {
        return;
    }
    let was_requested = running.shutdown != Shutdown::None;
    eprintln!("launch: rank 0 has ended: ends the other processes of the world");
    running.kill();
    (running.hung, running.is_cut_off) = (!was_requested, was_requested);
}

/// Kills a world that does not end although a rank has written why it ends. Returns whether a rank has.
fn kill_if_unfinished(running: &mut Running) -> bool {
    let Some(cause) = running.world.cause() else { return false };
    if running.ends_since.get_or_insert_with(Instant::now).elapsed() > END_GRACE {
        eprintln!("launch: the world has not ended within {END_GRACE:?} ({cause}): kills it");
        running.kill();
    }
    true
}
