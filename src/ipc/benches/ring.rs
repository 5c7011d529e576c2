//! Cost of a message: round trip between two processes, and throughput within one.
//!
//! `cargo bench -p ipc`. The other process is this binary again; it echoes every message.

use std::process::{Command, Stdio};
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput};
use ipc::{Prefix, Received, Ring, RingReceiver, RingSender};

const LONG: Duration = Duration::from_secs(10);
const SPINS: [(&str, Duration); 2] = [("futex", Duration::ZERO), ("spin 50us", Duration::from_micros(50))];

fn main() {
    if let Ok(prefix) = std::env::var("IPC_BENCH_ECHO") {
        let spin = std::env::var("IPC_BENCH_SPIN_US").map_or(0, |us| us.parse().expect("microseconds"));
        return echo(&prefix.parse().expect("a prefix"), Duration::from_micros(spin));
    }
    let mut criterion = Criterion::default().configure_from_args().measurement_time(Duration::from_secs(3));
    round_trip(&mut criterion);
    throughput(&mut criterion);
    criterion.final_summary();
}

fn echo(prefix: &Prefix, spin: Duration) {
    let mut requests = RingReceiver::open(prefix, "requests").expect("the parent made it");
    let mut replies = RingSender::open(prefix, "replies").expect("the parent made it");
    requests.set_spin(spin);
    let mut message = Vec::new();
    while let Ok(Received::Message) = requests.recv(&mut message, LONG) {
        replies.send(&message, LONG).expect("the parent reads");
    }
}

fn round_trip(criterion: &mut Criterion) {
    let prefix: Prefix = format!("ipcbench{}_", std::process::id()).parse().expect("a valid prefix");
    let mut group = criterion.benchmark_group("round trip between two processes");
    for (name, spin) in SPINS {
        let rings = ["requests", "replies"].map(|ring| Ring::create(&prefix, ring, 1 << 20).expect("room in /dev/shm"));
        let (mut sender, mut receiver) = (rings[0].sender().expect("free"), rings[1].receiver().expect("free"));
        receiver.set_spin(spin);
        let mut child = Command::new(std::env::current_exe().expect("this binary"))
            .env("IPC_BENCH_ECHO", prefix.as_str())
            .env("IPC_BENCH_SPIN_US", spin.as_micros().to_string())
            .stdout(Stdio::null())
            .spawn()
            .expect("this binary starts");
        for bytes in [64, 4096, 65536] {
            let (message, mut reply) = (vec![7; bytes], Vec::new());
            group.bench_function(BenchmarkId::new(name, bytes), |bencher| {
                bencher.iter(|| {
                    sender.send(&message, LONG).expect("room");
                    assert_eq!(receiver.recv(&mut reply, LONG).expect("alive"), Received::Message);
                });
            });
        }
        drop(sender);
        child.wait().expect("it ends with the ring");
    }
}

fn throughput(criterion: &mut Criterion) {
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
