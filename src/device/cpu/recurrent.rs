//! Layers with a recurrent state, and the slots of the states.

use engine::CopiedState;
use kernels::cpu::{self as k, Buffer, DeltaWeights, KimiDeltaWeights, Mamba2Weights, StateRow, StateShape};
use ops::{AttentionSpec, DeviceError, RecurrentRule, RecurrentShape, RecurrentWeights, StepInputs};

use super::{CpuDevice, CpuTensor, available_memory, out_of_range};

/// The weights of a layer besides its projections.
pub struct Recurrent {
    rule: RecurrentRule,
    shape: StateShape,
    conv: Vec<f32>,      // [taps, C]
    conv_bias: Vec<f32>, // [C], or none
    decay: Vec<f32>,     // [V], or none
    dt_bias: Vec<f32>,   // [V] or [V DK], or none
    skip: Vec<f32>,      // [V], or none
    norm: Vec<f32>,      // [DV] or [V DV], or none
}

/// Recurrent states of sequences.
#[derive(Default)]
pub(super) struct States {
    layers: Vec<LayerStates>,
    num_slots: usize,
}

/// Those of one layer.
struct LayerStates {
    slots: Buffer<f32>, // [slots, state_len]
    state_len: usize,
}

impl States {
    pub(super) fn num_slots(&self) -> usize {
        self.num_slots
    }

    /// Refuses a step whose rows, and states that are saved, have no slots of their own.
    pub(super) fn check(&self, inputs: &StepInputs) -> Result<(), DeviceError> {
        if self.layers.is_empty() {
            return Ok(());
        }
        let (slots, saved) = (&inputs.states, &inputs.saved_states);
        if let Some([row, ..]) = saved.iter().find(|[row, ..]| *row as usize >= inputs.num_rows()) {
            return Err(out_of_range("row", *row, inputs.num_rows()));
        }
        let mut sorted: Vec<u32> = slots.iter().copied().chain(saved.iter().map(|[_, _, slot]| *slot)).collect();
        sorted.sort_unstable();
        if slots.len() != inputs.num_rows() || sorted.windows(2).any(|pair| pair[0] == pair[1]) {
            return Err(DeviceError::Unsupported {
                what: "states of a step".into(),
                found: format!("slots {slots:?}"),
                expected: format!("{} slots that differ", inputs.num_rows()),
            });
        }
        let outside = sorted.last().filter(|&&slot| slot as usize >= self.num_slots);
        outside.map_or(Ok(()), |&slot| Err(out_of_range("state", slot, self.num_slots)))
    }

    /// Elements of a slot in all layers.
    pub(super) fn slot_len(&self) -> usize {
        self.layers.iter().map(|layer| layer.state_len).sum()
    }

    /// The states of a slot, one for each layer.
    pub(super) fn slot_mut(&mut self, slot: u32) -> Result<impl Iterator<Item = &mut [f32]>, DeviceError> {
        if slot as usize >= self.num_slots {
            return Err(out_of_range("state", slot, self.num_slots));
        }
        Ok(self.layers.iter_mut().map(move |layer| {
            let start = slot as usize * layer.state_len;
            &mut layer.slots[start..start + layer.state_len]
        }))
    }

    pub(super) fn copy(&mut self, copied: &[CopiedState]) -> Result<(), DeviceError> {
        for copied in copied {
            let [from, to] = [copied.from.0, copied.to.0];
            let slot = from.max(to);
            if slot as usize >= self.num_slots {
                return Err(out_of_range("state", slot, self.num_slots));
            }
            for LayerStates { slots, state_len } in &mut self.layers {
                let start = from as usize * *state_len;
                slots.copy_within(start..start + *state_len, to as usize * *state_len);
            }
        }
        Ok(())
    }
}

impl CpuDevice {
    pub(super) fn load_recurrent_layer(&mut self, layer: &RecurrentWeights) -> Recurrent {
        let RecurrentWeights { shape, conv, conv_bias, a_log, dt_bias, skip, norm } = layer;
        let RecurrentShape { rule, num_key_heads, num_value_heads, key_dim, value_dim, num_taps } = *shape;
        let vectors = [conv, conv_bias, a_log, dt_bias, skip, norm];
        self.weights_bytes += vectors.iter().map(|vector| size_of_val(&vector[..])).sum::<usize>() as u64;
        Recurrent {
            rule,
            shape: StateShape { num_key_heads, num_value_heads, key_dim, value_dim, num_taps },
            conv: (0..num_taps).flat_map(|tap| conv.iter().skip(tap).step_by(num_taps)).copied().collect(),
            conv_bias: conv_bias.clone(),
            decay: a_log.iter().map(|a_log| -a_log.exp()).collect(),
            dt_bias: dt_bias.clone(),
            skip: skip.clone(),
            norm: norm.clone(),
        }
    }

    pub(super) fn take_states(&mut self, spec: &AttentionSpec, num_slots: usize) -> Result<(), DeviceError> {
        let needed_bytes = (spec.state_bytes() * num_slots) as u64;
        let free_bytes = available_memory();
        if needed_bytes > free_bytes {
            let what = format!("{num_slots} recurrent states");
            return Err(DeviceError::OutOfMemory { device: "cpu".into(), what, needed_bytes, free_bytes });
        }
        let layer = |shape: &RecurrentShape| LayerStates {
            slots: Buffer::new(num_slots * shape.state_len()),
            state_len: shape.state_len(),
        };
        self.states = States { layers: spec.states.iter().map(layer).collect(), num_slots };
        Ok(())
    }

    pub(super) fn run_recurrent(
        &mut self,
        out: &mut CpuTensor,
        inputs: [&CpuTensor; 2],
        layer: usize,
        weights: &Recurrent,
        eps: f32,
    ) {
        let (tokens, rows) = (self.num_tokens(), self.state_rows());
        let Recurrent { rule, shape, conv, conv_bias, decay, dt_bias, skip, norm } = weights;
        let (out, states) = (out.rows_mut(tokens), &mut self.states.layers[layer].slots);
        let (inputs, pool) = (inputs.map(|inputs| inputs.rows(tokens)), &mut self.pool);
        match *rule {
            RecurrentRule::GatedDelta { has_doubled_rates } => {
                let max_rate = if has_doubled_rates { 2.0 } else { 1.0 };
                let by = DeltaWeights { conv, decay, dt_bias, norm, max_rate, eps };
                k::gated_delta(pool, shape, &by, &rows, inputs, (out, states));
            }
            RecurrentRule::Mamba2 { norm_heads } => {
                let norm_heads = norm_heads.unwrap_or(1);
                let by = Mamba2Weights { conv, conv_bias, decay, dt_bias, skip, norm, norm_heads, eps };
                k::mamba2(pool, shape, &by, &rows, inputs, (out, states));
            }
            RecurrentRule::ShortConv => {
                k::short_conv(pool, shape, [conv, conv_bias], &rows, inputs, (out, states));
            }
            RecurrentRule::KimiDelta => unreachable!("it has three inputs"),
        }
    }

    pub(super) fn run_kimi_delta(
        &mut self,
        out: &mut CpuTensor,
        inputs: [&CpuTensor; 3],
        layer: usize,
        weights: &Recurrent,
        eps: f32,
    ) {
        let (tokens, rows) = (self.num_tokens(), self.state_rows());
        let Recurrent { shape, conv, decay, dt_bias, norm, .. } = weights;
        let by = KimiDeltaWeights { conv, decay, dt_bias, norm, eps };
        let (out, states) = (out.rows_mut(tokens), &mut self.states.layers[layer].slots);
        k::kimi_delta(&mut self.pool, shape, &by, &rows, inputs.map(|inputs| inputs.rows(tokens)), (out, states));
    }

    /// The rows of the step.
    fn state_rows(&self) -> Vec<StateRow> {
        let step = &self.inputs;
        let row = |(index, starts): (usize, &[u32])| StateRow {
            first_token: starts[0] as usize,
            num_tokens: (starts[1] - starts[0]) as usize,
            state: step.states[index] as usize,
            is_first: step.positions[starts[0] as usize] == 0,
            saved: step
                .saved_states
                .iter()
                .find(|[row, ..]| *row as usize == index)
                .map(|&[_, count, slot]| [count, slot]),
        };
        step.row_starts.windows(2).enumerate().filter(|(_, s)| s[0] < s[1]).map(row).collect()
    }

    /// `x *= sigmoid(gates)`.
    pub(super) fn run_gate(&mut self, x: &mut CpuTensor, gates: &CpuTensor) {
        let tokens = self.num_tokens();
        let gated = x.rows_mut(tokens).iter_mut().zip(gates.rows(tokens));
        gated.for_each(|(x, gate)| *x /= 1.0 + k::exp(-gate));
    }
}
