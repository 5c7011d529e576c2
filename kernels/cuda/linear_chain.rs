//! Consecutive linear layers for few rows in one kernel, which streams the weights of the next layer before the last
//! one ends. Kernel: `sm90_linear_chain.cu`.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use half::bf16;

use super::all_reduce::{PeerGroup, Shots};
use super::error::ensure;
use super::packed_weight::PackedWeight;
use super::quantized_gemm::{check_product, meta_argument};
use super::skinny_gemm::{self, Epilogue, LinearWeight};
use super::tensor_map::TensorMap;
use super::{Arg, CudaError, DeviceBuffer, Gpu, Launch, Queue, Span};

/// Maximum number of rows of `x`. With more rows, thread blocks would read `x` more often than the bandwidth beside
/// their weights allows (kernels/README.md).
pub const MAX_ROWS: usize = 16;

/// Maximum number of links in a chain.
pub const MAX_LINKS: usize = 4;

const OP: &str = "linear_chain";
/// Number of rows of a weight in a tile, and number of columns in a slice that the copy engine fetches: 128 bytes.
const TILE: usize = 64;
const SLICE: usize = 64;
/// Number of warpgroups of a block that multiply slices of K in turn, and number of all threads of a block.
const GROUPS: usize = 4;
const THREADS: usize = GROUPS * 128 + 96;
/// Maximum number of stages of the ring; the kernel has this number of barriers.
const MAX_STAGES: usize = 32;
/// Bytes of shared memory left to other kernels and to the block's own barriers and scales.
const SPARE_BYTES: usize = 6 << 10;
/// Bytes of a block's packets: a tile of f32 sums with a tag beside each.
const PACKET_BYTES: usize = MAX_ROWS * TILE * 8;
/// Value of the kernel's `epilogue` besides those of [`Epilogue`].
const ADD_NORM: u32 = 4;
/// Number of counter words before the blocks' epochs.
const FIRST_EPOCH: usize = 64;

/// One product of a chain: `y = end(x @ weight^T + bias)` for `x [rows, k]`.
#[derive(Debug, Clone, Copy)]
pub struct Link {
    /// The output, whose shape depends on `end`.
    pub y: Span,
    /// Distance in elements from one row of `y` to the next, at least `linear.n`. Used only if a product is stored
    /// without a gate.
    pub pitch: usize,
    /// `[rows, k]` bf16: the output of the previous link, or older data.
    pub x: Span,
    /// Weight and bias. All links of a chain have the same [`LinkWeight::name`].
    pub linear: LinkWeight,
    /// What happens with the product.
    pub end: LinkEnd,
    /// The scale that the rows of `x` lack, if [`LinkEnd::AddNorm`] wrote `x`.
    pub scale: Option<RowScale>,
}

/// The weight of a link.
#[derive(Debug, Clone, Copy)]
pub enum LinkWeight {
    /// In bf16.
    Plain(LinearWeight),
    /// In 8 or 4 bits.
    Packed(PackedWeight),
}

impl LinkWeight {
    /// The part of the kernel's name.
    pub fn name(&self) -> &'static str {
        match self {
            LinkWeight::Plain(_) => "bf16",
            LinkWeight::Packed(weight) => weight.format.name(),
        }
    }

    /// Numbers of outputs and inputs.
    fn shape(&self) -> [usize; 2] {
        match self {
            LinkWeight::Plain(weight) => [weight.n, weight.k],
            LinkWeight::Packed(weight) => [weight.n, weight.k],
        }
    }

    /// Columns of a slice, and bytes that a stage of the ring has besides 128 for each row of the weight and its columns
    /// of `x`.
    fn slice(&self) -> (usize, usize) {
        match self {
            LinkWeight::Plain(_) => (SLICE, 0),
            LinkWeight::Packed(weight) => (weight.format.slice_cols(), weight.format.max_meta_bytes()),
        }
    }
}

/// What happens with a product.
#[derive(Debug, Clone, Copy)]
pub enum LinkEnd {
    /// It is stored.
    Store(Epilogue),
    /// It is added to a residual and normalized, except for the rows' scales.
    AddNorm(AddNorm),
}

/// `residual += the product, summed over the group`, each rank's part rounded to bf16, then `y = residual * gain`, both
/// `[rows, n]` bf16, and the squares of `residual` before it is rounded. This is an RMSNorm without its scale, which is
/// applied by the product that reads `y`.
#[derive(Debug, Clone, Copy)]
pub struct AddNorm {
    /// `[rows, n]` bf16.
    pub residual: Span,
    /// `[n]` bf16, the norm's weight.
    pub gain: Span,
    /// `[rows, norm_slices(n)]` f32; every element is written.
    pub squares: Span,
}

/// A scale for each row: `rsqrt(mean of its squares + eps)`.
#[derive(Debug, Clone, Copy)]
pub struct RowScale {
    /// `[rows, norm_slices(cols)]` f32, sums of squares.
    pub squares: Span,
    /// Columns of a row.
    pub cols: usize,
    /// Epsilon of the norm.
    pub eps: f32,
}

/// Number of sums of squares that [`AddNorm`] writes for a row of `n`.
pub fn norm_slices(n: usize) -> usize {
    n.div_ceil(TILE)
}

/// Whether this GPU and this build have the kernel.
pub fn has_kernel(gpu: &Gpu) -> bool {
    gpu.capability().0 == 9 && gpu.has_kernel("sm90_linear_chain_bf16_m8")
}

/// Memory for the synchronization between blocks of a chain. Chains that share it run one after the other.
#[derive(Debug)]
pub struct ChainScratch {
    packets: DeviceBuffer,
    /// The number of blocks that arrived, then each block's epoch.
    counters: DeviceBuffer,
}

impl ChainScratch {
    /// Scratch for chains on this GPU.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self, CudaError> {
        let blocks = gpu.num_multiprocessors() as usize;
        let packets = DeviceBuffer::from_slice(gpu, &vec![0u8; blocks * PACKET_BYTES])?;
        let counters = DeviceBuffer::from_slice(gpu, &vec![0u32; FIRST_EPOCH + blocks])?;
        Ok(Self { packets, counters })
    }

    /// Bytes that [`ChainScratch::new`] allocates on a GPU with `multiprocessors`.
    pub fn bytes(multiprocessors: usize) -> usize {
        multiprocessors * PACKET_BYTES + 4 * (FIRST_EPOCH + multiprocessors)
    }
}

/// Runs the links in order, each for the same number of rows, at most [`MAX_ROWS`]. With a group, all ranks must call
/// it with the same arguments and use the group for nothing else. Requires Hopper ([`has_kernel`]).
pub fn linear_chain(
    q: &Queue,
    links: &[Link],
    rows: usize,
    scratch: &ChainScratch,
    group: Option<&PeerGroup>,
) -> Result<(), CudaError> {
    ensure!(OP, (1..=MAX_LINKS).contains(&links.len()), "{} links; expected 1 to {MAX_LINKS}", links.len());
    ensure!(OP, (1..=MAX_ROWS).contains(&rows), "{rows} rows; expected 1 to {MAX_ROWS}");
    let gpu = q.gpu();
    let width = skinny_gemm::width_for(rows);
    let name = links[0].linear.name();
    let other = links.iter().map(|link| link.linear.name()).find(|other| *other != name);
    ensure!(OP, other.is_none(), "weights in {name} and {}", other.unwrap_or_default());
    let (slice, more) = links[0].linear.slice();
    let (stage_bytes, partial_bytes) = (TILE * 128 + width * slice * 2 + more, GROUPS * width * (TILE + 4) * 4);
    // A stage belongs to one group of warps, because its barrier must be waited for in order.
    let room = (gpu.max_shared_bytes() as usize).saturating_sub(SPARE_BYTES + 1024 + partial_bytes);
    let stages = (room / stage_bytes).min(MAX_STAGES) / GROUPS * GROUPS;
    ensure!(OP, stages > 0, "shared memory of {} bytes is too small", gpu.max_shared_bytes());

    let mut chain = ChainArgument {
        packets: scratch.packets.span().address(),
        arrivals: scratch.counters.span().address(),
        epochs: scratch.counters.span().part(FIRST_EPOCH * 4, 4).address(),
        count: links.len() as u32,
        stages: stages as u32,
        ..ChainArgument::zeroed()
    };
    for (argument, link) in chain.links.iter_mut().zip(links) {
        let [n, k] = link.linear.shape();
        let slices = n.div_ceil(TILE) * k.div_ceil(slice);
        let fits = slices < u32::MAX as usize / (gpu.num_multiprocessors() as usize + 1);
        ensure!(OP, fits, "a weight of {n} x {k} is too large");
        *argument = link.argument(rows, width)?;
    }
    let summed = links.iter().find(|link| matches!(link.end, LinkEnd::AddNorm(_)));
    if let (Some(group), Some(link)) = (group, summed) {
        let peers = group.argument(&[link.y], rows, link.linear.shape()[0], Shots::One)?;
        chain.peers = bytemuck::pod_read_unaligned(&peers);
    }
    let launch = Launch::new(gpu.num_multiprocessors(), THREADS as u32)
        .shared((stages * stage_bytes + partial_bytes + 1024) as u32);
    let kind = if group.is_some() { "peer_" } else { "" };
    q.launch(&format!("sm90_{kind}linear_chain_{name}_m{width}"), launch, &[Arg::Bytes(bytemuck::bytes_of(&chain))])
}

impl Link {
    /// The kernel's `Link`, after a check that the operands have `rows` rows.
    fn argument(&self, rows: usize, width: usize) -> Result<LinkArgument, CudaError> {
        let Self { y, pitch, x, linear, end, scale } = *self;
        let [n, k] = linear.shape();
        let epilogue = match end {
            LinkEnd::Store(epilogue) => epilogue,
            LinkEnd::AddNorm(_) => Epilogue::Store,
        };
        let (weight, bias, meta) = match linear {
            LinkWeight::Plain(plain) => {
                skinny_gemm::check(y, x, &plain, rows, epilogue)?;
                (TensorMap::matrix(plain.weight, n, k, TILE, SLICE)?, plain.bias, [0; 2])
            }
            LinkWeight::Packed(packed) => {
                check_product(y, x, &packed, rows, epilogue)?;
                let map = TensorMap::bytes_matrix(packed.codes, n, packed.format.row_bytes(k), TILE, 128)?;
                (map, packed.bias, meta_argument(packed.scales, packed.format))
            }
        };
        if let LinkEnd::Store(Epilogue::Store | Epilogue::StoreF32) = end {
            let bytes = if epilogue == Epilogue::StoreF32 { 4 } else { 2 };
            let fits = pitch >= n && pitch.is_multiple_of(8) && y.bytes() >= ((rows - 1) * pitch + n) * bytes;
            ensure!(OP, fits, "y does not hold {rows} rows of {n} outputs, {pitch} apart");
        }
        let mut argument = LinkArgument {
            weight: map_words(&weight),
            x: map_words(&TensorMap::matrix(x, rows, k, width, SLICE)?),
            y: y.address(),
            bias: bias.address(),
            m: rows as u32,
            n: n as u32,
            epilogue: epilogue.code(),
            pitch: pitch as u32,
            k: k as u32,
            meta,
            ..LinkArgument::zeroed()
        };
        if let LinkEnd::AddNorm(add) = end {
            add.fill(&mut argument, y, rows, n)?;
        }
        if let Some(RowScale { squares, cols, eps }) = scale {
            let found = squares.count::<f32>();
            let fits = cols == k && found >= rows * norm_slices(cols);
            ensure!(OP, fits, "{found} squares of {rows} rows of {cols} columns, for {k} inputs");
            argument.squares_in = squares.address();
            argument.slices_in = norm_slices(cols) as u32;
            argument.inverse_cols = 1.0 / cols as f32;
            argument.eps = eps;
        }
        Ok(argument)
    }
}

impl AddNorm {
    fn fill(&self, argument: &mut LinkArgument, y: Span, rows: usize, n: usize) -> Result<(), CudaError> {
        let Self { residual, gain, squares } = *self;
        let fits = residual.count::<bf16>() >= rows * n && gain.count::<bf16>() >= n;
        ensure!(OP, fits, "the residual or the norm's weight is too short for {rows} rows of {n}");
        let found = squares.count::<f32>();
        ensure!(OP, found >= rows * norm_slices(n), "{found} squares of {rows} x {}", norm_slices(n));
        ensure!(OP, residual.is_aligned(8) && gain.is_aligned(8), "a buffer is not 8-byte aligned");
        ensure!(OP, y.address() != residual.address(), "y and residual are one buffer");
        argument.epilogue = ADD_NORM;
        argument.residual = residual.address();
        argument.gain = gain.address();
        argument.squares_out = squares.address();
        argument.slices_out = norm_slices(n) as u32;
        Ok(())
    }
}

fn map_words(map: &TensorMap) -> [u64; 16] {
    bytemuck::pod_read_unaligned(map.bytes())
}

/// The kernel's `Link`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct LinkArgument {
    weight: [u64; 16],
    x: [u64; 16],
    y: u64,
    bias: u64,
    m: u32,
    n: u32,
    epilogue: u32,
    pitch: u32,
    squares_in: u64,
    residual: u64,
    gain: u64,
    squares_out: u64,
    slices_in: u32,
    slices_out: u32,
    inverse_cols: f32,
    eps: f32,
    k: u32,
    padding: u32,
    meta: [u64; 2],
    padding_after: [u32; 6],
}

/// The kernel's `Chain`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct ChainArgument {
    links: [LinkArgument; MAX_LINKS],
    peers: [u64; 14],
    packets: u64,
    arrivals: u64,
    epochs: u64,
    count: u32,
    stages: u32,
    padding: [u32; 12],
}

const _: () = assert!(size_of::<LinkArgument>() == 384 && size_of::<ChainArgument>() == 4 * 384 + 192);
