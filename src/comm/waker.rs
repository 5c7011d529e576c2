//! Wakes the MPI threads of other ranks. MPI cannot wait without using a whole core, so an idle thread asks it seldom. A
//! sender therefore announces a message after a pause with a datagram, and the thread that waits for datagrams asks MPI at once.
//!
//! Datagrams only save time. They have no content but the number of the receiver, and one that is lost or forged delays or hastens
//! a question to MPI.

use std::cell::Cell;
use std::collections::HashSet;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::mpi::Mpi;
use crate::node::Node;

/// Most time between two questions to MPI.
const MAX_SLEEP: Duration = Duration::from_millis(250);

/// A rank asks MPI often for this time after a message, so a message that follows sooner is not announced.
pub(crate) const AWAKE: Duration = Duration::from_millis(5);

/// Announced are messages this long after the last one to their rank: well before it stops asking often.
const ANNOUNCE_AFTER: Duration = Duration::from_millis(2);

/// Bytes that each rank gives to all: its port and its number.
const ADDRESS_BYTES: usize = 10;

/// The MPI thread's own socket. Other threads of this rank use it to wake their thread.
pub(crate) struct Waker {
    socket: UdpSocket,
    /// Datagrams with another number are ignored.
    number: [u8; 8],
    own: SocketAddr,
    /// Whether the MPI thread waits for datagrams.
    is_asleep: AtomicBool,
    /// Number of calls of [`Waker::wake`].
    num_calls: AtomicU64,
}

impl Waker {
    /// A socket that other nodes reach if there are any.
    pub(crate) fn new(is_one_node: bool) -> std::io::Result<Self> {
        let address = if is_one_node { Ipv4Addr::LOCALHOST } else { Ipv4Addr::UNSPECIFIED };
        let socket = UdpSocket::bind((address, 0))?;
        socket.set_read_timeout(Some(MAX_SLEEP))?;
        let own = SocketAddr::from((Ipv4Addr::LOCALHOST, socket.local_addr()?.port()));
        let number = RandomState::new().build_hasher().finish().to_le_bytes();
        Ok(Self { socket, number, own, is_asleep: AtomicBool::new(false), num_calls: AtomicU64::new(0) })
    }

    /// Wakes this rank's own MPI thread, if it waits for datagrams.
    pub(crate) fn wake(&self) {
        self.num_calls.fetch_add(1, Ordering::SeqCst);
        if self.is_asleep.load(Ordering::SeqCst) {
            let _ = self.socket.send_to(&self.number, self.own);
        }
    }

    /// Number of calls of [`Waker::wake`] so far.
    pub(crate) fn num_calls(&self) -> u64 {
        self.num_calls.load(Ordering::SeqCst)
    }

    /// Waits for a datagram, at most [`MAX_SLEEP`]. Returns at once if [`Waker::wake`] was called since `num_calls` were counted.
    /// Returns whether a message was announced.
    pub(crate) fn sleep(&self, num_calls: u64) -> bool {
        self.is_asleep.store(true, Ordering::SeqCst);
        let mut bytes = [0; 9];
        let is_announced =
            self.num_calls() == num_calls && self.socket.recv(&mut bytes).is_ok_and(|len| bytes[..len] == self.number);
        self.is_asleep.store(false, Ordering::SeqCst);
        is_announced
    }
}

/// Announces messages to other ranks, and waits for announcements.
pub(crate) struct Announcer {
    waker: Arc<Waker>,
    peers: Vec<Peer>,
}

struct Peer {
    address: SocketAddr,
    number: [u8; 8],
    last_sent: Cell<Option<Instant>>,
}

impl Announcer {
    /// Exchanges addresses with all ranks, and tries them. Returns `None` on every rank if a rank has no address or datagrams do
    /// not arrive, for example because of a firewall: then all ask MPI more often.
    pub(crate) fn start(mpi: &Mpi, nodes: &[Node]) -> Option<Self> {
        let waker = Waker::new(nodes.iter().all(|node| *node == nodes[0]));
        let own = waker.as_ref().map_or([0; ADDRESS_BYTES], |waker| address_bytes(waker.own.port(), waker.number));
        let addresses = mpi.allgather(&own);
        let local = &nodes[mpi.rank() as usize];
        let peers = addresses.iter().zip(nodes).map(|(bytes, node)| Peer::new(bytes, node, node == local));
        let announcer = waker.ok().zip(peers.collect::<Option<Vec<_>>>());
        let announcer = announcer.map(|(waker, peers)| Self { waker: Arc::new(waker), peers });
        let announcer = agreed(mpi, announcer)?;
        announcer.send_probes(mpi.rank() as usize, nodes);
        let have_all_sent = agreed(mpi, Some(()));
        let is_reached = announcer.receive_probes(num_probes(mpi.rank() as usize, nodes));
        agreed(mpi, have_all_sent.filter(|()| is_reached)).map(|()| announcer)
    }

    /// Sends the datagrams that show whether a network lets them through: from rank 0 to all, and from one rank of each other
    /// node to rank 0. Nearly all messages are between rank 0 and another.
    fn send_probes(&self, rank: usize, nodes: &[Node]) {
        let to: Vec<usize> = match rank {
            0 => (1..nodes.len()).collect(),
            _ if is_first_of_other_node(rank, nodes) => vec![0],
            _ => vec![],
        };
        for peer in to.into_iter().map(|to| &self.peers[to]) {
            let _ = self.waker.socket.send_to(&peer.number, peer.address);
        }
    }

    /// Whether datagrams of `count` different ranks arrive.
    fn receive_probes(&self, count: usize) -> bool {
        let (mut from, mut bytes) = (HashSet::new(), [0; 9]);
        while from.len() < count {
            match self.waker.socket.recv_from(&mut bytes) {
                Ok((len, address)) if bytes[..len] == self.waker.number => drop(from.insert(address)),
                Ok(_) => {}
                Err(_) => return false, // None came for as long as a rank sleeps at most.
            }
        }
        true
    }

    /// The waker of this rank's own MPI thread.
    pub(crate) fn waker(&self) -> Arc<Waker> {
        Arc::clone(&self.waker)
    }

    /// Number of calls of [`Waker::wake`] so far.
    pub(crate) fn num_calls(&self) -> u64 {
        self.waker.num_calls()
    }

    /// Waits for an announcement, as [`Waker::sleep`].
    pub(crate) fn sleep(&self, num_calls: u64) -> bool {
        self.waker.sleep(num_calls)
    }

    /// Announces a message to `rank` if it may have stopped to ask MPI often.
    pub(crate) fn announce(&self, rank: u32) {
        let peer = &self.peers[rank as usize];
        let last = peer.last_sent.replace(Some(Instant::now()));
        if last.is_none_or(|last| last.elapsed() > ANNOUNCE_AFTER) {
            let _ = self.waker.socket.send_to(&peer.number, peer.address);
        }
    }
}

impl Peer {
    fn new(bytes: &[u8], node: &Node, is_local: bool) -> Option<Self> {
        let (port, number) = bytes.split_first_chunk::<2>()?;
        let port = u16::from_le_bytes(*port);
        let ip = match is_local {
            true => IpAddr::V4(Ipv4Addr::LOCALHOST),
            false => {
                (node.hostname.as_str(), port).to_socket_addrs().ok()?.map(|found| found.ip()).find(IpAddr::is_ipv4)?
            }
        };
        let address = (port != 0).then_some(SocketAddr::new(ip, port))?;
        Some(Self { address, number: number.try_into().ok()?, last_sent: Cell::new(None) })
    }
}

/// `value` if every rank has one.
fn agreed<T>(mpi: &Mpi, value: Option<T>) -> Option<T> {
    let all = mpi.allgather(&[u8::from(value.is_some())]);
    value.filter(|_| all.iter().all(|bytes| bytes == &[1]))
}

/// Whether `rank` is the first of its node, and this node is not that of rank 0.
fn is_first_of_other_node(rank: usize, nodes: &[Node]) -> bool {
    nodes.iter().position(|node| *node == nodes[rank]) == Some(rank) && rank > 0
}

/// Number of ranks from which `rank` gets a probe.
fn num_probes(rank: usize, nodes: &[Node]) -> usize {
    if rank > 0 { 1 } else { (1..nodes.len()).filter(|&other| is_first_of_other_node(other, nodes)).count() }
}

fn address_bytes(port: u16, number: [u8; 8]) -> [u8; ADDRESS_BYTES] {
    let mut bytes = [0; ADDRESS_BYTES];
    bytes[..2].copy_from_slice(&port.to_le_bytes());
    bytes[2..].copy_from_slice(&number);
    bytes
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn a_thread_that_waits_is_woken_and_one_that_does_not_costs_no_datagram() {
        let waker = Arc::new(Waker::new(true).unwrap());
        let before = waker.num_calls();
        waker.wake();
        let started = Instant::now();
        assert!(!waker.sleep(before), "a call came before the wait");
        assert!(started.elapsed() < MAX_SLEEP / 2, "and it was not lost");
        let (other, before) = (Arc::clone(&waker), waker.num_calls());
        let thread = thread::spawn(move || other.sleep(before));
        while !waker.is_asleep.load(Ordering::SeqCst) {
            thread::yield_now();
        }
        waker.wake();
        assert!(thread.join().unwrap());
    }

    #[test]
    fn a_datagram_without_the_number_announces_nothing() {
        let waker = Waker::new(true).unwrap();
        UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().send_to(b"anything", waker.own).unwrap();
        assert!(!waker.sleep(waker.num_calls()));
    }

    #[test]
    fn each_rank_gets_a_probe_of_rank_0_and_rank_0_one_of_each_other_node() {
        let node = |name: &str| {
            let mut bytes = name.as_bytes().to_vec();
            bytes.resize(Node::current().to_bytes().len(), 0);
            Node::from_bytes(&bytes)
        };
        let nodes = ["a", "a", "b", "b", "c"].map(node);
        assert_eq!([0, 1, 2, 3, 4].map(|rank| num_probes(rank, &nodes)), [2, 1, 1, 1, 1]);
        assert_eq!([0, 1, 2, 3, 4].map(|rank| is_first_of_other_node(rank, &nodes)), [false, false, true, false, true]);
        assert_eq!(num_probes(0, &nodes[..2]), 0);
    }

    #[test]
    fn probes_that_do_not_arrive_are_noticed() {
        let waker = Arc::new(Waker::new(true).unwrap());
        let peers = vec![Peer { address: waker.own, number: waker.number, last_sent: Cell::new(None) }];
        let announcer = Announcer { waker, peers };
        assert!(announcer.receive_probes(0) && !announcer.receive_probes(1));
        announcer.announce(0);
        assert!(announcer.receive_probes(1));
    }

    #[test]
    fn a_rank_without_a_port_has_no_address() {
        let node = Node::current();
        assert!(Peer::new(&address_bytes(0, [1; 8]), &node, true).is_none());
        let peer = Peer::new(&address_bytes(513, [1; 8]), &node, true).unwrap();
        assert_eq!((peer.address.to_string(), peer.number), ("127.0.0.1:513".to_owned(), [1; 8]));
    }
}
