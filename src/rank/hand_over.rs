//! How a new world takes the ports of an old one: listening sockets travel over a Unix socket, so that there is no
//! moment at which a connection is refused. What is queued on them is accepted by whichever world is first.
//!
//! ```text
//! new world: loads its models ─► connects ─► gets the sockets ─► serves ─► says so ─┐
//! old world: serves ───────────────────────► sends them ────────────────────────────┴► accepts no more, drains, ends
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

/// How long the other world may take for its part.
const PATIENCE: Duration = Duration::from_secs(30);

/// What the new world says once it serves.
const SERVING: u8 = b'!';
/// What the launcher says that only wants the sockets too, for the time after this world.
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
                Err(error) => tracing::warn!("another world asked for the ports and did not take them: {error}"),
            }
        }
        // Gone already is as good.
        let _ = std::fs::remove_file(&path);
        // Nobody waits for it where this world ends anyway.
        let _ = taken.send(());
    })?;
    Ok(is_taken)
}

/// Sends the sockets, and returns once the other side serves on them; false when it does not want to.
fn give(mut stream: UnixStream, listeners: &Listeners) -> io::Result<bool> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let all = [(b'g', &listeners.grpc), (b'h', &listeners.http), (b'm', &listeners.metrics)];
    let given: Vec<_> = all.iter().filter_map(|(name, socket)| Some((*name, socket.as_ref()?))).collect();
    let names: Vec<u8> = given.iter().map(|(name, _)| *name).collect();
    let files: Vec<_> = given.iter().map(|(_, socket)| socket.as_fd()).collect();
    ipc::send_files(&stream, &names, &files)?;
    let mut answer = [0];
    stream.read_exact(&mut answer)?;
    match answer[0] {
        SERVING => Ok(true),
        COPIED => Ok(false),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// The ports of an old world, which serves on until it is told that this one does.
pub(crate) struct Taken {
    stream: UnixStream,
}

/// Gets the sockets of the world that offers them at `path`.
pub(crate) fn take(path: &Path) -> io::Result<(Listeners, Taken)> {
    let stream = ipc::connect_private(path)?;
    stream.set_read_timeout(Some(PATIENCE))?;
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
    /// This world serves: the old one may go.
    pub(crate) fn confirm(mut self) {
        if let Err(error) = self.stream.write_all(&[SERVING]) {
            // It has died meanwhile, which comes to the same.
            tracing::warn!("the world that served before has gone: {error}");
        }
    }
}
