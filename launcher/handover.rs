//! Passes listening sockets from one world to the next through this process. While the next world loads, connections wait in the
//! sockets' backlog and none is refused. `restart --rolling --after` uses this where memory does not allow two worlds at a time.

use std::fs;
use std::io::{self, Read, Write};
use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};

/// Timeout of each read and write of the hand-over.
const IO_TIMEOUT: Duration = Duration::from_secs(30);
/// Sent by the receiver of sockets if the sender shall stop accepting and drain.
const TAKE: u8 = b'!';
/// Sent by the receiver of sockets if the sender shall go on serving.
pub(crate) const COPY: u8 = b'=';

/// Listening sockets, with the names by which rank 0 distinguishes them: one byte each.
#[derive(Debug)]
pub(crate) struct Sockets {
    names: Vec<u8>,
    sockets: Vec<OwnedFd>,
}

impl Sockets {
    /// Receives the sockets of the world that offers them at `path`. That world stops accepting and drains.
    pub(crate) fn take(path: &Path) -> Result<Self> {
        Self::receive(path, TAKE)
    }

    /// Receives copies of the sockets of the world that offers them at `path`. That world goes on serving.
    pub(crate) fn copy(path: &Path) -> Result<Self> {
        Self::receive(path, COPY)
    }

    fn receive(path: &Path, reply: u8) -> Result<Self> {
        let cannot = || format!("rank 0 hands nothing over at {}", path.display());
        let mut stream = ipc::connect_private(path).with_context(cannot)?;
        stream.set_read_timeout(Some(IO_TIMEOUT))?;
        let mut names = [0; ipc::MAX_FILES];
        let (len, sockets) = ipc::receive_files(&stream, &mut names).with_context(cannot)?;
        if len == 0 || len != sockets.len() {
            bail!("{}", cannot());
        }
        stream.write_all(&[reply]).with_context(cannot)?;
        Ok(Self { names: names[..len].to_vec(), sockets })
    }

    /// Offers the sockets at `path` to the next world, from a thread. They stay open here until one has taken them.
    pub(crate) fn offer(self, path: PathBuf) -> Result<()> {
        let listener = ipc::bind_private(&path).with_context(|| format!("cannot offer ports at {}", path.display()))?;
        thread::spawn(move || {
            let mut acceptor = ipc::Acceptor::new(listener);
            while self.send(acceptor.accept()).is_err() {}
            // It does not matter if the file is gone already.
            let _ = fs::remove_file(&path);
        });
        Ok(())
    }

    /// Duplicates of the sockets, to accept from.
    pub(crate) fn listeners(&self) -> io::Result<Vec<TcpListener>> {
        self.sockets.iter().map(|socket| socket.try_clone().map(TcpListener::from)).collect()
    }

    /// Sends the sockets. Returns once the other side has confirmed that it serves on them.
    pub(crate) fn send(&self, mut stream: UnixStream) -> io::Result<()> {
        stream.set_read_timeout(Some(IO_TIMEOUT))?;
        stream.set_write_timeout(Some(IO_TIMEOUT))?;
        let sockets: Vec<_> = self.sockets.iter().map(AsFd::as_fd).collect();
        ipc::send_files(&stream, &self.names, &sockets)?;
        let mut reply = [0];
        stream.read_exact(&mut reply)?;
        if reply[0] == TAKE { Ok(()) } else { Err(io::ErrorKind::InvalidData.into()) }
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpStream;
    use std::os::unix::net::UnixListener;

    use super::*;

    /// Offers `socket` at `path`, like rank 0.
    fn offer_like_rank_0(path: &Path, socket: &TcpListener) {
        let (stream, _) = UnixListener::bind(path).unwrap().accept().unwrap();
        ipc::send_files(&stream, b"h", &[socket.as_fd()]).unwrap();
        let mut reply = [0];
        (&stream).read_exact(&mut reply).unwrap();
        assert_eq!(reply[0], TAKE);
    }

    #[test]
    fn a_client_that_connects_between_two_worlds_is_answered_by_the_second() {
        let dir = tempfile::tempdir().unwrap();
        let (old, between) = (dir.path().join("old"), dir.path().join("between"));
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = socket.local_addr().unwrap();
        let path = old.clone();
        let first = thread::spawn(move || offer_like_rank_0(&path, &socket));
        while !old.exists() {
            thread::sleep(Duration::from_millis(5));
        }
        let sockets = Sockets::take(&old).unwrap();
        first.join().unwrap();
        let mut client = TcpStream::connect(address).unwrap();
        client.write_all(b"hello").unwrap();

        sockets.offer(between.clone()).unwrap();
        let second = Sockets::take(&between).unwrap();
        let (mut accepted, _) = TcpListener::from(second.sockets.into_iter().next().unwrap()).accept().unwrap();
        let mut bytes = [0; 5];
        accepted.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"hello");
    }

    #[test]
    fn an_error_names_the_path_at_which_no_world_offers_sockets() {
        let error = Sockets::take(Path::new("/nowhere/hand-over")).unwrap_err();
        assert!(format!("{error:#}").contains("rank 0 hands nothing over at /nowhere/hand-over"), "{error:#}");
    }
}
