//! A world that is started for a replay.

use std::net::TcpListener;
use std::process::{Command, Stdio};

use client::ClientError;

use super::send::Addresses;

/// A running world, which ends when this is dropped.
pub(crate) struct World {
    http_port: u16,
    grpc_port: u16,
}

impl World {
    /// Starts a world with flags of `launch`, on free ports, and waits until it serves.
    ///
    /// # Errors
    /// When it does not serve. Its launcher has printed the reason.
    pub(crate) fn start(flags: &[String]) -> Result<Self, ClientError> {
        let io = |what: &str| {
            let what = what.to_owned();
            move |source| ClientError::Io { what, source }
        };
        // All are bound at once, so that they differ.
        let listeners = (0..3).map(|_| TcpListener::bind("127.0.0.1:0")).collect::<Result<Vec<_>, _>>();
        let listeners = listeners.map_err(io("finding free ports"))?;
        let ports = listeners.iter().map(|listener| listener.local_addr().map(|address| address.port()));
        let ports = ports.collect::<Result<Vec<u16>, _>>().map_err(io("finding free ports"))?;
        drop(listeners);
        let names = ["--http_port", "--grpc_port", "--metrics_port"];
        let ports_of = names.iter().zip(&ports).map(|(name, port)| format!("{name}={port}"));
        let mut launch = launch()?;
        // What the launcher says of the start is no part of the comparison.
        launch.args(ports_of).arg("--detach").args(flags).stdin(Stdio::null()).stdout(Stdio::null());
        let status = launch.status().map_err(io("starting a world"))?;
        if !status.success() {
            let flags = flags.join(" ");
            return Err(ClientError::Usage(format!("no world with the flags `{flags}` serves; its reason is above")));
        }
        Ok(Self { http_port: ports[0], grpc_port: ports[1] })
    }

    /// Where it serves.
    pub(crate) fn addresses(&self) -> Addresses {
        Addresses { http: format!("localhost:{}", self.http_port), grpc: format!("localhost:{}", self.grpc_port) }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let stopped = launch().and_then(|mut launch| {
            launch.args(["stop", &format!("--http_port={}", self.http_port)]).stdout(Stdio::null());
            launch.status().map_err(|source| ClientError::Io { what: "ending the world".to_owned(), source })
        });
        if !stopped.is_ok_and(|status| status.success()) {
            eprintln!("the world on http port {} did not end; `launch stop --all` ends it", self.http_port);
        }
    }
}

/// This program as `launch`.
fn launch() -> Result<Command, ClientError> {
    let program = std::env::current_exe()
        .map_err(|source| ClientError::Io { what: "finding this program".to_owned(), source })?;
    let mut command = Command::new(program);
    command.arg("launch");
    Ok(command)
}
