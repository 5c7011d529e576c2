//! The tensors between the steps of an ensemble, for one request.

use super::graph::Wire;
use crate::index_memo::IndexMemo;
use crate::{Shape, Tensor};

/// Tensors by slot.
pub(super) struct Tensors {
    slots: Vec<Option<Tensor>>,
    /// Whether each slot holds a tensor. Checking these bytes touches fewer cache lines than checking `slots`.
    is_filled: Vec<bool>,
}

impl Tensors {
    /// Makes `num_tensors` empty slots.
    pub(super) fn new(num_tensors: usize) -> Self {
        Self { slots: vec![None; num_tensors], is_filled: vec![false; num_tensors] }
    }

    /// Whether the slot holds a tensor.
    pub(super) fn has(&self, slot: usize) -> bool {
        self.is_filled[slot]
    }

    /// The tensor in the wire's slot, with the name that the wire's model uses.
    pub(super) fn of(&self, wire: &Wire) -> Option<Tensor> {
        if !self.has(wire.slot) {
            return None;
        }
        let tensor = self.slots[wire.slot].as_ref()?;
        let shape = Shape::from_slice(&tensor.shape);
        Some(Tensor { name: wire.name.clone(), datatype: tensor.datatype, shape, data: tensor.data.clone() })
    }

    /// Stores each tensor that has a wire in the wire's slot. Returns whether there was one.
    pub(super) fn put_all(&mut self, wires: &[Wire], tensors: Vec<Tensor>, memo: &mut IndexMemo) -> bool {
        let mut has_stored = false;
        for (index, tensor) in tensors.into_iter().enumerate() {
            if let Some(found) = memo.find(index, wires, |wire| wire.name == tensor.name) {
                let slot = wires[found].slot;
                has_stored = true;
                self.is_filled[slot] = true;
                self.slots[slot] = Some(tensor);
            }
        }
        has_stored
    }

    /// Empties a slot.
    pub(super) fn remove(&mut self, slot: usize) {
        if self.is_filled[slot] {
            self.is_filled[slot] = false;
            self.slots[slot] = None;
        }
    }
}
