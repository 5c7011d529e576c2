//! The workers of one model on several nodes, and the TCP connections between them.
//!
//! Workers connect directly instead of sending through MPI and the ranks. A part goes from a worker's memory to the
//! other node's shared memory with one thread wake-up; through the ranks there would be two more rings and two polled
//! MPI queues. A stream carries bytes in one direction, so two writers can never wait for each other.

use std::io;
use std::net::{IpAddr, TcpListener};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use ipc::Prefix;
use ops::DeviceError;

use super::handshake::{WorkerAddress, accept, addresses_towards, connect_to, listen, parsed, random_token, words};
use super::streams::{Stream, Streams, streams};
use crate::Exchange;

/// All workers of a model in order of stages, as seen by one of them.
#[derive(Clone)]
pub struct Peers {
    /// The number of this worker: its stage times the workers of a stage, plus its rank in its group.
    pub me: u32,
    /// Number of pipeline stages.
    pub num_stages: u32,
    /// `[workers]`: the node of each.
    pub nodes: Vec<u32>,
    /// Addresses where workers of other nodes may reach this one.
    pub addresses: Vec<IpAddr>,
    /// Exchange among all workers of the model.
    pub exchange: Arc<dyn Exchange>,
    /// Prefix of shared memory between stages on one node.
    pub prefix: Prefix,
    /// First part of the names in shared memory: the same for all workers.
    pub name: String,
    /// Maximum time to wait for another worker, at start and in a step.
    pub timeout: Duration,
}

impl Peers {
    /// Number of workers of a stage.
    pub(crate) fn tp_size(&self) -> u32 {
        self.nodes.len() as u32 / self.num_stages
    }

    /// This worker's stage.
    pub(crate) fn stage(&self) -> u32 {
        self.me / self.tp_size()
    }

    /// The nodes of this stage's workers, by rank in the group.
    pub(crate) fn stage_nodes(&self) -> &[u32] {
        let (first, size) = ((self.stage() * self.tp_size()) as usize, self.tp_size() as usize);
        &self.nodes[first..first + size]
    }

    /// Opens every stream that begins or ends here. Either all workers of the model call it, or none.
    pub(crate) fn connect(&self) -> Result<Streams, DeviceError> {
        let streams = streams(&self.nodes, self.num_stages);
        if streams.is_empty() {
            return Ok(Streams::default());
        }
        let failed = |what: &str, error: std::io::Error| DeviceError::Call {
            call: format!("{what} of worker {}", self.me),
            reason: error.to_string(),
        };
        let expected: Vec<Stream> = streams.iter().copied().filter(|stream| stream.to == self.me).collect();
        // First exchange all addresses, so that each worker listens only on addresses that its peers can reach.
        let addresses: Vec<Vec<IpAddr>> = self.gather(&self.addresses)?;
        let callers: Vec<IpAddr> = expected.iter().flat_map(|stream| addresses[stream.from as usize].clone()).collect();
        let listeners =
            listen(&addresses_towards(&callers, &self.addresses)).map_err(|error| failed("listening", error))?;
        let sockets = listeners.iter().map(TcpListener::local_addr).collect::<io::Result<Vec<_>>>();
        let token = random_token().map_err(|error| failed("drawing a token", error))?;
        let worker = WorkerAddress { token, sockets: sockets.map_err(|error| failed("listening", error))? };
        let worker_addresses: Vec<WorkerAddress> =
            self.exchange.gather(&worker.to_bytes())?.iter().map(|bytes| WorkerAddress::from_bytes(bytes)).collect();
        let token = worker_addresses[0].token;
        let deadline = Instant::now() + self.timeout;
        let accepting = thread::spawn(move || accept(&listeners, token, expected, deadline));
        let connect = |stream: Stream| {
            let worker = &worker_addresses[stream.to as usize];
            connect_to(stream, worker, &self.addresses, token, deadline).map(|socket| (stream, socket))
        };
        let outgoing: Result<Vec<_>, DeviceError> =
            streams.iter().copied().filter(|stream| stream.from == self.me).map(connect).collect();
        let incoming = accepting.join().unwrap_or_else(|_| {
            Err(DeviceError::Call { call: "accepting workers of other nodes".into(), reason: "it panicked".into() })
        });
        Ok(Streams { outgoing: outgoing?, incoming: incoming? })
    }

    /// Gathers what each worker passed.
    fn gather(&self, mine: &[IpAddr]) -> Result<Vec<Vec<IpAddr>>, DeviceError> {
        let gathered = self.exchange.gather(&words(mine))?;
        Ok(gathered.iter().map(|bytes| parsed(bytes)).collect())
    }
}
