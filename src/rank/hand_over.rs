//! A new world takes over the ports of an old one: the listening sockets are sent over a Unix socket, so that no connection is refused
//! at any time. Either world may accept queued connections.
//!
//! ```text
//! new world: loads its models ─► connects ─► gets the sockets ─► serves ─► confirms ─┐
//! old world: serves ───────────────────────► sends them ─────────────────────────────┴► stops accepting, drains, ends
//! ```

use std::io::{self, Read, Write};
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use front::Listeners;
use ipc::Acceptor;
use tokio::sync::oneshot;

/// Timeout for each step of the other world.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The reply of a new world once it serves.
const SERVING: u8 = b'!';
/// The reply of a launcher that only keeps copies of the sockets for the time after this world.
const COPIED: u8 = b'=';

/// Offers the ports at `path`; resolves once another world serves on them.
pub(crate) fn offer(path: PathBuf, listeners: Listeners) -> io::Result<oneshot::Receiver<()>> {
    let mut acceptor = Acceptor::new(ipc::bind_private(&path)?);
    let (taken, is_taken) = oneshot::channel();
    thread::Builder::new().name("hand-over".to_owned()).spawn(move || {
        loop {
            match give(acceptor.accept(), &listeners) {
                Ok(true) => break,
                Ok(false) => {}
                Err(error) => tracing::warn!("another world requested the ports and did not take them: {error}"),
            }
        }
        // The file may have been removed.
        let _ = std::fs::remove_file(&path);
        // The receiver is dropped if this world ends anyway.
        let _ = taken.send(());
    })?;
    Ok(is_taken)
}

/// Sends the sockets and waits for the reply: true once the other world serves on them, false if it only keeps copies.
fn give(mut stream: UnixStream, listeners: &Listeners) -> io::Result<bool> {
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    let all = [(b'g', &listeners.grpc), (b'h', &listeners.http), (b'm', &listeners.metrics)];
    let given: Vec<_> = all.iter().filter_map(|(name, socket)| Some((*name, socket.as_ref()?))).collect();
    let names: Vec<u8> = given.iter().map(|(name, _)| *name).collect();
    let files: Vec<_> = given.iter().map(|(_, socket)| socket.as_fd()).collect();
    ipc::send_files(&stream, &names, &files)?;
    let mut reply = [0];
    stream.read_exact(&mut reply)?;
    match reply[0] {
        SERVING => Ok(true),
        COPIED => Ok(false),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// The connection to the old world, which serves until [`Taken::confirm`].
pub(crate) struct Taken {
    stream: UnixStream,
}

/// Receives the sockets of the world that offers them at `path`.
pub(crate) fn take(path: &Path) -> io::Result<(Listeners, Taken)> {
    let stream = ipc::connect_private(path)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    let mut names = [0; ipc::MAX_FILES];
    let (len, files) = ipc::receive_files(&stream, &mut names)?;
    if len == 0 || len != files.len() {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut listeners = Listeners::default();
    for (name, file) in names[..len].iter().zip(files) {
        let socket = Some(TcpListener::from(file));
        match name {
            b'g' => listeners.grpc = socket,
            b'h' => listeners.http = socket,
            b'm' => listeners.metrics = socket,
            _ => return Err(io::ErrorKind::InvalidData.into()),
        }
    }
    Ok((listeners, Taken { stream }))
}

impl Taken {
    /// Confirms to the old world that this one serves, so that the old one may end.
    pub(crate) fn confirm(mut self) {
        if let Err(error) = self.stream.write_all(&[SERVING]) {
            // The old world has ended already, which has the same effect.
            tracing::warn!("the world that served before has ended: {error}");
        }
    }
}
