//! The devices that models run on: implementations of [`ops::Device`] for CPUs in `cpu/` and for GPUs in `cuda/`.
//!
//! [`Estimator`] implements it too: it counts memory instead of computing.

pub mod cpu;
pub mod cuda;
mod estimate;
mod exchange;
mod kv_elements;
mod slices;

pub use estimate::{EstimatedWeight, Estimator};
pub use exchange::{Exchange, FileExchange};
