//! The number of ranks: the smallest that fits, by the memory plan.

use std::ffi::OsString;

use anyhow::{Result, bail};
use rank::{Hardware, RankArgs, WorldPlan};

use crate::args::ServeArgs;

/// Most ranks that are tried.
const MAX_RANKS: u32 = 64;
/// The flag of ranks for the form of weights.
const PRECISION: &str = "--weight-only-precision=";

/// A world that fits.
pub(crate) struct Chosen {
    pub(crate) world_size: u32,
    pub(crate) plan: WorldPlan,
    /// Why it has this size.
    pub(crate) why: String,
}

/// Chooses the size of a world whose ranks have the flags `line`, and `replicas` x `pp` ranks at least.
///
/// # Errors
/// When no size fits, with what would.
pub(crate) fn choose(args: &ServeArgs, line: &[String], hardware: &Hardware) -> Result<Chosen> {
    let rank_args = rank_args(line)?;
    let num_gpus = num_gpus(&rank_args, hardware)?;
    let (copies, sizes) = (args.pp * args.replicas, sizes(args, num_gpus));
    // Without any GPU the plan says why.
    let available = |world_size| num_gpus.is_none_or(|gpus| gpus == 0 || world_size <= gpus);
    let mut last = None;
    for &tp in &sizes {
        let world_size = tp * copies;
        if !available(world_size) {
            bail!(
                "--tp {tp} x --pp {} x --replicas {} are {world_size} GPUs, and this machine has {}; `launch` serves on \
                 several machines",
                args.pp,
                args.replicas,
                num_gpus.unwrap_or(0)
            );
        }
        let plan = WorldPlan::new(&rank_args, world_size, world_size, hardware)?;
        if plan.fits() {
            let why = match (args.tp, num_gpus) {
                (Some(_), _) => "as requested".to_owned(),
                (None, None) => on_cpus(&rank_args, hardware),
                (None, Some(gpus)) => format!("the smallest number of {gpus} GPUs that fits"),
            };
            return Ok(Chosen { world_size, plan, why });
        }
        // A number that does not divide the heads says less than one that is too small.
        if plan.failures.is_empty() || last.is_none() {
            last = Some(plan);
        }
    }
    let plan = last.expect("there is one size at least");
    let world_sizes: Vec<u32> = sizes.into_iter().map(|tp| tp * copies).collect();
    let lacks_memory = plan.failures.is_empty();
    let fewer_bits = lacks_memory.then(|| fewer_bits(line, &world_sizes, hardware)).flatten();
    let cures = [advice(args, &plan), fewer_bits].into_iter().flatten();
    bail!("{}{}", refusal(&plan), cures.collect::<Vec<_>>().join("; "))
}

/// The flags of the ranks.
fn rank_args(line: &[String]) -> Result<RankArgs> {
    let words = ["rank"].into_iter().chain(line.iter().map(String::as_str)).map(OsString::from);
    let matches = rank::command().try_get_matches_from(rank::with_dashes(words))?;
    Ok(rank::parse(&matches)?.0)
}

/// Numbers of GPUs that share each layer, in the order in which they are tried.
fn sizes(args: &ServeArgs, num_gpus: Option<u32>) -> Vec<u32> {
    match (args.tp, num_gpus) {
        (Some(tp), _) => vec![tp],
        (None, None) => vec![1],
        (None, Some(gpus)) => (1..=(gpus / (args.pp * args.replicas)).clamp(1, MAX_RANKS)).collect(),
    }
}

/// The GPUs of this machine; `None` where the model computes on CPUs.
///
/// # Errors
/// When GPUs are asked for, and there is none that can be used.
fn num_gpus(args: &RankArgs, hardware: &Hardware) -> Result<Option<u32>> {
    let found = || (hardware.num_gpus)().map(|gpus| u32::try_from(gpus).unwrap_or(u32::MAX));
    Ok(match args.device {
        settings::DeviceKind::Cpu => None,
        // Rank 0 logs why GPUs that are there are not used.
        settings::DeviceKind::Auto => found().ok().filter(|gpus| *gpus > 0),
        settings::DeviceKind::Cuda => Some(found().map_err(|reason| anyhow::anyhow!(reason))?),
    })
}

/// Why the model computes on CPUs, if there are GPUs that cannot be used.
fn on_cpus(args: &RankArgs, hardware: &Hardware) -> String {
    match (args.device, (hardware.num_gpus)()) {
        (settings::DeviceKind::Auto, Err(reason)) => format!("on CPUs: {reason}"),
        _ => "on CPUs".to_owned(),
    }
}

fn refusal(plan: &WorldPlan) -> String {
    match plan.failures.first() {
        Some(failure) => failure.clone(),
        None => format!("the model does not fit\n{plan}"),
    }
}

/// The form of weights with which one of these worlds would fit, unless a form was asked for.
fn fewer_bits(line: &[String], world_sizes: &[u32], hardware: &Hardware) -> Option<String> {
    if line.iter().any(|flag| flag.starts_with(PRECISION)) {
        return None;
    }
    for precision in ["fp8", "int8", "int4"] {
        let Ok(args) = rank_args(&[line, &[format!("{PRECISION}{precision}")]].concat()) else { continue };
        for &world_size in world_sizes {
            // A form that the device or the checkpoint does not allow is a failure of the plan.
            let Ok(plan) = WorldPlan::new(&args, world_size, world_size, hardware) else { continue };
            if plan.fits() {
                let on = if plan.device == "cpu" { "here".to_owned() } else { format!("on {world_size} GPU(s)") };
                return Some(format!("`--quantization {precision}` would fit {on}"));
            }
        }
    }
    None
}

/// The longest sequences that would fit, if that is what lacks.
fn advice(args: &ServeArgs, plan: &WorldPlan) -> Option<String> {
    let [model] = &plan.models[..] else { return None };
    let positions = model.num_blocks(plan.free_bytes()) * model.engine.block_size as u64;
    let is_windowed = model.engine.windows[..] != [None];
    if is_windowed || positions == 0 || !plan.failures.is_empty() {
        return None;
    }
    let given = args.max_model_len.map_or("", |_| "lower ");
    Some(format!("{given}`--max-model-len {positions}` would fit"))
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use clap::{Args as _, Command, FromArgMatches as _};
    use front::{ClientDevices, DeviceMemory};
    use models::{Config, ModelError, WorkerShape};
    use ops::MemoryEstimate;
    use settings::WeightPrecision;

    use super::*;

    #[derive(Debug)]
    struct NoDevices;

    impl ClientDevices for NoDevices {
        fn open(&self, _handle: &[u8; 64], _device: u64, _bytes: u64) -> Result<Arc<dyn DeviceMemory>, String> {
            Err("no test opens a device".to_owned())
        }
    }

    /// A model of `GIB` GiB, or a quarter of that in 4 bits, which divides by any number of workers.
    fn estimate<const GIB: u64>(_: &Path, _: &Config, shape: &WorkerShape) -> Result<MemoryEstimate, ModelError> {
        let num_workers = shape.tp.size as u64 * shape.stage.count as u64;
        let shared = if shape.precision == WeightPrecision::Int4 { 4 } else { 1 };
        Ok(MemoryEstimate {
            weights_bytes: (GIB << 30) / shared / num_workers,
            mapped_bytes: 0,
            workspace_bytes: 0,
            host_buffer_bytes: 0,
            communicator_bytes: 0,
            reserve_bytes: 0,
            block_bytes: 1 << 20,
            state_bytes: 0,
        })
    }

    /// A machine with `GPUS` GPUs of 10 GiB, and 64 GiB for CPUs.
    fn machine<const GPUS: usize, const GIB: u64>() -> Hardware {
        Hardware {
            num_gpus: || Ok(GPUS),
            free_gpu_memory: |ordinal| Ok((format!("GPU {ordinal}"), 10 << 30)),
            free_cpu_memory: || 64 << 30,
            num_allowed_cores: || 1,
            nvrtc_version: None,
            client_devices: Arc::new(NoDevices),
            estimate_memory: estimate::<GIB>,
        }
    }

    /// The size that is chosen for the demo model with these flags of `serve`, and why; or the error.
    fn chosen(flags: &str, hardware: &Hardware) -> Result<(u32, String), String> {
        planned(flags, hardware).map(|chosen| (chosen.world_size, chosen.why))
    }

    fn planned(flags: &str, hardware: &Hardware) -> Result<Chosen, String> {
        let words = ["serve", "model"].into_iter().chain(flags.split_whitespace());
        let matches = ServeArgs::augment_args(Command::new("serve")).try_get_matches_from(words).unwrap();
        let args = ServeArgs::from_arg_matches(&matches).unwrap();
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../model_repository/tensorrt_llm/1");
        let dir = tempfile::tempdir().unwrap();
        let parameters = crate::run_files::parameters(&args);
        let repository = dir.path().join("repository");
        lint::write_text_repository(&repository, "demo", &demo.canonicalize().unwrap(), &parameters).unwrap();
        let checkpoint = crate::Checkpoint { name: "demo".into(), dir: demo.clone() };
        let line = crate::line::plan_flags(&args, &checkpoint, &repository).unwrap();
        choose(&args, &line, hardware).map_err(|error| error.to_string())
    }

    #[test]
    fn the_smallest_number_of_gpus_that_fits_is_chosen() {
        let size = |result: Result<(u32, String), String>| result.unwrap().0;
        assert_eq!(size(chosen("", &machine::<4, 5>())), 1);
        assert_eq!(size(chosen("", &machine::<4, 15>())), 2);
        assert_eq!(size(chosen("", &machine::<4, 25>())), 4, "3 workers cannot share 4 KV heads");
        assert_eq!(chosen("", &machine::<4, 15>()).unwrap().1, "the smallest number of 4 GPUs that fits");
    }

    #[test]
    fn requested_sizes_are_taken_and_stages_and_replicas_multiply_them() {
        assert_eq!(chosen("--tp 4", &machine::<4, 5>()).unwrap(), (4, "as requested".to_owned()));
        assert_eq!(chosen("--replicas 2", &machine::<4, 15>()).unwrap().0, 4);
        assert_eq!(chosen("--pp 2", &machine::<4, 15>()).unwrap().0, 2);
    }

    #[test]
    fn host_memory_is_a_share_on_gpus_unless_a_size_is_set_or_the_model_can_sleep() {
        let host_memory = |flags: &str, hardware: &Hardware| {
            let brief = planned(flags, hardware).unwrap().plan.brief().remove(0);
            brief.split_once("evicted blocks ").map(|(_, words)| words.to_owned())
        };
        let share = |size: &str| Some(format!("{size} GiB, a share of what is free"));
        assert_eq!(host_memory("", &machine::<1, 5>()), share("9.00"), "twice 0.9 of the 5 GiB that are left");
        assert_eq!(host_memory("--tp 4", &machine::<4, 5>()), share("4.00"), "of 64 GiB, a quarter is for 4 ranks");
        assert_eq!(host_memory("--replicas 2", &machine::<2, 5>()), share("8.00"));
        assert_eq!(host_memory("--kv-cache-host-memory 2GiB", &machine::<1, 5>()), Some("2.00 GiB".to_owned()));
        for flags in ["--kv-cache-host-memory 0", "--enable-sleep-mode", "--device cpu"] {
            assert_eq!(host_memory(flags, &machine::<1, 5>()), None, "{flags}");
        }
    }

    #[test]
    fn without_gpus_one_rank_serves_on_cpus() {
        assert_eq!(chosen("", &machine::<0, 5>()).unwrap(), (1, "on CPUs".to_owned()));
        assert_eq!(chosen("--device cpu", &machine::<4, 5>()).unwrap(), (1, "on CPUs".to_owned()));
        assert_eq!(chosen("--tp 2", &machine::<0, 5>()).unwrap().0, 2);
        let unusable = Hardware { num_gpus: || Err("this build has no GPU kernels".to_owned()), ..machine::<0, 5>() };
        assert_eq!(chosen("", &unusable).unwrap(), (1, "on CPUs: this build has no GPU kernels".to_owned()));
    }

    #[test]
    fn what_no_number_of_gpus_holds_is_refused_with_what_lacks() {
        let error = chosen("", &machine::<2, 40>()).unwrap_err();
        assert!(error.contains("the model does not fit") && error.contains("a world of 8 would fit"), "{error}");
        assert!(
            !error.contains("max_sequence_len") && error.ends_with("`--quantization int4` would fit on 2 GPU(s)"),
            "{error}"
        );
        let error = chosen("--quantization int4", &machine::<2, 160>()).unwrap_err();
        assert!(error.contains("the model does not fit") && !error.contains("--quantization"), "{error}");
        assert!(chosen("--max-model-len 2048", &machine::<1, 5>()).is_ok());
        let error = chosen("--max-model-len 2049", &machine::<1, 5>()).unwrap_err();
        assert!(error.contains("(`--max-model-len`) is 2049, more than the 2048 positions"), "{error}");
        let error = chosen("--device cuda", &machine::<0, 5>()).unwrap_err();
        assert!(error.contains("no NVIDIA driver"), "{error}");
        let error = chosen("--tp 4 --replicas 2", &machine::<4, 5>()).unwrap_err();
        assert!(error.contains("are 8 GPUs, and this machine has 4"), "{error}");
        let error = chosen("", &machine::<1, 9>()).map(|(size, _)| size);
        assert_eq!(error, Ok(1), "9 of 10 GiB leave room for a short sequence");
    }
}
