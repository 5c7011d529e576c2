//! CUDA kernels in C++ without external headers, one op per file, compiled by `build.rs` and embedded.
//!
//! # Conventions of kernels and device
//!
//! All buffers are device memory, row-major, with 256-byte aligned base pointers, and bf16 unless stated otherwise.
//! Indices are `u32`; lengths are in elements. The dimension letters are those of the `device` crate:
//! `T R H K D E V B S`.
//!
//! | buffer | layout |
//! |---|---|
//! | activations | `[T, cols]` bf16, contiguous, `cols % 8 == 0` |
//! | qkv | `[T, (H + 2K) D]` bf16: all q heads, then all k heads, then all v heads of one token; q alone, `[T, H D]`, in layers that read the keys and values of another |
//! | K blocks, V blocks | two buffers, each `[layer][block][K][B][D]` bf16, or codes of a byte with two buffers of scales `[layer][block][K][B]` f32; a wrapper gets the spans of one layer |
//! | latent blocks | one buffer, `[layer][block][B][576]` bf16: in the place of K and V blocks, a latent vector and the rotated part of k for all heads |
//! | slots | `[T]` u32: `block * B + offset`; `u32::MAX` writes nothing (padding) |
//! | block_tables | `[R, max_blocks]` u32, padded with 0; row stride `max_blocks` is fixed for the life of the device |
//! | context_lens | `[R]` u32: number of positions after this step, including this step's; 0 marks a padding row |
//! | row_starts | `[R + 1]` u32: prefix sum of tokens per row; the chunk of row `r` has positions `context_lens[r] - n .. context_lens[r]` where `n = row_starts[r + 1] - row_starts[r]` |
//! | positions | `[T]` u32 |
//! | rope table | cos and sin, each `[max_positions, D / 2]` f32 |
//! | linear weight | `[N, K]` bf16 as in the checkpoint, bias `[N]` bf16 |
//! | gate/up weight | `[2F, K]`, gate and up rows interleaved as `skinny_gemm` documents; packed at load |
//!
//! `B` is a power of two, 16 to 128. Block 0 is an ordinary block. The values of padding rows are unspecified. They
//! must be finite in activations that other rows do not read, and padding rows must not write KV blocks.
//!
//! Decode runs in CUDA graphs with a fixed number of rows, the bucket. So the grid of a decode kernel depends only on
//! the bucket and on constants; everything else is read from tables on the device.
//!
//! Every kernel calls `pdl_wait()` (common.cuh) before it reads what an earlier kernel wrote, or writes what an earlier
//! kernel reads. It may call `pdl_launch()` at any time: launches have the programmatic-dependent-launch attribute, so
//! a kernel may start while its predecessor is still running. `pdl_wait()` waits for the whole predecessor grid and its
//! memory. By induction this includes everything before it, provided that *every* kernel of the stream calls it in
//! every thread block that does not exit at once. Weights, the step's inputs and what earlier steps wrote to KV blocks
//! may be read before it: a step begins with a copy, which waits for the whole previous step.
//!
//! # Use from Rust
//!
//! [`Gpu::open`] loads every embedded module for one device; a [`Queue`] is a stream on it. Each op has a wrapper in a
//! file of the same name as the kernel. It checks shapes, alignment and sizes of its [`Span`]s, computes the launch
//! geometry and calls [`Queue::launch`]. No driver is needed until [`Gpu::open`] is called.

pub mod activation;
pub mod add_positions;
pub mod all_reduce;
pub mod branch_norm;
pub mod cap_logits;
pub mod client_memory;
pub mod copy_blocks;
pub mod decode_attention;
pub mod decode_division;
pub mod embed;
mod error;
pub mod expand_blocks;
pub mod expert_rows;
pub mod fp8_gemm;
pub mod gate;
pub mod gate_rows;
pub mod gated_activation;
pub mod gated_delta;
pub mod gather_columns;
pub mod gather_rows;
mod gemm_plan;
mod gpu;
pub mod grouped_fp8_gemm;
pub mod grouped_gemm;
pub mod guess;
pub mod head_norm;
mod images;
pub mod latent_attention;
pub mod latent_cache;
pub mod latent_product;
mod launch;
pub mod layer_norm;
pub mod library;
pub mod library_gemm;
pub mod linear_chain;
pub mod low_rank;
pub mod mamba2;
mod mapping;
mod memory;
pub mod owner_norm;
mod packed_weight;
pub mod paged_attention;
mod pinned_memory;
pub mod prefill_attention;
pub mod quantize_rows;
pub mod quantized_gemm;
mod queue;
pub mod recurrent;
pub mod rms_norm;
pub mod rope_cache;
pub mod route_few_tokens;
pub mod route_tokens;
pub mod sample;
pub mod scale;
pub mod scale_routes;
pub mod scores;
pub mod short_conv;
pub mod skinny_gemm;
pub mod sort_routes;
pub mod sum_experts;
pub mod sum_order;
mod tensor_map;
pub mod wide_gemm;
pub mod wide_head_norm;

pub use error::CudaError;
pub use gpu::{Gpu, driver_is_present};
pub use images::{Image, KernelInfo, NVRTC_VERSION, kernel_infos};
pub use launch::{Arg, Launch, Rows};
pub use memory::{DeviceBuffer, PinnedBuffer, Residence, Span};
pub use pinned_memory::{PINNED_PORTION, PinnedMemory};
pub use queue::{Event, Graph, Queue};
