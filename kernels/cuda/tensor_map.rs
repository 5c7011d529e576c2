//! Matrix descriptions for Hopper's tensor copy engine.

use std::ffi::c_void;

use cudarc::driver::sys;

use super::error::{check, ensure};
use super::{CudaError, Span};

const OP: &str = "tensor_map";
/// Type and bytes of an element.
const BF16: (sys::CUtensorMapDataType, usize) = (sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2);
const BYTES: (sys::CUtensorMapDataType, usize) = (sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8, 1);

/// A matrix of bf16 or bytes and the box that one copy fetches, with the 128-byte swizzle; elements outside the matrix are zero.
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
        Self::encode(matrix, BF16, [cols, rows], [cols * 2], [box_cols, box_rows])
    }

    /// The same for a matrix of bytes.
    pub(crate) fn bytes_matrix(
        matrix: Span,
        rows: usize,
        cols: usize,
        box_rows: usize,
        box_cols: usize,
    ) -> Result<Self, CudaError> {
        Self::encode(matrix, BYTES, [cols, rows], [cols], [box_cols, box_rows])
    }

    /// `matrix` `[rows, cols]`, contiguous, as panels of 64 columns. A box has `box_rows` rows of all panels, one panel
    /// after the other.
    pub(crate) fn panels(matrix: Span, rows: usize, cols: usize, box_rows: usize) -> Result<Self, CudaError> {
        ensure!(OP, cols.is_multiple_of(64), "{cols} columns are not panels of 64");
        let panels = cols / 64;
        Self::encode(matrix, BF16, [64, rows, panels], [cols * 2, 128], [64, box_rows, panels])
    }

    /// Sizes of the dimensions and of a box in elements, innermost first, and strides of all but the innermost in
    /// bytes.
    fn encode<const N: usize, const M: usize>(
        matrix: Span,
        (dtype, element_bytes): (sys::CUtensorMapDataType, usize),
        dims: [usize; N],
        strides: [usize; M],
        boxes: [usize; N],
    ) -> Result<Self, CudaError> {
        const { assert!(M + 1 == N, "the innermost dimension has no stride") };
        ensure!(
            OP,
            boxes[0] * element_bytes <= 128 && boxes.iter().all(|size| (1..=256).contains(size)),
            "a box of {boxes:?}"
        );
        let aligned = strides.iter().all(|stride| stride.is_multiple_of(16)) && matrix.is_aligned(16);
        ensure!(OP, aligned, "rows do not start at multiples of 16 bytes");
        // SAFETY: a map is plain data, written below.
        let mut map: sys::CUtensorMap = unsafe { std::mem::zeroed() };
        let (dims, strides) = (dims.map(|size| size as u64), strides.map(|stride| stride as u64));
        let (boxes, steps) = (boxes.map(|size| size as u32), [1u32; N]);
        // SAFETY: the arrays have the lengths required for rank N; the driver only encodes them and reads no matrix.
        let code = unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut map,
                dtype,
                N as u32,
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

    /// The bytes of the kernel's `TensorMap` parameter.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: plain data of 128 bytes, all initialised.
        unsafe { std::slice::from_raw_parts((&raw const self.0).cast(), size_of::<sys::CUtensorMap>()) }
    }
}
