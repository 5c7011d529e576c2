//! Products of rows sorted by expert with the weights of their experts. Kernels: `sm90_grouped_skinny_gemm.cu` for few
//! rows an expert and `sm90_grouped_gemm.cu` for many, and `grouped_gemm.cu` on other GPUs; for few rows and weights in 8
//! or 4 bits `sm90_grouped_quantized_gemm.cu`.

use half::bf16;

use super::error::ensure;
use super::expert_rows::{ExpertRows, GroupedRows, RowInputs};
use super::gated_activation::GATE_GROUP;
use super::gated_activation::GateActivation;
use super::packed_weight::{PackedFormat, PackedWeight, TILE};
use super::quantized_gemm::{dequantize, meta_argument};
use super::route_tokens::MAX_EXPERTS;
use super::tensor_map::TensorMap;
use super::{Arg, CudaError, Gpu, Launch, Queue, Span};

const OP: &str = "grouped_gemm";

/// Rows of a tile of the kernels for few rows, at most.
const MAX_TILE_ROWS: usize = 64;
/// What the code of an activation alone has more than that of its gate.
const PLAIN: u32 = 6;
/// Rows of an expert from which on the kernel for many rows is faster.
const WIDE_ROWS: usize = 24;
/// The same for weights in 8 or 4 bits, all of which are expanded for it.
const PACKED_WIDE_ROWS: usize = 72;
/// Rows of an expert from which on tiles have 192 rows.
const ROWS_OF_192: usize = 96;

/// The weights `[num_experts, n, k]` of a layer of a worker's experts, and their biases `[num_experts, n]` in bf16.
#[derive(Debug, Clone, Copy)]
pub struct GroupedWeight {
    /// `[num_experts, n, k]` bf16, or the codes of a packed weight `[num_experts * n, k]`.
    pub weight: Span,
    /// Scales and format of codes; `n` is then a multiple of 64.
    pub packed: Option<(Span, PackedFormat)>,
    /// `[num_experts, n]`, or [`Span::NULL`].
    pub bias: Span,
    /// Number of experts.
    pub num_experts: usize,
    /// Number of outputs.
    pub n: usize,
    /// Number of inputs.
    pub k: usize,
}

/// How the two halves of a gated product are joined.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Gate {
    /// `activation(gate) * up`.
    Activation(GateActivation),
    /// `g * sigmoid(alpha * g) * (u + 1)`, where `g = min(gate, limit)` and `u = clamp(up, -limit, limit)`.
    Clamped {
        /// `alpha`.
        alpha: f32,
        /// `limit`.
        limit: f32,
    },
}

/// What follows a product.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum GroupedEpilogue {
    /// Sums are stored.
    Store,
    /// The activation of each sum is stored.
    Activated(GateActivation),
    /// The two halves are joined.
    Gated(Gate),
}

impl GroupedEpilogue {
    fn is_gated(self) -> bool {
        matches!(self, Self::Gated(_))
    }

    /// Number of columns that are stored for `n` sums.
    pub fn outputs(self, n: usize) -> usize {
        if self.is_gated() { n / 2 } else { n }
    }
}

impl GroupedWeight {
    /// Elements of all weights.
    pub fn elements(&self) -> usize {
        self.num_experts * self.n * self.k
    }

    /// The same weights in bf16: those that are packed are expanded into `buffer`.
    pub fn expanded(&self, q: &Queue, buffer: Span) -> Result<Self, CudaError> {
        let Some((scales, format)) = self.packed else { return Ok(*self) };
        let (n, k) = (self.num_experts * self.n, self.k);
        let packed = PackedWeight { codes: self.weight, scales, bias: Span::NULL, n, k, format };
        dequantize(q, buffer, &packed)?;
        Ok(Self { weight: buffer, packed: None, ..*self })
    }
}

/// The kernel that computes a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kernel {
    /// For any GPU.
    Simple,
    /// For Hopper and few rows an expert: reads weights as fast as memory allows.
    Skinny,
    /// The same for packed weights, but the order of K never depends on the number of tokens.
    InOrder,
    /// For Hopper and many rows an expert: uses the tensor cores fully.
    Wide,
}

impl Kernel {
    /// The fastest kernel for `routes` rows, by measurement (kernels/README.md). Only [`Kernel::Skinny`] and [`Kernel::InOrder`] take packed
    /// weights; for the others they are expanded first.
    pub fn for_rows(gpu: &Gpu, routes: usize, weight: &GroupedWeight) -> Self {
        let wide_rows = if weight.packed.is_some() { PACKED_WIDE_ROWS } else { WIDE_ROWS };
        match has_hopper_kernels(gpu) {
            false => Kernel::Simple,
            true if routes >= weight.num_experts * wide_rows => Kernel::Wide,
            true => Kernel::Skinny,
        }
    }
}

/// Whether this GPU and this build have the fast kernels.
pub fn has_hopper_kernels(gpu: &Gpu) -> bool {
    gpu.capability().0 == 9 && gpu.has_kernel("sm90_grouped_gemm_bf16_m128")
}

/// `y[r, :] = x[r, :] @ weight[expert of r]^T + bias`, `[routes, n]`, and an activation of it; if it is gated, `[routes, n / 2]`, where the
/// rows of each expert's weight are packed in groups of [`GATE_GROUP`]. The result of a row does not depend on other rows; if weights are packed and the kernel is
/// [`Kernel::Skinny`], on nothing but whether there are more than 16 tokens. Only [`Kernel::Wide`] gathers rows of tokens, and only [`Kernel::Skinny`] and
/// [`Kernel::InOrder`] take listed experts.
pub fn grouped_gemm(
    q: &Queue,
    y: Span,
    inputs: RowInputs<Span>,
    weight: &GroupedWeight,
    rows: GroupedRows,
    epilogue: GroupedEpilogue,
    kernel: Kernel,
) -> Result<(), CudaError> {
    check_products(y, weight, rows, epilogue)?;
    let (tokens, (x, x_rows)) = (inputs.tokens(rows)?, inputs.values(rows));
    ensure!(OP, x.count::<bf16>() >= x_rows * weight.k, "x is shorter than {x_rows} x {}", weight.k);
    ensure!(OP, x.is_aligned(16), "x is not 16-byte aligned");
    ensure!(OP, tokens.is_null() || kernel == Kernel::Wide, "rows of tokens by {kernel:?}; expected Wide");
    let is_for_few_rows = matches!(kernel, Kernel::Skinny | Kernel::InOrder);
    ensure!(OP, weight.packed.is_none() || is_for_few_rows, "packed weights by {kernel:?}; expected Skinny or InOrder");
    ensure!(OP, !rows.is_listed() || is_for_few_rows, "listed experts by {kernel:?}; expected Skinny or InOrder");
    let GroupedWeight { num_experts, n, k, .. } = *weight;
    let parameters = parameters(y, weight, rows, epilogue, &inputs);
    // Every expert with rows has at least one tile.
    let most_tiles = |tile_rows: usize| rows.routes.min(num_experts) + rows.routes / tile_rows;
    let tile_rows = rows.tokens.next_power_of_two().clamp(8, MAX_TILE_ROWS);
    match kernel {
        Kernel::Simple => {
            let launch = Launch::new((n.div_ceil(16) * most_tiles(tile_rows)) as u32, 256);
            let launch = launch.shared((8 * tile_rows * 17 * 4) as u32);
            let args = [Arg::Bytes(bytemuck::bytes_of(&parameters)), x.into(), weight.weight.into()];
            q.launch(&format!("grouped_gemm_bf16_m{tile_rows}"), launch, &args)
        }
        Kernel::Skinny | Kernel::InOrder if let Some(packed) = weight.packed => {
            // Four warpgroups have too few registers for 32 rows.
            let groups = if kernel == Kernel::Skinny && tile_rows <= 16 { 4 } else { 2 };
            quantized(q, [x, weight.weight], packed, &parameters, [num_experts * n, k, x_rows, tile_rows], groups)
        }
        Kernel::Skinny | Kernel::InOrder => {
            let w_map = TensorMap::matrix(weight.weight, num_experts * n, k, 64, 64)?;
            let x_map = TensorMap::matrix(x, x_rows, k, 8, 64)?;
            let (stages, shared) = ring(q.gpu(), 2 * (64 + tile_rows) * 64 * 2, 24, 0);
            let args = [
                Arg::Bytes(w_map.bytes()),
                Arg::Bytes(x_map.bytes()),
                Arg::Bytes(bytemuck::bytes_of(&parameters)),
                (tile_rows as u32).into(),
                stages.into(),
            ];
            let launch = Launch::new(q.gpu().num_multiprocessors(), 2 * 128 + 32).shared(shared);
            q.launch("sm90_grouped_skinny_gemm_bf16", launch, &args)
        }
        Kernel::Wide => {
            let w_map = TensorMap::matrix(weight.weight, num_experts * n, k, 256, 64)?;
            let x_map = TensorMap::matrix(x, x_rows, k, 64, 64)?;
            // Barriers of each stage and the table of tiles follow the stages.
            let tile_rows = wide_tile_rows(rows.routes, num_experts);
            let (stage_bytes, table_bytes) = ((tile_rows + 256) * 64 * 2 + 2 * 8, MAX_EXPERTS * 4);
            let stages = (q.gpu().max_shared_bytes() as usize - table_bytes) / stage_bytes;
            ensure!(OP, stages > 1, "shared memory is too small for tiles of {tile_rows} x 256");
            let from = [x.address(), tokens.address()];
            let args = [
                Arg::Bytes(w_map.bytes()),
                Arg::Bytes(x_map.bytes()),
                Arg::Bytes(bytemuck::bytes_of(&from)),
                Arg::Bytes(bytemuck::bytes_of(&parameters)),
                (stages as u32).into(),
            ];
            let shared = (stages * stage_bytes + table_bytes) as u32;
            // A warpgroup for each 64 rows, and one that loads.
            let launch = Launch::new(q.gpu().num_multiprocessors(), 2 * tile_rows as u32 + 128).shared(shared);
            q.launch(&format!("sm90_grouped_gemm_bf16_m{tile_rows}"), launch, &args)
        }
    }
}

/// Rows of a tile of [`Kernel::Wide`]. Tiles of 192 read the weights less often; tiles of 128 are faster if experts have few rows.
fn wide_tile_rows(routes: usize, num_experts: usize) -> usize {
    if routes >= num_experts * ROWS_OF_192 { 192 } else { 128 }
}

/// The kernel for packed weights `[n, k]` of all experts, in tiles of `tile_rows` of `x_rows` rows, with `groups` warpgroups that multiply.
fn quantized(
    q: &Queue,
    [x, codes]: [Span; 2],
    (scales, format): (Span, PackedFormat),
    parameters: &[u64; 8],
    [n, k, x_rows, tile_rows]: [usize; 4],
    groups: u32,
) -> Result<(), CudaError> {
    let w_map = TensorMap::bytes_matrix(codes, n, format.row_bytes(k), TILE, 128)?;
    let x_map = TensorMap::matrix(x, x_rows, k, 8, 64)?;
    let stage_bytes = TILE * 128 + tile_rows * format.slice_cols() * 2 + format.max_meta_bytes();
    let sums_bytes = if groups == 4 { 3 * 8 * 128 * 4 } else { 0 };
    let (stages, shared) = ring(q.gpu(), stage_bytes, 24, sums_bytes);
    let meta = meta_argument(scales, format);
    let args = [
        Arg::Bytes(w_map.bytes()),
        Arg::Bytes(x_map.bytes()),
        Arg::Bytes(bytemuck::bytes_of(parameters)),
        Arg::Bytes(bytemuck::bytes_of(&meta)),
        (tile_rows as u32).into(),
        // Each warpgroup has stages of its own.
        (stages / groups * groups).into(),
    ];
    let launch = Launch::new(q.gpu().num_multiprocessors(), groups * 128 + 32).shared(shared);
    q.launch(&format!("sm90_grouped_quantized_gemm_{}_g{groups}", format.name()), launch, &args)
}

/// Number of stages of a ring that fills the shared memory, and the bytes to request. `other_bytes` of static shared memory are used
/// besides tables and barriers.
pub(super) fn ring(gpu: &Gpu, stage_bytes: usize, most: usize, other_bytes: usize) -> (u32, u32) {
    // Tables and barriers are in static shared memory; the ring starts at a multiple of 1024 bytes.
    let room = gpu.max_shared_bytes() as usize - 4 * MAX_EXPERTS - 1024 - 1024 - other_bytes;
    let stages = (room / stage_bytes).min(most);
    (stages as u32, (stages * stage_bytes + 1024) as u32)
}

/// Checks everything but the inputs.
pub(super) fn check_products(
    y: Span,
    weight: &GroupedWeight,
    rows: GroupedRows,
    epilogue: GroupedEpilogue,
) -> Result<(), CudaError> {
    let GroupedWeight { weight, packed, bias, num_experts, n, k } = *weight;
    let routes = rows.routes;
    rows.check(num_experts)?;
    ensure!(OP, (1..=MAX_EXPERTS).contains(&num_experts), "{num_experts} experts; expected 1 to {MAX_EXPERTS}");
    ensure!(OP, k > 0 && k.is_multiple_of(8), "{k} inputs are not a multiple of 8");
    let group = if epilogue.is_gated() { 2 * GATE_GROUP } else { 8 };
    ensure!(OP, n > 0 && n.is_multiple_of(group), "{n} outputs are not a multiple of {group}");
    let outputs = epilogue.outputs(n);
    ensure!(OP, y.count::<bf16>() >= routes * outputs, "y is shorter than {routes} x {outputs}");
    let (weight_bytes, scales_bytes) = match packed {
        Some((_, format)) => (format.codes_bytes(num_experts * n, k), format.scales_bytes(num_experts * n, k)),
        None => (num_experts * n * k * size_of::<bf16>(), 0),
    };
    ensure!(OP, weight.bytes() >= weight_bytes, "weights are shorter than {num_experts} x {n} x {k}");
    if let Some((scales, _)) = packed {
        ensure!(OP, n.is_multiple_of(TILE), "{n} packed outputs are not a multiple of {TILE}");
        ensure!(OP, scales.bytes() >= scales_bytes && scales.is_aligned(16), "scales are too short, or not aligned");
    }
    ensure!(
        OP,
        bias.is_null() || bias.count::<bf16>() >= num_experts * n,
        "biases are shorter than {num_experts} x {n}"
    );
    let aligned = [y, weight].iter().all(|span| span.is_aligned(16)) && (bias.is_null() || bias.is_aligned(8));
    ensure!(OP, aligned, "a buffer is not 16-byte aligned");
    Ok(())
}

/// `Grouped` of the kernels: y, bias, offsets, groups, n, k, epilogue, alpha, limit, list, listed_tokens, most_listed.
pub(super) fn parameters<X>(
    y: Span,
    weight: &GroupedWeight,
    rows: GroupedRows,
    epilogue: GroupedEpilogue,
    inputs: &RowInputs<X>,
) -> [u64; 8] {
    let [offsets, list] = match rows.experts {
        ExpertRows::Offsets(offsets) => [offsets, Span::NULL],
        ExpertRows::Listed(list) => [Span::NULL, list],
    };
    let listed_tokens = if matches!(inputs, RowInputs::OfAllTokens(_)) { rows.tokens } else { 0 };
    let (epilogue, alpha, limit): (u32, f32, f32) = match epilogue {
        GroupedEpilogue::Store => (0, 0.0, 0.0),
        GroupedEpilogue::Activated(activation) => (PLAIN + activation_code(activation), 0.0, 0.0),
        GroupedEpilogue::Gated(Gate::Activation(activation)) => (activation_code(activation), 0.0, 0.0),
        GroupedEpilogue::Gated(Gate::Clamped { alpha, limit }) => (6, alpha, limit),
    };
    [
        y.address(),
        weight.bias.address(),
        offsets.address(),
        weight.num_experts as u64 | (weight.n as u64) << 32,
        weight.k as u64 | u64::from(epilogue) << 32,
        u64::from(alpha.to_bits()) | u64::from(limit.to_bits()) << 32,
        list.address(),
        listed_tokens as u64 | (rows.routes as u64) << 32,
    ]
}

fn activation_code(activation: GateActivation) -> u32 {
    match activation {
        GateActivation::Silu => 1,
        GateActivation::GeluTanh => 2,
        GateActivation::Gelu => 3,
        GateActivation::Relu => 4,
        GateActivation::ReluSquared => 5,
    }
}
