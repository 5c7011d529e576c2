//! Adapters (LoRA): low-rank products `scale * B (A x)` that are added to the outputs of linear layers.
//!
//! [`Adapter::read`] reads a folder that PEFT has saved, and checks it against the model. Rank 0 sends it to the workers as
//! bytes; each takes the part of its shard (`targets.rs`): A whole and rows of B for layers that are split by output,
//! columns of A and B whole for those that are split by input, whose sums over the group include the product.

mod bytes;
mod config;
mod error;
mod read;
pub(crate) mod targets;
mod tensors;

use ops::{DType, Device, LowRankPart};
use serde::{Deserialize, Serialize};

pub use error::AdapterError;
use targets::Target;
pub use tensors::AdapterTensors;

/// Most that the rank of an adapter may be.
pub const MAX_ADAPTER_RANK: usize = 64;

/// Bounds of adapters that are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdapterBounds {
    /// Largest rank.
    pub max_rank: usize,
    /// Largest number of bytes of weights.
    pub max_bytes: u64,
}

/// An adapter of a model, with the weights of the whole model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Adapter {
    products: Vec<LowRank>,
}

/// The weights of a worker in which adapters may add products.
#[derive(Debug, Default)]
pub struct AdapterLayers(pub(crate) Vec<(usize, Target)>);

/// The low-rank product of one linear layer of the checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct LowRank {
    layer: u32,
    /// Its name within the layer, such as `self_attn.q_proj`.
    module: String,
    rank: u32,
    scale: f32,
    a: Matrix, // [rank, inputs]
    b: Matrix, // [outputs, rank]
}

/// A row-major matrix, little-endian.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Matrix {
    element: Element,
    cols: u32,
    #[serde(with = "bytes")]
    data: Vec<u8>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Element {
    Bf16,
    F16,
    F32,
}

impl Adapter {
    /// The bytes from which [`Adapter::from_bytes`] makes the same adapter.
    pub fn to_bytes(&self) -> Vec<u8> {
        postcard::to_stdvec(self).expect("an adapter holds nothing that cannot be serialized")
    }

    /// The adapter of these bytes.
    ///
    /// # Errors
    /// When they are not those of [`Adapter::to_bytes`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, AdapterError> {
        postcard::from_bytes(bytes).map_err(|source| AdapterError::Bytes { len: bytes.len(), source })
    }

    /// This worker's products in each of the layers, as its device holds them.
    pub fn products<D: Device>(&self, layers: &AdapterLayers) -> Vec<Vec<D::Product>> {
        let of_target =
            |(layer, target): &(usize, Target)| self.parts(*layer, target).into_iter().map(D::product).collect();
        layers.0.iter().map(of_target).collect()
    }

    /// The parts of a worker's weight, which covers the rows and columns of `target`.
    fn parts(&self, layer: usize, target: &Target) -> Vec<LowRankPart> {
        let of_module = |module: &targets::Module| {
            let product = self.products.iter().find(|it| it.layer as usize == layer && it.module == module.name)?;
            let rows = module.slices.iter().flat_map(|slice| {
                let (order, padding) = (slice.head_order, slice.padding);
                let stored = move |row| order.map_or(row, |order| order.stored(row));
                slice.taken.clone().map(move |row| padding.map_or(Some(stored(row)), |padding| padding.stored(row)))
            });
            let rank = product.rank as usize;
            let mut b = Vec::new();
            rows.for_each(|row| match row {
                Some(row) => product.b.append(row, 0..rank, &mut b),
                None => b.resize(b.len() + rank, 0.0),
            });
            let mut a = Vec::new();
            for row in 0..rank {
                match target.padding {
                    None => product.a.append(row, target.taken.clone(), &mut a),
                    Some(padding) => target.taken.clone().for_each(|col| match padding.stored(col) {
                        Some(col) => product.a.append(row, col..col + 1, &mut a),
                        None => a.push(0.0),
                    }),
                }
            }
            Some(LowRankPart { first_row: module.first_row, rank, scale: product.scale, a, b })
        };
        target.modules.iter().filter_map(of_module).collect()
    }
}

impl Matrix {
    /// Whether all values are finite, also in bf16: devices multiply those of one adapter by zeros of rows that have another.
    fn is_finite(&self) -> bool {
        match self.element {
            Element::Bf16 => self.data.as_chunks().0.iter().all(|it| half::bf16::from_le_bytes(*it).is_finite()),
            Element::F16 => self.data.as_chunks().0.iter().all(|it| half::f16::from_le_bytes(*it).is_finite()),
            Element::F32 => {
                let mut values = self.data.as_chunks().0.iter().map(|it| f32::from_le_bytes(*it));
                values.all(|value| half::bf16::from_f32(value).is_finite())
            }
        }
    }

    /// Appends columns of a row, in f32.
    fn append(&self, row: usize, cols: std::ops::Range<usize>, out: &mut Vec<f32>) {
        let size = self.element.dtype().size();
        let start = row * self.cols as usize + cols.start;
        let bytes = &self.data[start * size..(start + cols.len()) * size];
        match self.element {
            Element::Bf16 => out.extend(bytes.as_chunks().0.iter().map(|it| half::bf16::from_le_bytes(*it).to_f32())),
            Element::F16 => out.extend(bytes.as_chunks().0.iter().map(|it| half::f16::from_le_bytes(*it).to_f32())),
            Element::F32 => out.extend(bytes.as_chunks().0.iter().map(|it| f32::from_le_bytes(*it))),
        }
    }
}

impl Element {
    fn of(dtype: DType) -> Self {
        match dtype {
            DType::Bf16 => Element::Bf16,
            DType::F16 => Element::F16,
            DType::F32 => Element::F32,
        }
    }

    fn dtype(self) -> DType {
        match self {
            Element::Bf16 => DType::Bf16,
            Element::F16 => DType::F16,
            Element::F32 => DType::F32,
        }
    }
}
