//! `trireme quantize`: writes a checkpoint with quantized linear layers, in the form of compressed-tensors that vLLM and transformers read.
//!
//! [`run`] opens the checkpoint, plans the tensors of the new one (`plan`), and writes them one by one into a directory beside the goal,
//! which gets its name when it is complete. Matrices are rounded by rows on all cores (`codes`). With calibration text the CPU device runs the
//! model first, and the inputs that it saw decide which errors matter (`calibration`, `search`).
#![forbid(unsafe_code)]

mod args;
mod calibration;
mod codes;
mod error;
mod files;
mod form;
mod matrix;
mod plan;
mod search;
mod write;

use std::path::Path;

use models::{Checkpoint, Config, linear_groups};

pub use args::QuantizeArgs;
pub use error::QuantizeError;
pub use form::Format;

use files::Target;
use plan::Plan;

/// Quantizes a checkpoint.
///
/// # Errors
/// When the checkpoint cannot be read or quantized, or the new one cannot be written.
pub fn run(args: &QuantizeArgs) -> Result<(), QuantizeError> {
    let target = Target::new(&args.out)?;
    let config = Config::from_dir(&args.checkpoint)?;
    if let Some(stored) = config.stored_quantization() {
        return Err(QuantizeError::AlreadyQuantized { dir: args.checkpoint.clone(), method: stored.method.clone() });
    }
    let checkpoint = Checkpoint::open(&args.checkpoint)?;
    let groups = linear_groups(&checkpoint, &config)?;
    let text = match (args.format.needs_calibration(), &args.calibration) {
        (true, None) => return Err(QuantizeError::NoCalibration),
        (false, Some(_)) => return Err(QuantizeError::UnusedCalibration { format: args.format.name() }),
        (_, text) => text,
    };
    let inputs = text.as_deref().map(|text| calibration::run(args, text, &config)).transpose()?;
    let tensors = checkpoint.stored_tensors()?;
    let plan = Plan::new(args.format, &tensors, &groups, inputs.as_deref().unwrap_or_default())?;
    write::weights(&plan, target.dir(), args.max_shard_bytes())?;
    files::write_config(&args.checkpoint, target.dir(), &plan)?;
    files::copy_others(&args.checkpoint, target.dir())?;
    target.finish()?;
    eprintln!("{}", summary(&plan, &args.out));
    Ok(())
}

fn summary(plan: &Plan<'_>, out: &Path) -> String {
    let (before, after) = plan.bytes();
    let size = |bytes: u64| indicatif::HumanBytes(bytes);
    let (count, kept) = (plan.num_quantized(), plan.kept());
    let kept = match kept.len() {
        0 => String::new(),
        count => format!("; {count} matrices stay as they are, such as `{}`", kept[0]),
    };
    format!("{}: {count} matrices quantized, {} became {}{kept}", out.display(), size(before), size(after))
}
