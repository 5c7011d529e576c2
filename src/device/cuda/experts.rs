//! Mixtures of experts: routes tokens, sorts them by expert, computes all experts in two grouped products, and sums.

use kernels::cuda::expert_rows::{ExpertRows, GroupedRows, RowInputs};
use kernels::cuda::gated_activation::GATE_GROUP;
use kernels::cuda::gather_rows::gather_rows;
use kernels::cuda::grouped_fp8_gemm::{grouped_fp8_gemm, has_grouped_fp8_kernel};
use kernels::cuda::grouped_gemm::{Gate, GroupedEpilogue, GroupedWeight, Kernel, grouped_gemm};
use kernels::cuda::quantize_rows::{Fp8Rows, quantize_rows};
use kernels::cuda::quantized_gemm::PackedFormat;
use kernels::cuda::route_few_tokens::{self, ListedRoutes, RoundedTokens, RouterProduct, route_few_tokens};
use kernels::cuda::route_tokens::{
    self as router, Choices, MAX_CHOICES, MAX_EXPERTS, MAX_GROUPS, Router, route_tokens,
};
use kernels::cuda::scale_routes::scale_routes;
use kernels::cuda::skinny_gemm::Epilogue;
use kernels::cuda::sort_routes::{SortedRoutes, SortedRows, sort_routes};
use kernels::cuda::sum_experts::ExpertOutputs;
use kernels::cuda::{DeviceBuffer, Span};
use ops::{Activation, DeviceError, ExpertSlices, GroupScore, Routing, Scoring, WeightSlice};

use super::decoder_ops::gate_activation;
use super::expert_buffers::ExpertBuffers;
use super::expert_sums::Unsummed;
use super::load::{Form, Part, RowOrder};
use super::packed::{expert_formats, fp8_expert_cols};
use super::{CudaDevice, CudaTensor, CudaWeight, device_error};

/// Up to this number of tokens it is faster if the kernel that sorts copies the rows. With more, the block of the expert
/// that most tokens choose would take longest.
const MAX_COPIED_TOKENS: usize = 128;

/// The experts of a layer: this worker's part of each.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ExpertLayer {
    router_bias: Span,
    selection_bias: Span, // [experts] f32, or null
    scales: Span,         // [experts] f32, or null
    gate_up: GroupedWeight,
    down: GroupedWeight,
    /// Whether `gate_up` has gates; otherwise it is up alone.
    is_gated: bool,
    /// Whether inputs may be rounded to e4m3.
    has_fp8_inputs: bool,
    /// Index of this worker's first expert.
    first: usize,
    routing: Routing,
}

/// The order of the rows of gate and up, or of up alone.
pub(crate) fn expert_order(layer: &ExpertSlices<'_>) -> RowOrder {
    if layer.is_gated() { RowOrder::Interleaved(GATE_GROUP) } else { RowOrder::Stacked }
}

impl CudaWeight {
    /// How tokens choose by `logits`, if this is the weight of experts.
    fn router(&self, logits: Span, slots: Span) -> Router {
        let ExpertLayer { router_bias, selection_bias, scales, routing, .. } =
            self.experts.expect("the weight of experts");
        Router {
            logits,
            bias: router_bias,
            selection_bias,
            scales,
            slots,
            count: self.rows,
            scoring: match routing.scoring {
                Scoring::Softmax => router::Scoring::Softmax,
                Scoring::Sigmoid => router::Scoring::Sigmoid,
                Scoring::SparseMixer { tolerance } => router::Scoring::SparseMixer { tolerance },
            },
            groups: routing.groups.map(|groups| router::Groups {
                count: groups.count,
                chosen: groups.chosen,
                score: match groups.score {
                    GroupScore::Best => router::GroupScore::Best,
                    GroupScore::BestTwo => router::GroupScore::BestTwo,
                },
            }),
            is_normalized: routing.is_normalized,
            scale: routing.scale,
        }
    }
}

impl CudaDevice {
    pub(super) fn load_expert_layer(&mut self, layer: &ExpertSlices<'_>) -> Result<CudaWeight, DeviceError> {
        let (count, hidden) = (layer.router.rows.len(), layer.router.cols.len());
        let inner = layer.experts.first().map_or(0, |expert| expert.down.cols.len());
        let top_k = layer.routing.top_k;
        self.check_invariant_weight(count, hidden)?;
        if count > MAX_EXPERTS || top_k > MAX_CHOICES || !inner.is_multiple_of(GATE_GROUP) {
            return Err(DeviceError::Unsupported {
                what: "experts".into(),
                found: format!("{top_k} of {count} experts with {inner} columns on this worker"),
                expected: format!("at most {MAX_CHOICES} of {MAX_EXPERTS} experts, columns a multiple of {GATE_GROUP}"),
            });
        }
        if let Some(groups) = layer.routing.groups.filter(|groups| groups.count > MAX_GROUPS) {
            return Err(DeviceError::Unsupported {
                what: "groups of experts".into(),
                found: groups.count.to_string(),
                expected: format!("at most {MAX_GROUPS}"),
            });
        }
        self.expert_sizes = self.expert_sizes.fitting(layer);
        let router = self.load_matrix(std::slice::from_ref(&layer.router), RowOrder::Stacked)?.values;
        let gate_ups: Vec<&[WeightSlice<'_>]> = layer.experts.iter().map(|expert| &expert.gate_up[..]).collect();
        let downs: Vec<_> = layer.experts.iter().map(|expert| std::slice::from_ref(&expert.down)).collect();
        let gate_up_biases: Vec<_> = layer.experts.iter().map(|expert| &expert.gate_up_bias[..]).collect();
        let down_biases: Vec<_> = layer.experts.iter().map(|expert| expert.down_bias.as_slice()).collect();
        let num_experts = layer.experts.len();
        let (width, order, is_gated) = (layer.width(), expert_order(layer), layer.is_gated());
        let rows = if is_gated { 2 * inner } else { inner };
        let formats = expert_formats(layer);
        let (weight, packed) = self.load_expert_matrices(&gate_ups, order, [rows, width], formats[0])?;
        let bias = self.load_grouped(&gate_up_biases, order, (Form::Values, 2 * rows), Part::column)?;
        let gate_up = GroupedWeight { weight, packed, bias, num_experts, n: rows, k: width };
        let (weight, packed) = self.load_expert_matrices(&downs, RowOrder::Stacked, [width, inner], formats[1])?;
        let bias = self.load_grouped(&down_biases, RowOrder::Stacked, (Form::Values, 2 * width), Part::column)?;
        let down = GroupedWeight { weight, packed, bias, num_experts, n: width, k: inner };
        let fp8_cols = fp8_expert_cols(layer, formats);
        if let Some(cols) = fp8_cols {
            self.product_scratch.count_expert_inputs(top_k, cols);
        }
        let has_fp8_inputs = fp8_cols.is_some();
        let router_bias = self.load_row(layer.router_bias.as_slice(), RowOrder::Stacked)?;
        let selection_bias = self.load_exact(layer.selection_bias.as_ref())?;
        let scales = self.load_exact(layer.scales.as_ref())?;
        let (first, routing) = (layer.first, layer.routing);
        let experts = ExpertLayer {
            router_bias,
            selection_bias,
            scales,
            gate_up,
            down,
            is_gated,
            has_fp8_inputs,
            first,
            routing,
        };
        Ok(CudaWeight { experts: Some(experts), ..CudaWeight::matrix(router, count, hidden) })
    }

    /// Uploads a vector in f32; nothing if there is none.
    fn load_exact(&mut self, vector: Option<&WeightSlice<'_>>) -> Result<Span, DeviceError> {
        let Some(vector) = vector else { return Ok(Span::NULL) };
        let values = crate::slices::vector(vector)?;
        let buffer = DeviceBuffer::from_slice(&self.gpu, &values).map_err(device_error)?;
        let span = buffer.span();
        self.weights.push(buffer);
        Ok(span)
    }

    /// Loads a matrix `[rows, cols]` for each expert, in a quantized format if there is one; then its scales follow.
    fn load_expert_matrices(
        &mut self,
        experts: &[&[WeightSlice<'_>]],
        order: RowOrder,
        [rows, cols]: [usize; 2],
        format: Option<PackedFormat>,
    ) -> Result<(Span, Option<(Span, PackedFormat)>), DeviceError> {
        let Some(format) = format else {
            return Ok((self.load_grouped(experts, order, (Form::Values, rows * cols * 2), Part::new)?, None));
        };
        let codes = (Form::Codes(format), format.codes_bytes(rows, cols));
        let scales = (Form::Scales(format), format.scales_bytes(rows, cols));
        let codes = self.load_grouped(experts, order, codes, Part::new)?;
        let scales = self.load_grouped(experts, order, scales, Part::new)?;
        self.product_scratch.count(experts.len() * rows, cols, false);
        Ok((codes, Some((scales, format))))
    }

    /// Loads one form of a matrix or vector, of a number of bytes, for each expert, one after the other; nothing if they
    /// have no parts.
    fn load_grouped(
        &mut self,
        experts: &[&[WeightSlice<'_>]],
        order: RowOrder,
        (form, bytes): (Form, usize),
        part: fn(&WeightSlice<'_>) -> Result<Part, DeviceError>,
    ) -> Result<Span, DeviceError> {
        if experts.iter().all(|parts| parts.is_empty()) {
            return Ok(Span::NULL);
        }
        let buffer = DeviceBuffer::with_residence(&self.gpu, experts.len() * bytes, self.config.residence());
        let buffer = buffer.map_err(device_error)?;
        let span = buffer.span();
        self.weights.push(buffer);
        for (index, parts) in experts.iter().enumerate() {
            let parts = parts.iter().map(part).collect::<Result<Vec<_>, _>>()?;
            self.loader.get_mut().load(parts, order, form, span.part(index * bytes, bytes))?;
        }
        Ok(span)
    }

    /// Outputs of the experts for `x`, which tokens choose by `routed`. They are summed later.
    pub(super) fn op_experts(
        &mut self,
        out: CudaTensor,
        x: CudaTensor,
        routed: CudaTensor,
        weight: &CudaWeight,
    ) -> Result<(), DeviceError> {
        let ExpertLayer { gate_up, down, is_gated, has_fp8_inputs, first, routing, .. } =
            weight.experts.expect("the weight of experts");
        let (tokens, count, width) = (self.num_tokens(), weight.rows, down.n);
        // Weights or inputs of experts may overwrite the memory of the rounded rows.
        self.rounded = None;
        let logits = self.expert_buffers().logits.span();
        // One kernel multiplies by the router, chooses and lists the experts. Its products have another order than those of more tokens.
        let is_few = self.config.use_fast_kernels
            && !self.config.batch_invariant
            && !routing.scales_input
            && route_few_tokens::takes(&self.gpu, tokens, routing.top_k, count);
        if !is_few {
            self.product(logits, routed.values, weight, tokens, count, Epilogue::StoreF32)?;
        }
        if self.current().only_products {
            return Ok(());
        }
        let gate = self.row_gate.take_if(|gate| is_few && gate.x.values.address() == routed.values.address());
        self.run_deferred()?;
        self.flush()?;
        let (q, b, routes) = (&self.queue, self.expert_buffers(), tokens * routing.top_k);
        let choices =
            Choices { experts: b.experts.span(), probabilities: b.probabilities.span(), top_k: routing.top_k };
        let sorted = SortedRoutes {
            offsets: b.offsets.span(),
            tokens: b.tokens.span(),
            places: b.places.span(),
            first_expert: first,
            num_experts: gate_up.num_experts,
        };
        let (rows, inner) = (b.rows.span(), b.inner.span());
        let listed = ListedRoutes {
            list: b.list.span(),
            places: sorted.places,
            first_expert: first,
            num_experts: gate_up.num_experts,
        };
        let experts = if is_few { ExpertRows::Listed(listed.list) } else { ExpertRows::Offsets(sorted.offsets) };
        let grouped = GroupedRows { experts, tokens, routes };
        let is_packed = gate_up.packed.is_some() || down.packed.is_some();
        let kernel = match self.config.use_fast_kernels {
            true if self.config.batch_invariant && is_packed => Kernel::InOrder,
            true => Kernel::for_rows(q.gpu(), routes, &gate_up),
            false => Kernel::Simple,
        };
        let epilogue = match routing.activation {
            Activation::ClampedSwiglu { alpha, limit } => GroupedEpilogue::Gated(Gate::Clamped { alpha, limit }),
            activation if is_gated => GroupedEpilogue::Gated(Gate::Activation(gate_activation(activation))),
            activation => GroupedEpilogue::Activated(gate_activation(activation)),
        };
        let has_fp8_kernel =
            |weight: &GroupedWeight| weight.packed.is_some_and(|(_, format)| has_grouped_fp8_kernel(q.gpu(), format));
        let rounds_inputs = self.config.use_fast_kernels && has_fp8_inputs && has_fp8_kernel(&gate_up);
        let router = weight.router(logits, self.current().spans.slots.of(0));
        let scratch = self.workspace().products.span();
        let in_e4m3 = |count: usize, cols: usize| Fp8Rows::in_buffer(scratch, count, cols);
        // By the first product, so that nothing is copied or rounded for each expert of a token.
        let is_gathered = !is_few && !routing.scales_input && (rounds_inputs || kernel == Kernel::Wide);
        let first_rows = match is_few {
            true => FirstRows::OfAllTokens,
            false if is_gathered => FirstRows::OfTokens,
            false => FirstRows::Sorted,
        };
        // The rows that the first product takes, and their number.
        let (from, num_from) = if is_few || is_gathered { (x.values, tokens) } else { (rows, routes) };
        let run = || {
            let copied = SortedRows { rows, x: x.values, cols: width };
            let is_copied = tokens <= MAX_COPIED_TOKENS && !is_gathered;
            if is_few {
                let product = RouterProduct {
                    x: routed.values,
                    weight: weight.values,
                    width: weight.cols,
                    gate: gate.map(|gate| [gate.gate.values, b.factors.span()]),
                };
                let rounded =
                    rounds_inputs.then(|| RoundedTokens { x: x.values, cols: width, to: in_e4m3(tokens, width) });
                route_few_tokens(q, listed, choices, &router, product, tokens, rounded)?;
            } else {
                route_tokens(q, choices, &router, tokens)?;
                sort_routes(q, sorted, choices, tokens, is_copied.then_some(copied))?;
                if !is_copied && !is_gathered {
                    gather_rows(q, rows, x.values, sorted.tokens, routes, width)?;
                }
            }
            if routing.scales_input {
                scale_routes(q, rows, choices, sorted, routes, width)?;
            }
            if rounds_inputs {
                if !is_few {
                    quantize_rows(q, in_e4m3(num_from, width), from, num_from, width)?;
                }
                let inputs = first_rows.of(in_e4m3(num_from, width), sorted.tokens);
                grouped_fp8_gemm(q, inner, inputs, &gate_up, grouped, epilogue)?;
                let rounded = in_e4m3(routes, down.k);
                quantize_rows(q, rounded, inner, routes, down.k)?;
                return grouped_fp8_gemm(q, rows, RowInputs::Sorted(rounded), &down, grouped, GroupedEpilogue::Store);
            }
            // One buffer holds the expanded weights of both products in turn.
            let taken = |weight: &GroupedWeight| match kernel {
                Kernel::Skinny | Kernel::InOrder => Ok(*weight),
                _ => weight.expanded(q, self.workspace().products.span()),
            };
            let inputs = first_rows.of(from, sorted.tokens);
            grouped_gemm(q, inner, inputs, &taken(&gate_up)?, grouped, epilogue, kernel)?;
            grouped_gemm(q, rows, RowInputs::Sorted(inner), &taken(&down)?, grouped, GroupedEpilogue::Store, kernel)
        };
        run().map_err(device_error)?;
        self.unsummed = Some(Unsummed {
            out: out.values,
            experts: ExpertOutputs {
                y: rows,
                choices,
                sorted,
                cols: width,
                also: Span::NULL,
                also_factors: gate.map_or(Span::NULL, |_| b.factors.span()),
            },
            gated: gate.map(|gate| gate.out.values),
        });
        Ok(())
    }

    fn expert_buffers(&self) -> &ExpertBuffers {
        self.expert_buffers.as_ref().expect("a model with experts has their buffers")
    }
}

/// The rows that the first product takes.
enum FirstRows {
    Sorted,
    OfTokens,
    OfAllTokens,
}

impl FirstRows {
    fn of<X>(&self, x: X, of_rows: Span) -> RowInputs<X> {
        match self {
            Self::Sorted => RowInputs::Sorted(x),
            Self::OfTokens => RowInputs::OfTokens { x, of_rows },
            Self::OfAllTokens => RowInputs::OfAllTokens(x),
        }
    }
}
