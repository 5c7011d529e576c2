//! What lies between the steps of one run.

use super::graph::Wire;
use crate::index_memo::Finder;
use crate::{Shape, Tensor};

/// The tensors between the steps, by slot.
pub(super) struct Tensors {
    slots: Vec<Option<Tensor>>,
    /// Which slots hold one: few of many do, and these bytes lie together.
    is_there: Vec<bool>,
}

impl Tensors {
    /// No tensor yet, of so many.
    pub(super) fn new(num_tensors: usize) -> Self {
        Self { slots: vec![None; num_tensors], is_there: vec![false; num_tensors] }
    }

    /// Whether the slot holds a tensor.
    pub(super) fn has(&self, slot: usize) -> bool {
        self.is_there[slot]
    }

    /// The tensor of a wire, by the name that it has at the wire's model.
    pub(super) fn of(&self, wire: &Wire) -> Option<Tensor> {
        if !self.has(wire.slot) {
            return None;
        }
        let tensor = self.slots[wire.slot].as_ref()?;
        let shape = Shape::from_slice(&tensor.shape);
        Some(Tensor { name: wire.name.clone(), datatype: tensor.datatype, shape, data: tensor.data.clone() })
    }

    /// Puts those that a wire leads from into its slot; whether there were any.
    pub(super) fn put_all(&mut self, wires: &[Wire], tensors: Vec<Tensor>, finder: &mut Finder) -> bool {
        let mut is_any = false;
        for (index, tensor) in tensors.into_iter().enumerate() {
            if let Some(found) = finder.find(index, wires, |wire| wire.name == tensor.name) {
                let slot = wires[found].slot;
                is_any = true;
                self.is_there[slot] = true;
                self.slots[slot] = Some(tensor);
            }
        }
        is_any
    }

    /// Drops the tensor of a slot, if it holds one.
    pub(super) fn remove(&mut self, slot: usize) {
        if self.is_there[slot] {
            self.is_there[slot] = false;
            self.slots[slot] = None;
        }
    }
}
