//! The model repository of a world, in the run directory.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use crate::args::ServeArgs;
use crate::checkpoint::Checkpoint;

/// Most adapters of a step where `--enable-lora` is given and no number.
const DEFAULT_LORAS: u32 = 4;

/// How the directory of a repository begins; the number of the process that made it follows.
const PREFIX: &str = "serve-";

/// Writes the repository of one model, and removes those of worlds that have ended.
///
/// # Errors
/// When the checkpoint cannot be served, or a file cannot be written.
pub(crate) fn write(args: &ServeArgs, checkpoint: &Checkpoint) -> Result<PathBuf> {
    let dir = place()?;
    lint::write_text_repository(&dir, checkpoint.model(), &checkpoint.dir, &parameters(args))?;
    Ok(dir)
}

/// Writes a repository without models.
///
/// # Errors
/// When it cannot be written.
pub(crate) fn empty() -> Result<PathBuf> {
    let dir = place()?;
    fs::create_dir(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    Ok(dir)
}

/// Where the repository of this process comes. Nothing is there.
fn place() -> Result<PathBuf> {
    let run_dir = launcher::run_dir()?;
    remove_unused(&run_dir);
    let dir = run_dir.join(format!("{PREFIX}{}", std::process::id()));
    if dir.exists() {
        // One of an ended process with the same number, which `remove_unused` has taken for this one's.
        fs::remove_dir_all(&dir).with_context(|| format!("cannot remove {}", dir.display()))?;
    }
    Ok(dir)
}

/// Removes a repository that no world will serve.
pub(crate) fn remove(dir: &Path) {
    // What is left is removed by the next start.
    let _ = fs::remove_dir_all(dir);
}

/// Removes the repositories of ended worlds; none if it is not known which worlds run.
fn remove_unused(run_dir: &Path) {
    let Ok(served) = launcher::served_repositories() else { return };
    for entry in fs::read_dir(run_dir).into_iter().flatten().flatten() {
        let (name, path) = (entry.file_name(), entry.path());
        let Some(pid) = name.to_str().and_then(|name| name.strip_prefix(PREFIX)) else { continue };
        let is_used = Path::new("/proc").join(pid).exists() || served.iter().any(|(repository, _)| *repository == path);
        if !is_used {
            remove(&path);
        }
    }
}

/// The adapters of the model as a parameter.
fn lora_modules(args: &ServeArgs) -> Option<String> {
    let modules = args.lora_modules.iter().map(|(name, path)| format!("{name}={}", path.display()));
    let modules = modules.collect::<Vec<_>>().join(",");
    Some(modules).filter(|modules| !modules.is_empty())
}

/// The parameters of the model.
pub(crate) fn parameters(args: &ServeArgs) -> Vec<(&'static str, String)> {
    let number = |number: u32| Some(number.to_string());
    let parameters = [
        ("tp", args.tp.and_then(number)),
        ("pp", number(args.pp)),
        ("replicas", number(args.replicas)),
        ("max_sequence_len", args.max_model_len.and_then(number)),
        ("max_num_tokens", args.max_num_batched_tokens.and_then(number)),
        ("max_inter_token_ms", args.max_inter_token_ms.and_then(number)),
        ("kv_cache_free_gpu_mem_fraction", args.kv_memory_fraction.map(|share| share.to_string())),
        ("enable_kv_cache_reuse", args.no_enable_prefix_caching.then(|| "false".to_owned())),
        ("batch_invariant", args.batch_invariant.then(|| "true".to_owned())),
        ("chat_format", args.chat_format.clone()),
        ("lora_modules", lora_modules(args)),
        ("max_loras", args.max_loras.or(args.enable_lora.then_some(DEFAULT_LORAS)).and_then(number)),
        ("max_lora_rank", args.max_lora_rank.and_then(number)),
    ];
    let drafts = args.speculative_config.iter().flat_map(|drafts| drafts.parameters());
    parameters.into_iter().filter_map(|(key, value)| Some((key, value?))).chain(drafts).collect()
}
