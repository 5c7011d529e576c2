//! Stands at the ports of a world while none serves: keeps copies of its listening sockets, answers who comes that it is
//! to come again, and hands the sockets to the next world, so that no connection is refused between the two.

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

use crate::handover::Held;
use crate::refusal;

/// Clients that are answered at once; more are let go without a word.
const MAX_CLIENTS: usize = 64;

/// The ports of the worlds of one launcher. Dropping it closes its copies of the sockets.
pub(crate) struct Doorman {
    path: PathBuf,
    orders: Arc<Mutex<Orders>>,
    /// Written to when orders have changed.
    wake: UnixStream,
}

#[derive(Default)]
struct Orders {
    /// What clients are told while no world serves.
    reason: Option<String>,
    ends: bool,
}

impl Doorman {
    /// Copies the sockets of the world that offers them at `offered`, and lends them at `path` to every later world.
    pub(crate) fn new(offered: &Path, path: PathBuf) -> Result<Self> {
        let sockets = Arc::new(Held::copy(offered)?);
        let door = ipc::bind_private(&path).with_context(|| format!("cannot lend ports at {}", path.display()))?;
        let (wake, woken) = UnixStream::pair()?;
        let orders = Arc::<Mutex<Orders>>::default();
        let listeners = sockets.listeners()?;
        let (orders_there, wake_there) = (Arc::clone(&orders), wake.try_clone()?);
        let num_clients = Arc::default();
        let watch = Watch { sockets, listeners, door, woken, wake: wake_there, orders: orders_there, num_clients };
        thread::Builder::new().name("doorman".to_owned()).spawn(move || watch.run())?;
        Ok(Self { path, orders, wake })
    }

    /// Where the next world gets the sockets.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// From now on clients are told `reason`.
    pub(crate) fn refuse(&self, reason: String) {
        self.order(|orders| orders.reason = Some(reason));
    }

    /// A world serves.
    pub(crate) fn step_aside(&self) {
        self.order(|orders| orders.reason = None);
    }

    fn order(&self, change: impl FnOnce(&mut Orders)) {
        change(&mut self.orders.lock().unwrap_or_else(PoisonError::into_inner));
        // The thread only ends when told so here.
        let _ = (&self.wake).write_all(&[1]);
    }
}

impl Drop for Doorman {
    fn drop(&mut self) {
        self.order(|orders| orders.ends = true);
        let _ = std::fs::remove_file(&self.path);
    }
}

/// The thread that waits for clients, worlds and orders.
struct Watch {
    sockets: Arc<Held>,
    listeners: Vec<TcpListener>,
    door: UnixListener,
    woken: UnixStream,
    /// The other end of `woken`.
    wake: UnixStream,
    orders: Arc<Mutex<Orders>>,
    num_clients: Arc<AtomicUsize>,
}

impl Watch {
    fn run(mut self) {
        loop {
            let reason = {
                let orders = self.orders.lock().unwrap_or_else(PoisonError::into_inner);
                if orders.ends {
                    return;
                }
                orders.reason.clone()
            };
            let Ok(ready) = self.wait(reason.is_some()) else { return };
            if ready[0] {
                let _ = std::io::Read::read(&mut self.woken, &mut [0; 64]);
            }
            if ready[1]
                && let Ok((stream, _)) = self.door.accept()
            {
                self.lend(stream);
                continue;
            }
            let Some(reason) = reason else { continue };
            for (listener, _) in self.listeners.iter().zip(&ready[2..]).filter(|(_, is_ready)| **is_ready) {
                match listener.accept() {
                    Ok((client, _)) => self.answer(client, reason.clone()),
                    // A world that has just begun to serve was faster.
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                    // Too many open files, say: not asked again at once.
                    Err(_) => thread::sleep(Duration::from_millis(100)),
                }
            }
        }
    }

    /// Gives the sockets to a world that has loaded. Clients wait from now on, for it takes them in a moment; should it die
    /// before it does, they are refused again.
    fn lend(&self, stream: UnixStream) {
        let (sockets, orders, wake) = (Arc::clone(&self.sockets), Arc::clone(&self.orders), self.wake.try_clone());
        let reason = orders.lock().unwrap_or_else(PoisonError::into_inner).reason.take();
        thread::spawn(move || {
            if sockets.give(stream).is_err() {
                let mut orders = orders.lock().unwrap_or_else(PoisonError::into_inner);
                orders.reason = orders.reason.take().or(reason);
                let _ = wake.and_then(|mut wake| wake.write_all(&[1]));
            }
        });
    }

    /// Which of `woken`, `door` and, if they are of interest, the listeners can be read.
    fn wait(&self, with_listeners: bool) -> nix::Result<Vec<bool>> {
        let wanted = |fd| PollFd::new(fd, PollFlags::POLLIN);
        let mut files = vec![wanted(self.woken.as_fd()), wanted(self.door.as_fd())];
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
            // One that goes away has heard enough.
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

    /// A world that lends its port when asked, as rank 0 does.
    fn world(path: &Path) -> (SocketAddr, thread::JoinHandle<TcpListener>) {
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        socket.set_nonblocking(true).unwrap();
        let (address, door) = (socket.local_addr().unwrap(), UnixListener::bind(path).unwrap());
        let lends = thread::spawn(move || {
            let (mut stream, _) = door.accept().unwrap();
            ipc::send_files(&stream, b"h", &[socket.as_fd()]).unwrap();
            let mut answer = [0];
            stream.read_exact(&mut answer).unwrap();
            assert_eq!(answer[0], crate::handover::COPIED);
            socket
        });
        (address, lends)
    }

    #[test]
    fn clients_hear_why_between_two_worlds_and_the_second_gets_the_ports() {
        let dir = tempfile::tempdir().unwrap();
        let (offered, lent) = (dir.path().join("offered"), dir.path().join("lent"));
        let (address, lends) = world(&offered);
        let doorman = Doorman::new(&offered, lent.clone()).unwrap();
        drop(lends.join().unwrap());

        // Comes before anyone is there to answer, and is answered.
        let mut client = TcpStream::connect(address).unwrap();
        client.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        client.write_all(b"POST /v2/models/m/generate HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}").unwrap();
        doorman.refuse("rank 0 was \"killed\"".to_owned());
        let mut answer = String::new();
        client.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 503 "), "{answer}");
        assert!(
            answer.contains("Retry-After: 1\r\n") && answer.ends_with(r#"{"error":"rank 0 was \"killed\""}"#),
            "{answer}"
        );

        // More than one world may ask: the first may die before it serves. The launcher need not notice at once.
        for _ in 0..2 {
            doorman.refuse("again".to_owned());
            let next = Held::take(&lent).unwrap();
            let mut client = TcpStream::connect(address).unwrap();
            let listener = next.listeners().unwrap().remove(0);
            listener.set_nonblocking(false).unwrap();
            let (mut accepted, _) = listener.accept().unwrap();
            accepted.write_all(b"hello").unwrap();
            let mut words = [0; 5];
            client.read_exact(&mut words).unwrap();
            listener.set_nonblocking(true).unwrap();
        }
        drop(doorman);
        assert!(!lent.exists());
    }
}
