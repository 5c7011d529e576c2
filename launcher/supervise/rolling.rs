//! Restarts without refused connections: the next world takes the ports over, or gets them through this process.

use std::time::{Duration, Instant};

use anyhow::Result;

use super::running::{Running, Shutdown};
use super::{EXIT_GRACE, Supervisor};
use crate::handover::Sockets;
use crate::state::Phase;
use crate::world::World;

impl Supervisor {
    /// Starts a second world, which takes the ports over once it has loaded; the old one then drains.
    pub(super) fn start_rolling(&mut self, running: &mut Running) -> Result<()> {
        if running.next.is_none() && !self.state.hosts_lost.is_empty() {
            let message = format!(
                "a rolling restart needs all hosts for the second world, and the world goes on without {}; restart it on the \
                 hosts that are left by `launch restart`, or wait until all are back",
                self.state.hosts_lost.join(", ")
            );
            eprintln!("launch: {message}");
            self.state.rolling_failure = Some(message);
            self.write_state();
        } else if running.next.is_none() {
            eprintln!("launch: a rolling restart is requested: loads a second world beside the first");
            running.next = Some(self.start_world(Some(&running.world))?);
            running.is_switched = false;
            self.state.rolling_failure = None;
            self.write_state();
        }
        Ok(())
    }

    /// Lets the relay forward to the second world once that serves. The old one then drains.
    pub(super) fn switch_relay(&mut self, running: &mut Running) {
        let Some(next) = running.next.as_ref().filter(|_| !running.is_switched) else { return };
        let (Some(relay), Some(directory)) = (&mut self.relay, next.relay()) else { return };
        if ipc::ask_health(next.control()).is_ok_and(|health| health.is_ready) {
            relay.serve(directory);
            running.is_switched = true;
            eprintln!(
                "launch: the new world serves; asks the old one to end, and gives it its time for requests in flight"
            );
            running.world.request_end();
        }
    }

    /// Takes the ports of the world that serves, which then drains and ends, and offers them to the next one.
    pub(super) fn take_ports(&mut self, running: &mut Running) {
        self.state.rolling_failure = None;
        let path = self.run_dir.hand_over_socket(self.state.launcher_pid, 0);
        let offered = Sockets::take(running.world.hand_over()).and_then(|sockets| sockets.offer(path.clone()));
        if let Err(error) = offered {
            eprintln!("launch: {error:#}; the world goes on");
            self.state.rolling_failure = Some(format!("{error:#}; the world goes on: use `launch restart`"));
            self.write_state();
            return;
        }
        eprintln!("launch: holds the ports while the world ends and is started again; connections wait");
        self.offered_ports = Some(path);
        running.restart = true;
        running.shutdown =
            Shutdown::Draining(Instant::now() + Duration::from_secs(self.state.exit_timeout_secs) + EXIT_GRACE);
        self.state.phase = Phase::Ending;
        self.write_state();
    }

    /// Makes `next` the current world after the old one has ended, normally because `next` has taken its ports.
    pub(super) fn switch_worlds(&mut self, running: &mut Running, next: World) -> Result<()> {
        let old = std::mem::replace(&mut running.world, next);
        let beside = self.beside(Some(running.world.pid()));
        let status = old.finish(&beside, || self.systemd.notify_watchdog())?.status;
        eprintln!("launch: the old world has ended ({}), the new one goes on", ipc::describe_exit(status));
        self.state.num_restarts += 1;
        (running.started, running.last_answer) = (Instant::now(), Instant::now());
        running.serving_since = None;
        self.record_world(&running.world, Phase::Loading);
        Ok(())
    }

    /// Handles the end of the new world before it took the ports over. The old world goes on.
    pub(super) fn give_up_rolling(&mut self, running: &mut Running) -> Result<()> {
        let Some(next) = running.next.take() else { return Ok(()) };
        let beside = self.beside(Some(running.world.pid()));
        let how = ipc::describe_exit(next.finish(&beside, || self.systemd.notify_watchdog())?.status);
        let message = format!(
            "the new world ended before it could take over ({how}), and the old one goes on; see the log, and where \
             memory does not allow two worlds use `launch restart --rolling --after`"
        );
        eprintln!("launch: {message}");
        self.state.rolling_failure = Some(message);
        self.write_state();
        Ok(())
    }
}
