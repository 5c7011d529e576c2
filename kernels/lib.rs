//! Compute kernels for CPUs (`cpu/`) and CUDA devices (`cuda/`). Each op has one safe wrapper.
//!
//! `reference.rs` contains the plain fp32 formula of every op; tests compare both kinds of kernels with it.

pub mod cpu;
pub mod cuda;
pub mod kv_codes;
pub mod reference;
