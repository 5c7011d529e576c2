//! Compiles `cuda/*.cu` ahead of time with NVRTC and embeds the results.
//!
//! Each file names its architectures: `// archs: 80 90a 100a ptx` makes cubins for sm_80, sm_90a and sm_100a, those of
//! [`WITH_80`], and PTX that the driver compiles on other GPUs. [`ARCHS`] chooses some of them. Results are cached in `.cache/cubin`
//! by a hash of source, headers, options and NVRTC version. If NVRTC is not found, the crate is built without CUDA kernels and prints a warning.

#[path = "cuda/build/nvrtc.rs"]
mod nvrtc;

use std::collections::hash_map::DefaultHasher;
use std::fmt::Write as _;
use std::fs;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use nvrtc::Nvrtc;

/// Built wherever a file names 80: the architectures of workstations. Without them the first start on sm_120 compiles PTX,
/// and sm_89 has the schedule of another GPU.
const WITH_80: [&str; 2] = ["89", "120"];

/// The variable that names the architectures to build, separated by spaces: `80 90a`. All without it.
const ARCHS: &str = "TRIREME_CUDA_ARCHS";

/// An image to build: a kernel file for one architecture.
struct Job {
    module: String,
    arch: String,
    source: String,
}

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=cuda");
    println!("cargo:rerun-if-env-changed=NVRTC_DIR");
    println!("cargo:rerun-if-env-changed=CUDA_HOME");
    println!("cargo:rerun-if-env-changed={ARCHS}");
    // Not the folder in which this script was compiled: work trees that share a target folder share the compiled script.
    let package = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR"));
    let workspace = package.parent().expect("kernels lies in the workspace");
    watch_nvrtc(workspace);
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join("cuda_images.rs");

    let nvrtc = match Nvrtc::find(workspace) {
        Ok(nvrtc) => nvrtc,
        Err(reason) => {
            println!("cargo:warning=built for CPUs only: {reason}; `scripts/install_nvrtc` fetches NVRTC");
            return write(&out, "const COMPILED_WITH: Option<&str> = None;\nstatic IMAGES: &[Image] = &[];\n");
        }
    };
    let cache = workspace.join(".cache/cubin");
    fs::create_dir_all(&cache).unwrap_or_else(|e| panic!("cannot create {}: {e}", cache.display()));
    let (headers, jobs) = read_sources(&package.join("cuda"));
    let images = compile_all(&nvrtc, &headers, &jobs, &cache);

    let (major, minor) = nvrtc.version();
    let mut code = format!("const COMPILED_WITH: Option<&str> = Some(\"{major}.{minor}\");\n");
    code.push_str("static IMAGES: &[Image] = &[\n");
    for (job, path) in jobs.iter().zip(&images) {
        let log = path.with_extension("log");
        writeln!(
            code,
            "    Image {{ module: {:?}, arch: {:?}, bytes: include_bytes!({path:?}), log: include_str!({log:?}) }},",
            job.module, job.arch
        )
        .expect("writing to a string");
    }
    code.push_str("];\n");
    write(&out, &code);
}

/// Builds again when NVRTC appears, changes or goes. Cargo takes a path that does not exist as changed in each build, so the
/// folder of `scripts/install_nvrtc` is made first, and libraries of the system are watched where they exist.
fn watch_nvrtc(workspace: &Path) {
    let unpacked = workspace.join(".cache/nvrtc");
    // A build in a read-only folder has no such folder to watch.
    if unpacked.is_dir() || fs::create_dir_all(&unpacked).is_ok() {
        println!("cargo:rerun-if-changed={}", unpacked.display());
    }
    for library in nvrtc::folders(workspace).iter().map(|folder| folder.join(nvrtc::LIBRARY)) {
        if library.exists() {
            println!("cargo:rerun-if-changed={}", library.display());
        }
    }
}

fn write(path: &Path, text: &str) {
    fs::write(path, text).unwrap_or_else(|e| panic!("cannot write {}: {e}", path.display()));
}

/// All headers as (name, text), and a job for each architecture of each kernel file, in a stable order.
fn read_sources(folder: &Path) -> (Vec<(String, String)>, Vec<Job>) {
    let mut paths: Vec<PathBuf> = fs::read_dir(folder)
        .expect("kernels/cuda exists")
        .map(|entry| entry.expect("a readable entry").path())
        .collect();
    paths.sort();
    let chosen = std::env::var(ARCHS).ok();
    let is_chosen = |arch: &str| chosen.as_ref().is_none_or(|chosen| chosen.split_whitespace().any(|one| one == arch));
    let (mut headers, mut jobs) = (Vec::new(), Vec::new());
    for path in paths {
        let extension = path.extension().and_then(|e| e.to_str()).unwrap_or_default();
        if extension != "cu" && extension != "cuh" {
            continue;
        }
        let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("cannot read {}: {e}", path.display()));
        if extension == "cuh" {
            headers.push((path.file_name().expect("a file").to_string_lossy().into_owned(), text));
            continue;
        }
        let archs = text
            .lines()
            .find_map(|line| line.strip_prefix("// archs:"))
            .unwrap_or_else(|| panic!("{} has no line `// archs: 80 90a 100a ptx`", path.display()));
        let module = path.file_stem().expect("a file").to_string_lossy().into_owned();
        let also = WITH_80.into_iter().filter(|_| archs.split_whitespace().any(|arch| arch == "80"));
        for arch in archs.split_whitespace().chain(also).filter(|arch| is_chosen(arch)) {
            jobs.push(Job { module: module.clone(), arch: arch.to_owned(), source: text.clone() });
        }
    }
    for arch in chosen.iter().flat_map(|chosen| chosen.split_whitespace()) {
        assert!(jobs.iter().any(|job| job.arch == arch), "{ARCHS} names `{arch}`, for which no kernel is built");
    }
    (headers, jobs)
}

/// Paths of the images, in the order of `jobs`. Compiles those that are not in the cache, on all cores.
fn compile_all(nvrtc: &Nvrtc, headers: &[(String, String)], jobs: &[Job], cache: &Path) -> Vec<PathBuf> {
    let next = AtomicUsize::new(0);
    let errors = Mutex::new(Vec::new());
    let paths: Vec<PathBuf> = jobs.iter().map(|job| cache.join(key(nvrtc, headers, job))).collect();
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(job) = jobs.get(index) else { return };
                    if let Err(error) = compile(nvrtc, headers, job, &paths[index]) {
                        errors
                            .lock()
                            .expect("no panic holds it")
                            .push(format!("{}.cu for {}:\n{error}", job.module, job.arch));
                    }
                }
            });
        }
    });
    let errors = errors.into_inner().expect("no panic holds it");
    assert!(errors.is_empty(), "kernels do not compile:\n{}", errors.join("\n"));
    paths
}

/// The name of an image: a hash of all that its compilation reads.
fn key(nvrtc: &Nvrtc, headers: &[(String, String)], job: &Job) -> String {
    let mut hash = DefaultHasher::new();
    (nvrtc.version(), included(headers, &job.source), &job.source, nvrtc::OPTIONS).hash(&mut hash);
    format!("{}.{}.{:016x}.bin", job.module, job.arch, hash.finish())
}

/// The headers that `source` includes, and those that they include, in the order of `headers`.
fn included<'a>(headers: &'a [(String, String)], source: &str) -> Vec<&'a (String, String)> {
    let names = |text: &str, name: &str| text.contains(&format!("#include \"{name}\""));
    let mut found: Vec<bool> = headers.iter().map(|(name, _)| names(source, name)).collect();
    loop {
        let of_found = |name: &str| headers.iter().zip(&found).any(|((_, text), found)| *found && names(text, name));
        let next: Vec<bool> = headers.iter().zip(&found).map(|((name, _), found)| *found || of_found(name)).collect();
        if next == found {
            return headers.iter().zip(found).filter_map(|(header, found)| found.then_some(header)).collect();
        }
        found = next;
    }
}

fn compile(nvrtc: &Nvrtc, headers: &[(String, String)], job: &Job, path: &Path) -> Result<(), String> {
    let log = path.with_extension("log");
    if path.exists() && log.exists() {
        return Ok(());
    }
    let (image, text) = nvrtc.compile(&format!("{}.cu", job.module), &job.source, headers, &job.arch)?;
    // Renamed into place, so that a parallel build never reads an incomplete file.
    for (target, bytes) in [(path, image.as_slice()), (log.as_path(), text.as_bytes())] {
        let temporary = target.with_extension(format!("tmp{}", std::process::id()));
        fs::write(&temporary, bytes).map_err(|e| format!("cannot write {}: {e}", temporary.display()))?;
        fs::rename(&temporary, target).map_err(|e| format!("cannot write {}: {e}", target.display()))?;
    }
    Ok(())
}
