//! Why a CUDA call or launch failed.

use cudarc::driver::sys::CUresult;

/// Why a CUDA op cannot run.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // Fields are named in the messages.
pub enum CudaError {
    /// There is no driver, it is too old, it shows no GPU, or this build has no kernels.
    #[error("no usable GPU: {reason}")]
    NoGpu { reason: String },
    /// This build has no kernels, or none for this device.
    #[error("no kernel `{kernel}` for compute capability {major}.{minor} in this build")]
    NoKernel { kernel: String, major: i32, minor: i32 },
    /// The driver refused a call.
    #[error("{call} failed: {name} ({text})")]
    Driver { call: String, name: String, text: String, code: CUresult },
    /// There is too little device memory.
    #[error("cannot allocate {bytes} bytes of device memory: {free} of {total} bytes are free")]
    OutOfMemory { bytes: usize, free: usize, total: usize },
    /// A library call failed.
    #[error("{call} failed: {reason}")]
    Library { call: String, reason: String },
    /// The arguments are not supported by the kernel.
    #[error("`{op}`: {reason}")]
    Argument { op: &'static str, reason: String },
}

impl CudaError {
    /// An argument error of `op`.
    pub fn argument(op: &'static str, reason: impl Into<String>) -> Self {
        Self::Argument { op, reason: reason.into() }
    }
}

/// `Ok` for `CUDA_SUCCESS`; otherwise the driver's name and text for the code.
pub(crate) fn check(code: CUresult, call: &str) -> Result<(), CudaError> {
    use cudarc::driver::sys;
    if code == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let text = |get: unsafe fn(CUresult, *mut *const std::ffi::c_char) -> CUresult| {
        let mut pointer = std::ptr::null();
        // SAFETY: both functions write a pointer to a static string, or null for an unknown code.
        let found = unsafe { get(code, &mut pointer) } == CUresult::CUDA_SUCCESS && !pointer.is_null();
        if !found {
            return format!("{code:?}");
        }
        // SAFETY: not null, static, and ended by a zero byte.
        unsafe { std::ffi::CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
    };
    Err(CudaError::Driver {
        call: call.to_owned(),
        name: text(sys::cuGetErrorName),
        text: text(sys::cuGetErrorString),
        code,
    })
}

/// Fails with the op's name unless the condition holds.
macro_rules! ensure {
    ($op:expr, $condition:expr, $($message:tt)*) => {
        if !$condition {
            return Err($crate::cuda::CudaError::argument($op, format!($($message)*)));
        }
    };
}
pub(crate) use ensure;
