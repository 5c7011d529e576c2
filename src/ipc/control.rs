//! Health checks of rank 0 by its launcher, over a Unix socket that no client of the server can reach.
//!
//! A request is one byte, the response one line: `1 live=12 ready=1 requests=3 lost=2,3`. The first number is the version of the line; later
//! versions may append fields, and earlier ones do not have the last ones.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::str::FromStr;
use std::thread;
use std::time::Duration;

use rustix::process::geteuid;

/// The request for the health of rank 0.
const HEALTH: u8 = b'h';
/// How long either side waits for the other.
const TIMEOUT: Duration = Duration::from_millis(500);
/// Pause between two attempts to accept.
const PAUSE: Duration = Duration::from_millis(20);
/// Longest response in bytes.
const MAX_BYTES: u64 = 64 * 1024;

/// The health of a rank 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Health {
    /// Time since the last progress of its slowest async runtime.
    pub silent: Duration,
    /// Whether it accepts requests.
    pub is_ready: bool,
    /// Requests in flight; None if it does not say.
    pub num_requests: Option<u64>,
    /// Ranks that are lost, and without which the world goes on.
    pub lost: Vec<u32>,
}

impl fmt::Display for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "1 live={} ready={}", self.silent.as_millis(), u8::from(self.is_ready))?;
        self.num_requests.map_or(Ok(()), |count| write!(f, " requests={count}"))?;
        match self.lost.is_empty() {
            true => Ok(()),
            false => write!(f, " lost={}", self.lost.iter().map(u32::to_string).collect::<Vec<_>>().join(",")),
        }
    }
}

impl FromStr for Health {
    type Err = io::Error;

    fn from_str(line: &str) -> io::Result<Self> {
        let parse = || {
            let mut words = line.split_ascii_whitespace();
            words.next()?.parse::<u32>().ok()?;
            let live = words.next()?.strip_prefix("live=")?.parse().ok()?;
            let is_ready = words.next()?.strip_prefix("ready=")? == "1";
            let rest: Vec<&str> = words.collect();
            let value = |name: &str| rest.iter().find_map(|word| word.strip_prefix(name));
            let num_requests = value("requests=").and_then(|count| count.parse().ok());
            let lost = value("lost=").map(|list| list.split(',').filter_map(|rank| rank.parse().ok()).collect());
            Some(Self { silent: Duration::from_millis(live), is_ready, num_requests, lost: lost.unwrap_or_default() })
        };
        parse().ok_or_else(|| io::ErrorKind::InvalidData.into())
    }
}

/// Answers health checks at `path`, on a thread of its own, until this process ends.
///
/// # Errors
/// When the socket or the thread cannot be created.
pub fn answer_health(path: &Path, health: impl Fn() -> Health + Send + 'static) -> io::Result<()> {
    // Before the thread runs, so that the reserved descriptor is there even if the process soon has no other left.
    let mut acceptor = Acceptor::new(bind_private(path)?);
    thread::Builder::new().name("control".to_owned()).spawn(move || {
        loop {
            // A client that disconnects is no error of this process.
            let _ = answer(acceptor.accept(), &health);
        }
    })?;
    Ok(())
}

fn answer(mut stream: UnixStream, health: &impl Fn() -> Health) -> io::Result<()> {
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    let mut request = [0];
    stream.read_exact(&mut request)?;
    match request[0] {
        HEALTH => writeln!(stream, "{}", health()),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Requests the health of the rank 0 that listens at `path`.
///
/// # Errors
/// `NotFound` or `ConnectionRefused` when no process listens there; others when the response is late or invalid.
pub fn ask_health(path: &Path) -> io::Result<Health> {
    request_health(connect_private(path)?)
}

fn request_health(mut stream: UnixStream) -> io::Result<Health> {
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    stream.write_all(&[HEALTH])?;
    let mut line = String::new();
    stream.take(MAX_BYTES).read_to_string(&mut line)?;
    line.parse()
}

/// A socket at `path` that only this user may connect to. It replaces the file of an earlier process.
///
/// # Errors
/// When the socket cannot be created.
pub fn bind_private(path: &Path) -> io::Result<UnixListener> {
    let _ = fs::remove_file(path);
    let listener = UnixListener::bind(path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// Connects to the socket at `path`.
///
/// # Errors
/// When no process listens there, or one of another user does.
pub fn connect_private(path: &Path) -> io::Result<UnixStream> {
    let stream = UnixStream::connect(path)?;
    check_peer(&stream)?;
    Ok(stream)
}

/// Errs when the peer is a process of another user than this one or root.
fn check_peer(stream: &UnixStream) -> io::Result<()> {
    let peer = rustix::net::sockopt::socket_peercred(stream)?;
    match peer.uid.is_root() || peer.uid == geteuid() {
        true => Ok(()),
        false => Err(io::Error::new(io::ErrorKind::PermissionDenied, "the other end is a process of another user")),
    }
}

/// Accepts connections of this user, even when the process has reached its limit of open files.
#[derive(Debug)]
pub struct Acceptor {
    listener: UnixListener,
    /// A reserved descriptor that is closed to make room for a connection.
    spare: Option<File>,
}

impl Acceptor {
    /// Accepts from `listener`.
    pub fn new(listener: UnixListener) -> Self {
        Self { listener, spare: spare() }
    }

    /// Waits for the next connection of a process of this user or of root. A failed accept is repeated after a pause.
    pub fn accept(&mut self) -> UnixStream {
        loop {
            if self.spare.is_none() {
                self.spare = spare();
            }
            match self.listener.accept() {
                Ok((stream, _)) if check_peer(&stream).is_ok() => return stream,
                Ok(_) => {}
                Err(error) if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) => {
                    // Without a reserved descriptor, wait until another is closed.
                    if self.spare.take().is_none() {
                        thread::sleep(PAUSE);
                    }
                }
                Err(_) => thread::sleep(PAUSE),
            }
        }
    }
}

fn spare() -> Option<File> {
    File::open("/dev/null").ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(name: &str) -> std::path::PathBuf {
        std::env::temp_dir().join(format!("trireme-{name}-{}", std::process::id()))
    }

    #[test]
    fn an_answer_says_what_was_put_into_it_and_more_words_do_no_harm() {
        let health =
            Health { silent: Duration::from_millis(1200), is_ready: true, num_requests: Some(7), lost: Vec::new() };
        assert_eq!(health.to_string(), "1 live=1200 ready=1 requests=7");
        assert_eq!("2 live=1200 ready=1 requests=7 more=yes\n".parse::<Health>().unwrap(), health);
        let without = Health { lost: vec![1, 12], ..health.clone() };
        assert_eq!(without.to_string(), "1 live=1200 ready=1 requests=7 lost=1,12");
        assert_eq!(without.to_string().parse::<Health>().unwrap(), without);
        let earlier = Health { num_requests: None, ..health };
        assert_eq!(earlier.to_string().parse::<Health>().unwrap(), earlier);
        assert_eq!("1 live=1200 ready=1 more=yes".parse::<Health>().unwrap(), earlier);
        for wrong in ["", "1", "1 live=x ready=1", "HTTP/1.1 200 OK"] {
            assert!(wrong.parse::<Health>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_private_socket_is_for_its_user_and_silent_callers_do_not_keep_it() {
        let path = place("control");
        let health =
            Health { silent: Duration::from_millis(5), is_ready: true, num_requests: Some(0), lost: Vec::new() };
        let answer = health.clone();
        answer_health(&path, move || answer.clone()).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let _silent = UnixStream::connect(&path).unwrap();
        // The first attempt may wait behind the silent connection.
        let received = (0..10).find_map(|_| ask_health(&path).ok());
        assert_eq!(received, Some(health));
        fs::remove_file(&path).unwrap();
        assert_eq!(ask_health(&path).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
