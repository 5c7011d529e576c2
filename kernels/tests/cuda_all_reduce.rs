//! Sums through peer memory over a group of processes with one GPU each.

mod gpu;

use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};

use gpu::{Random, assert_close, floats, poisoned};
use half::bf16;
use kernels::cuda::all_reduce::{PeerBuffer, PeerGroup, PeerHandle, Shots};
use kernels::cuda::linear_chain::{self, AddNorm, ChainScratch, Link, LinkEnd, LinkWeight, linear_chain};
use kernels::cuda::owner_norm::{OwnerNorm, SharedBuffer, owner_norm, owner_rows};
use kernels::cuda::skinny_gemm::LinearWeight;
use kernels::cuda::{CudaError, DeviceBuffer, Event, Gpu, Queue, Span};
use kernels::reference;

const FOLDER: &str = "ALL_REDUCE_TEST_FOLDER";
const RANK: &str = "ALL_REDUCE_TEST_RANK";
const RANKS: &str = "ALL_REDUCE_TEST_RANKS";
/// Set if times are meaningless, for example under a sanitizer.
const UNTIMED: &str = "ALL_REDUCE_TEST_UNTIMED";
const MAX_ROWS: usize = 128;
const MAX_COLS: usize = 8192;
/// For sums by owners.
const MANY_ROWS: usize = 16384;
const FUSED_ROWS: usize = linear_chain::MAX_ROWS;
const FUSED_COLS: usize = 4096;
const PATIENCE_NS: u64 = 5_000_000_000;

#[test]
fn every_rank_of_a_group_ends_with_the_same_sum_residual_and_norm() {
    let gpus = Gpu::count().unwrap_or(0);
    if gpus < 2 {
        println!("skipped: {gpus} CUDA devices, 2 are needed");
        return;
    }
    for ranks in [2, 4, 8].into_iter().filter(|&ranks| ranks <= gpus) {
        let folder = std::env::temp_dir().join(format!("all_reduce_{}_{ranks}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let workers: Vec<Child> = (0..ranks).map(|rank| start_worker(&folder, rank, ranks)).collect();
        let ended: Vec<bool> = workers.into_iter().map(|mut w| w.wait().expect("a worker").success()).collect();
        std::fs::remove_dir_all(&folder).expect("the folder");
        assert!(ended.iter().all(|&ok| ok), "{ranks} ranks ended with success: {ended:?}");
    }
}

fn start_worker(folder: &Path, rank: usize, ranks: usize) -> Child {
    Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "a_worker_of_the_group", "--nocapture"])
        .env(FOLDER, folder)
        .env(RANK, rank.to_string())
        .env(RANKS, ranks.to_string())
        .spawn()
        .expect("a worker starts")
}

/// The worker of each process of the group; returns at once in the test runner.
#[test]
fn a_worker_of_the_group() {
    let Ok(folder) = std::env::var(FOLDER) else { return };
    let number = |name: &str| std::env::var(name).expect("set with the folder").parse::<usize>().expect("a number");
    let worker = Worker::new(PathBuf::from(folder), number(RANK), number(RANKS));
    for (rows, cols) in [(1, 4096), (3, 8), (2, 520), (7, 5120), (64, 4096), (128, 8192), (1, 8192)] {
        for shots in [Shots::One, Shots::Two] {
            for round in 0..3 {
                worker.check(rows, cols, shots, round);
                worker.check_gather(rows, cols, round);
            }
        }
    }
    if linear_chain::has_kernel(&worker.gpu) {
        let scratch = ChainScratch::new(&worker.gpu).expect("memory");
        let fused = worker.open("fused", FUSED_ROWS, FUSED_COLS);
        for (rows, n, k) in [
            (1, 4096, 1024),
            (3, 4096, 2752),
            (8, 64, 64),
            (7, 208, 136),
            (9, 4096, 1024),
            (1, 64, 1032),
            (16, 520, 1024),
        ] {
            (0..3).for_each(|round| worker.check_chain(&fused, &scratch, rows, n, k, round));
        }
        assert_eq!(fused.missing_rank(), None);
    }
    let owners = worker.owners();
    for (rows, cols) in [(1, 4096), (3, 8), (64, 4096), (130, 520), (1, 8192), (1100, 4096), (MANY_ROWS, 40)] {
        for round in 0..3 {
            worker.check_owner(&owners, rows, cols, round);
            worker.check_owner_rows(&owners, rows, cols, round);
        }
    }
    let is_timed = std::env::var_os(UNTIMED).is_none();
    if is_timed {
        worker.time_owners(&owners);
    }
    assert_eq!(owners.flags.missing_rank(), None);
    assert_eq!(worker.group.missing_rank(), None);
    if is_timed {
        worker.time();
    }
    worker.meet("end");
}

struct Owners {
    flags: PeerGroup,
    y: SharedBuffer,
    partial: SharedBuffer,
    _buffers: [DeviceBuffer; 2],
}

struct Worker {
    folder: PathBuf,
    rank: usize,
    ranks: usize,
    gpu: Arc<Gpu>,
    queue: Queue,
    group: PeerGroup,
}

impl Worker {
    fn new(folder: PathBuf, rank: usize, ranks: usize) -> Self {
        let gpu = Gpu::open(rank).expect("a GPU for each rank");
        let queue = Queue::new(&gpu).expect("a queue");
        let group = open(&gpu, &folder, "handle", rank, ranks, [MAX_ROWS, MAX_COLS]);
        let worker = Self { folder, rank, ranks, gpu, queue, group };
        worker.meet("start");
        worker
    }

    /// Opens another exchange buffer on every rank.
    fn open(&self, name: &str, rows: usize, cols: usize) -> PeerGroup {
        let group = open(&self.gpu, &self.folder, name, self.rank, self.ranks, [rows, cols]);
        self.meet(&format!("{name} open"));
        group
    }

    fn owners(&self) -> Owners {
        let flags = PeerBuffer::for_flags(&self.gpu, self.ranks, MANY_ROWS, MAX_COLS).expect("a buffer");
        let flags = map(&self.gpu, &self.folder, "flags", self.rank, self.ranks, flags);
        let buffer = || DeviceBuffer::with_count::<bf16>(&self.gpu, MANY_ROWS * 4096).expect("memory");
        let buffers = [buffer(), buffer()];
        let [y, partial] = [self.share("y", &buffers[0]), self.share("partial", &buffers[1])];
        Owners { flags, y, partial, _buffers: buffers }
    }

    fn meet(&self, name: &str) {
        publish(&self.folder, name, self.rank, &[]);
        (0..self.ranks).for_each(|r| drop(await_bytes(&self.folder, name, r)));
    }

    /// Checks this rank's result. Every rank can compute all partial results. The results must be equal to the last
    /// bit, because they are functions of the same fp32 sum in the same order.
    fn check(&self, rows: usize, cols: usize, shots: Shots, round: u64) {
        let count = rows * cols;
        let seed = (rows * 31 + cols) as u64 * 7 + round;
        let partials: Vec<Vec<bf16>> =
            (0..self.ranks).map(|r| Random::new(seed * 100 + r as u64).bf16s(count, 1.0)).collect();
        let mut random = Random::new(seed * 100 + 99);
        let (residual, weight) = (random.bf16s(count, 1.0), random.bf16s(cols, 1.0));
        let upload = |values: &[bf16]| DeviceBuffer::from_slice(&self.gpu, values).expect("memory");
        let (p, r, w) = (upload(&partials[self.rank]), upload(&residual), upload(&weight));
        let sum = poisoned::<bf16>(&self.gpu, &self.queue, count);
        let y = poisoned::<bf16>(&self.gpu, &self.queue, count);
        self.queue.wait().expect("fills");
        let group = &self.group;
        group.all_reduce(&self.queue, sum.span(), p.span(), rows, cols, shots).expect("a launch");
        group
            .all_reduce_add_norm(&self.queue, y.span(), r.span(), p.span(), w.span(), rows, cols, 1e-5, shots)
            .expect("a launch");
        self.queue.wait().expect("the kernels run");

        let read = |buffer: &DeviceBuffer| floats(&buffer.span().read::<bf16>(count).expect("a copy"));
        let what = |part: &str| format!("{part}, rank {} of {}, {rows} x {cols}, {shots:?}", self.rank, self.ranks);
        let exact: Vec<f32> = (0..count).map(|i| partials.iter().fold(0.0f32, |sum, p| sum + p[i].to_f32())).collect();
        let rounded: Vec<f32> = exact.iter().map(|&x| bf16::from_f32(x).to_f32()).collect();
        assert_close(&what("sum"), &read(&sum), &rounded, 0.0, 0.0);
        let joined = if shots == Shots::Two { &rounded } else { &exact };
        let joined: Vec<f32> = joined.iter().zip(&residual).map(|(s, r)| s + r.to_f32()).collect();
        let kept: Vec<f32> = joined.iter().map(|&x| bf16::from_f32(x).to_f32()).collect();
        assert_close(&what("residual"), &read(&r), &kept, 0.0, 0.0);
        let normed: Vec<f32> = joined.chunks(cols).flat_map(|row| norm(row, &weight)).collect();
        assert_close(&what("norm"), &read(&y), &normed, 1.0 / 128.0, 1e-6);
    }

    /// A product whose K is divided among the ranks, added to the residual and multiplied by the norm's weight, with
    /// the squares for the norm.
    fn check_chain(&self, group: &PeerGroup, scratch: &ChainScratch, rows: usize, n: usize, k: usize, round: u64) {
        let seed = (rows * 13 + n + k) as u64 * 7 + round;
        let of_rank = |r: usize| {
            let mut random = Random::new(seed * 100 + r as u64);
            (random.bf16s(rows * k, 1.0), random.bf16s(n * k, 0.05))
        };
        let mut random = Random::new(seed * 100 + 99);
        let (residual, gain) = (random.bf16s(rows * n, 1.0), random.bf16s(n, 1.0));
        let upload = |values: &[bf16]| DeviceBuffer::from_slice(&self.gpu, values).expect("memory");
        let (x, weight) = of_rank(self.rank);
        let (x, weight, r, g) = (upload(&x), upload(&weight), upload(&residual), upload(&gain));
        let y = poisoned::<bf16>(&self.gpu, &self.queue, rows * n);
        let slices = linear_chain::norm_slices(n);
        let squares = poisoned::<f32>(&self.gpu, &self.queue, rows * slices);
        self.queue.wait().expect("fills");
        let linear = LinkWeight::Plain(LinearWeight { weight: weight.span(), bias: Span::NULL, n, k });
        let add = AddNorm { residual: r.span(), gain: g.span(), squares: squares.span() };
        let link = Link { y: y.span(), pitch: n, x: x.span(), linear, end: LinkEnd::AddNorm(add), scale: None };
        linear_chain(&self.queue, &[link], rows, scratch, Some(group)).expect("a launch");
        self.queue.wait().expect("the kernel runs");

        let mut sums: Vec<f32> = residual.iter().map(|x| x.to_f32()).collect();
        for r in 0..self.ranks {
            let (x, weight) = of_rank(r);
            let part = reference::linear(&floats(&x), &floats(&weight), None, k);
            sums.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
        }
        let what = |part: &str| format!("{part}, rank {} of {}, {rows} x {n} x {k}", self.rank, self.ranks);
        // Each rank's part is rounded to bf16, with a relative error of at most 2^-8; it is at most 5 sqrt(K) 0.05.
        let slack = self.ranks as f32 * 2.0f32.powi(-8) * 5.0 * (k as f32).sqrt() * 0.05;
        let kept = floats(&r.span().read::<bf16>(rows * n).expect("a copy"));
        assert_close(&what("residual"), &kept, &sums, 2.0f32.powi(-8), slack);
        let gained: Vec<f32> = sums.iter().enumerate().map(|(i, sum)| sum * gain[i % n].to_f32()).collect();
        assert_close(
            &what("y"),
            &floats(&y.span().read::<bf16>(rows * n).expect("a copy")),
            &gained,
            1.0 / 128.0,
            4.0 * slack, // The weight is rarely above 4.
        );
        let found = squares.span().read::<f32>(rows * slices).expect("a copy");
        let found: Vec<f32> = found.chunks(slices).map(|row| row.iter().sum()).collect();
        let expected: Vec<f32> = sums.chunks(n).map(|row| row.iter().map(|x| x * x).sum()).collect();
        assert_close(&what("squares"), &found, &expected, 1.0 / 64.0, slack);
    }

    /// Shares an activation buffer of every rank.
    fn share(&self, name: &str, buffer: &DeviceBuffer) -> SharedBuffer {
        publish(&self.folder, name, self.rank, &SharedBuffer::handle(buffer).expect("a handle"));
        let handles = handles(&self.folder, name, self.ranks);
        let shared = SharedBuffer::new(buffer, self.rank, &handles).expect("peers can be mapped");
        self.meet(&format!("{name} mapped"));
        shared
    }

    /// Sum, add and norm by the rows' owners: every rank gets all of `y`, and keeps the residual of its own rows.
    fn check_owner(&self, owners: &Owners, rows: usize, cols: usize, round: u64) {
        let count = rows * cols;
        let seed = (rows * 37 + cols) as u64 * 7 + round;
        let partials: Vec<Vec<bf16>> =
            (0..self.ranks).map(|r| Random::new(seed * 100 + r as u64).bf16s(count, 1.0)).collect();
        let mut random = Random::new(seed * 100 + 99);
        let (residual, weight) = (random.bf16s(count, 1.0), random.bf16s(cols, 1.0));
        let upload = |values: &[bf16]| DeviceBuffer::from_slice(&self.gpu, values).expect("memory");
        let (r, w) = (upload(&residual), upload(&weight));
        let poison = vec![bf16::from_f32(f32::NAN); count];
        owners.y.own().elements::<bf16>(0, count).write(&poison).expect("a copy");
        owners.partial.own().elements::<bf16>(0, count).write(&partials[self.rank]).expect("a copy");
        let x = OwnerNorm { y: &owners.y, partial: &owners.partial, residual: r.span(), weight: w.span(), eps: 1e-5 };
        // No rank may write rows before all outputs are poisoned. In a device, earlier kernels of the stream guarantee
        // this order.
        self.meet(&format!("owner {rows} {cols} {round}"));
        owner_norm(&self.queue, &owners.flags, x, rows, cols).expect("a launch");
        self.queue.wait().expect("the kernel runs");

        let read = |span: Span| floats(&span.elements::<bf16>(0, count).read::<bf16>(count).expect("a copy"));
        let what = |part: &str| format!("{part} by owners, rank {} of {}, {rows} x {cols}", self.rank, self.ranks);
        let sums: Vec<f32> = (0..count)
            .map(|i| partials.iter().fold(0.0f32, |sum, p| sum + p[i].to_f32()) + residual[i].to_f32())
            .collect();
        let normed: Vec<f32> = sums.chunks(cols).flat_map(|row| norm(row, &weight)).collect();
        assert_close(&what("norm"), &read(owners.y.own()), &normed, 1.0 / 128.0, 1e-6);
        let is_own = |i: usize| i / cols % self.ranks == self.rank;
        let kept: Vec<f32> = (0..count)
            .map(|i| if is_own(i) { bf16::from_f32(sums[i]).to_f32() } else { residual[i].to_f32() })
            .collect();
        assert_close(&what("residual"), &read(r.span()), &kept, 0.0, 0.0);
    }

    /// Every rank must have every row of its owner, bit for bit.
    fn check_owner_rows(&self, owners: &Owners, rows: usize, cols: usize, round: u64) {
        let count = rows * cols;
        let expected = Random::new((rows * 41 + cols) as u64 * 7 + round).bf16s(count, 1.0);
        let is_own = |i: usize| i / cols % self.ranks == self.rank;
        let own: Vec<bf16> =
            (0..count).map(|i| if is_own(i) { expected[i] } else { bf16::from_f32(f32::NAN) }).collect();
        let y = owners.y.own().elements::<bf16>(0, count);
        y.write(&own).expect("a copy");
        self.meet(&format!("owner rows {rows} {cols} {round}"));
        owner_rows(&self.queue, &owners.flags, &owners.y, rows, cols).expect("a launch");
        self.queue.wait().expect("the kernel runs");
        let found = y.read::<u16>(count).expect("a copy");
        let expected: Vec<u16> = expected.iter().map(|x| x.to_bits()).collect();
        assert!(found == expected, "rows of owners, {rows} x {cols}, rank {} of {}", self.rank, self.ranks);
    }

    /// Prints microseconds of a sum with add and norm by owners, measured with a graph of twenty.
    fn time_owners(&self, owners: &Owners) {
        for rows in [8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384] {
            let cols = 4096;
            let residual = DeviceBuffer::with_count::<bf16>(&self.gpu, rows * cols).expect("memory");
            let weight = DeviceBuffer::from_slice(&self.gpu, &vec![bf16::ONE; cols]).expect("memory");
            let call = || {
                let (residual, weight) = (residual.span(), weight.span());
                let x = OwnerNorm { y: &owners.y, partial: &owners.partial, residual, weight, eps: 1e-5 };
                owner_norm(&self.queue, &owners.flags, x, rows, cols)
            };
            let us = self.time_graph(&format!("owners{rows}"), 20, call);
            if self.rank == 0 {
                println!("{} ranks, {:>6} KiB, by owners: {us:8.2} us", self.ranks, rows * cols * 2 / 1024);
            }
        }
    }

    /// Median microseconds of a call, measured with a graph of `calls`.
    fn time_graph(&self, name: &str, calls: usize, call: impl Fn() -> Result<(), CudaError>) -> f32 {
        let graph = self.queue.capture(|| (0..calls).try_for_each(|_| call())).expect("a graph");
        let (begin, end) = (Event::new(true).expect("an event"), Event::new(true).expect("an event"));
        let mut times: Vec<f32> = (0..7)
            .map(|i| {
                self.meet(&format!("{name} {i}"));
                begin.record(&self.queue).expect("a mark");
                self.queue.replay(&graph).expect("a replay");
                end.record(&self.queue).expect("a mark");
                self.queue.wait().expect("the graph runs");
                end.ms_since(&begin).expect("a time") * 1e3 / calls as f32
            })
            .collect();
        times.sort_by(f32::total_cmp);
        times[3]
    }

    /// Every rank must have every rank's part, bit for bit.
    fn check_gather(&self, rows: usize, cols: usize, round: u64) {
        let count = rows * cols;
        let seed = (rows * 17 + cols) as u64 * 11 + round;
        let parts: Vec<Vec<bf16>> =
            (0..self.ranks).map(|r| Random::new(seed * 100 + r as u64).bf16s(count, 1.0)).collect();
        let z = poisoned::<bf16>(&self.gpu, &self.queue, self.ranks * count);
        self.queue.wait().expect("the fill");
        z.span().elements::<bf16>(self.rank * count, count).write(&parts[self.rank]).expect("a copy");
        self.group.all_gather(&self.queue, z.span(), rows, cols * 2).expect("a launch");
        self.queue.wait().expect("the kernel runs");
        let found = z.span().read::<u16>(self.ranks * count).expect("a copy");
        let expected: Vec<u16> = parts.iter().flatten().map(|x| x.to_bits()).collect();
        assert!(found == expected, "gather of {rows} x {cols}, rank {} of {}", self.rank, self.ranks);
    }

    /// Prints microseconds of a sum with add and norm, measured with a graph of a hundred.
    fn time(&self) {
        for (rows, cols) in
            [(1, 4096), (4, 4096), (16, 4096), (64, 4096), (128, 4096), (1, 8192), (32, 8192), (128, 8192)]
        {
            for shots in [Shots::One, Shots::Two] {
                let buffers: Vec<DeviceBuffer> = (0..3)
                    .map(|_| DeviceBuffer::from_slice(&self.gpu, &vec![bf16::ONE; rows * cols]).expect("memory"))
                    .collect();
                let weight = DeviceBuffer::from_slice(&self.gpu, &vec![bf16::ONE; cols]).expect("memory");
                let spans: Vec<_> = buffers.iter().map(DeviceBuffer::span).collect();
                let call = || {
                    let (y, residual, partial) = (spans[0], spans[1], spans[2]);
                    let group = &self.group;
                    group.all_reduce_add_norm(&self.queue, y, residual, partial, weight.span(), rows, cols, 1e-5, shots)
                };
                let us = self.time_graph(&format!("time{rows}x{cols}{shots:?}"), 100, call);
                if self.rank == 0 {
                    println!("{} ranks, {:>5} KiB, {shots:?} shot: {:6.2} us", self.ranks, rows * cols * 2 / 1024, us);
                }
            }
        }
    }
}

/// This rank's exchange buffer with those of the others mapped. Their handles are exchanged through files named after
/// `name`.
fn open(gpu: &Arc<Gpu>, folder: &Path, name: &str, rank: usize, ranks: usize, [rows, cols]: [usize; 2]) -> PeerGroup {
    map(gpu, folder, name, rank, ranks, PeerBuffer::new(gpu, ranks, rows, cols).expect("a buffer"))
}

fn map(gpu: &Arc<Gpu>, folder: &Path, name: &str, rank: usize, ranks: usize, own: PeerBuffer) -> PeerGroup {
    publish(folder, name, rank, &own.handle().expect("a handle"));
    PeerGroup::new(gpu, own, rank, &handles(folder, name, ranks), PATIENCE_NS).expect("peers can be mapped")
}

fn handles(folder: &Path, name: &str, ranks: usize) -> Vec<PeerHandle> {
    (0..ranks).map(|r| await_bytes(folder, name, r).try_into().expect("a handle has 64 bytes")).collect()
}

fn norm(row: &[f32], weight: &[bf16]) -> Vec<f32> {
    let mean = row.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>() / row.len() as f64;
    let scale = 1.0 / (mean + 1e-5).sqrt() as f32;
    row.iter().zip(weight).map(|(x, w)| x * scale * w.to_f32()).collect()
}

fn publish(folder: &Path, name: &str, rank: usize, bytes: &[u8]) {
    let path = folder.join(format!("{name}.{rank}"));
    let temporary = path.with_extension(format!("{rank}.new"));
    std::fs::write(&temporary, bytes).expect("a file");
    std::fs::rename(&temporary, &path).expect("a name");
}

fn await_bytes(folder: &Path, name: &str, rank: usize) -> Vec<u8> {
    let path = folder.join(format!("{name}.{rank}"));
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        match std::fs::read(&path) {
            Ok(bytes) => return bytes,
            Err(_) if Instant::now() < deadline => std::thread::sleep(Duration::from_micros(200)),
            Err(error) => panic!("rank {rank} did not publish `{name}`: {error}"),
        }
    }
}
