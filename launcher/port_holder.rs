//! Replies 503 or UNAVAILABLE while no world serves. It keeps copies of the listening sockets of the first world and passes them
//! to each later one, so that no connection is refused in between.

use std::io::{ErrorKind, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::handover::Sockets;
use crate::refusal;

/// Clients that are answered at the same time. Further connections are closed without an answer.
const MAX_CLIENTS: usize = 64;

/// Holds the ports of one launcher's worlds. Dropping it closes its copies of the sockets.
pub(crate) struct PortHolder {
    path: PathBuf,
    state: Arc<Mutex<State>>,
    /// A byte written here wakes the thread after a change of `state`.
    wake: UnixStream,
}

#[derive(Default)]
struct State {
    /// The error message for clients. None while a world serves; the thread then accepts no connection.
    reason: Option<String>,
    /// The thread must end.
    stop: bool,
}

impl PortHolder {
    /// Copies the sockets of the world that offers them at `offered`, and offers them at `path` to every later world.
    pub(crate) fn new(offered: &Path, path: PathBuf) -> Result<Self> {
        let sockets = Arc::new(Sockets::copy(offered)?);
        let offer = ipc::bind_private(&path).with_context(|| format!("cannot offer ports at {}", path.display()))?;
        let (wake, woken) = UnixStream::pair()?;
        let state = Arc::<Mutex<State>>::default();
        let listeners = sockets.listeners()?;
        let (thread_state, thread_wake) = (Arc::clone(&state), wake.try_clone()?);
        let num_clients = Arc::default();
        let thread =
            HolderThread { sockets, listeners, offer, woken, wake: thread_wake, state: thread_state, num_clients };
        thread::Builder::new().name("port_holder".to_owned()).spawn(move || thread.run())?;
        Ok(Self { path, state, wake })
    }

    /// The path at which the next world takes the sockets.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Accepts connections from now on and answers them with the error `reason`.
    pub(crate) fn refuse(&self, reason: String) {
        self.change(|state| state.reason = Some(reason));
    }

    /// Accepts no more connections: a world serves.
    pub(crate) fn stop_refusing(&self) {
        self.change(|state| state.reason = None);
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner));
        // Fails only if the thread has ended.
        let _ = (&self.wake).write_all(&[1]);
    }
}

impl Drop for PortHolder {
    fn drop(&mut self) {
        self.change(|state| state.stop = true);
        let _ = std::fs::remove_file(&self.path);
    }
}

/// The thread that waits for clients, for worlds that take the sockets, and for changes of the state.
struct HolderThread {
    sockets: Arc<Sockets>,
    listeners: Vec<TcpListener>,
    offer: UnixListener,
    woken: UnixStream,
    /// The other end of `woken`.
    wake: UnixStream,
    state: Arc<Mutex<State>>,
    num_clients: Arc<AtomicUsize>,
}

impl HolderThread {
    fn run(mut self) {
        loop {
            let reason = {
                let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
                if state.stop {
                    return;
                }
                state.reason.clone()
            };
            let Ok(ready) = self.wait(reason.is_some()) else { return };
            if ready[0] {
                let _ = std::io::Read::read(&mut self.woken, &mut [0; 64]);
            }
            if ready[1]
                && let Ok((stream, _)) = self.offer.accept()
            {
                self.send_sockets(stream);
                continue;
            }
            let Some(reason) = reason else { continue };
            for (listener, _) in self.listeners.iter().zip(&ready[2..]).filter(|(_, is_ready)| **is_ready) {
                match listener.accept() {
                    Ok((client, _)) => self.answer(client, reason.clone()),
                    // A world that has just begun to serve has accepted the connection.
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                    // For example too many open files: pauses before the next attempt.
                    Err(_) => thread::sleep(Duration::from_millis(100)),
                }
            }
        }
    }

    /// Sends the sockets to a world that has loaded. It will accept in a moment, so no client is refused meanwhile. If it dies
    /// before it has the sockets, clients are refused again.
    fn send_sockets(&self, stream: UnixStream) {
        let (sockets, state, wake) = (Arc::clone(&self.sockets), Arc::clone(&self.state), self.wake.try_clone());
        let reason = state.lock().unwrap_or_else(PoisonError::into_inner).reason.take();
        thread::spawn(move || {
            if sockets.send(stream).is_err() {
                let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
                state.reason = state.reason.take().or(reason);
                let _ = wake.and_then(|mut wake| wake.write_all(&[1]));
            }
        });
    }

    /// Waits until one of `woken`, `offer` and, with `with_listeners`, the listeners is readable; whether each is, in this order.
    fn wait(&self, with_listeners: bool) -> nix::Result<Vec<bool>> {
        let wanted = |fd| PollFd::new(fd, PollFlags::POLLIN);
        let mut files = vec![wanted(self.woken.as_fd()), wanted(self.offer.as_fd())];
        if with_listeners {
            files.extend(self.listeners.iter().map(|listener| wanted(listener.as_fd())));
        }
        match poll(&mut files, PollTimeout::NONE) {
            Ok(_) | Err(nix::Error::EINTR) => {
                Ok(files.iter().map(|file| file.revents().is_some_and(|events| !events.is_empty())).collect())
            }
            Err(error) => Err(error),
        }
    }

    fn answer(&self, client: TcpStream, reason: String) {
        let num_clients = Arc::clone(&self.num_clients);
        if num_clients.fetch_add(1, Ordering::Relaxed) >= MAX_CLIENTS {
            num_clients.fetch_sub(1, Ordering::Relaxed);
            return;
        }
        thread::spawn(move || {
            // An error means that the client has left.
            let _ = refusal::refuse(client, &reason);
            num_clients.fetch_sub(1, Ordering::Relaxed);
        });
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::SocketAddr;

    use super::*;

    /// A world that offers one port once, like rank 0.
    fn world_with_port(path: &Path) -> (SocketAddr, thread::JoinHandle<TcpListener>) {
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        socket.set_nonblocking(true).unwrap();
        let (address, offer) = (socket.local_addr().unwrap(), UnixListener::bind(path).unwrap());
        let world = thread::spawn(move || {
            let (mut stream, _) = offer.accept().unwrap();
            ipc::send_files(&stream, b"h", &[socket.as_fd()]).unwrap();
            let mut answer = [0];
            stream.read_exact(&mut answer).unwrap();
            assert_eq!(answer[0], crate::handover::COPY);
            socket
        });
        (address, world)
    }

    #[test]
    fn clients_get_the_reason_between_two_worlds_and_the_second_gets_the_ports() {
        let dir = tempfile::tempdir().unwrap();
        let (offered, passed_on) = (dir.path().join("offered"), dir.path().join("passed_on"));
        let (address, world) = world_with_port(&offered);
        let port_holder = PortHolder::new(&offered, passed_on.clone()).unwrap();
        drop(world.join().unwrap());

        // A client that connects before the holder accepts is answered.
        let mut client = TcpStream::connect(address).unwrap();
        client.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        client.write_all(b"POST /v2/models/m/generate HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}").unwrap();
        port_holder.refuse("rank 0 was \"killed\"".to_owned());
        let mut answer = String::new();
        client.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 503 "), "{answer}");
        assert!(
            answer.contains("Retry-After: 1\r\n") && answer.ends_with(r#"{"error":"rank 0 was \"killed\""}"#),
            "{answer}"
        );

        // Several worlds may take the sockets in turn: the first may die before it serves.
        for _ in 0..2 {
            port_holder.refuse("again".to_owned());
            let next = Sockets::take(&passed_on).unwrap();
            let mut client = TcpStream::connect(address).unwrap();
            let listener = next.listeners().unwrap().remove(0);
            listener.set_nonblocking(false).unwrap();
            let (mut accepted, _) = listener.accept().unwrap();
            accepted.write_all(b"hello").unwrap();
            let mut bytes = [0; 5];
            client.read_exact(&mut bytes).unwrap();
            listener.set_nonblocking(true).unwrap();
        }
        drop(port_holder);
        assert!(!passed_on.exists());
    }
}
