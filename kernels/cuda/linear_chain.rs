//! Consecutive linear layers for few rows in one kernel, which streams the weights of the next layer before the last
//! one ends. Kernels: `sm90_linear_chain.cuh`.

mod argument;

use std::sync::Arc;

use bytemuck::Zeroable;

use argument::ChainArgument;

use super::all_reduce::{PeerGroup, Shots};
use super::error::ensure;
use super::packed_weight::PackedWeight;
use super::skinny_gemm::{self, Epilogue, LinearWeight};
use super::{Arg, CudaError, DeviceBuffer, Gpu, Launch, Queue, Span};

/// Maximum number of rows of `x`. With more rows, thread blocks would read `x` more often than the bandwidth beside
/// their weights allows (kernels/README.md).
pub const MAX_ROWS: usize = 16;

/// Maximum number of rows of a chain with [`LinkEnd::AddBranch`], whose products have two rows of `x` for each. With more, single products
/// are as fast (kernels/README.md).
pub const MAX_BRANCH_ROWS: usize = 4;

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
/// Sums of a tile that [`AddBranch`] writes for a row.
const BRANCH_SUMS: usize = 4;
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
    /// The scale that the rows of `x` lack, if [`LinkEnd::AddNorm`] or [`LinkEnd::AddBranch`] wrote `x`.
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
    /// It is a branch with a norm of its own.
    AddBranch(AddBranch),
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

/// A branch `p`, the product summed over the group, whose norm is added to the residual: `r + s p branch_gain`, where `s` is a scale of the
/// row that is known when all blocks have ended the link. So the residual stays without the branch until the next such link, and `y`
/// `[2 rows, n]` bf16 has `r gain` in row `m` and `p branch_gain gain` in row `rows + m`. Products that read `y` add both.
#[derive(Debug, Clone, Copy)]
pub struct AddBranch {
    /// `[rows, n]` bf16. The branch before is added to it, if it lacks one.
    pub residual: Span,
    /// `[rows, n]` bf16: the branch before, and then this one.
    pub branch: Span,
    /// `[n]` bf16, the weight of the branch's norm.
    pub branch_gain: Span,
    /// The branch that the residual lacks.
    pub before: Option<BranchBefore>,
    /// `[n]` bf16, the weight of the norm of the sum.
    pub gain: Span,
    /// `[rows, norm_slices(n), 4]` f32; every element is written. Not those of `before`.
    pub squares: Span,
}

/// A branch that a residual lacks.
#[derive(Debug, Clone, Copy)]
pub struct BranchBefore {
    /// `[n]` bf16, the weight of its norm.
    pub gain: Span,
    /// The scale of its rows.
    pub scale: RowScale,
}

/// A scale for each row: `rsqrt(mean of its squares + eps)`.
#[derive(Debug, Clone, Copy)]
pub struct RowScale {
    /// `[rows, norm_slices(cols)]` f32, sums of squares; of a branch `[rows, norm_slices(cols), 4]`.
    pub squares: Span,
    /// Columns of a row.
    pub cols: usize,
    /// Epsilon of the norm, and of that of the branch.
    pub eps: f32,
    /// Whether [`LinkEnd::AddBranch`] wrote the squares.
    pub is_of_branch: bool,
}

/// Number of sums of squares that [`AddNorm`] writes for a row of `n`.
pub fn norm_slices(n: usize) -> usize {
    n.div_ceil(TILE)
}

/// Bytes of the squares that [`AddBranch`] writes for `rows` rows of `n`.
pub fn branch_squares_bytes(rows: usize, n: usize) -> usize {
    rows * norm_slices(n) * BRANCH_SUMS * 4
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
    let has_branches = links.iter().any(Link::is_of_branch);
    let most = if has_branches { MAX_BRANCH_ROWS } else { MAX_ROWS };
    ensure!(OP, rows <= most, "{rows} rows of branches; expected 1 to {most}");
    let is_mixed = has_branches && links.iter().any(|link| link.is_scaled() && !link.is_of_branch());
    ensure!(OP, !is_mixed, "links with and without branches");
    let width = skinny_gemm::width_for(if has_branches { 2 * rows } else { rows });
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
    let summed = links.iter().find(|link| !matches!(link.end, LinkEnd::Store(_)));
    if let (Some(group), Some(link)) = (group, summed) {
        let peers = group.argument(&[link.y], rows, link.linear.shape()[0], Shots::One)?;
        chain.peers = bytemuck::pod_read_unaligned(&peers);
    }
    let launch = Launch::new(gpu.num_multiprocessors(), THREADS as u32)
        .shared((stages * stage_bytes + partial_bytes + 1024) as u32);
    let peers = if group.is_some() { "peer_" } else { "" };
    let kind = if has_branches { "branch" } else { "linear" };
    q.launch(&format!("sm90_{peers}{kind}_chain_{name}_m{width}"), launch, &[Arg::Bytes(bytemuck::bytes_of(&chain))])
}

impl Link {
    /// Whether rows are read or stored without their scale.
    fn is_scaled(&self) -> bool {
        self.scale.is_some() || !matches!(self.end, LinkEnd::Store(_))
    }

    /// Whether it reads or stores two rows for each.
    fn is_of_branch(&self) -> bool {
        self.scale.is_some_and(|scale| scale.is_of_branch) || matches!(self.end, LinkEnd::AddBranch(_))
    }
}
