//! How a launcher asks its rank 0 whether it is well: over a Unix socket that no client of the server can reach.
//!
//! A question is one byte, an answer one line: `1 live=12 ready=1`. The first number is the version of the line; further
//! words may follow in later ones.

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

/// What is asked.
const HEALTH: u8 = b'h';
/// How long either side waits for the other.
const PATIENCE: Duration = Duration::from_millis(500);
/// Between two attempts to accept.
const PAUSE: Duration = Duration::from_millis(20);
/// Longest answer.
const MAX_BYTES: u64 = 256;

/// How a rank 0 is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Health {
    /// Time since the slowest of its runtimes made progress.
    pub silent: Duration,
    /// Whether it takes requests.
    pub is_ready: bool,
}

impl fmt::Display for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "1 live={} ready={}", self.silent.as_millis(), u8::from(self.is_ready))
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
            Some(Self { silent: Duration::from_millis(live), is_ready })
        };
        parse().ok_or_else(|| io::ErrorKind::InvalidData.into())
    }
}

/// Answers at `path`, on a thread of its own, for as long as this process lives.
///
/// # Errors
/// When there can be no socket at `path`.
pub fn answer_health(path: &Path, health: impl Fn() -> Health + Send + 'static) -> io::Result<()> {
    let listener = bind_private(path)?;
    thread::Builder::new().name("control".to_owned()).spawn(move || {
        let mut acceptor = Acceptor::new(listener);
        loop {
            // One that asks and goes away harms nobody.
            let _ = answer(acceptor.accept(), &health);
        }
    })?;
    Ok(())
}

fn answer(mut stream: UnixStream, health: &impl Fn() -> Health) -> io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut question = [0];
    stream.read_exact(&mut question)?;
    match question[0] {
        HEALTH => writeln!(stream, "{}", health()),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Asks the rank 0 that answers at `path`.
///
/// # Errors
/// `NotFound` or `ConnectionRefused` when none does; others when it does not answer in time, or something else does.
pub fn ask_health(path: &Path) -> io::Result<Health> {
    ask_on(connect_private(path)?)
}

fn ask_on(mut stream: UnixStream) -> io::Result<Health> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.write_all(&[HEALTH])?;
    let mut line = String::new();
    stream.take(MAX_BYTES).read_to_string(&mut line)?;
    line.parse()
}

/// A socket at `path` for this user alone, in place of what an earlier process may have left there.
///
/// # Errors
/// When there can be none.
pub fn bind_private(path: &Path) -> io::Result<UnixListener> {
    let _ = fs::remove_file(path);
    let listener = UnixListener::bind(path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// Connects to the socket at `path`.
///
/// # Errors
/// When nobody listens there, or a process of another user.
pub fn connect_private(path: &Path) -> io::Result<UnixStream> {
    let stream = UnixStream::connect(path)?;
    check_peer(&stream)?;
    Ok(stream)
}

/// Errs when the other end is a process of another user, who is not root.
fn check_peer(stream: &UnixStream) -> io::Result<()> {
    let peer = rustix::net::sockopt::socket_peercred(stream)?;
    match peer.uid.is_root() || peer.uid == geteuid() {
        true => Ok(()),
        false => Err(io::Error::new(io::ErrorKind::PermissionDenied, "the other end is a process of another user")),
    }
}

/// Accepts connections of this user, also while the process has no descriptor left for others.
#[derive(Debug)]
pub struct Acceptor {
    listener: UnixListener,
    /// A descriptor to be given up for a connection.
    spare: Option<File>,
}

impl Acceptor {
    /// Accepts from `listener`.
    pub fn new(listener: UnixListener) -> Self {
        Self { listener, spare: spare() }
    }

    /// The next connection of a process of this user, or of root. An accept that fails is tried again after a pause.
    pub fn accept(&mut self) -> UnixStream {
        loop {
            if self.spare.is_none() {
                self.spare = spare();
            }
            match self.listener.accept() {
                Ok((stream, _)) if check_peer(&stream).is_ok() => return stream,
                Ok(_) => {}
                Err(error) if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) => {
                    // Without one to give up, wait for another to be closed.
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
        let health = Health { silent: Duration::from_millis(1200), is_ready: true };
        assert_eq!(health.to_string(), "1 live=1200 ready=1");
        assert_eq!("2 live=1200 ready=1 more=yes\n".parse::<Health>().unwrap(), health);
        for wrong in ["", "1", "1 live=x ready=1", "HTTP/1.1 200 OK"] {
            assert!(wrong.parse::<Health>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_private_socket_is_for_its_user_and_silent_callers_do_not_keep_it() {
        let path = place("control");
        let health = Health { silent: Duration::from_millis(5), is_ready: true };
        answer_health(&path, move || health).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let _silent = UnixStream::connect(&path).unwrap();
        // The first attempt may wait behind the one that says nothing.
        let asked = (0..10).find_map(|_| ask_health(&path).ok());
        assert_eq!(asked, Some(health));
        fs::remove_file(&path).unwrap();
        assert_eq!(ask_health(&path).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
