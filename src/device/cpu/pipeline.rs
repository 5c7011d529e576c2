//! Pipeline stages on CPUs. Activations go from each worker to the worker of the same rank in the next stage, through a
//! ring on one node and through a TCP stream between nodes.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::mpsc::{self, SyncSender};
use std::thread;
use std::time::{Duration, Instant};

use ipc::{Prefix, Received, Ring, RingReceiver, RingSender};
use ops::{DeviceError, PipelineStage};

use super::peers::Peers;
use super::streams::Streams;

/// Maximum number of steps whose activations wait for the next stage; then this stage waits.
const MAX_WAITING: usize = 2;
/// Header of the activations of a step: its number, and the length in numbers.
const HEADER_BYTES: usize = 16;

/// A worker's stage, and its channels to the neighbouring stages.
pub(crate) struct Pipeline {
    pub(crate) stage: PipelineStage,
    from: Option<Receiver>,
    to: Option<Sender>,
    bytes: Vec<u8>,
    timeout: Duration,
}

enum Sender {
    Ring(RingSender),
    /// To the thread that writes to the stream.
    Stream(SyncSender<Vec<u8>>),
}

enum Receiver {
    Ring(RingReceiver),
    Stream(TcpStream),
}

impl Pipeline {
    /// Connects to the neighbouring stages. `max_floats` bounds the activations of a step.
    pub(crate) fn join(peers: &Peers, streams: Streams, max_floats: usize) -> Result<Self, DeviceError> {
        let stage = PipelineStage { index: peers.stage(), count: peers.num_stages };
        let (mut incoming, mut outgoing) = (streams.incoming, streams.outgoing);
        // A stage also waits for the stages before it to compute.
        let timeout = peers.timeout * (stage.count + 1);
        for (_, socket) in incoming.iter().chain(&outgoing) {
            let set = socket.set_read_timeout(Some(timeout)).and_then(|()| socket.set_write_timeout(Some(timeout)));
            set.map_err(|error| DeviceError::Call { call: "setting a timeout".into(), reason: error.to_string() })?;
        }
        // The receiver creates the ring, so an early sender waits for it.
        let from = match (stage.is_first(), incoming.pop()) {
            (true, _) => None,
            (false, Some((_, socket))) => Some(Receiver::Stream(socket)),
            (false, None) => Some(Receiver::Ring(make_ring(peers, max_floats)?)),
        };
        let to = match (stage.is_last(), outgoing.pop()) {
            (true, _) => None,
            (false, Some((_, socket))) => Some(Sender::Stream(write_behind(socket))),
            (false, None) => Some(Sender::Ring(await_ring(peers)?)),
        };
        Ok(Self { stage, from, to, bytes: Vec::new(), timeout })
    }

    /// Sends the activations of step `step` to the next stage.
    pub(crate) fn send(&mut self, step: u64, hidden: &[f32]) -> Result<(), DeviceError> {
        self.bytes.clear();
        self.bytes.extend_from_slice(&step.to_le_bytes());
        self.bytes.extend_from_slice(&(hidden.len() as u64).to_le_bytes());
        self.bytes.extend_from_slice(bytemuck::cast_slice(hidden));
        let failed =
            |reason: String| DeviceError::Call { call: "handing activations to the next stage".into(), reason };
        match self.to.as_mut().expect("the last stage hands nothing on") {
            Sender::Ring(ring) => ring.send(&self.bytes, self.timeout).map_err(|error| failed(error.to_string())),
            Sender::Stream(writer) => {
                let sent = writer.send(std::mem::take(&mut self.bytes));
                sent.map_err(|_| failed("its stream is closed".to_owned()))
            }
        }
    }

    /// Waits for the activations of step `step` from the previous stage.
    pub(crate) fn receive(&mut self, step: u64, hidden: &mut [f32]) -> Result<(), DeviceError> {
        let timeout = self.timeout;
        let failed = |reason: String| DeviceError::Call { call: "waiting for the stage before".into(), reason };
        match self.from.as_mut().expect("nothing comes before the first stage") {
            Receiver::Ring(ring) => {
                receive_from_ring(ring, &mut self.bytes, timeout).map_err(failed)?;
                check_header(&self.bytes, step, hidden.len()).map_err(failed)?;
                let bytes: &mut [u8] = bytemuck::cast_slice_mut(hidden);
                bytes.copy_from_slice(&self.bytes[HEADER_BYTES..]);
                Ok(())
            }
            Receiver::Stream(socket) => {
                let mut header = [0; HEADER_BYTES];
                let mut read = |bytes: &mut [u8]| socket.read_exact(bytes).map_err(|error| failed(error.to_string()));
                read(&mut header)?;
                check_header(&header, step, hidden.len()).map_err(failed)?;
                read(bytemuck::cast_slice_mut(hidden))
            }
        }
    }
}

fn ring_name(peers: &Peers, receiver: u32) -> String {
    format!("{}_pipe{receiver}", peers.name)
}

fn make_ring(peers: &Peers, max_floats: usize) -> Result<RingReceiver, DeviceError> {
    let bytes = MAX_WAITING * (HEADER_BYTES + max_floats * size_of::<f32>() + 8);
    let make = || -> Result<RingReceiver, ipc::IpcError> {
        let ring = Ring::create(&peers.prefix, &ring_name(peers, peers.me), bytes)?;
        let receiver = ring.receiver()?;
        // Kept until the process ends: the name must exist when the previous stage opens it.
        std::mem::forget(ring);
        Ok(receiver)
    };
    make().map_err(|error| DeviceError::Call { call: "making a stage's ring".into(), reason: error.to_string() })
}

fn await_ring(peers: &Peers) -> Result<RingSender, DeviceError> {
    let deadline = Instant::now() + peers.timeout;
    let name = ring_name(peers, peers.me + peers.tp_size());
    let open = |prefix: &Prefix| loop {
        match RingSender::open(prefix, &name) {
            Err(_) if Instant::now() < deadline => thread::sleep(Duration::from_millis(1)),
            other => break other,
        }
    };
    open(&peers.prefix)
        .map_err(|error| DeviceError::Call { call: "opening the next stage's ring".into(), reason: error.to_string() })
}

/// A thread that writes buffers to the stream, so that the stage continues while the network transfers its last step.
fn write_behind(mut socket: TcpStream) -> SyncSender<Vec<u8>> {
    let (sender, waiting) = mpsc::sync_channel::<Vec<u8>>(MAX_WAITING);
    thread::spawn(move || {
        for bytes in waiting {
            if socket.write_all(&bytes).is_err() {
                // The sender notices that the receiver is gone.
                return;
            }
        }
    });
    sender
}

fn receive_from_ring(ring: &mut RingReceiver, bytes: &mut Vec<u8>, timeout: Duration) -> Result<(), String> {
    let deadline = Instant::now() + timeout;
    loop {
        match ring.recv(bytes, deadline.saturating_duration_since(Instant::now())) {
            Ok(Received::Message) => return Ok(()),
            Ok(_) if Instant::now() >= deadline => return Err(format!("nothing came within {timeout:?}")),
            Ok(_) => {}
            Err(error) => return Err(error.to_string()),
        }
    }
}

fn check_header(bytes: &[u8], step: u64, len: usize) -> Result<(), String> {
    let word = |at: usize| bytes.get(at..at + 8).map(|word| u64::from_le_bytes(word.try_into().expect("eight bytes")));
    if word(0) != Some(step) || word(8) != Some(len as u64) {
        return Err(format!("{:?} numbers of step {:?} came, expected {len} of step {step}", word(8), word(0)));
    }
    Ok(())
}
