//! Layers with a recurrent state, the slots of the states, and the gates of attention's output.

use std::sync::Arc;

use engine::CopiedState;
use kernels::cuda::gate::gate;
use kernels::cuda::gated_delta::{self, DeltaShape, DeltaWeights, GatedDelta, HEAD_DIM};
use kernels::cuda::mamba2::{self, Mamba2, MambaShape, MambaWeights};
use kernels::cuda::recurrent::{NUM_TAPS, RecurrentOp, RecurrentRows, RecurrentStates, RowsKernel};
use kernels::cuda::short_conv::{SHORT_TAPS, ShortConv};
use kernels::cuda::{CudaError, DeviceBuffer, Gpu, Queue, Residence, Span};
use ops::{AttentionSpec, DeviceError, Feature, RecurrentRule, RecurrentShape, RecurrentWeights, StepInputs};

use super::{CudaDevice, CudaTensor, CudaWeight, device_error};

/// The sizes of a layer as the kernels of its rule take them.
#[derive(Debug, Clone, Copy)]
pub(crate) enum RecurrentKernel {
    GatedDelta(DeltaShape),
    /// With the number of heads that have one norm together.
    Mamba2(MambaShape, usize),
    /// With the number of channels.
    ShortConv(usize),
}

/// The weights of a layer besides its projections.
#[derive(Debug, Clone, Copy)]
pub(crate) enum RecurrentLayer {
    GatedDelta(DeltaShape, DeltaWeights),
    Mamba2(MambaShape, MambaWeights),
    /// Number of channels, taps `[3, channels]`, and biases `[channels]` or null.
    ShortConv(usize, [Span; 2]),
}

/// Recurrent states of sequences: slots of all layers' states, one after the other.
#[derive(Default)]
pub(crate) struct States {
    memory: Option<DeviceBuffer>, // [slots, layers, state] f32
    /// The first float of each layer in a slot.
    starts: Vec<usize>,
    num_slots: usize,
    /// Floats of a slot.
    pitch: usize,
}

impl States {
    fn new(gpu: &Arc<Gpu>, spec: &AttentionSpec, num_slots: usize, residence: Residence) -> Result<Self, CudaError> {
        let pitch = spec.state_bytes() / size_of::<f32>();
        let next = |start: &mut usize, shape: &RecurrentShape| {
            *start += shape.state_len();
            Some(*start - shape.state_len())
        };
        let starts = spec.states.iter().scan(0, next).collect();
        let memory = DeviceBuffer::with_residence(gpu, num_slots * pitch * size_of::<f32>(), residence)?;
        Ok(Self { memory: Some(memory), starts, num_slots, pitch })
    }

    /// The buffer of all states; none for a model without them.
    pub(super) fn buffer(&mut self) -> Option<&mut DeviceBuffer> {
        self.memory.as_mut()
    }

    /// Refuses a step whose rows, and states that are saved, have no slots of their own.
    pub(super) fn check(&self, inputs: &StepInputs) -> Result<(), DeviceError> {
        let (slots, saved, num_rows) = (&inputs.states, &inputs.saved_states, inputs.num_rows());
        if self.num_slots == 0 && saved.is_empty() {
            return Ok(());
        }
        let mut sorted: Vec<u32> = slots.iter().copied().chain(saved.iter().map(|[_, _, slot]| *slot)).collect();
        sorted.sort_unstable();
        let is_shared = sorted.windows(2).any(|pair| pair[0] == pair[1]);
        if slots.len() == num_rows && !is_shared && sorted.last().is_none_or(|&slot| (slot as usize) < self.num_slots) {
            return Ok(());
        }
        Err(DeviceError::Unsupported {
            what: "states of a step".into(),
            found: format!("slots {slots:?}, and saved {saved:?}"),
            expected: format!("{num_rows} slots that differ, below {}", self.num_slots),
        })
    }

    /// Bytes of a slot; 0 without states.
    pub(super) fn bytes(&self) -> usize {
        self.pitch * size_of::<f32>()
    }

    pub(super) fn slot(&self, slot: u32) -> Result<Span, DeviceError> {
        match &self.memory {
            Some(memory) if (slot as usize) < self.num_slots => {
                Ok(memory.span().elements::<f32>(slot as usize * self.pitch, self.pitch))
            }
            _ => Err(DeviceError::Call {
                call: "copy_states".into(),
                reason: format!("slot {slot} of {}", self.num_slots),
            }),
        }
    }

    fn copy(&self, queue: &Queue, copied: &[CopiedState]) -> Result<(), DeviceError> {
        for copied in copied {
            let (from, to) = (self.slot(copied.from.0)?, self.slot(copied.to.0)?);
            queue.copy(to, from).map_err(device_error)?;
        }
        Ok(())
    }

    /// The states of a layer in all slots.
    fn layer(&self, layer: usize) -> RecurrentStates {
        let memory = self.memory.as_ref().expect("states are allocated before the first step").span();
        let start = self.starts[layer];
        let memory = memory.elements::<f32>(start, memory.count::<f32>() - start);
        RecurrentStates { memory, pitch: self.pitch, num_slots: self.num_slots }
    }
}

impl RecurrentKernel {
    /// The kernels for a layer; refuses rules and sizes that they do not have.
    pub(crate) fn new(shape: &RecurrentShape) -> Result<Self, DeviceError> {
        let RecurrentShape { num_key_heads, num_value_heads, key_dim, value_dim, num_taps, rule } = *shape;
        let refused = |what: &str, expected: String| DeviceError::Unsupported {
            what: format!("layers with a recurrent state ({what}) on GPUs"),
            found: format!("keys of {key_dim}, values of {value_dim}, a convolution of {num_taps}"),
            expected: format!("{expected} and a convolution of {NUM_TAPS}, or `--device=cpu`"),
        };
        let has_taps = num_taps == NUM_TAPS;
        match rule {
            RecurrentRule::GatedDelta { .. } if has_taps && [key_dim, value_dim] == [HEAD_DIM; 2] => {
                Ok(Self::GatedDelta(DeltaShape { num_key_heads, num_value_heads }))
            }
            RecurrentRule::GatedDelta { .. } => {
                Err(refused("Gated DeltaNet", format!("keys and values of {HEAD_DIM}")))
            }
            RecurrentRule::Mamba2 { norm_heads: None } => Err(DeviceError::lacks(Feature::UnnormedMamba2)),
            RecurrentRule::Mamba2 { norm_heads: Some(norm_heads) }
                if has_taps
                    && key_dim == mamba2::KEY_DIM
                    && mamba2::VALUE_DIMS.contains(&value_dim)
                    && norm_heads * value_dim <= mamba2::MAX_NORM_WIDTH =>
            {
                Ok(Self::Mamba2(MambaShape { num_key_heads, num_value_heads, value_dim }, norm_heads))
            }
            RecurrentRule::Mamba2 { .. } => {
                let [key_dim, value_dims] = [format!("{}", mamba2::KEY_DIM), format!("{:?}", mamba2::VALUE_DIMS)];
                let expected = format!(
                    "a state of {key_dim}, heads of one of {value_dims}, norms of up to {} elements",
                    mamba2::MAX_NORM_WIDTH
                );
                Err(refused("Mamba-2", expected))
            }
            RecurrentRule::KimiDelta => Err(DeviceError::lacks(Feature::KimiDelta)),
            RecurrentRule::ShortConv if num_taps == SHORT_TAPS && shape.channels().is_multiple_of(8) => {
                Ok(Self::ShortConv(shape.channels()))
            }
            RecurrentRule::ShortConv => Err(DeviceError::Unsupported {
                what: "layers with a short convolution on GPUs".into(),
                found: format!("a convolution of {num_taps} inputs for {} channels", shape.channels()),
                expected: format!("one of {SHORT_TAPS} for a multiple of 8, or `--device=cpu`"),
            }),
        }
    }

    /// Bytes of scratch memory for chunks of steps of up to `tokens` tokens.
    pub(crate) fn scratch_bytes(self, tokens: usize) -> usize {
        match self {
            Self::GatedDelta(shape) => gated_delta::scratch_bytes(shape, tokens),
            Self::Mamba2(shape, _) => shape.scratch_bytes(tokens),
            Self::ShortConv(_) => 0,
        }
    }
}

impl CudaDevice {
    pub(super) fn load_recurrent_layer(&mut self, layer: &RecurrentWeights) -> Result<CudaWeight, DeviceError> {
        let RecurrentWeights { shape, conv, conv_bias, a_log, dt_bias, skip, norm } = layer;
        let kernel = RecurrentKernel::new(shape)?;
        self.product_scratch.count_recurrent(kernel);
        let taps = shape.num_taps;
        let conv: Vec<f32> = (0..taps).flat_map(|tap| conv.iter().skip(tap).step_by(taps)).copied().collect();
        let decay: Vec<f32> = a_log.iter().map(|a_log| -a_log.exp()).collect();
        // What kernels read as vectors comes first.
        let parts = [&conv, conv_bias, norm, &decay, dt_bias, skip];
        let buffer = DeviceBuffer::from_slice(&self.gpu, &parts.map(Vec::as_slice).concat()).map_err(device_error)?;
        let all = buffer.span();
        self.weights.push(buffer);
        let mut start = 0;
        let [conv, conv_bias, norm, decay, dt_bias, skip] = parts.map(|part| {
            start += part.len();
            if part.is_empty() { Span::NULL } else { all.elements::<f32>(start - part.len(), part.len()) }
        });
        let eps = 0.0; // That of a call is used.
        let recurrent = match kernel {
            RecurrentKernel::GatedDelta(shape) => {
                RecurrentLayer::GatedDelta(shape, DeltaWeights { conv, decay, dt_bias, norm, eps })
            }
            RecurrentKernel::Mamba2(shape, norm_heads) => {
                let weights = MambaWeights { conv, conv_bias, decay, dt_bias, skip, norm, norm_heads, eps };
                RecurrentLayer::Mamba2(shape, weights)
            }
            RecurrentKernel::ShortConv(width) => RecurrentLayer::ShortConv(width, [conv, conv_bias]),
        };
        Ok(CudaWeight { recurrent: Some(recurrent), ..CudaWeight::matrix(all, 1, start) })
    }

    pub(super) fn take_states(&mut self, spec: &AttentionSpec, num_slots: usize) -> Result<(), DeviceError> {
        self.states = States::new(&self.gpu, spec, num_slots, self.config.residence()).map_err(device_error)?;
        Ok(())
    }

    pub(super) fn copy_slots(&self, copied: &[CopiedState]) -> Result<(), DeviceError> {
        self.states.copy(&self.queue, copied)
    }

    pub(super) fn op_recurrent(
        &mut self,
        out: CudaTensor,
        inputs: [CudaTensor; 2],
        layer: usize,
        weights: &CudaWeight,
        eps: f32,
    ) -> Result<(), DeviceError> {
        if self.current().only_products {
            return Ok(());
        }
        self.run_deferred()?;
        self.flush()?;
        let spans = self.current().spans;
        let states = self.states.layer(layer);
        let (out, [inputs, steps], positions) = (out.values, inputs.map(|tensor| tensor.values), spans.positions);
        match weights.recurrent.expect("the weights of a layer with a state") {
            RecurrentLayer::GatedDelta(shape, weights) => {
                let (qkvz, ba, weights) = (inputs, steps, DeltaWeights { eps, ..weights });
                self.run_recurrent(&GatedDelta { out, qkvz, ba, shape, weights, states, positions })
            }
            RecurrentLayer::Mamba2(shape, weights) => {
                let (dt, weights) = (steps, MambaWeights { eps, ..weights });
                self.run_recurrent(&Mamba2 { out, inputs, dt, shape, weights, states, positions })
            }
            RecurrentLayer::ShortConv(width, [taps, bias]) => {
                let gates = steps;
                self.run_recurrent(&ShortConv { out, inputs, gates, width, taps, bias, states, positions })
            }
        }
    }

    /// Computes the rows of the step.
    fn run_recurrent(&self, op: &impl RecurrentOp) -> Result<(), DeviceError> {
        let (spans, step) = (self.current().spans, self.current().shape);
        let decodes = step.rows - step.prefill_rows;
        // Rows of several tokens that are chunks, and their tokens; others compute their tokens in order, decodes among them.
        let [chunks, chunk_tokens] = self.current().in_order.unwrap_or([step.prefill_rows, step.tokens - decodes]);
        let rows = |first: usize, count: usize, num_tokens: usize| {
            let slots = spans.states.elements::<u32>(first, count);
            RecurrentRows { slots, starts: spans.state_starts.elements::<u32>(first, count + 1), num_tokens, count }
        };
        if chunks > 0 {
            let kernel = match self.config.use_fast_kernels {
                true => RowsKernel::Chunks(self.workspace().products.span()),
                false => RowsKernel::InOrder,
            };
            op.rows(&self.queue, &rows(0, chunks, chunk_tokens), kernel).map_err(device_error)?;
        }
        if self.current().in_order.is_some() {
            let count = step.rows - chunks;
            let kernel = RowsKernel::Saving(spans.saved_states.elements::<u32>(2 * chunks, 2 * count));
            op.rows(&self.queue, &rows(chunks, count, step.tokens), kernel).map_err(device_error)?;
        } else if decodes > 0 {
            let slots = spans.states.elements::<u32>(step.prefill_rows, decodes);
            op.decode(&self.queue, slots, chunk_tokens, decodes).map_err(device_error)?;
        }
        Ok(())
    }

    /// `x *= sigmoid(gates)`.
    pub(super) fn op_gate(&mut self, x: CudaTensor, gates: CudaTensor) -> Result<(), DeviceError> {
        if self.current().only_products {
            return Ok(());
        }
        self.flush()?;
        gate(&self.queue, x.values, gates.values, self.num_tokens() * x.cols).map_err(device_error)
    }
}
