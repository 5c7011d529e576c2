//! Descriptions of matrices for Hopper's tensor copy engine.

use std::ffi::c_void;

use cudarc::driver::sys;

use super::error::{check, ensure};
use super::{CudaError, Span};

const OP: &str = "tensor_map";

/// A bf16 matrix and the box that one copy brings, under the 128-byte swizzle; elements outside arrive as zero.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TensorMap(sys::CUtensorMap);

impl TensorMap {
    /// `matrix` `[rows, cols]`, contiguous; boxes of `box_rows` by `box_cols`.
    pub(crate) fn matrix(
        matrix: Span,
        rows: usize,
        cols: usize,
        box_rows: usize,
        box_cols: usize,
    ) -> Result<Self, CudaError> {
        ensure!(OP, box_cols * 2 <= 128 && (1..=256).contains(&box_rows), "a box of {box_rows} x {box_cols}");
        ensure!(
            OP,
            (cols * 2).is_multiple_of(16) && matrix.is_aligned(16),
            "rows do not start at multiples of 16 bytes"
        );
        // SAFETY: a map is plain data, written below.
        let mut map: sys::CUtensorMap = unsafe { std::mem::zeroed() };
        let (dims, strides) = ([cols as u64, rows as u64], [cols as u64 * 2]);
        let (boxes, steps) = ([box_cols as u32, box_rows as u32], [1u32; 2]);
        // SAFETY: arrays have the lengths that rank 2 asks for; the driver only encodes, it reads no matrix.
        let code = unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut map,
                sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                2,
                matrix.address() as *mut c_void,
                dims.as_ptr(),
                strides.as_ptr(),
                boxes.as_ptr(),
                steps.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        check(code, "cuTensorMapEncodeTiled")?;
        Ok(Self(map))
    }

    /// As the kernel's `TensorMap` parameter.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: plain data of 128 bytes, all initialised.
        unsafe { std::slice::from_raw_parts((&raw const self.0).cast(), size_of::<sys::CUtensorMap>()) }
    }
}
