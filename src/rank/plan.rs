//! `trireme plan`: prints the memory that the LLMs of a world would need, without loading them.

use std::collections::HashMap;
use std::fmt::{self, Write as _};
use std::process::ExitCode;
use std::sync::Arc;

use backends::layouts::Layouts;
use backends::llm::{ModelPlan, PlanFactory};
use futures::FutureExt;
use futures::future::BoxFuture;
use serde_json::{Value, json};
use serving::{Backend, BackendFactory, InferError, LoadRequest, Server};
use supervision::DeviceChoice;

use crate::args::RankArgs;
use crate::configs::{llm_defaults, server_config};
use crate::error::RankError;
use crate::hardware::Hardware;

/// Prints the memory of each LLM of a world of `world_size` ranks, `ranks_per_node` of them on each node, as if the devices of every
/// node were those of this one. The exit code is a failure if one does not fit.
///
/// # Errors
/// When the repository or the device cannot be used.
pub fn print_plan(
    args: &RankArgs,
    world_size: u32,
    ranks_per_node: u32,
    hardware: &Hardware,
) -> Result<ExitCode, RankError> {
    let plan = WorldPlan::new(args, world_size, ranks_per_node, hardware)?;
    print!("{plan}");
    plan.failures.iter().for_each(|failure| println!("{failure}"));
    if plan.models.is_empty() && plan.failures.is_empty() {
        let places: Vec<_> = args.model_repository.iter().map(|path| path.display().to_string()).collect();
        println!("no language model is in {}", places.join(", "));
    }
    Ok(if plan.fits() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Prints the same as JSON, for `launch doctor`.
///
/// # Errors
/// When the repository or the device cannot be used.
pub fn print_plan_as_json(
    args: &RankArgs,
    world_size: u32,
    ranks_per_node: u32,
    hardware: &Hardware,
) -> Result<ExitCode, RankError> {
    let plan = WorldPlan::new(args, world_size, ranks_per_node, hardware)?;
    let free = plan.free_bytes();
    let model = |model: &ModelPlan| {
        json!({
            "name": model.name,
            "summary": plan.brief_of(model),
            "replicas": model.num_replicas,
            "missing_bytes": model.missing_bytes(free).max(plan.missing_host_bytes(model)),
            "advice": plan.advice(model),
        })
    };
    let models: Vec<Value> = plan.models.iter().map(model).collect();
    let (device, why, nvrtc) = (plan.device, &plan.why, hardware.nvrtc_version);
    let report = json!({"device": device, "why": why, "nvrtc": nvrtc, "models": models, "failures": plan.failures});
    println!("{report}");
    Ok(if plan.fits() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The memory of the LLMs of a world. `Display` shows a table for each.
pub struct WorldPlan {
    /// The LLMs that could be planned.
    pub models: Vec<ModelPlan>,
    /// Why the others could not, one line each.
    pub failures: Vec<String>,
    /// `cpu` or `cuda`.
    pub device: &'static str,
    /// Why the workers compute there.
    pub why: String,
    devices: Vec<Free>,
    host_free_bytes: u64,
}

impl WorldPlan {
    /// Plans a world of `world_size` ranks, `ranks_per_node` of them on each node, which has the devices of this one.
    ///
    /// # Errors
    /// When the repository or the device cannot be used.
    pub fn new(args: &RankArgs, world_size: u32, ranks_per_node: u32, hardware: &Hardware) -> Result<Self, RankError> {
        let per_node = ranks_per_node.clamp(1, world_size) as usize;
        let (defaults, why) = llm_defaults(args, hardware, world_size, per_node)?;
        let device = match defaults.worker.device {
            DeviceChoice::Cpu { .. } => "cpu",
            DeviceChoice::Cuda { .. } => "cuda",
        };
        let place = |rank: usize| Free::of(hardware, defaults.worker.device, rank % per_node);
        let devices = (0..world_size as usize).map(place);
        let devices = devices.collect::<Result<_, _>>()?;
        let planner = Arc::new(PlanFactory::new(defaults, hardware.estimate_memory));
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(RankError::Runtime)?;
        runtime.block_on(load(args, &planner))?;
        let host_free_bytes = (hardware.free_cpu_memory)();
        Ok(Self { models: planner.plans(), failures: planner.failures(), device, why, devices, host_free_bytes })
    }

    /// Free bytes of the device with the least.
    pub fn free_bytes(&self) -> u64 {
        self.devices.iter().map(|device| device.bytes).min().unwrap_or(0)
    }

    /// Whether every LLM could be planned and fits.
    pub fn fits(&self) -> bool {
        let is_missing =
            |plan: &ModelPlan| plan.missing_bytes(self.free_bytes()).max(self.missing_host_bytes(plan)) > 0;
        self.failures.is_empty() && !self.models.iter().any(is_missing)
    }

    /// Bytes of host memory that a model lacks for what is evicted from its devices.
    fn missing_host_bytes(&self, plan: &ModelPlan) -> u64 {
        match self.host_free_bytes {
            0 => 0, // It is unknown.
            free => plan.all_host_memory_bytes(self.free_bytes()).saturating_sub(free),
        }
    }

    /// What a model lacks, and what would fit; empty if it fits.
    fn advice(&self, plan: &ModelPlan) -> String {
        let of_host = match self.missing_host_bytes(plan) {
            0 => String::new(),
            _ => host_advice(plan, self.free_bytes(), self.host_free_bytes),
        };
        let of_devices = advice(plan, self.free_bytes());
        [of_devices, of_host].into_iter().filter(|text| !text.is_empty()).collect::<Vec<_>>().join("; ")
    }

    /// One line for each LLM: what its largest worker takes of its device, and what that allows.
    pub fn brief(&self) -> Vec<String> {
        self.models.iter().map(|plan| self.brief_of(plan)).collect()
    }

    fn brief_of(&self, plan: &ModelPlan) -> String {
        let free = self.free_bytes();
        let worker = plan.workers.iter().max_by_key(|worker| worker.weights_bytes);
        let (weights, block) = worker.map_or((0, 0), |worker| (worker.weights_bytes, worker.block_bytes));
        let blocks = plan.num_blocks(free);
        let device = self.devices.first().map_or("", |device| device.name.as_str());
        let states = plan.num_states(free) * worker.map_or(0, |worker| worker.state_bytes);
        let (weights, cache, free) = (size(weights), size(blocks * block + states), size(free));
        let shape = shape(plan);
        let shape = shape.trim_end_matches(", each with:");
        let mut line = format!("{shape}: weights {weights} and KV cache {cache} of {free} that are free on {device}");
        if let [None] = plan.engine.windows[..] {
            let positions = blocks * plan.engine.block_size as u64;
            let longest = plan.engine.max_sequence_len;
            let _ = write!(line, "; {positions} tokens of KV cache, {longest} a sequence at most");
        }
        if let host @ 1.. = plan.host_memory_bytes(self.free_bytes()) {
            let source = if plan.has_host_share { ", a share of what is free" } else { "" };
            let _ = write!(line, "; host memory for evicted blocks {}{source}", size(host));
        }
        line
    }
}

impl fmt::Display for WorldPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let table = |plan| Table { plan, devices: &self.devices, host_free_bytes: self.host_free_bytes };
        self.models.iter().try_for_each(|plan| write!(f, "{}", table(plan)))
    }
}

/// Loads the repository as a server would, with factories that only plan. Models without weights are skipped.
async fn load(args: &RankArgs, planner: &Arc<PlanFactory>) -> Result<(), RankError> {
    let mut factories: HashMap<String, Arc<dyn BackendFactory>> = backends::builtin();
    let layouts = Layouts::new(Arc::clone(planner) as _, Arc::new(NotPlanned));
    factories.extend(layouts.factories());
    let server = Server::new(server_config(args), factories).map_err(|error| RankError::Server(error.to_string()))?;
    layouts.attach(&server);
    // No LLM loads, on purpose. The planner keeps the failures.
    let _ = server.load_all().await;
    Ok(())
}

/// Python models run in processes of their own, whose memory cannot be planned.
struct NotPlanned;

impl BackendFactory for NotPlanned {
    fn load(&self, _load: LoadRequest) -> BoxFuture<'static, Result<Arc<dyn Backend>, InferError>> {
        async { Err(InferError::unavailable("not planned")) }.boxed()
    }
}

/// A device and its free memory.
struct Free {
    name: String,
    bytes: u64,
}

impl Free {
    fn of(hardware: &Hardware, device: DeviceChoice, rank: usize) -> Result<Self, RankError> {
        let found = match device {
            DeviceChoice::Cpu { .. } => Ok(("CPU".to_owned(), (hardware.free_cpu_memory)())),
            DeviceChoice::Cuda { ordinal } => (hardware.free_gpu_memory)(ordinal + rank),
        };
        let (name, bytes) = found.map_err(|reason| RankError::Device { device: "cuda".to_owned(), reason })?;
        Ok(Self { name, bytes })
    }
}

/// One model's plan.
struct Table<'a> {
    plan: &'a ModelPlan,
    devices: &'a [Free],
    host_free_bytes: u64,
}

impl fmt::Display for Table<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Table { plan, devices, .. } = *self;
        let num_workers = plan.num_replicas * plan.workers.len();
        let least = devices.iter().take(num_workers).map(|device| device.bytes).min().unwrap_or(0);
        let (blocks, states) = (plan.num_blocks(least), plan.num_states(least));
        writeln!(f, "model `{}`: {}", plan.name, shape(plan))?;
        let heads =
            ["worker", "device", "free", "weights", "workspace", "communicators", "graphs", "KV blocks", "states"];
        let mut rows = vec![heads.map(str::to_owned)];
        for (rank, (worker, device)) in plan.workers.iter().cycle().take(num_workers).zip(devices).enumerate() {
            rows.push([
                rank.to_string(),
                device.name.clone(),
                size(device.bytes),
                size(worker.weights_bytes),
                size(worker.workspace_bytes),
                size(worker.communicator_bytes),
                size(worker.reserve_bytes),
                size(blocks * worker.block_bytes),
                size(states * worker.state_bytes),
            ]);
        }
        write_table(f, &rows)?;
        self.write_concurrency(f, blocks, states)?;
        self.write_host_memory(f, least)?;
        self.write_advice(f, least)
    }
}

/// How the model is distributed over workers.
fn shape(plan: &ModelPlan) -> String {
    let num_workers = plan.workers.len();
    let stages = match num_workers / plan.tp_size as usize {
        1 => String::new(),
        count => format!(" in {count} stages"),
    };
    match plan.num_replicas {
        1 => format!("{num_workers} worker(s){stages}"),
        count => format!("{count} replicas of {num_workers} worker(s){stages}, each with:"),
    }
}

impl Table<'_> {
    fn write_concurrency(&self, f: &mut fmt::Formatter<'_>, blocks: u64, states: u64) -> fmt::Result {
        let engine = &self.plan.engine;
        let most = if states > 0 { states.min(engine.max_rows as u64) } else { engine.max_rows as u64 };
        let at_once = |length: usize| (blocks / engine.num_blocks_of(length).max(1) as u64).min(most);
        write!(f, "  {blocks} KV blocks of {} positions", engine.block_size)?;
        match engine.windows[..] {
            [None] => writeln!(f, ": {} positions", blocks * engine.block_size as u64)?,
            ref windows => writeln!(f, ", {}", groups(windows))?,
        }
        let bytes = self.plan.workers.iter().map(|worker| worker.state_bytes).max().unwrap_or(0);
        if states > 0 {
            writeln!(f, "  {states} recurrent states of {}, for running sequences and snapshots", size(bytes))?;
        }
        let mut line = format!("  at once, of at most {} sequences:", engine.max_rows);
        let shorter = [512, 2048].into_iter().filter(|&length| length < engine.max_sequence_len);
        for length in shorter.chain([engine.max_sequence_len]) {
            let _ = write!(line, " {} of {length} positions,", at_once(length));
        }
        writeln!(f, "{}", line.trim_end_matches(','))
    }

    /// The host memory for what is evicted, if there is any.
    fn write_host_memory(&self, f: &mut fmt::Formatter<'_>, device_free: u64) -> fmt::Result {
        let Table { plan, host_free_bytes: free, .. } = *self;
        let (bytes, all) = (plan.host_memory_bytes(device_free), plan.all_host_memory_bytes(device_free));
        if bytes == 0 {
            return Ok(());
        }
        let [blocks, states] = plan.host_slots(device_free);
        write!(f, "  host memory of each worker: {} for {blocks} evicted KV blocks", size(bytes))?;
        if states > 0 {
            write!(f, " and {states} recurrent states")?;
        }
        write!(f, "; {} in all, {} are free", size(all), size(free))?;
        let source = ", a share of which it is, without `--kv-cache-host-memory`";
        writeln!(f, "{}", if plan.has_host_share { source } else { "" })?;
        if plan.disk_bytes > 0 {
            let [blocks, states] = plan.disk_slots();
            write!(
                f,
                "  file of each worker: {} for {blocks} KV blocks that leave host memory",
                size(plan.disk_bytes)
            )?;
            let states = if states > 0 { format!(" and {states} recurrent states") } else { String::new() };
            writeln!(f, "{states}")?;
        }
        match all > free && free > 0 {
            true => writeln!(f, "  does not fit: {}", host_advice(plan, device_free, free)),
            false => Ok(()),
        }
    }

    fn write_advice(&self, f: &mut fmt::Formatter<'_>, free: u64) -> fmt::Result {
        match advice(self.plan, free) {
            advice if advice.is_empty() => Ok(()),
            advice => writeln!(f, "  does not fit: {advice}"),
        }
    }
}

/// What to do where the host has too little memory.
fn host_advice(plan: &ModelPlan, device_free: u64, free: u64) -> String {
    let workers = (plan.num_replicas * plan.workers.len()) as u64;
    format!(
        "`kv_cache_host_memory_bytes` is {} for each of {workers} workers, and the host has {} free: lower it to {} at most",
        plan.host_memory_bytes(device_free),
        size(free),
        free / workers.max(1)
    )
}

/// What a model lacks, and what would fit; empty if it fits.
fn advice(plan: &ModelPlan, free: u64) -> String {
    let (longest, missing) = (plan.engine.max_sequence_len, plan.missing_bytes(free));
    let lacks = format!("a sequence of {longest} positions lacks {}", size(missing));
    if missing == 0 {
        return String::new();
    }
    let world = plan.fitting_world(free).map(|size| match plan.num_replicas {
        // Workers on CPUs of one machine share its memory.
        _ if plan.is_on_cpus() => format!("{size} machines with as much memory, one worker on each (`--hosts`),"),
        1 => format!("a world of {size}"),
        _ => format!("replicas of {size} workers"),
    });
    let cure = match (world, plan.holds_weights(free)) {
        (Some(world), true) => format!("{world} would fit, or a smaller `max_sequence_len`"),
        (Some(world), false) => format!("{world} would fit, {FEWER_BITS}"),
        (None, true) => {
            "no larger world divides this model and fits: lower `max_sequence_len` or `max_batch_size`".to_owned()
        }
        (None, false) => format!("no larger world divides this model and fits, {FEWER_BITS}"),
    };
    format!("{lacks}; {cure}")
}

const FEWER_BITS: &str = "and weights of fewer bits need less (`--weight-only-precision`)";

/// The KV groups of a model with windows, those that are alike together.
fn groups(windows: &[Option<usize>]) -> String {
    let kinds = windows.chunk_by(|a, b| a == b).map(|alike| {
        let verb = if alike.len() == 1 { "keeps" } else { "keep" };
        match alike[0] {
            None => format!("{} {verb} all positions", alike.len()),
            Some(window) => format!("{} {verb} the last {window}", alike.len()),
        }
    });
    let plural = if windows.len() == 1 { "" } else { "s" };
    format!("{} group{plural} of layers: {}", windows.len(), kinds.collect::<Vec<_>>().join(", "))
}

/// Writes columns that are as wide as their longest cells.
fn write_table<const N: usize>(f: &mut fmt::Formatter<'_>, rows: &[[String; N]]) -> fmt::Result {
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let widths: [usize; N] = std::array::from_fn(width);
    for row in rows {
        let line: Vec<String> = row.iter().zip(widths).map(|(word, width)| format!("{word:width$}")).collect();
        writeln!(f, "  {}", line.join("  ").trim_end())?;
    }
    Ok(())
}

fn size(bytes: u64) -> String {
    match bytes {
        0 => "-".to_owned(),
        bytes if bytes < 1 << 30 => format!("{:.1} MiB", bytes as f64 / (1u64 << 20) as f64),
        bytes => format!("{:.2} GiB", bytes as f64 / (1u64 << 30) as f64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_that_are_alike_are_counted_together() {
        assert_eq!(groups(&[Some(4096)]), "1 group of layers: 1 keeps the last 4096");
        assert_eq!(
            groups(&[None, Some(1024), Some(1024), Some(64)]),
            "4 groups of layers: 1 keeps all positions, 2 keep the last 1024, 1 keeps the last 64"
        );
    }
}
