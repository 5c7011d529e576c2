//! CPU kernels: one safe wrapper per op, with f32 activations and weights in the checkpoint's type.
//!
//! Every result has one order of summation, whatever else is in the step: an output is a sum along `K` in lanes, the
//! lanes are added at the end, and threads divide outputs, never sums. So the bits of a row depend only on that row.

#[macro_use]
mod isa;

mod activation;
mod affinity;
mod attention;
mod attention_tile;
mod buffer;
mod coded_kv;
mod dot;
mod exp;
mod gated_delta;
mod group_dot;
mod kimi_delta;
mod kv_cache;
mod kv_layout;
mod latent_attention;
mod latent_cache;
mod linear;
mod mamba2;
mod matrix;
mod norm;
mod packed;
#[cfg(target_arch = "x86_64")]
mod panel_linear;
mod panels;
mod pool;
mod quantized;
mod quantized_linear;
mod recurrent;
mod rope;
mod rows;
mod shared;
mod short_conv;
#[cfg(target_arch = "x86_64")]
mod x86;
#[cfg(target_arch = "x86_64")]
mod x86_attention;
#[cfg(target_arch = "x86_64")]
mod x86_quantized;

pub use activation::{Gate, Xielu, activate, gate};
pub use affinity::allowed_cores;
pub use attention_tile::{Attention, AttentionRow};
pub use buffer::Buffer;
pub use exp::exp;
pub use gated_delta::{DeltaWeights, gated_delta};
pub use isa::Isa;
pub use kimi_delta::{KimiDeltaWeights, kimi_delta};
pub use kv_cache::{KvCache, KvType, Rotation, rotate_queries};
pub use latent_attention::LatentAttention;
pub use latent_cache::{LatentCache, LatentSizes, LatentTokens};
pub use linear::linear;
pub use mamba2::{Mamba2Weights, mamba2};
pub use matrix::{Matrix, WeightType, read_weights};
pub use norm::{Heads, Norm, add_norm, add_normed, head_norm, head_squares, norm, scale_heads};
pub use packed::PackedInput;
#[cfg(target_arch = "x86_64")]
pub use panel_linear::{panel_gated_linear, panel_linear};
pub use panels::{PanelInput, PanelMatrix};
pub use pool::Pool;
pub use quantized::{QuantInput, QuantMatrix, QuantType};
pub use quantized_linear::quantized_linear;
pub use recurrent::{StateRow, StateShape};
pub use rope::rotate;
pub use rows::map_rows;
pub use short_conv::short_conv;
