//! Workers of one model on several nodes: who connects to whom, and the TCP streams between them.
//!
//! Streams rather than MPI through the ranks: a part then goes from a worker's memory to the other node's shared memory
//! with one thread woken on the way, where ranks would add two rings and two polled MPI queues. A stream carries bytes one way, so no two writers can wait for each other.

use std::hash::{BuildHasher, RandomState};
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use ipc::Prefix;

use crate::DeviceError;
use crate::cuda::Exchange;

/// How long one address of a peer may take to answer before the next is tried.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Connection, greeting, answer: token, then a number.
const GREETING_BYTES: usize = 16;

/// All workers of a model, stage by stage, as one of them sees them.
#[derive(Clone)]
pub struct Peers {
    /// This worker: its stage times the workers of a stage, plus its place in its group.
    pub me: u32,
    /// Pipeline stages.
    pub num_stages: u32,
    /// `[workers]` the node of each.
    pub nodes: Vec<u32>,
    /// Where workers of other nodes may reach this one.
    pub addresses: Vec<IpAddr>,
    /// Over all workers of the model.
    pub exchange: Arc<dyn Exchange>,
    /// Prefix of shared memory between stages of one node.
    pub prefix: Prefix,
    /// What its names begin with: the same for all workers.
    pub name: String,
    /// Longest wait for another worker, at start and in a step.
    pub timeout: Duration,
}

/// What a stream is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Use {
    /// Parts of sums and gathers, to another node of the same group.
    Parts,
    /// Activations, to the next stage.
    Hidden,
}

/// One stream of the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stream {
    pub(crate) from: u32,
    pub(crate) to: u32,
    pub(crate) carries: Use,
}

/// This worker's ends.
#[derive(Default)]
pub(crate) struct Streams {
    pub(crate) outgoing: Vec<(Stream, TcpStream)>,
    pub(crate) incoming: Vec<(Stream, TcpStream)>,
}

impl Streams {
    /// Takes the streams of one use.
    pub(crate) fn take(&mut self, carries: Use) -> Streams {
        let taken = |all: &mut Vec<(Stream, TcpStream)>| {
            let (taken, kept) = std::mem::take(all).into_iter().partition(|(stream, _)| stream.carries == carries);
            *all = kept;
            taken
        };
        Streams { outgoing: taken(&mut self.outgoing), incoming: taken(&mut self.incoming) }
    }
}

impl Peers {
    /// Workers of a stage.
    pub(crate) fn tp_size(&self) -> u32 {
        self.nodes.len() as u32 / self.num_stages
    }

    /// This worker's stage.
    pub(crate) fn stage(&self) -> u32 {
        self.me / self.tp_size()
    }

    /// Nodes of this worker's stage, by place in its group.
    pub(crate) fn stage_nodes(&self) -> &[u32] {
        let (first, size) = ((self.stage() * self.tp_size()) as usize, self.tp_size() as usize);
        &self.nodes[first..first + size]
    }

    /// Opens every stream that begins or ends here. All workers of the model call it, or none.
    pub(crate) fn connect(&self) -> Result<Streams, DeviceError> {
        let streams = streams(&self.nodes, self.num_stages);
        if streams.is_empty() {
            return Ok(Streams::default());
        }
        let failed = |what: &str, error: std::io::Error| DeviceError::Call {
            call: format!("{what} of worker {}", self.me),
            reason: error.to_string(),
        };
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).map_err(|error| failed("listening", error))?;
        let port = listener.local_addr().map_err(|error| failed("listening", error))?.port();
        let heard = self.exchange.gather(&self.card(port))?;
        let cards: Vec<Card> = heard.iter().map(|bytes| Card::from_bytes(bytes)).collect();
        let token = cards[0].token;
        let deadline = Instant::now() + self.timeout;
        let expected: Vec<Stream> = streams.iter().copied().filter(|stream| stream.to == self.me).collect();
        let accepting = thread::spawn(move || accept(&listener, token, expected, deadline));
        let connect = |stream: Stream| {
            let card = &cards[stream.to as usize];
            call(stream, card, &self.addresses, token, deadline).map(|socket| (stream, socket))
        };
        let outgoing: Result<Vec<_>, DeviceError> =
            streams.iter().copied().filter(|stream| stream.from == self.me).map(connect).collect();
        let incoming = accepting.join().expect("the accepting thread does not panic");
        Ok(Streams { outgoing: outgoing?, incoming: incoming? })
    }

    fn card(&self, port: u16) -> Vec<u8> {
        let token = RandomState::new().hash_one(std::process::id());
        Card { token, port, addresses: self.addresses.clone() }.to_bytes()
    }
}

/// All streams of a model: parts go from every worker to one worker of each other node of its stage, the receivers taken
/// in turn; activations go from each worker to its like in the next stage, unless both share a node.
pub(crate) fn streams(nodes: &[u32], num_stages: u32) -> Vec<Stream> {
    let tp_size = nodes.len() as u32 / num_stages;
    let mut streams = Vec::new();
    for stage in 0..num_stages {
        let workers = stage * tp_size..(stage + 1) * tp_size;
        let members = |node: u32| workers.clone().filter(move |&worker| nodes[worker as usize] == node);
        for from in workers.clone() {
            let own = nodes[from as usize];
            let place = members(own).position(|worker| worker == from).expect("a worker is on its node");
            let mut others: Vec<u32> = nodes[workers.start as usize..workers.end as usize].to_vec();
            others.sort_unstable();
            others.dedup();
            for node in others.into_iter().filter(|&node| node != own) {
                let receivers: Vec<u32> = members(node).collect();
                streams.push(Stream { from, to: receivers[place % receivers.len()], carries: Use::Parts });
            }
            let next = from + tp_size;
            if stage + 1 < num_stages && nodes[next as usize] != own {
                streams.push(Stream { from, to: next, carries: Use::Hidden });
            }
        }
    }
    streams
}

/// How to reach a worker; worker 0's token tells the model's own connections from strangers'.
struct Card {
    token: u64,
    port: u16,
    addresses: Vec<IpAddr>,
}

impl Card {
    fn to_bytes(&self) -> Vec<u8> {
        let addresses: Vec<String> = self.addresses.iter().map(IpAddr::to_string).collect();
        format!("{} {} {}", self.token, self.port, addresses.join(" ")).into_bytes()
    }

    fn from_bytes(bytes: &[u8]) -> Self {
        let text = String::from_utf8_lossy(bytes);
        let mut words = text.split(' ');
        let mut number = || words.next().and_then(|word| word.parse::<u64>().ok()).unwrap_or(0);
        let (token, port) = (number(), number() as u16);
        Self { token, port, addresses: words.filter_map(|word| word.parse().ok()).collect() }
    }
}

/// Opens `stream` to whoever `card` is of, on the first of its addresses that answers.
fn call(stream: Stream, card: &Card, own: &[IpAddr], token: u64, deadline: Instant) -> Result<TcpStream, DeviceError> {
    // One that this machine has as well, as of a container bridge, leads back here. Nearest first.
    let mut addresses: Vec<IpAddr> = card.addresses.iter().copied().filter(|address| !own.contains(address)).collect();
    addresses.sort_by_key(|&address| std::cmp::Reverse(own.iter().map(|&mine| common_bits(mine, address)).max()));
    let mut reasons = Vec::new();
    loop {
        for &address in &addresses {
            match greet(SocketAddr::new(address, card.port), stream, token) {
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

fn greet(address: SocketAddr, stream: Stream, token: u64) -> std::io::Result<TcpStream> {
    let mut socket = TcpStream::connect_timeout(&address, CONNECT_TIMEOUT)?;
    socket.set_nodelay(true)?;
    socket.set_read_timeout(Some(CONNECT_TIMEOUT))?;
    socket.write_all(&greeting(token, stream.from, stream.carries))?;
    let mut answer = [0; GREETING_BYTES];
    socket.read_exact(&mut answer)?;
    if answer != greeting(token, stream.to, stream.carries) {
        return Err(std::io::Error::other("another program answers there"));
    }
    socket.set_read_timeout(None)?;
    Ok(socket)
}

fn greeting(token: u64, worker: u32, carries: Use) -> [u8; GREETING_BYTES] {
    let mut bytes = [0; GREETING_BYTES];
    bytes[..8].copy_from_slice(&token.to_le_bytes());
    bytes[8..12].copy_from_slice(&worker.to_le_bytes());
    bytes[12] = carries as u8;
    bytes
}

/// Takes the `expected` streams in whatever order they come; strangers are sent away.
fn accept(
    listener: &TcpListener,
    token: u64,
    mut expected: Vec<Stream>,
    deadline: Instant,
) -> Result<Vec<(Stream, TcpStream)>, DeviceError> {
    let failed = |reason: String| DeviceError::Call { call: "accepting workers of other nodes".into(), reason };
    listener.set_nonblocking(true).map_err(|error| failed(error.to_string()))?;
    let mut accepted = Vec::new();
    while !expected.is_empty() {
        if let Ok((socket, _)) = listener.accept()
            && let Ok((stream, socket)) = answer(socket, token, &expected)
        {
            expected.retain(|&other| other != stream);
            accepted.push((stream, socket));
        } else if Instant::now() >= deadline {
            let missing: Vec<String> = expected.iter().map(|stream| stream.from.to_string()).collect();
            let reason = format!("no connection from worker {} in time; is a firewall between?", missing.join(", "));
            return Err(failed(reason));
        } else {
            thread::sleep(Duration::from_millis(1));
        }
    }
    Ok(accepted)
}

fn answer(mut socket: TcpStream, token: u64, expected: &[Stream]) -> std::io::Result<(Stream, TcpStream)> {
    socket.set_nonblocking(false)?;
    socket.set_nodelay(true)?;
    socket.set_read_timeout(Some(CONNECT_TIMEOUT))?;
    let mut bytes = [0; GREETING_BYTES];
    socket.read_exact(&mut bytes)?;
    let known = expected.iter().find(|stream| greeting(token, stream.from, stream.carries) == bytes);
    let stream = *known.ok_or_else(|| std::io::Error::other("a stranger"))?;
    socket.write_all(&greeting(token, stream.to, stream.carries))?;
    socket.set_read_timeout(None)?;
    Ok((stream, socket))
}

/// Leading bits that two addresses share: more, the nearer.
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
    fn one_node_needs_no_stream() {
        assert_eq!(streams(&[0; 4], 1), []);
        assert_eq!(streams(&[0; 4], 2), []);
    }

    #[test]
    fn parts_reach_every_other_node_once_and_receivers_take_turns() {
        // Three workers on node 0, two on node 1.
        let streams = streams(&[0, 0, 0, 1, 1], 1);
        let pairs: Vec<_> = streams.iter().map(|stream| (stream.from, stream.to)).collect();
        assert_eq!(pairs, [(0, 3), (1, 4), (2, 3), (3, 0), (4, 1)]);
    }

    #[test]
    fn activations_cross_nodes_only_between_stages_that_do_not_share_one() {
        let hidden = |from, to| Stream { from, to, carries: Use::Hidden };
        // Three stages of two workers: node 0 holds the first, node 1 the other two.
        assert_eq!(streams(&[0, 0, 1, 1, 1, 1], 3), [hidden(0, 2), hidden(1, 3)]);
    }
}
