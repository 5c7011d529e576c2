//! Products whose rows have the same bits whatever the other rows of their step are: `CudaConfig::batch_invariant`.
//!
//! Each weight has one order in which K is summed, for any number of rows. Together with decode attention that divides rows by length
//! and prefill attention, which always adds keys in the order of their positions, a row's result then depends on its own
//! tokens alone. The same holds for attention over latent vectors and, if chunks of prompts end at multiples of 64 positions,
//! for recurrent layers. Products of few rows are not joined to chains, because a chain divides K by its number of blocks. Inputs of
//! weights in e4m3 that may be are rounded to e4m3 for any number of rows. Experts and the heads of latent vectors sum in the order of K
//! by themselves; for quantized experts one kernel takes any number of tokens. A group adds in the order of its workers, through peer memory
//! (`group.rs`).

use kernels::cuda::decode_division::Division;
use kernels::cuda::skinny_gemm::{self, Epilogue};
use kernels::cuda::sum_order::SumOrder;
use kernels::cuda::wide_gemm::{self, wide_gemm};
use kernels::cuda::{Gpu, Span};
use ops::DeviceError;

use super::{CudaConfig, CudaDevice, CudaWeight, device_error};

fn unsupported(found: String, expected: &str) -> DeviceError {
    DeviceError::Unsupported { what: "batch_invariant".into(), found, expected: expected.into() }
}

/// What the division of a row of attention depends on.
pub(crate) fn division(batch_invariant: bool) -> Division {
    if batch_invariant { Division::ByLength } else { Division::ByRows }
}

/// # Errors
/// When the GPU, or the shares of a group, have no invariant form.
pub(super) fn check(config: &CudaConfig, gpu: &Gpu) -> Result<(), DeviceError> {
    if config.batch_invariant && !wide_gemm::has_kernel(gpu) {
        let (major, minor) = gpu.capability();
        let found = format!("{} (compute capability {major}.{minor})", gpu.name());
        return Err(unsupported(found, "a GPU of compute capability 9, and a build with its kernels"));
    }
    check_vocab(config, config.limits.vocab_size)
}

/// # Errors
/// When the workers of a group would not have equal shares of a vocabulary.
pub(super) fn check_vocab(config: &CudaConfig, vocab: usize) -> Result<(), DeviceError> {
    let workers = config.tensor_parallel.size as usize;
    if config.batch_invariant && workers > 1 && !vocab.is_multiple_of(8 * workers) {
        let found = format!("{vocab} words for {workers} workers");
        return Err(unsupported(found, "a vocabulary of equal shares that are multiples of 8"));
    }
    Ok(())
}

/// # Errors
/// When sums of a group would not use peer memory: those of NCCL depend on the number of rows.
pub(super) fn check_peers(config: &CudaConfig, has_peers: bool) -> Result<(), DeviceError> {
    let workers = config.tensor_parallel.size;
    if config.batch_invariant && workers > 1 && !has_peers {
        let found = format!("{workers} workers whose GPUs cannot map each other's memory");
        return Err(unsupported(found, "GPUs of one host that can, or `tp` 1"));
    }
    Ok(())
}

impl CudaDevice {
    /// # Errors
    /// When a weight of `rows` outputs has no invariant form. That of one output is a gate, with which each row is multiplied by itself.
    pub(super) fn check_invariant_weight(&self, rows: usize, cols: usize) -> Result<(), DeviceError> {
        let is_gate = rows == 1;
        if self.config.batch_invariant && !is_gate && !(rows.is_multiple_of(8) && cols.is_multiple_of(8)) {
            return Err(unsupported(format!("a layer of {rows} outputs and {cols} inputs"), "multiples of 8"));
        }
        Ok(())
    }

    /// `out [m, rows]` = `x [m, K]` @ weight^T in the order of the weight, which is in bf16.
    pub(super) fn invariant_product(
        &mut self,
        out: Span,
        x: Span,
        weight: &CudaWeight,
        m: usize,
        stride: usize,
        epilogue: Epilogue,
    ) -> Result<(), DeviceError> {
        if self.current().only_products {
            return Ok(());
        }
        self.flush()?;
        debug_assert_eq!(stride, weight.rows, "equal shares are not padded");
        let (linear, order) = (weight.linear(), SumOrder::for_shape(weight.rows, weight.cols));
        match m <= skinny_gemm::MAX_ROWS {
            true => skinny_gemm::skinny_gemm_split(&self.queue, out, x, &linear, m, epilogue, order.split()),
            false => wide_gemm(&self.queue, out, x, &linear, m, epilogue, order),
        }
        .map_err(device_error)
    }
}
