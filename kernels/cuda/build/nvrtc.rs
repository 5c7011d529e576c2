//! NVRTC, loaded only at build time: finds the library and compiles one source file to a cubin or to PTX.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fs;
use std::path::{Path, PathBuf};

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

/// Options besides the architecture.
pub const OPTIONS: &[&str] = &["-std=c++17", "-default-device", "--ptxas-options=-v", "-DTRIREME_KERNEL=1"];

type Program = *mut c_void;
type Create = unsafe extern "C" fn(
    *mut Program,
    *const c_char,
    *const c_char,
    c_int,
    *const *const c_char,
    *const *const c_char,
) -> c_int;
type Size = unsafe extern "C" fn(Program, *mut usize) -> c_int;
type Get = unsafe extern "C" fn(Program, *mut c_char) -> c_int;

/// A loaded NVRTC.
pub struct Nvrtc {
    create: Create,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int,
    destroy: unsafe extern "C" fn(*mut Program) -> c_int,
    error: unsafe extern "C" fn(c_int) -> *const c_char,
    log: (Size, Get),
    cubin: (Size, Get),
    ptx: (Size, Get),
    version: (c_int, c_int),
    _library: Library,
}

/// File name of the library.
pub const LIBRARY: &str = "libnvrtc.so.13";

/// Where the library is searched for: `$NVRTC_DIR`, the unpacked wheel in `<workspace>/.cache/nvrtc`, `$CUDA_HOME` and the
/// usual places.
pub fn folders(workspace: &Path) -> Vec<PathBuf> {
    let mut folders = Vec::new();
    if let Some(folder) = std::env::var_os("NVRTC_DIR") {
        folders.push(PathBuf::from(folder));
    }
    folders.push(workspace.join(".cache/nvrtc/nvidia/cu13/lib"));
    if let Some(home) = std::env::var_os("CUDA_HOME") {
        folders.push(PathBuf::from(home).join("lib64"));
    }
    folders.extend(["/usr/local/cuda/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib64"].map(PathBuf::from));
    folders
}

impl Nvrtc {
    /// Loads the library from the first of the [`folders`] that has it.
    pub fn find(workspace: &Path) -> Result<Self, String> {
        let folders = folders(workspace);
        let mut problems = Vec::new();
        for folder in &folders {
            match Self::load(folder) {
                Ok(Some(found)) => return Ok(found),
                Ok(None) => {}
                Err(problem) => problems.push(format!("{}: {problem}", folder.display())),
            }
        }
        let folders: Vec<String> = folders.iter().map(|f| f.display().to_string()).collect();
        match problems.is_empty() {
            true => Err(format!("no {LIBRARY} in {}", folders.join(", "))),
            false => Err(problems.join("; ")),
        }
    }

    fn load(folder: &Path) -> Result<Option<Self>, String> {
        let path = folder.join(LIBRARY);
        if !path.exists() {
            return Ok(None);
        }
        // NVRTC opens its built-ins by name. Outside the loader's path this works only if they are already loaded.
        for entry in fs::read_dir(folder).map_err(|e| e.to_string())?.flatten() {
            if entry.file_name().to_string_lossy().starts_with("libnvrtc-builtins.so.13") {
                // SAFETY: NVIDIA's library runs none of our code when it is loaded, and is never unloaded.
                let library = unsafe { Library::open(Some(entry.path()), RTLD_NOW | RTLD_GLOBAL) };
                std::mem::forget(library.map_err(|e| e.to_string())?);
            }
        }
        // SAFETY: as above; the symbols have the signatures of nvrtc.h 13.0, and live as long as `_library`.
        unsafe {
            let library = Library::open(Some(&path), RTLD_NOW | RTLD_GLOBAL).map_err(|e| e.to_string())?;
            let size = |name: &str| library.get::<Size>(name.as_bytes()).map(|s| *s).map_err(|e| e.to_string());
            let get = |name: &str| library.get::<Get>(name.as_bytes()).map(|s| *s).map_err(|e| e.to_string());
            let mut version = (0, 0);
            let read_version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int =
                *library.get(b"nvrtcVersion").map_err(|e| e.to_string())?;
            read_version(&mut version.0, &mut version.1);
            Ok(Some(Self {
                create: *library.get(b"nvrtcCreateProgram").map_err(|e| e.to_string())?,
                compile: *library.get(b"nvrtcCompileProgram").map_err(|e| e.to_string())?,
                destroy: *library.get(b"nvrtcDestroyProgram").map_err(|e| e.to_string())?,
                error: *library.get(b"nvrtcGetErrorString").map_err(|e| e.to_string())?,
                log: (size("nvrtcGetProgramLogSize")?, get("nvrtcGetProgramLog")?),
                cubin: (size("nvrtcGetCUBINSize")?, get("nvrtcGetCUBIN")?),
                ptx: (size("nvrtcGetPTXSize")?, get("nvrtcGetPTX")?),
                version,
                _library: library,
            }))
        }
    }

    /// Major and minor version.
    pub fn version(&self) -> (c_int, c_int) {
        self.version
    }

    /// Compiles for `sm_<arch>` to a cubin, or for `ptx` to PTX that runs on any GPU with compute capability 8.0 or
    /// later.
    /// Returns the image and the compiler's log.
    pub fn compile(
        &self,
        name: &str,
        source: &str,
        headers: &[(String, String)],
        arch: &str,
    ) -> Result<(Vec<u8>, String), String> {
        let c = |text: &str| CString::new(text).map_err(|e| e.to_string());
        let texts = headers.iter().map(|(_, text)| c(text)).collect::<Result<Vec<_>, _>>()?;
        let names = headers.iter().map(|(name, _)| c(name)).collect::<Result<Vec<_>, _>>()?;
        let target = if arch == "ptx" { "-arch=compute_80".to_owned() } else { format!("-arch=sm_{arch}") };
        let options = OPTIONS.iter().copied().chain([target.as_str()]).map(c).collect::<Result<Vec<_>, _>>()?;
        let pointers = |list: &[CString]| list.iter().map(|s| s.as_ptr()).collect::<Vec<_>>();
        let (source, name) = (c(source)?, c(name)?);
        let (text_pointers, name_pointers) = (pointers(&texts), pointers(&names));
        let mut program: Program = std::ptr::null_mut();
        // SAFETY: all strings outlive the calls; sizes are those that NVRTC reports.
        unsafe {
            let count = texts.len() as c_int;
            let created = (self.create)(
                &mut program,
                source.as_ptr(),
                name.as_ptr(),
                count,
                text_pointers.as_ptr(),
                name_pointers.as_ptr(),
            );
            self.check(created)?;
            let option_pointers = pointers(&options);
            let compiled = (self.compile)(program, option_pointers.len() as c_int, option_pointers.as_ptr());
            let log = String::from_utf8_lossy(&Self::fetch(self.log, program)).trim_end_matches('\0').to_owned();
            let result = match self.check(compiled) {
                Ok(()) => Ok((Self::fetch(if arch == "ptx" { self.ptx } else { self.cubin }, program), log)),
                Err(error) => Err(format!("{error}\n{log}")),
            };
            (self.destroy)(&mut program);
            result
        }
    }

    fn check(&self, code: c_int) -> Result<(), String> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: NVRTC returns a static string for any code.
        Err(unsafe { CStr::from_ptr((self.error)(code)) }.to_string_lossy().into_owned())
    }

    /// # Safety
    /// `program` must be alive and `(size, get)` must be a matching pair of NVRTC's functions.
    unsafe fn fetch((size, get): (Size, Get), program: Program) -> Vec<u8> {
        let mut bytes = 0;
        // SAFETY: by the contract; the buffer has the size that NVRTC asked for.
        unsafe {
            if size(program, &mut bytes) != 0 {
                return Vec::new();
            }
            let mut buffer = vec![0u8; bytes];
            get(program, buffer.as_mut_ptr().cast());
            buffer
        }
    }
}
