//! The command line of the world, and what its user reads when it serves.

use std::path::Path;

use anyhow::{Context as _, Result};
use serde_json::json;
use text::ChatTemplate;

use crate::args::ServeArgs;
use crate::checkpoint::Checkpoint;

/// The flags of every rank that follow from those of `serve`.
pub(crate) fn rank_flags(args: &ServeArgs, checkpoint: &Checkpoint) -> Vec<String> {
    let model = checkpoint.model();
    let mut flags = vec![format!("--http-address={}", args.host), format!("--grpc-address={}", args.host)];
    let names = names(args, checkpoint);
    flags.extend(names.iter().filter(|name| *name != model).map(|name| format!("--served-model-name={name}={model}")));
    if let Some(file) = &args.api_key_file {
        flags.push(format!("--api-key-file={file}"));
    }
    if let Some(source) = &args.generation_config {
        flags.push(format!("--generation-config={source}"));
    }
    flags.extend(args.weight_updates_dir.as_ref().map(|dir| format!("--weight-updates-dir={}", dir.display())));
    flags.extend(args.rank_flags.iter().cloned());
    flags
}

/// The names by which clients request the model.
fn names(args: &ServeArgs, checkpoint: &Checkpoint) -> Vec<String> {
    match args.served_model_name.is_empty() {
        true => vec![checkpoint.name.clone()],
        false => args.served_model_name.clone(),
    }
}

/// The flags of `trireme plan` for the repository.
///
/// # Errors
/// When `--quantization` does not fit the checkpoint.
pub(crate) fn plan_flags(args: &ServeArgs, checkpoint: &Checkpoint, repository: &Path) -> Result<Vec<String>> {
    let mut flags = vec![format!("--model-repository={}", repository.display()), format!("--device={}", args.device)];
    flags.extend(args.precision(checkpoint)?.map(|precision| format!("--weight-only-precision={precision}")));
    flags.extend(args.kv_cache_dtype.map(|kind| format!("--kv-cache-dtype={kind}")));
    flags.extend(args.enable_sleep_mode.then(|| "--enable-sleep-mode".to_owned()));
    flags.extend(args.kv_cache_host_memory.map(|size| format!("--kv-cache-host-memory={size}")));
    flags.extend(disk_flags(args));
    flags.extend(args.rank_flags.iter().cloned());
    Ok(flags)
}

/// The flags of files for KV blocks that leave host memory.
fn disk_flags(args: &ServeArgs) -> impl Iterator<Item = String> {
    let size = args.kv_cache_disk.map(|size| format!("--kv-cache-disk={size}"));
    let directory = args.kv_cache_disk_dir.as_ref().map(|dir| format!("--kv-cache-disk-dir={}", dir.display()));
    size.into_iter().chain(directory)
}

/// The ports of HTTP, gRPC and metrics.
///
/// # Errors
/// When a port has no successors.
pub(crate) fn ports(args: &ServeArgs) -> Result<[u16; 3]> {
    let next = |given: Option<u16>, distance: u16, flag: &str| {
        given
            .or_else(|| args.port.checked_add(distance))
            .with_context(|| format!("--port {} leaves none for {flag}; name it", args.port))
    };
    Ok([args.port, next(args.grpc_port, 1, "--grpc-port")?, next(args.metrics_port, 2, "--metrics-port")?])
}

/// The arguments of `launch`.
///
/// # Errors
/// When a port has no successors, `--quantization` does not fit the checkpoint, or the chat template cannot be read.
pub(crate) fn launch(
    args: &ServeArgs,
    checkpoint: &Checkpoint,
    repository: &Path,
    world_size: u32,
) -> Result<Vec<String>> {
    let [http, grpc, metrics] = ports(args)?;
    let mut line = vec![
        format!("--world-size={world_size}"),
        format!("--model-repo={}", repository.display()),
        format!("--http-port={http}"),
        format!("--grpc-port={grpc}"),
        format!("--metrics-port={metrics}"),
        format!("--device={}", args.device),
        format!("--ready-message={}", ready_message(args, checkpoint)?),
    ];
    line.extend(args.precision(checkpoint)?.map(|precision| format!("--weight-only-precision={precision}")));
    line.extend(args.kv_cache_dtype.map(|kind| format!("--kv-cache-dtype={kind}")));
    line.extend(args.enable_sleep_mode.then(|| "--enable-sleep-mode".to_owned()));
    line.extend(args.kv_cache_host_memory.map(|size| format!("--kv-cache-host-memory={size}")));
    line.extend(disk_flags(args));
    line.extend(args.wait_ready.map(|seconds| format!("--wait-ready={seconds}")));
    line.extend(args.detach.then(|| "--detach".to_owned()));
    line.extend(args.dry_run.then(|| "--dry-run".to_owned()));
    line.push("--".to_owned());
    line.extend(rank_flags(args, checkpoint));
    Ok(line)
}

/// The address, and a command to try.
fn ready_message(args: &ServeArgs, checkpoint: &Checkpoint) -> Result<String> {
    let host = match args.host.as_str() {
        "0.0.0.0" | "::" => "localhost".to_owned(),
        host if host.contains(':') => format!("[{host}]"),
        host => host.to_owned(),
    };
    let (names, address) = (names(args, checkpoint), format!("http://{host}:{}", args.port));
    let name = names.first().expect("a model has a name");
    let has_template = ChatTemplate::from_dir(&checkpoint.dir)?.is_some();
    let (path, body) = match has_template {
        true => ("chat/completions", json!({"model": name, "messages": [{"role": "user", "content": "Hello"}]})),
        false => ("completions", json!({"model": name, "prompt": "Once upon a time", "max_tokens": 64})),
    };
    let key = args.api_key_file.as_ref().map_or("", |_| " -H 'Authorization: Bearer KEY'");
    let body = body.to_string().replace('\'', r"'\''");
    let has_page = !args.rank_flags.iter().any(|flag| flag.replace('_', "-") == "--allow-page=false");
    let page = if has_page { format!(", with a page at {address}/") } else { String::new() };
    let names = names.join("`, `");
    Ok(format!("serves `{names}` at {address}/v1{page}; try:\n  curl {address}/v1/{path}{key} -d '{body}'"))
}
