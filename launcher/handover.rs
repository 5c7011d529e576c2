//! Listening sockets of a world that ends, held until the next one has loaded: connections wait meanwhile, and none is
//! refused. For restarts where memory does not allow two worlds at a time.

use std::fs;
use std::io::{self, Read, Write};
use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};

/// How long a rank 0 may take for its part.
const PATIENCE: Duration = Duration::from_secs(30);
/// What the one that takes sockets says once it has them.
const TAKEN: u8 = b'!';
/// What it says when it only wants them too.
pub(crate) const COPIED: u8 = b'=';

/// Sockets and what they are for, as rank 0 named them.
#[derive(Debug)]
pub(crate) struct Held {
    names: Vec<u8>,
    sockets: Vec<OwnedFd>,
}

impl Held {
    /// Takes the sockets of the world that offers them at `path`, which from then on accepts nothing and drains.
    pub(crate) fn take(path: &Path) -> Result<Self> {
        Self::get(path, TAKEN)
    }

    /// Copies the sockets of the world that offers them at `path`, which serves on.
    pub(crate) fn copy(path: &Path) -> Result<Self> {
        Self::get(path, COPIED)
    }

    fn get(path: &Path, answer: u8) -> Result<Self> {
        let cannot = || format!("rank 0 hands nothing over at {}", path.display());
        let mut stream = ipc::connect_private(path).with_context(cannot)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let mut names = [0; ipc::MAX_FILES];
        let (len, sockets) = ipc::receive_files(&stream, &mut names).with_context(cannot)?;
        if len == 0 || len != sockets.len() {
            bail!("{}", cannot());
        }
        stream.write_all(&[answer]).with_context(cannot)?;
        Ok(Self { names: names[..len].to_vec(), sockets })
    }

    /// Gives them at `path` to the first world that asks and has taken them; until then they are open here.
    pub(crate) fn offer(self, path: PathBuf) -> Result<()> {
        let listener = ipc::bind_private(&path).with_context(|| format!("cannot offer ports at {}", path.display()))?;
        thread::spawn(move || {
            let mut acceptor = ipc::Acceptor::new(listener);
            while self.give(acceptor.accept()).is_err() {}
            // Gone already is as good.
            let _ = fs::remove_file(&path);
        });
        Ok(())
    }

    /// The sockets, to be accepted from beside others who do.
    pub(crate) fn listeners(&self) -> io::Result<Vec<TcpListener>> {
        self.sockets.iter().map(|socket| socket.try_clone().map(TcpListener::from)).collect()
    }

    /// Sends the sockets; returns once the other side serves on them.
    pub(crate) fn give(&self, mut stream: UnixStream) -> io::Result<()> {
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let sockets: Vec<_> = self.sockets.iter().map(AsFd::as_fd).collect();
        ipc::send_files(&stream, &self.names, &sockets)?;
        let mut answer = [0];
        stream.read_exact(&mut answer)?;
        if answer[0] == TAKEN { Ok(()) } else { Err(io::ErrorKind::InvalidData.into()) }
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpStream;
    use std::os::unix::net::UnixListener;

    use super::*;

    /// As rank 0 offers its ports.
    fn world(path: &Path, socket: &TcpListener) {
        let (stream, _) = UnixListener::bind(path).unwrap().accept().unwrap();
        ipc::send_files(&stream, b"h", &[socket.as_fd()]).unwrap();
        let mut answer = [0];
        (&stream).read_exact(&mut answer).unwrap();
        assert_eq!(answer[0], TAKEN);
    }

    #[test]
    fn a_client_that_comes_between_two_worlds_is_answered_by_the_second() {
        let dir = tempfile::tempdir().unwrap();
        let (old, between) = (dir.path().join("old"), dir.path().join("between"));
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = socket.local_addr().unwrap();
        let path = old.clone();
        let first = thread::spawn(move || world(&path, &socket));
        while !old.exists() {
            thread::sleep(Duration::from_millis(5));
        }
        let held = Held::take(&old).unwrap();
        first.join().unwrap();
        let mut client = TcpStream::connect(address).unwrap();
        client.write_all(b"hello").unwrap();

        held.offer(between.clone()).unwrap();
        let second = Held::take(&between).unwrap();
        let (mut accepted, _) = TcpListener::from(second.sockets.into_iter().next().unwrap()).accept().unwrap();
        let mut words = [0; 5];
        accepted.read_exact(&mut words).unwrap();
        assert_eq!(&words, b"hello");
    }

    #[test]
    fn a_world_that_offers_nothing_is_left_alone() {
        let error = Held::take(Path::new("/nowhere/hand-over")).unwrap_err();
        assert!(format!("{error:#}").contains("rank 0 hands nothing over at /nowhere/hand-over"), "{error:#}");
    }
}
