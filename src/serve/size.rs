//! The number of ranks: the smallest that fits, by the memory plan.

use std::ffi::OsString;

use anyhow::{Result, bail};
use rank::{Hardware, RankArgs, WorldPlan};

use crate::args::ServeArgs;

/// Most ranks that are tried.
const MAX_RANKS: u32 = 64;

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
    let words = ["rank"].into_iter().chain(line.iter().map(String::as_str)).map(OsString::from);
    let matches = rank::command().try_get_matches_from(rank::with_dashes(words))?;
    let (rank_args, _) = rank::parse(&matches)?;
    let num_gpus = num_gpus(&rank_args, hardware)?;
    let copies = args.pp * args.replicas;
    let sizes = match (args.tp, num_gpus) {
        (Some(tp), _) => vec![tp],
        (None, None) => vec![1],
        (None, Some(gpus)) => (1..=(gpus / copies).clamp(1, MAX_RANKS)).collect(),
    };
    let available = |world_size| num_gpus.is_none_or(|gpus| world_size <= gpus);
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
        let plan = WorldPlan::new(&rank_args, world_size, hardware)?;
        if plan.fits() {
            let why = match (args.tp, num_gpus) {
                (Some(_), _) => "as asked".to_owned(),
                (None, None) => "on CPUs".to_owned(),
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
    bail!("{}{}", refusal(&plan), advice(args, &plan))
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

fn refusal(plan: &WorldPlan) -> String {
    match plan.failures.first() {
        Some(failure) => failure.clone(),
        None => format!("the model does not fit\n{plan}"),
    }
}

/// The longest sequences that would fit, if that is what lacks.
fn advice(args: &ServeArgs, plan: &WorldPlan) -> String {
    let [model] = &plan.models[..] else { return String::new() };
    let positions = model.num_blocks(plan.free_bytes()) * model.engine.block_size as u64;
    let is_windowed = model.engine.windows[..] != [None];
    if is_windowed || positions == 0 || !plan.failures.is_empty() {
        return String::new();
    }
    let given = args.max_model_len.map_or("", |_| "lower ");
    format!("{given}`--max-model-len {positions}` would fit")
}
