//! Opens and accepts the connections between workers. A random token in the greeting identifies those of this model.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::thread;
use std::time::{Duration, Instant};

use ops::DeviceError;

use super::streams::{Stream, StreamKind};

/// Timeout of a connection attempt to one address of a peer, before the next address is tried.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Length of the random token that identifies connections of this model. It is new at each start.
const TOKEN_BYTES: usize = 16;
pub(super) type Token = [u8; TOKEN_BYTES];
/// A greeting contains the token, the worker's number and the purpose of the connection.
const GREETING_BYTES: usize = TOKEN_BYTES + 8;
type Greeting = [u8; GREETING_BYTES];
/// Maximum number of accepted connections without a complete greeting; more wait in the kernel.
const MAX_PENDING: usize = 64;

pub(super) fn words<T: ToString>(items: &[T]) -> Vec<u8> {
    items.iter().map(T::to_string).collect::<Vec<_>>().join(" ").into_bytes()
}

pub(super) fn parsed<T: std::str::FromStr>(bytes: &[u8]) -> Vec<T> {
    String::from_utf8_lossy(bytes).split(' ').filter_map(|word| word.parse().ok()).collect()
}

/// The addresses in `own` that have a route to `callers`; all of them if the routes give no answer.
pub(super) fn addresses_towards(callers: &[IpAddr], own: &[IpAddr]) -> Vec<IpAddr> {
    let source = |caller: &IpAddr| -> io::Result<IpAddr> {
        let any: IpAddr = if caller.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let socket = UdpSocket::bind((any, 0))?;
        // Sends nothing: the kernel selects a route, and with it an address of this machine.
        socket.connect((*caller, 9))?;
        Ok(socket.local_addr()?.ip())
    };
    let callers = callers.iter().filter(|caller| !own.contains(caller));
    let mut sources: Vec<IpAddr> =
        callers.filter_map(|caller| source(caller).ok()).filter(|ip| own.contains(ip)).collect();
    sources.sort_unstable();
    sources.dedup();
    if sources.is_empty() { own.to_vec() } else { sources }
}

/// Listens on each of `addresses`, or only on loopback if there are none.
pub(super) fn listen(addresses: &[IpAddr]) -> io::Result<Vec<TcpListener>> {
    let loopback = [IpAddr::V4(Ipv4Addr::LOCALHOST)];
    let addresses = if addresses.is_empty() { &loopback[..] } else { addresses };
    let listener = |address: &IpAddr| {
        let listener = TcpListener::bind((*address, 0))?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    };
    addresses.iter().map(listener).collect()
}

pub(super) fn random_token() -> io::Result<Token> {
    let mut token = [0; TOKEN_BYTES];
    File::open("/dev/urandom")?.read_exact(&mut token)?;
    Ok(token)
}

/// The addresses of a worker. Worker 0's token identifies the connections of this model.
pub(super) struct WorkerAddress {
    pub(super) token: Token,
    pub(super) sockets: Vec<SocketAddr>,
}

impl WorkerAddress {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        [&self.token[..], &words(&self.sockets)].concat()
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> Self {
        let (token, sockets) = bytes.split_first_chunk().unwrap_or((&[0; TOKEN_BYTES], &[]));
        Self { token: *token, sockets: parsed(sockets) }
    }
}

/// Opens `stream` to `worker`, on the first of its addresses that answers.
pub(super) fn connect_to(
    stream: Stream,
    worker: &WorkerAddress,
    own: &[IpAddr],
    token: Token,
    deadline: Instant,
) -> Result<TcpStream, DeviceError> {
    // An address that this machine has as well (for example of a container bridge) leads back here. Nearest addresses
    // come first.
    let is_elsewhere = |socket: &SocketAddr| !own.contains(&socket.ip());
    let mut addresses: Vec<SocketAddr> = worker.sockets.iter().copied().filter(is_elsewhere).collect();
    addresses.sort_by_key(|address| std::cmp::Reverse(own.iter().map(|&mine| common_bits(mine, address.ip())).max()));
    let mut reasons = Vec::new();
    loop {
        for &address in &addresses {
            match greet(address, stream, token) {
                Ok(socket) => return Ok(socket),
                Err(error) => reasons.push(format!("{address}: {error}")),
            }
        }
        if addresses.is_empty() || Instant::now() >= deadline {
            reasons.dedup();
            let tried = if reasons.is_empty() { "it has no address".to_owned() } else { reasons.join("; ") };
            return Err(DeviceError::Call {
                call: format!("connecting worker {} to worker {} on another node", stream.from, stream.to),
                reason: format!("{tried}; nodes need a network between them without a firewall"),
            });
        }
        thread::sleep(Duration::from_millis(100));
    }
}

fn greet(address: SocketAddr, stream: Stream, token: Token) -> io::Result<TcpStream> {
    let mut socket = TcpStream::connect_timeout(&address, CONNECT_TIMEOUT)?;
    socket.set_nodelay(true)?;
    socket.set_read_timeout(Some(CONNECT_TIMEOUT))?;
    socket.write_all(&greeting(token, stream.from, stream.kind))?;
    let mut answer = [0; GREETING_BYTES];
    socket.read_exact(&mut answer)?;
    if !is_equal(&answer, &greeting(token, stream.to, stream.kind)) {
        return Err(io::Error::other("another program answers there"));
    }
    socket.set_read_timeout(None)?;
    Ok(socket)
}

fn greeting(token: Token, worker: u32, kind: StreamKind) -> Greeting {
    let mut bytes = [0; GREETING_BYTES];
    bytes[..TOKEN_BYTES].copy_from_slice(&token);
    bytes[TOKEN_BYTES..TOKEN_BYTES + 4].copy_from_slice(&worker.to_le_bytes());
    bytes[TOKEN_BYTES + 4] = kind as u8;
    bytes
}

/// Compares in constant time: otherwise a stranger could guess the token byte by byte.
fn is_equal(one: &Greeting, other: &Greeting) -> bool {
    let difference = one.iter().zip(other).fold(0, |difference, (one, other)| difference | (one ^ other));
    std::hint::black_box(difference) == 0
}

/// A connection whose greeting is not complete.
struct PendingConnection {
    socket: TcpStream,
    received: Greeting,
    len: usize,
    deadline: Instant,
}

/// Accepts the `expected` streams in any order. Unknown connections are closed, and silent ones delay nobody.
pub(super) fn accept(
    listeners: &[TcpListener],
    token: Token,
    mut expected: Vec<Stream>,
    deadline: Instant,
) -> Result<Vec<(Stream, TcpStream)>, DeviceError> {
    let (mut accepted, mut pending) = (Vec::new(), Vec::<PendingConnection>::new());
    while !expected.is_empty() {
        let now = Instant::now();
        for listener in listeners {
            while pending.len() < MAX_PENDING
                && let Ok((socket, _)) = listener.accept()
            {
                if socket.set_nonblocking(true).is_ok() {
                    let received = [0; GREETING_BYTES];
                    pending.push(PendingConnection { socket, received, len: 0, deadline: now + CONNECT_TIMEOUT });
                }
            }
        }
        for mut connection in std::mem::take(&mut pending) {
            match connection.read_greeting() {
                Ok(true) => {
                    if let Ok((stream, socket)) = connection.answer(token, &expected) {
                        expected.retain(|&other| other != stream);
                        accepted.push((stream, socket));
                    }
                }
                Ok(false) if now < connection.deadline => pending.push(connection),
                Ok(false) | Err(_) => {}
            }
        }
        if now >= deadline && !expected.is_empty() {
            let missing: Vec<String> = expected.iter().map(|stream| stream.from.to_string()).collect();
            let reason = format!("no connection from worker {} in time; is a firewall between?", missing.join(", "));
            return Err(DeviceError::Call { call: "accepting workers of other nodes".into(), reason });
        }
        thread::sleep(Duration::from_millis(1));
    }
    Ok(accepted)
}

impl PendingConnection {
    /// Whether the greeting is complete.
    fn read_greeting(&mut self) -> io::Result<bool> {
        match self.socket.read(&mut self.received[self.len..]) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => {
                self.len += read;
                Ok(self.len == GREETING_BYTES)
            }
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn answer(self, token: Token, expected: &[Stream]) -> io::Result<(Stream, TcpStream)> {
        let Self { mut socket, received, .. } = self;
        let known = expected.iter().find(|stream| is_equal(&greeting(token, stream.from, stream.kind), &received));
        let stream = *known.ok_or_else(|| io::Error::other("a stranger"))?;
        socket.set_nonblocking(false)?;
        socket.set_nodelay(true)?;
        socket.write_all(&greeting(token, stream.to, stream.kind))?;
        Ok((stream, socket))
    }
}

/// Number of leading bits that two addresses have in common; a larger number means nearer.
fn common_bits(one: IpAddr, other: IpAddr) -> u32 {
    match (one, other) {
        (IpAddr::V4(one), IpAddr::V4(other)) => (one.to_bits() ^ other.to_bits()).leading_zeros(),
        (IpAddr::V6(one), IpAddr::V6(other)) => (one.to_bits() ^ other.to_bits()).leading_zeros(),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silent_and_foreign_connections_delay_no_worker() {
        let listeners = listen(&[IpAddr::V4(Ipv4Addr::LOCALHOST)]).unwrap();
        let address = listeners[0].local_addr().unwrap();
        assert!(address.ip().is_loopback());
        let stream = Stream { from: 1, to: 0, kind: StreamKind::Parts };
        let token = random_token().unwrap();
        assert_ne!(token, random_token().unwrap());
        // Each of them once took several seconds, one after the other.
        let _silent: Vec<_> = (0..20).map(|_| TcpStream::connect(address).unwrap()).collect();
        let deadline = Instant::now() + Duration::from_secs(20);
        let accepting = thread::spawn(move || accept(&listeners, token, vec![stream], deadline));
        let mut wrong = token;
        wrong[TOKEN_BYTES - 1] ^= 1;
        assert!(greet(address, stream, wrong).is_err(), "a wrong token was answered");
        assert!(greet(address, Stream { from: 2, ..stream }, token).is_err(), "an unexpected worker was answered");
        greet(address, stream, token).unwrap();
        assert_eq!(accepting.join().unwrap().unwrap()[0].0, stream);
    }

    #[test]
    fn a_worker_listens_only_on_addresses_that_its_peers_can_reach() {
        let own = ["127.0.0.1", "192.0.2.1"].map(|address| address.parse::<IpAddr>().unwrap());
        let callers = ["127.0.0.9".parse().unwrap()];
        assert_eq!(addresses_towards(&callers, &own), [own[0]]);
        assert_eq!(addresses_towards(&callers, &own[1..]), [own[1]], "what routes do not know is not left out");
        assert_eq!(addresses_towards(&[own[1]], &own), own, "an address of its own is nobody else's");
        let listeners = listen(&own[..1]).unwrap();
        assert!(listeners.iter().all(|listener| listener.local_addr().unwrap().ip() == own[0]));
        let worker = WorkerAddress { token: [7; TOKEN_BYTES], sockets: vec![listeners[0].local_addr().unwrap()] };
        let same = WorkerAddress::from_bytes(&worker.to_bytes());
        assert_eq!((same.token, same.sockets), (worker.token, worker.sockets));
    }
}
