//! CUDA kernels.
