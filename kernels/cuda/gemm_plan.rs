//! cuBLASLt's descriptors of one product, and its algorithms.

use std::mem::MaybeUninit;

use cudarc::cublaslt::sys;

use super::{CudaError, DeviceBuffer, Event, Queue, Span};

/// Size of the algorithms' workspace.
pub(super) const WORKSPACE_BYTES: usize = 64 << 20;
/// Number of algorithms measured for a shape.
const CANDIDATES: usize = 16;
/// `y [m, n] = x [m, k] @ w [n, k]^T (+ bias [n])`: bf16 operands, fp32 sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GemmShape {
    /// Number of rows of x and y.
    pub m: usize,
    /// Number of rows of w and columns of y.
    pub n: usize,
    /// Number of columns of x and w.
    pub k: usize,
    /// Distance in elements from one row of y to the next.
    pub stride: usize,
    /// Whether y is f32; otherwise it is bf16.
    pub to_f32: bool,
}

/// Operands of a product.
#[derive(Debug, Clone, Copy)]
pub struct GemmBuffers {
    /// `[m, stride]`.
    pub y: Span,
    /// `[m, k]` bf16.
    pub x: Span,
    /// `[n, k]` bf16.
    pub w: Span,
    /// `[n]` bf16, or [`Span::NULL`].
    pub bias: Span,
}

/// The descriptors of one shape.
pub(super) struct Plan {
    product: sys::cublasLtMatmulDesc_t,
    w: sys::cublasLtMatrixLayout_t,
    x: sys::cublasLtMatrixLayout_t,
    y: sys::cublasLtMatrixLayout_t,
    pub(super) algorithm: sys::cublasLtMatmulAlgo_t,
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: created in `Plan::new`, destroyed once.
        unsafe {
            sys::cublasLtMatmulDescDestroy(self.product);
            for layout in [self.w, self.x, self.y] {
                sys::cublasLtMatrixLayoutDestroy(layout);
            }
        }
    }
}

pub(super) fn check(status: sys::cublasStatus_t, call: &str) -> Result<(), CudaError> {
    match status {
        sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS => Ok(()),
        status => Err(CudaError::Library { call: call.to_owned(), reason: format!("{status:?}") }),
    }
}

impl Plan {
    /// In the library's column-major order: y^T [n, m] = w [k, n]^T x [k, m].
    pub(super) fn new(shape: GemmShape, bias: Span) -> Result<Self, CudaError> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let GemmShape { m, n, k, stride, to_f32 } = shape;
        let half = sys::cudaDataType_t::CUDA_R_16BF;
        let out = if to_f32 { sys::cudaDataType_t::CUDA_R_32F } else { half };
        let null = std::ptr::null_mut();
        let mut plan = Self {
            product: null,
            w: null.cast(),
            x: null.cast(),
            y: null.cast(),
            algorithm: sys::cublasLtMatmulAlgo_t { data: [0; 8] },
        };
        let transposed: i32 = 1;
        let has_bias = !bias.is_null();
        let epilogue = if has_bias {
            sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS
        } else {
            sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DEFAULT
        };
        // SAFETY: out pointers are writable; attributes have the sizes that the library documents.
        unsafe {
            let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
            let created = sys::cublasLtMatmulDescCreate(&mut plan.product, compute, sys::cudaDataType_t::CUDA_R_32F);
            check(created, "cublasLtMatmulDescCreate")?;
            plan.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &transposed)?;
            plan.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
            if has_bias {
                plan.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &half)?;
            }
            let layouts =
                [(&mut plan.w, half, k, n, k), (&mut plan.x, half, k, m, k), (&mut plan.y, out, n, m, stride)];
            for (layout, dtype, rows, cols, ld) in layouts {
                let created = sys::cublasLtMatrixLayoutCreate(layout, dtype, rows as u64, cols as u64, ld as i64);
                check(created, "cublasLtMatrixLayoutCreate")?;
            }
        }
        plan.set_bias(bias)?;
        Ok(plan)
    }

    fn set<T>(&self, attribute: sys::cublasLtMatmulDescAttributes_t, value: &T) -> Result<(), CudaError> {
        let pointer = std::ptr::from_ref(value).cast();
        // SAFETY: a live descriptor; the value has the size that the library documents for the attribute.
        let status = unsafe { sys::cublasLtMatmulDescSetAttribute(self.product, attribute, pointer, size_of::<T>()) };
        check(status, "cublasLtMatmulDescSetAttribute")
    }

    fn set_bias(&self, bias: Span) -> Result<(), CudaError> {
        if bias.is_null() {
            return Ok(());
        }
        self.set(sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias.address())
    }

    /// The library's recommended algorithms, best first.
    pub(super) fn candidates(
        &self,
        handle: sys::cublasLtHandle_t,
    ) -> Result<Vec<sys::cublasLtMatmulAlgo_t>, CudaError> {
        let mut preference = std::ptr::null_mut();
        let mut results = [const { MaybeUninit::<sys::cublasLtMatmulHeuristicResult_t>::zeroed() }; CANDIDATES];
        let mut count = 0;
        let attribute = sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        let bytes = WORKSPACE_BYTES;
        // SAFETY: live descriptors, room for CANDIDATES results; the first `count` of them are written.
        unsafe {
            check(sys::cublasLtMatmulPreferenceCreate(&mut preference), "cublasLtMatmulPreferenceCreate")?;
            let pointer = std::ptr::from_ref(&bytes).cast();
            let set = sys::cublasLtMatmulPreferenceSetAttribute(preference, attribute, pointer, size_of::<usize>());
            let found = sys::cublasLtMatmulAlgoGetHeuristic(
                handle,
                self.product,
                self.w,
                self.x,
                self.y,
                self.y,
                preference,
                CANDIDATES as i32,
                results.as_mut_ptr().cast(),
                &mut count,
            );
            sys::cublasLtMatmulPreferenceDestroy(preference);
            check(set, "cublasLtMatmulPreferenceSetAttribute")?;
            check(found, "cublasLtMatmulAlgoGetHeuristic")?;
            Ok(results[..count as usize].iter().map(|result| result.assume_init().algo).collect())
        }
    }

    /// Whether the algorithm runs these descriptors within the workspace.
    pub(super) fn is_usable(&self, handle: sys::cublasLtHandle_t) -> bool {
        let mut result = MaybeUninit::<sys::cublasLtMatmulHeuristicResult_t>::zeroed();
        // SAFETY: live descriptors; the result is plain data for which zero is valid.
        unsafe {
            let status = sys::cublasLtMatmulAlgoCheck(
                handle,
                self.product,
                self.w,
                self.x,
                self.y,
                self.y,
                &self.algorithm,
                result.as_mut_ptr(),
            );
            status == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS
                && result.assume_init().workspaceSize <= WORKSPACE_BYTES
        }
    }

    /// Milliseconds of one run, averaged over this number of runs after one warm-up run.
    pub(super) fn measure(
        &self,
        handle: sys::cublasLtHandle_t,
        q: &Queue,
        buffers: GemmBuffers,
        workspace: &DeviceBuffer,
        runs: usize,
    ) -> Result<f32, CudaError> {
        let (start, end) = (Event::new(true)?, Event::new(true)?);
        self.run(handle, q, buffers, workspace)?;
        start.record(q)?;
        for _ in 0..runs {
            self.run(handle, q, buffers, workspace)?;
        }
        end.record(q)?;
        end.wait()?;
        Ok(end.ms_since(&start)? / runs as f32)
    }

    pub(super) fn run(
        &self,
        handle: sys::cublasLtHandle_t,
        q: &Queue,
        buffers: GemmBuffers,
        workspace: &DeviceBuffer,
    ) -> Result<(), CudaError> {
        let (alpha, beta) = (1.0f32, 0.0f32);
        self.set_bias(buffers.bias)?;
        // SAFETY: live descriptors and handle; `LibraryGemm::run` checked that the spans hold the operands.
        let status = unsafe {
            sys::cublasLtMatmul(
                handle,
                self.product,
                std::ptr::from_ref(&alpha).cast(),
                buffers.w.address() as *const _,
                self.w,
                buffers.x.address() as *const _,
                self.x,
                std::ptr::from_ref(&beta).cast(),
                buffers.y.address() as *const _,
                self.y,
                buffers.y.address() as *mut _,
                self.y,
                &self.algorithm,
                workspace.span().address() as *mut _,
                WORKSPACE_BYTES,
                q.raw().cast(),
            )
        };
        check(status, "cublasLtMatmul")
    }
}
