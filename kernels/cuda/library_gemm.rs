//! Matrix products with cuBLASLt. The algorithm is chosen by measurement, once for each shape, and stored on disk.

use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use cudarc::cublaslt::sys;
use half::bf16;

use super::error::ensure;
pub use super::gemm_plan::{GemmBuffers, GemmShape};
use super::gemm_plan::{Plan, check};
use super::{CudaError, DeviceBuffer, Gpu, Queue, gemm_plan, library};

/// Timed runs of each algorithm.
const RUNS: usize = 3;
/// A product with more operations than this is timed with one run, which takes about a millisecond.
const LONG_PRODUCT: usize = 500_000_000_000;
/// Maximum number of cached descriptors. Step sizes vary, so the map is cleared when it is full.
const MAX_PLANS: usize = 4096;

/// Key of a measured choice: the shape with `m` rounded up by [`measured_rows`].
type ChoiceKey = (usize, usize, usize, bool, bool);

/// cuBLASLt with its workspace and its chosen algorithms.
pub struct LibraryGemm {
    handle: sys::cublasLtHandle_t,
    workspace: DeviceBuffer,
    plans: HashMap<(GemmShape, bool), Plan>,
    choices: HashMap<ChoiceKey, [u64; 8]>,
    /// The library's own choice, for shapes that were not measured.
    guesses: HashMap<ChoiceKey, [u64; 8]>,
    /// Measurements that were interrupted.
    begun: HashMap<ChoiceKey, Measuring>,
    /// Shapes that ran once before their first use, because the library loads a kernel when it is first launched.
    loaded: HashSet<ChoiceKey>,
    first_use: FirstUse,
    file: Option<PathBuf>,
}

/// What happens at the first use of a shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FirstUse {
    /// Measures algorithms, which takes tens of runs of the product, and then runs the best.
    Measure,
    /// Runs the algorithm chosen by the library, until the shape is measured.
    Guess,
    /// Measures until a deadline and leaves the rest for later. Shapes that were measured before run once, so that
    /// their kernels are loaded.
    Prepare {
        /// No further algorithm is measured after this time.
        until: Instant,
        /// Whether something was left for later.
        is_cut: bool,
    },
}

/// A measurement in progress.
struct Measuring {
    /// The next one is the last in the list.
    candidates: Vec<sys::cublasLtMatmulAlgo_t>,
    /// The fastest algorithm so far, and its milliseconds.
    best: Option<(f32, sys::cublasLtMatmulAlgo_t)>,
}

// SAFETY: the handle may be used from any thread, one at a time, which `&mut self` guarantees.
unsafe impl Send for LibraryGemm {}

/// The number of rows whose measured algorithm is used for `m` rows: a multiple of a quarter of the next lower power of
/// two, and of 64.
pub fn measured_rows(m: usize) -> usize {
    let step = (m.next_power_of_two() / 8).max(64);
    if m <= 64 { m.next_power_of_two() } else { m.next_multiple_of(step) }
}

fn choice_key(shape: GemmShape, has_bias: bool) -> ChoiceKey {
    (measured_rows(shape.m), shape.n, shape.k, shape.to_f32, has_bias)
}

fn no_algorithm(shape: GemmShape) -> CudaError {
    CudaError::Library { call: "cublasLtMatmul".into(), reason: format!("no algorithm for {shape:?}") }
}

impl LibraryGemm {
    /// Bytes of device memory that it uses as the algorithms' workspace.
    pub const WORKSPACE_BYTES: usize = gemm_plan::WORKSPACE_BYTES;

    /// Loads cuBLASLt; `folders` are those of [`library::load`]. Choices are read from and added to a file in
    /// `cache_dir`.
    pub fn new(gpu: &Arc<Gpu>, folders: &[PathBuf], cache_dir: Option<&PathBuf>) -> Result<Self, CudaError> {
        std::mem::forget(library::load("libcublasLt.so.13", folders)?);
        let mut handle = std::ptr::null_mut();
        // SAFETY: the library is loaded; `handle` is writable.
        check(unsafe { sys::cublasLtCreate(&mut handle) }, "cublasLtCreate")?;
        // SAFETY: has no arguments.
        let version = unsafe { sys::cublasLtGetVersion() };
        let name = format!("cublaslt-{version}-{}.txt", gpu.name().replace([' ', '/'], "_"));
        let file = cache_dir.map(|folder| folder.join(name));
        let choices =
            file.as_ref().and_then(|path| std::fs::read_to_string(path).ok()).map_or_else(HashMap::new, |t| parse(&t));
        let workspace = DeviceBuffer::new(gpu, LibraryGemm::WORKSPACE_BYTES)?;
        let (plans, guesses, begun, loaded) = Default::default();
        Ok(Self { handle, workspace, plans, choices, guesses, begun, loaded, first_use: FirstUse::Measure, file })
    }

    /// Sets what happens from now on with shapes that were not measured; the initial value is [`FirstUse::Measure`].
    /// Returns the previous value.
    pub fn set_first_use(&mut self, first_use: FirstUse) -> FirstUse {
        std::mem::replace(&mut self.first_use, first_use)
    }

    /// Queues the product. If the first use of a shape measures, it waits for the GPU, so it must not be captured into
    /// a graph.
    pub fn run(&mut self, q: &Queue, shape: GemmShape, buffers: GemmBuffers) -> Result<(), CudaError> {
        let GemmBuffers { y, x, w, bias } = buffers;
        let GemmShape { m, n, k, stride, to_f32 } = shape;
        let op = "library_gemm";
        ensure!(op, m > 0 && n > 0 && k > 0 && stride >= n, "m {m}, n {n}, k {k}, stride {stride}");
        ensure!(op, x.count::<bf16>() >= m * k, "x is shorter than {m} x {k}");
        ensure!(op, w.count::<bf16>() >= n * k, "w is shorter than {n} x {k}");
        let element = if to_f32 { 4 } else { 2 };
        ensure!(op, y.bytes() >= ((m - 1) * stride + n) * element, "y is shorter than {m} x {stride}");
        ensure!(op, bias.is_null() || bias.count::<bf16>() >= n, "bias is shorter than {n}");
        let key = (shape, !bias.is_null());
        let choice_key = choice_key(shape, key.1);
        if let FirstUse::Prepare { until, .. } = self.first_use {
            if self.loaded.contains(&choice_key) {
                return Ok(());
            }
            if !self.choices.contains_key(&choice_key) {
                let is_done = Instant::now() < until && self.measure(q, shape, buffers, Some(until))?.is_some();
                if let FirstUse::Prepare { is_cut, .. } = &mut self.first_use {
                    *is_cut |= !is_done;
                }
                return Ok(());
            }
            self.loaded.insert(choice_key);
        }
        let is_guess = self.first_use == FirstUse::Measure && self.guesses.contains_key(&choice_key);
        if is_guess || !self.plans.contains_key(&key) {
            let plan = self.plan(q, shape, buffers)?;
            if self.plans.len() >= MAX_PLANS {
                self.plans.clear();
            }
            self.plans.insert(key, plan);
        }
        self.plans[&key].run(self.handle, q, buffers, &self.workspace)
    }

    /// A plan with the algorithm measured for the shape; if there is none, with one that is measured now or guessed.
    fn plan(&mut self, q: &Queue, shape: GemmShape, buffers: GemmBuffers) -> Result<Plan, CudaError> {
        let mut plan = Plan::new(shape, buffers.bias)?;
        let choice_key = choice_key(shape, !buffers.bias.is_null());
        let measures = self.first_use == FirstUse::Measure;
        let guess = self.guesses.get(&choice_key).filter(|_| !measures);
        if let Some(choice) = self.choices.get(&choice_key).or(guess) {
            plan.algorithm.data = *choice;
            if plan.is_usable(self.handle) {
                return Ok(plan);
            }
        }
        if measures && let Some(plan) = self.measure(q, shape, buffers, None)? {
            return Ok(plan);
        }
        plan.algorithm = *plan.candidates(self.handle)?.first().ok_or_else(|| no_algorithm(shape))?;
        self.guesses.insert(choice_key, plan.algorithm.data);
        Ok(plan)
    }

    /// A plan with the fastest algorithm for these operands, which is stored. Returns `None` if time is up before all
    /// have been measured; the next call continues with the remaining ones.
    fn measure(
        &mut self,
        q: &Queue,
        shape: GemmShape,
        buffers: GemmBuffers,
        until: Option<Instant>,
    ) -> Result<Option<Plan>, CudaError> {
        let mut plan = Plan::new(shape, buffers.bias)?;
        let choice_key = choice_key(shape, !buffers.bias.is_null());
        let runs = if 2 * shape.m * shape.n * shape.k > LONG_PRODUCT { 1 } else { RUNS };
        let mut measuring = match self.begun.remove(&choice_key) {
            Some(begun) => begun,
            None => Measuring { candidates: plan.candidates(self.handle)?.into_iter().rev().collect(), best: None },
        };
        while let Some(candidate) = measuring.candidates.pop() {
            plan.algorithm = candidate;
            if let Ok(ms) = plan.measure(self.handle, q, buffers, &self.workspace, runs)
                && measuring.best.is_none_or(|(least, _)| ms < least)
            {
                measuring.best = Some((ms, candidate));
            }
            let is_late = until.is_some_and(|until| Instant::now() >= until);
            if is_late && !measuring.candidates.is_empty() {
                self.begun.insert(choice_key, measuring);
                return Ok(None);
            }
        }
        plan.algorithm = measuring.best.ok_or_else(|| no_algorithm(shape))?.1;
        self.choices.insert(choice_key, plan.algorithm.data);
        self.loaded.insert(choice_key);
        if self.guesses.remove(&choice_key).is_some() {
            self.plans.retain(|(shape, has_bias), _| self::choice_key(*shape, *has_bias) != choice_key);
        }
        self.save();
        Ok(Some(plan))
    }

    /// Saves the choices. If this fails, only the next start takes longer.
    fn save(&self) {
        let Some(path) = &self.file else { return };
        let mut text = String::new();
        for ((m, n, k, to_f32, bias), words) in &self.choices {
            let words: Vec<String> = words.iter().map(|word| format!("{word:016x}")).collect();
            let _ = writeln!(text, "{m} {n} {k} {} {} {}", u8::from(*to_f32), u8::from(*bias), words.join(" "));
        }
        let temporary = path.with_extension(format!("{}", std::process::id()));
        let folder_stands = path.parent().is_none_or(|folder| std::fs::create_dir_all(folder).is_ok());
        if folder_stands && std::fs::write(&temporary, text).is_ok() {
            let _ = std::fs::rename(&temporary, path);
        }
    }
}

/// Parses lines of m, n, k, to_f32, bias and eight hexadecimal words; other lines are ignored.
fn parse(text: &str) -> HashMap<ChoiceKey, [u64; 8]> {
    let line = |line: &str| {
        let mut fields = line.split_whitespace();
        let mut number = || fields.next()?.parse::<usize>().ok();
        let key = (number()?, number()?, number()?, number()? == 1, number()? == 1);
        let words: Vec<u64> = fields.map_while(|field| u64::from_str_radix(field, 16).ok()).collect();
        Some((key, words.try_into().ok()?))
    };
    text.lines().filter_map(line).collect()
}

impl Drop for LibraryGemm {
    fn drop(&mut self) {
        self.plans.clear();
        // SAFETY: created in `new`, destroyed once.
        unsafe { sys::cublasLtDestroy(self.handle) };
    }
}

#[cfg(test)]
mod tests {
    use super::measured_rows;

    #[test]
    fn rows_are_measured_at_a_few_sizes_of_each_power_of_two() {
        let sizes = |rows: std::ops::Range<usize>| {
            let mut sizes: Vec<usize> = rows.map(measured_rows).collect();
            sizes.dedup();
            sizes
        };
        assert_eq!(sizes(1..65), [1, 2, 4, 8, 16, 32, 64]);
        assert_eq!(sizes(65..1025), [128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024]);
        assert_eq!(sizes(8193..16385), [10240, 12288, 14336, 16384]);
    }
}
