//! Adapters: slots for low-rank products beside linear layers.
//!
//! All slots of a layer are one matrix B, a group of columns for each slot, so that a product for few rows reads it like more columns of
//! the layer's own weight (`kernels/cuda/low_rank.cuh`). A step without adapters runs the kernels that it runs without slots.

use std::collections::HashMap;
use std::sync::Arc;

use half::bf16;
use kernels::cuda::gated_activation::GATE_GROUP;
use kernels::cuda::low_rank::{self, LowRankStep, LowRankWeight, Modules};
use kernels::cuda::skinny_gemm::{self, Epilogue};
use kernels::cuda::{CudaError, DeviceBuffer, Gpu, Queue, Rows, Span, quantized_gemm};
use ops::{AdapterSlots, DeviceError, LowRankPart};

use super::step::AdapterBounds;
use super::{CudaDevice, CudaWeight, device_error};

/// The buffers of layers start at multiples of this number of bytes.
const ALIGN: usize = 256;

/// The slots of all layers.
pub(crate) struct Adapters {
    bounds: AdapterBounds,
    /// By the address of the layer's weight.
    layers: HashMap<u64, Layer>,
    /// `h` of the widest layer.
    inner: Span,
    /// B of one adapter of the largest layer, on its way to its columns.
    staging: Span,
}

/// A part of an adapter in bf16.
#[derive(Debug, Clone)]
pub struct CudaProduct {
    first_row: usize,
    rank: usize,
    scale: f32,
    /// `[R, K]`.
    a: Vec<bf16>,
    /// `[N, R]`.
    b: Vec<bf16>,
    is_finite: bool,
}

impl CudaProduct {
    pub(crate) fn new(part: &LowRankPart) -> Self {
        let rounded = |values: &[f32]| values.iter().map(|&value| bf16::from_f32(value)).collect::<Vec<_>>();
        let (a, b) = (rounded(&part.a), rounded(&part.b));
        let is_finite = part.scale.is_finite() && a.iter().chain(&b).all(|value| value.is_finite());
        Self { first_row: part.first_row, rank: part.rank, scale: part.scale, a, b, is_finite }
    }
}

/// The slots of a layer.
struct Layer {
    slots: LowRankWeight,
    /// Outputs of each module.
    modules: Vec<usize>,
    /// Whether the slot has a product.
    has_product: Vec<bool>,
}

/// Where the buffers of a layer begin, and the bytes of all.
struct Layout {
    a: usize,
    b: usize,
    scales: usize,
    in_layer: usize,
    bytes: usize,
}

/// The sizes of a layer's slots.
#[derive(Clone, Copy)]
struct Sizes {
    num_slots: usize,
    rank: usize,
    num_modules: usize,
    n: usize,
    k: usize,
}

impl Sizes {
    fn of(slots: &AdapterSlots) -> Self {
        let (rank, n) = (low_rank::padded_rank(slots.max_rank), slots.modules.iter().sum());
        Self { num_slots: slots.count, rank, num_modules: slots.modules.len(), n, k: slots.cols }
    }

    /// Columns of a module in `h`.
    fn cols(&self) -> usize {
        low_rank::slot_cols(self.num_slots, self.rank)
    }

    /// Values of one slot in A.
    fn a_values(&self) -> usize {
        self.num_modules * self.rank * self.k
    }

    fn layout(&self) -> Layout {
        let mut bytes = 0;
        let mut take = |count: usize| {
            let start = bytes;
            bytes += count.next_multiple_of(ALIGN);
            start
        };
        let a = take(self.num_slots * self.a_values() * 2);
        let b = take(self.n * self.cols() * 2);
        let scales = take(self.num_slots * self.num_modules * 4);
        let in_layer = take(8);
        Layout { a, b, scales, in_layer, bytes }
    }

    /// Bytes of `h` for `tokens` tokens, and of B of one slot.
    fn scratch_bytes(&self, tokens: usize) -> [usize; 2] {
        [tokens * self.num_modules * self.cols() * 2, self.n * self.rank * 2]
    }
}

/// Bytes of the largest `h` and of the largest B of one slot.
fn scratch_bytes<'a>(layers: impl Iterator<Item = &'a AdapterSlots>, tokens: usize) -> [usize; 2] {
    let sizes = layers.map(|slots| Sizes::of(slots).scratch_bytes(tokens));
    let largest = sizes.fold([0; 2], |[h, b], [next_h, next_b]| [h.max(next_h), b.max(next_b)]);
    largest.map(|bytes| bytes.next_multiple_of(ALIGN))
}

/// Bytes that [`CudaDevice::take_adapters`] allocates for steps of up to `tokens` tokens.
pub(crate) fn adapter_bytes(layers: &[AdapterSlots], tokens: usize) -> u64 {
    let slots: usize = layers.iter().map(|slots| Sizes::of(slots).layout().bytes).sum();
    (slots + scratch_bytes(layers.iter(), tokens).iter().sum::<usize>()) as u64
}

impl Adapters {
    /// No slots.
    pub(crate) fn new() -> Self {
        Self { bounds: AdapterBounds::default(), layers: HashMap::new(), inner: Span::NULL, staging: Span::NULL }
    }

    pub(crate) fn bounds(&self) -> AdapterBounds {
        self.bounds
    }
}

impl Layer {
    fn new(memory: Span, sizes: Sizes, modules: &[usize], weight: &CudaWeight) -> Self {
        let Sizes { num_slots, rank, n, k, .. } = sizes;
        let layout = sizes.layout();
        let part = |start: usize, end: usize| memory.part(start, end - start);
        let starts = |index: usize| match modules.get(index) {
            Some(_) => modules[..index].iter().sum(),
            None => usize::MAX,
        };
        let slots = LowRankWeight {
            a: part(layout.a, layout.b),
            b: part(layout.b, layout.scales),
            scales: part(layout.scales, layout.in_layer),
            in_layer: part(layout.in_layer, layout.bytes),
            num_slots,
            rank,
            n,
            k,
            modules: match modules {
                [_, _] if weight.group == GATE_GROUP => Modules::Gated,
                _ => Modules::Stacked { count: modules.len(), starts: [starts(1), starts(2)] },
            },
        };
        Self { slots, modules: modules.to_vec(), has_product: vec![false; num_slots] }
    }

    /// The matrices of a slot in the order of the device: A, B and the scales.
    fn pack(&self, parts: &[CudaProduct], group: usize) -> (Vec<bf16>, Vec<bf16>, Vec<f32>) {
        let LowRankWeight { rank, n, k, .. } = self.slots;
        let mut a = vec![bf16::ZERO; self.modules.len() * rank * k];
        let mut b = vec![bf16::ZERO; n * rank];
        let mut scales = vec![0.0; self.modules.len()];
        let mut first = 0;
        for (module, &rows) in self.modules.iter().enumerate() {
            if let Some(part) = parts.iter().find(|part| part.first_row == first) {
                a[module * rank * k..][..part.rank * k].copy_from_slice(&part.a);
                for (row, from) in part.b.chunks_exact(part.rank).enumerate().take(rows) {
                    b[weight_row(first + row, n, group) * rank..][..part.rank].copy_from_slice(from);
                }
                scales[module] = part.scale;
            }
            first += rows;
        }
        (a, b, scales)
    }

    /// Fills a slot.
    fn set(
        &mut self,
        q: &Queue,
        staging: Span,
        slot: usize,
        parts: &[CudaProduct],
        group: usize,
    ) -> Result<(), CudaError> {
        let had_product = std::mem::replace(&mut self.has_product[slot], !parts.is_empty());
        if parts.is_empty() && !had_product {
            return Ok(());
        }
        let LowRankWeight { a, b, scales, in_layer, num_slots, rank, n, .. } = self.slots;
        let (a_values, b_values, scale_values) = self.pack(parts, group);
        q.upload_copied(a.elements::<bf16>(slot * a_values.len(), a_values.len()), bytemuck::cast_slice(&a_values))?;
        q.upload_copied(staging, bytemuck::cast_slice(&b_values))?;
        let (bytes, pitch) = (2 * rank, 2 * low_rank::slot_cols(num_slots, rank));
        let columns = b.part(slot * bytes, (n - 1) * pitch + bytes);
        let to = Rows { memory: columns, pitch, bytes, count: n };
        q.copy_rows(to, Rows { memory: staging, pitch: bytes, bytes, count: n })?;
        let own = scales.elements::<f32>(slot * scale_values.len(), scale_values.len());
        q.upload_copied(own, bytemuck::cast_slice(&scale_values))?;
        let filled = (0..num_slots as u32).filter(|&slot| self.has_product[slot as usize]);
        let mask = filled.fold(0, |mask, slot| mask | low_rank::slice_bit(slot, rank));
        q.upload_copied(in_layer, bytemuck::bytes_of(&mask))
    }
}

/// The row of a weight with `rows` rows that is output `row` of its parts one behind the other. If `group` is set, its two parts alternate
/// in groups of so many rows.
fn weight_row(row: usize, rows: usize, group: usize) -> usize {
    if group == 0 {
        return row;
    }
    let (part, row) = (row / (rows / 2), row % (rows / 2));
    (row / group * 2 + part) * group + row % group
}

impl CudaDevice {
    /// Allocates the slots of layers, which are empty.
    pub(crate) fn take_adapters(&mut self, layers: &[(&CudaWeight, AdapterSlots)]) -> Result<(), DeviceError> {
        layers.iter().try_for_each(|(weight, slots)| check_layer(weight, slots))?;
        let Some((_, first)) = layers.first() else { return Ok(()) };
        let tokens = self.tensor_rows();
        let [inner, staging] = scratch_bytes(layers.iter().map(|(_, slots)| slots), tokens);
        let bytes = layers.iter().map(|(_, slots)| Sizes::of(slots).layout().bytes).sum();
        let residences = [self.config.residence(), self.config.activation_residence()];
        let allocate = |gpu: &Arc<Gpu>| -> Result<[DeviceBuffer; 2], CudaError> {
            Ok([
                DeviceBuffer::with_residence(gpu, bytes, residences[0])?,
                DeviceBuffer::with_residence(gpu, inner + staging, residences[1])?,
            ])
        };
        let [memory, scratch] = allocate(&self.gpu).map_err(device_error)?;
        // Products read all columns of a slice that one slot uses.
        self.queue.fill(memory.span(), 0).map_err(device_error)?;
        let mut start = 0;
        for (weight, slots) in layers {
            let sizes = Sizes::of(slots);
            let of_layer = memory.span().part(start, sizes.layout().bytes);
            start += of_layer.bytes();
            let layer = Layer::new(of_layer, sizes, &slots.modules, weight);
            self.adapters.layers.insert(weight.values.address(), layer);
        }
        self.adapters.bounds = AdapterBounds { num_slots: first.count, rank: low_rank::padded_rank(first.max_rank) };
        self.adapters.inner = scratch.span().part(0, inner);
        self.adapters.staging = scratch.span().part(inner, staging);
        self.weights.push(memory);
        self.tensors.push(scratch);
        self.graphs.plan_idle_work(self.config.limits.max_tokens, true, self.guesses.is_some());
        Ok(())
    }

    /// Fills a slot of a layer, after the steps that were queued.
    pub(crate) fn fill_adapter_slot(
        &mut self,
        weight: &CudaWeight,
        slot: u32,
        parts: &[CudaProduct],
    ) -> Result<(), DeviceError> {
        let Adapters { bounds, layers, staging, .. } = &mut self.adapters;
        let refuse = |reason: String| Err(DeviceError::Call { call: "set_adapter".into(), reason });
        let Some(layer) = layers.get_mut(&weight.values.address()) else {
            return refuse("the layer has no slots".into());
        };
        if slot as usize >= bounds.num_slots {
            return refuse(format!("slot {slot} of {}", bounds.num_slots));
        }
        for part in parts {
            if part.rank > bounds.rank || part.rank == 0 {
                return refuse(format!("rank {} in slots of rank {}", part.rank, bounds.rank));
            }
            // Other rows of a step multiply it by zero.
            if !part.is_finite {
                return refuse("an adapter has values that are not finite".into());
            }
        }
        layer.set(&self.queue, *staging, slot as usize, parts, weight.group).map_err(device_error)
    }

    /// The slots of a layer, if a row of the step has an adapter.
    fn low_rank(&self, weight: &CudaWeight) -> Option<(LowRankWeight, LowRankStep)> {
        let current = self.current();
        let layer = self.adapters.layers.get(&weight.values.address()).filter(|_| current.shape.has_adapters)?;
        let (slots, in_step) = (current.spans.adapters, current.spans.adapter_slices);
        Some((layer.slots, LowRankStep { slots, in_step, h: self.adapters.inner }))
    }

    /// Whether a product for `m` rows adds those of adapters itself, if the modules of its layer allow it.
    fn fuses_adapters(&self, m: usize) -> bool {
        // Sums that are added before they are rounded have other bits than those that are added later.
        let is_allowed = self.config.use_fast_kernels && !self.config.batch_invariant;
        is_allowed && m <= skinny_gemm::MAX_ROWS && low_rank::has_fused_kernel(&self.gpu)
    }

    /// Whether the activation of gate and up follows their product in a kernel of its own, because products of adapters lie
    /// between. With `batch_invariant` it does so in every step, whatever rows it has.
    pub(super) fn splits_activation(&self, m: usize, weight: &CudaWeight) -> bool {
        let has_slots = self.adapters.layers.contains_key(&weight.values.address());
        let has_adapters = self.current().shape.has_adapters && !self.fuses_adapters(m);
        has_slots && (self.config.batch_invariant || has_adapters)
    }

    /// A product of all outputs of a linear layer, with those of adapters. With [`CudaDevice::splits_activation`] it is stored as it is.
    pub(super) fn adapted_product(
        &mut self,
        out: Span,
        x: Span,
        weight: &CudaWeight,
        epilogue: Epilogue,
    ) -> Result<(), DeviceError> {
        let m = self.num_tokens();
        let low_rank = self.low_rank(weight).filter(|_| !self.current().only_products);
        let Some((slots, step)) = low_rank else { return self.product(out, x, weight, m, weight.rows, epilogue) };
        self.flush()?;
        low_rank::shrink(&self.queue, &slots, &step, x, m).map_err(device_error)?;
        if !(self.fuses_adapters(m) && slots.is_aligned()) {
            self.product(out, x, weight, m, weight.rows, epilogue)?;
            return low_rank::expand(&self.queue, &slots, &step, out, m).map_err(device_error);
        }
        let x = self.ordered_inputs(x, weight, m)?;
        let (q, operands) = (&self.queue, (&slots, &step));
        match weight.packed_weight() {
            Some(packed) => quantized_gemm::quantized_gemm_low_rank(q, [out, x], &packed, m, epilogue, operands),
            None => skinny_gemm::skinny_gemm_low_rank(q, [out, x], &weight.linear(), m, epilogue, operands),
        }
        .map_err(device_error)
    }
}

fn unsupported(found: String, expected: String) -> DeviceError {
    DeviceError::Unsupported { what: "adapters (LoRA)".into(), found, expected }
}

/// # Errors
/// When the kernels add no products of such slots.
pub(crate) fn check_slots(slots: &AdapterSlots) -> Result<(), DeviceError> {
    let AdapterSlots { count, max_rank, cols, modules } = slots;
    let rank = low_rank::padded_rank(*max_rank);
    if rank > low_rank::SLICE || *count > low_rank::max_slots(rank) {
        let found = format!("`max_loras` {count} with `max_lora_rank` {max_rank}");
        let most = low_rank::max_slots(rank.min(low_rank::SLICE));
        return Err(unsupported(
            found,
            format!("ranks up to {}, and up to {most} slots of this rank", low_rank::SLICE),
        ));
    }
    if !cols.is_multiple_of(8) || modules.len() > 3 {
        let found = format!("{} parts and {cols} inputs", modules.len());
        return Err(unsupported(found, "at most 3 parts, and a multiple of 8 inputs".into()));
    }
    Ok(())
}

/// Refuses slots that do not fit the kernels or the layer.
fn check_layer(weight: &CudaWeight, slots: &AdapterSlots) -> Result<(), DeviceError> {
    check_slots(slots)?;
    let (cols, sum) = (slots.cols, slots.modules.iter().sum::<usize>());
    match (weight.rows, weight.cols) == (sum, cols) {
        true => Ok(()),
        false => Err(unsupported(
            format!("parts of {sum} outputs and {cols} inputs"),
            format!("{} and {}", weight.rows, weight.cols),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outputs_of_gate_and_up_have_the_rows_of_their_groups() {
        let rows = |rows: usize, group: usize| (0..rows).map(|row| weight_row(row, rows, group)).collect::<Vec<_>>();
        assert_eq!(rows(8, 2), [0, 1, 4, 5, 2, 3, 6, 7]);
        assert_eq!(rows(6, 3), [0, 1, 2, 3, 4, 5]);
        assert_eq!(rows(3, 0), [0, 1, 2]);
    }

    #[test]
    fn memory_is_that_of_the_slots_and_of_the_largest_scratch() {
        let slots = |modules: &[usize], cols| AdapterSlots { count: 8, max_rank: 10, cols, modules: modules.to_vec() };
        let layers = [slots(&[512, 128, 128], 256), slots(&[256], 512)];
        let (a, b) = (8 * 16 * 2 * (3 * 256 + 512), 8 * 16 * 2 * (768 + 256));
        // Scales and masks take 256 bytes each.
        let scratch = 100 * 3 * 128 * 2 + 768 * 16 * 2;
        assert_eq!(adapter_bytes(&layers, 100), (a + b + 4 * 256 + scratch) as u64);
        assert_eq!(adapter_bytes(&[], 100), 0);
    }

    #[test]
    fn slots_that_the_kernels_have_not_are_refused_by_name() {
        let check = |count, max_rank, cols| {
            let slots = AdapterSlots { count, max_rank, cols, modules: vec![6, 6] };
            check_slots(&slots).map_err(|error| error.to_string())
        };
        assert_eq!([check(512, 8, 64), check(256, 9, 64), check(64, 64, 8)], [const { Ok(()) }; 3]);
        for (count, max_rank, most) in [(513, 1, 512), (257, 16, 256), (65, 33, 64)] {
            let error = check(count, max_rank, 64).unwrap_err();
            let found = format!("`max_loras` {count} with `max_lora_rank` {max_rank}");
            assert!(error.contains(&found) && error.contains(&format!("up to {most} slots of this rank")), "{error}");
        }
        assert!(check(1, 8, 12).unwrap_err().contains("2 parts and 12 inputs"));
    }
}
