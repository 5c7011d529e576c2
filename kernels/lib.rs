//! Kernels: what computes, for CPUs (`cpu/`) and CUDA devices (`cuda/`), each op behind one safe wrapper.
//!
//! `reference.rs` has the plain fp32 formula of every op; tests hold both against it.

pub mod cpu;
pub mod cuda;
pub mod reference;
