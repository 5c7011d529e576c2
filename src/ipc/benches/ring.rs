//! Cost of a message between two processes (one way, round trip, in a stream) and within one thread.
//!
//! `cargo bench -p ipc`. The other process runs this binary, too: it answers every message with the time of its arrival.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput};
use ipc::{Prefix, Received, Ring, RingReceiver, RingSender};
use rustix::time::{ClockId, clock_gettime};

const LONG: Duration = Duration::from_secs(10);
const SPINS: [(&str, Duration); 2] = [("futex", Duration::ZERO), ("spin 50us", Duration::from_micros(50))];
/// Number of messages in a stream between two replies.
const STREAM: usize = 1000;

fn main() {
    if let Ok(prefix) = std::env::var("IPC_BENCH_ANSWER") {
        let spin = std::env::var("IPC_BENCH_SPIN_US").map_or(0, |us| us.parse().expect("microseconds"));
        return answer(&prefix.parse().expect("a prefix"), Duration::from_micros(spin));
    }
    let mut criterion = Criterion::default().configure_from_args().measurement_time(Duration::from_secs(3));
    SPINS.iter().for_each(|(name, spin)| between_processes(&mut criterion, name, *spin));
    within_a_thread(&mut criterion);
    criterion.final_summary();
}

/// The other process: replies to messages that begin with 1, and only receives the others.
fn answer(prefix: &Prefix, spin: Duration) {
    let mut requests = RingReceiver::open(prefix, "requests").expect("the parent made it");
    let mut replies = RingSender::open(prefix, "replies").expect("the parent made it");
    requests.set_spin(spin);
    let mut message = Vec::new();
    while let Ok(Received::Message) = requests.recv(&mut message, LONG) {
        if message[0] == 1 {
            replies.send(&now().as_nanos().to_ne_bytes(), LONG).expect("the parent reads");
        }
    }
}

/// The ends of two rings in this process, and the other process.
struct Peer {
    sender: RingSender,
    receiver: RingReceiver,
    reply: Vec<u8>,
    child: Child,
    _rings: [Ring; 2],
}

impl Peer {
    fn start(spin: Duration) -> Self {
        let prefix: Prefix = format!("ipcbench{}_", std::process::id()).parse().expect("a valid prefix");
        let rings = ["requests", "replies"].map(|ring| Ring::create(&prefix, ring, 1 << 20).expect("room in /dev/shm"));
        let (sender, mut receiver) = (rings[0].sender().expect("free"), rings[1].receiver().expect("free"));
        receiver.set_spin(spin);
        let child = Command::new(std::env::current_exe().expect("this binary"))
            .env("IPC_BENCH_ANSWER", prefix.as_str())
            .env("IPC_BENCH_SPIN_US", spin.as_micros().to_string())
            .stdout(Stdio::null())
            .spawn()
            .expect("this binary starts");
        Self { sender, receiver, reply: Vec::new(), child, _rings: rings }
    }

    /// Sends `message`, which begins with 1, and waits for the reply: the time of its arrival at the other process.
    fn round_trip(&mut self, message: &[u8]) -> Duration {
        self.sender.send(message, LONG).expect("room");
        assert_eq!(self.receiver.recv(&mut self.reply, LONG).expect("alive"), Received::Message);
        let nanoseconds = u128::from_ne_bytes(self.reply[..].try_into().expect("a time"));
        Duration::from_nanos(nanoseconds as u64)
    }
}

fn between_processes(criterion: &mut Criterion, name: &str, spin: Duration) {
    let mut peer = Peer::start(spin);
    let mut group = criterion.benchmark_group(format!("between two processes, {name}"));
    for bytes in [64, 4096, 65536] {
        let asking = vec![1; bytes];
        group.bench_function(BenchmarkId::new("one way", bytes), |bencher| {
            bencher.iter_custom(|num| {
                (0..num).map(|_| (now(), peer.round_trip(&asking))).map(|(sent, came)| came.saturating_sub(sent)).sum()
            });
        });
        group
            .bench_function(BenchmarkId::new("round trip", bytes), |bencher| bencher.iter(|| peer.round_trip(&asking)));
    }
    group.throughput(Throughput::Elements(STREAM as u64));
    for bytes in [64, 4096, 65536] {
        let (quiet, asking) = (vec![0; bytes], vec![1; bytes]);
        group.bench_function(BenchmarkId::new("stream", bytes), |bencher| {
            bencher.iter(|| {
                (1..STREAM).for_each(|_| peer.sender.send(&quiet, LONG).expect("room"));
                peer.round_trip(&asking)
            });
        });
    }
    group.finish();
    let Peer { sender, mut child, .. } = peer;
    drop(sender);
    child.wait().expect("it ends with the ring");
}

fn within_a_thread(criterion: &mut Criterion) {
    let prefix: Prefix = format!("ipcbench{}_", std::process::id()).parse().expect("a valid prefix");
    let ring = Ring::create(&prefix, "stream", 1 << 20).expect("room in /dev/shm");
    let mut sender = ring.sender().expect("free");
    let mut receiver = ring.receiver().expect("free");
    let mut group = criterion.benchmark_group("send and receive in one thread");
    for bytes in [64, 4096, 65536] {
        let (message, mut received) = (vec![7; bytes], Vec::new());
        group.throughput(Throughput::Bytes(bytes as u64));
        group.bench_function(BenchmarkId::from_parameter(bytes), |bencher| {
            bencher.iter(|| {
                sender.send(&message, LONG).expect("room");
                assert!(receiver.try_recv(&mut received).expect("whole"));
            });
        });
    }
}

/// Time since boot, which is the same clock in both processes.
fn now() -> Duration {
    let time = clock_gettime(ClockId::Monotonic);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
