//! One GPU: its context, its limits and the kernels of this build for it.

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char};
use std::mem::MaybeUninit;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUdevice_attribute as Attribute, CUfunction};

use super::error::check;
use super::images::images_for;
use super::{CudaError, NVRTC_VERSION};

/// Whether the driver's library can be loaded. No other function of the driver may be called before this is known.
pub fn driver_is_present() -> bool {
    // SAFETY: only tries to open the library.
    unsafe { sys::is_culib_present() }
}

/// The reason, and what to do, where a build has no kernels.
const NO_KERNELS: &str = "this build has no GPU kernels: run `scripts/install_nvrtc`, then `cargo build --release`";

/// What is wrong with a driver that supports CUDA `driver`, as the driver counts (1000 times the major version plus 10 times the
/// minor one), for kernels that CUDA `kernels` compiled. Drivers load what any minor version of their own major version compiled.
fn too_old(driver: i32, kernels: &str) -> Option<String> {
    let major: i32 = kernels.split('.').next()?.parse().ok()?;
    (driver / 1000 < major).then(|| {
        let (found, minor) = (driver / 1000, driver % 1000 / 10);
        format!("the NVIDIA driver supports CUDA up to {found}.{minor}, but the kernels need CUDA {major}: update the driver")
    })
}

/// A GPU with its primary context and all embedded kernels loaded. It exists until the process ends.
#[derive(Debug)]
pub struct Gpu {
    device: sys::CUdevice,
    context: sys::CUcontext,
    name: String,
    capability: (i32, i32),
    num_multiprocessors: u32,
    max_shared_bytes: u32,
    l2_bytes: usize,
    kernels: HashMap<String, Kernel>,
}

/// An entry point of a kernel.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kernel(pub(crate) CUfunction);

// SAFETY: driver handles may be used from any thread whose current context is theirs, which `Gpu::bind` guarantees.
unsafe impl Send for Gpu {}
// SAFETY: as above; nothing in it changes after `open`.
unsafe impl Sync for Gpu {}

impl Gpu {
    /// Number of GPUs that this process can use; 0 without a driver.
    ///
    /// # Errors
    /// Returns why a driver that is there cannot be used, and what to do: it shows no GPU, it is too old for the kernels, or
    /// this build has no kernels.
    pub fn count() -> Result<usize, CudaError> {
        let none = |reason: String| Err(CudaError::NoGpu { reason });
        if !driver_is_present() {
            return Ok(0);
        }
        let (mut count, mut driver) = (0, 0);
        // SAFETY: the library is present; `count` and `driver` are writable.
        let result = unsafe {
            check(sys::cuInit(0), "cuInit")
                .and_then(|()| check(sys::cuDeviceGetCount(&mut count), "cuDeviceGetCount"))
                .and_then(|()| check(sys::cuDriverGetVersion(&mut driver), "cuDriverGetVersion"))
        };
        match (result, usize::try_from(count)) {
            (Err(error), _) => none(format!("the NVIDIA driver shows no GPU: {error}; see `nvidia-smi`")),
            (_, Ok(0) | Err(_)) => none("the NVIDIA driver shows no GPU; see CUDA_VISIBLE_DEVICES".to_owned()),
            (_, Ok(_)) if NVRTC_VERSION.is_none() => none(NO_KERNELS.to_owned()),
            (_, Ok(count)) => match too_old(driver, NVRTC_VERSION.unwrap_or_default()) {
                Some(reason) => none(reason),
                None => Ok(count),
            },
        }
    }

    /// Opens GPU `ordinal` and loads the kernels.
    ///
    /// # Errors
    /// Returns an error without a driver, without that GPU, or if this build has no kernels for it.
    pub fn open(ordinal: usize) -> Result<Arc<Self>, CudaError> {
        if !driver_is_present() {
            return Err(CudaError::NoGpu {
                reason: "libcuda.so.1 cannot be loaded; is the NVIDIA driver installed?".into(),
            });
        }
        if NVRTC_VERSION.is_none() {
            return Err(CudaError::NoGpu { reason: NO_KERNELS.into() });
        }
        let (mut device, mut context) = (0, std::ptr::null_mut());
        // SAFETY: out pointers are writable; the context is retained until the process ends.
        unsafe {
            check(sys::cuInit(0), "cuInit")?;
            check(sys::cuDeviceGet(&mut device, ordinal as i32), &format!("cuDeviceGet({ordinal})"))?;
            check(sys::cuDevicePrimaryCtxRetain(&mut context, device), "cuDevicePrimaryCtxRetain")?;
            check(sys::cuCtxSetCurrent(context), "cuCtxSetCurrent")?;
        }
        let attribute = |which| attribute(device, which);
        let capability = (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        let mut gpu = Self {
            device,
            context,
            name: device_name(device)?,
            capability,
            num_multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32,
            max_shared_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as u32,
            l2_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)? as usize,
            kernels: HashMap::new(),
        };
        gpu.load_kernels()?;
        Ok(Arc::new(gpu))
    }

    fn load_kernels(&mut self) -> Result<(), CudaError> {
        for image in images_for(self.capability.0, self.capability.1) {
            let mut module = std::ptr::null_mut();
            // SAFETY: the image is a complete cubin or PTX text with a final zero; the module is never unloaded.
            let code = unsafe { sys::cuModuleLoadData(&mut module, image.bytes.as_ptr().cast()) };
            check(code, &format!("cuModuleLoadData(`{}` for {})", image.module, image.arch))?;
            let mut count = 0;
            // SAFETY: a live module and a writable count.
            check(unsafe { sys::cuModuleGetFunctionCount(&mut count, module) }, "cuModuleGetFunctionCount")?;
            let mut functions = vec![std::ptr::null_mut(); count as usize];
            // SAFETY: room for `count` handles.
            let code = unsafe { sys::cuModuleEnumerateFunctions(functions.as_mut_ptr(), count, module) };
            check(code, "cuModuleEnumerateFunctions")?;
            for function in functions {
                let kernel = self.prepare(function)?;
                self.kernels.insert(kernel, Kernel(function));
            }
        }
        Ok(())
    }

    /// Allows a kernel to use all dynamic shared memory that its static shared memory leaves; returns its name.
    fn prepare(&self, function: CUfunction) -> Result<String, CudaError> {
        let mut name = std::ptr::null();
        let mut static_bytes = 0;
        // SAFETY: a live function; the name lives as long as its module.
        unsafe {
            check(sys::cuFuncGetName(&mut name, function), "cuFuncGetName")?;
            let which = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
            check(sys::cuFuncGetAttribute(&mut static_bytes, which, function), "cuFuncGetAttribute")?;
            let which = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let most = self.max_shared_bytes as i32 - static_bytes;
            check(sys::cuFuncSetAttribute(function, which, most), "cuFuncSetAttribute")?;
            Ok(CStr::from_ptr(name).to_string_lossy().into_owned())
        }
    }

    /// Makes this GPU's context current on the calling thread. Every thread that uses the GPU calls it once.
    pub fn bind(&self) -> Result<(), CudaError> {
        // SAFETY: the context lives as long as the process.
        check(unsafe { sys::cuCtxSetCurrent(self.context) }, "cuCtxSetCurrent")
    }

    pub(crate) fn device(&self) -> sys::CUdevice {
        self.device
    }

    /// The vendor's name of the GPU.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Compute capability, major and minor.
    pub fn capability(&self) -> (i32, i32) {
        self.capability
    }

    /// Number of multiprocessors.
    pub fn num_multiprocessors(&self) -> u32 {
        self.num_multiprocessors
    }

    /// Maximum shared memory of one block, in bytes.
    pub fn max_shared_bytes(&self) -> u32 {
        self.max_shared_bytes
    }

    /// Size of the L2 cache, in bytes.
    pub fn l2_bytes(&self) -> usize {
        self.l2_bytes
    }

    /// Free and total bytes of device memory.
    pub fn memory(&self) -> Result<(usize, usize), CudaError> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: both are writable.
        check(unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) }, "cuMemGetInfo")?;
        Ok((free, total))
    }

    /// Whether this build has the kernel for this GPU.
    pub fn has_kernel(&self, name: &str) -> bool {
        self.kernels.contains_key(name)
    }

    pub(crate) fn kernel(&self, name: &str) -> Result<Kernel, CudaError> {
        let (major, minor) = self.capability;
        let missing = || CudaError::NoKernel { kernel: name.to_owned(), major, minor };
        self.kernels.get(name).copied().ok_or_else(missing)
    }

    /// Number of thread blocks of the kernel that one multiprocessor runs at the same time.
    pub fn blocks_per_multiprocessor(&self, kernel: &str, threads: u32, shared_bytes: u32) -> Result<u32, CudaError> {
        let mut count = 0;
        let function = self.kernel(kernel)?.0;
        // SAFETY: a live function and a writable count.
        let code = unsafe {
            sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &mut count,
                function,
                threads as i32,
                shared_bytes as usize,
            )
        };
        check(code, "cuOccupancyMaxActiveBlocksPerMultiprocessor")?;
        Ok(count as u32)
    }

    /// PCI address, which identifies a GPU of a host in messages and peer checks.
    pub fn pci_address(&self) -> Result<String, CudaError> {
        let mut text = [0 as c_char; 32];
        // SAFETY: the driver writes at most 32 bytes with a final zero.
        unsafe {
            check(sys::cuDeviceGetPCIBusId(text.as_mut_ptr(), 32, self.device), "cuDeviceGetPCIBusId")?;
            Ok(CStr::from_ptr(text.as_ptr()).to_string_lossy().into_owned())
        }
    }
}

fn attribute(device: sys::CUdevice, which: Attribute) -> Result<i32, CudaError> {
    let mut value = 0;
    // SAFETY: `value` is writable.
    check(unsafe { sys::cuDeviceGetAttribute(&mut value, which, device) }, "cuDeviceGetAttribute")?;
    Ok(value)
}

fn device_name(device: sys::CUdevice) -> Result<String, CudaError> {
    let mut text = MaybeUninit::<[c_char; 128]>::zeroed();
    // SAFETY: the driver writes at most 128 bytes with a final zero.
    unsafe {
        check(sys::cuDeviceGetName(text.as_mut_ptr().cast(), 128, device), "cuDeviceGetName")?;
        let text: CString = CStr::from_ptr(text.as_ptr().cast()).to_owned();
        Ok(text.to_string_lossy().into_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_of_an_older_major_version_is_refused_with_both_versions() {
        assert_eq!(too_old(13000, "13.0"), None);
        assert_eq!(too_old(13010, "13.2"), None);
        let reason = too_old(12080, "13.0").unwrap();
        assert!(reason.contains("CUDA up to 12.8, but the kernels need CUDA 13: update the driver"), "{reason}");
    }
}
