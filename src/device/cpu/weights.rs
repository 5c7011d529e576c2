//! Weights of the CPU device, most of them used directly in the mapped checkpoint.

use kernels::cpu::{Matrix, Norm};
use ops::{DeviceError, NormKind, NormSlices, WeightSlice};

use super::Linear;
use super::experts::Experts;
use super::latent::Latent;
use super::recurrent::Recurrent;
use crate::slices::vector;

/// A weight of the model.
pub enum CpuWeight {
    /// A linear layer. `statistics` is where those of its inputs are collected; `adapters` is its number among the layers that may have
    /// adapters.
    #[allow(missing_docs)] // Fields are named by the lines above.
    Linear { linear: Linear, statistics: Option<usize>, adapters: usize },
    /// An output head. `offsets` are the first token of each worker's share of its vocabulary, and the end.
    #[allow(missing_docs)] // Fields are named by the line above.
    Head { linear: Linear, offsets: Vec<usize> },
    /// An output head of a drafter: the token of each of its outputs.
    #[allow(missing_docs)] // Fields are named by the line above.
    DraftHead { linear: Linear, token_ids: Vec<u32> },
    /// An embedding table; `first_row` is the index of its first row in the whole table.
    #[allow(missing_docs)] // Fields are named by the line above.
    Matrix { matrix: Matrix, first_row: usize },
    /// The experts of a layer.
    Experts(Experts),
    /// A layer with a recurrent state, without its projections.
    Recurrent(Recurrent),
    /// A layer with latent vectors, without its projections.
    Latent(Latent),
    /// An RMS norm's gain.
    RmsNorm(Vec<f32>),
    /// A layer norm's gain and bias.
    #[allow(missing_docs)] // Fields are named by the line above.
    LayerNorm { weight: Vec<f32>, bias: Vec<f32> },
}

impl CpuWeight {
    pub(crate) fn matrix(&self) -> (&Matrix, usize) {
        match self {
            CpuWeight::Matrix { matrix, first_row } => (matrix, *first_row),
            _ => panic!("the weight is no table"),
        }
    }

    pub(crate) fn head(&self) -> (&Linear, &[usize]) {
        match self {
            CpuWeight::Head { linear, offsets } => (linear, offsets),
            _ => panic!("the weight is no output head"),
        }
    }

    pub(crate) fn linear(&self) -> &Linear {
        match self {
            CpuWeight::Linear { linear, .. } => linear,
            _ => panic!("the weight is no linear layer's"),
        }
    }

    /// The number of a linear layer among those that may have adapters.
    pub(crate) fn adapters(&self) -> usize {
        match self {
            CpuWeight::Linear { adapters, .. } => *adapters,
            _ => panic!("the weight is no linear layer's"),
        }
    }

    pub(crate) fn norm(&self) -> Norm<'_> {
        match self {
            CpuWeight::RmsNorm(weight) => Norm::Rms { weight },
            CpuWeight::LayerNorm { weight, bias } => Norm::Layer { weight, bias },
            _ => panic!("the weight is no norm's"),
        }
    }

    pub(crate) fn experts(&self) -> &Experts {
        match self {
            CpuWeight::Experts(experts) => experts,
            _ => panic!("the weight is no layer of experts"),
        }
    }

    pub(crate) fn recurrent(&self) -> &Recurrent {
        match self {
            CpuWeight::Recurrent(recurrent) => recurrent,
            _ => panic!("the weight is no layer with a state"),
        }
    }

    pub(crate) fn latent(&self) -> &Latent {
        match self {
            CpuWeight::Latent(latent) => latent,
            _ => panic!("the weight is no layer with latent vectors"),
        }
    }

    /// The gain of a norm.
    pub(crate) fn gain(&self) -> &[f32] {
        match self {
            CpuWeight::RmsNorm(weight) | CpuWeight::LayerNorm { weight, .. } => weight,
            _ => panic!("the weight is no norm's"),
        }
    }
}

/// Number of tokens in the vocabulary of a head whose workers' shares begin at `offsets`, which has its end, too.
pub(crate) fn num_outputs(offsets: &[usize]) -> usize {
    *offsets.last().expect("a head has an end")
}

/// A norm's gain and bias, with its offset and factor applied.
pub(crate) fn norm(norm: &NormSlices<'_>) -> Result<CpuWeight, DeviceError> {
    let read = |slice: &Option<WeightSlice<'_>>| slice.as_ref().map(vector).transpose();
    let mut weight = read(&norm.weight)?.unwrap_or_else(|| vec![1.0; norm.width]);
    weight.iter_mut().for_each(|weight| *weight = (*weight + norm.offset) * norm.factor);
    Ok(match norm.kind {
        NormKind::Rms => CpuWeight::RmsNorm(weight),
        NormKind::Layer => {
            let mut bias = read(&norm.bias)?.unwrap_or_else(|| vec![0.0; norm.width]);
            bias.iter_mut().for_each(|bias| *bias *= norm.factor);
            CpuWeight::LayerNorm { weight, bias }
        }
    })
}
