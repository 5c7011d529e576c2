//! The command line of `trireme serve`: few flags, with the names that users of vLLM know.

use std::path::PathBuf;
use std::str::FromStr;

use anyhow::{Result, bail};
use clap::Args;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use settings::{ByteSize, DeviceKind, KvCacheType, WeightPrecision};

use crate::checkpoint::Checkpoint;
use crate::speculative::SpeculativeConfig;

/// `trireme serve`
#[derive(Debug, Clone, Args)]
pub struct ServeArgs {
    /// Directory of a Hugging Face checkpoint, or the name of a model on the hub: ORG/NAME, ORG/NAME@REVISION
    #[arg(value_name = "MODEL")]
    pub(crate) model: String,
    /// Branch, tag or commit of a model on the hub
    #[arg(long, value_name = "REVISION")]
    pub(crate) revision: Option<String>,
    /// Names by which clients request the model, in place of ORG/NAME or the directory's
    #[arg(long, value_name = "NAME", num_args = 1.., value_delimiter = ',')]
    pub(crate) served_model_name: Vec<String>,
    /// GPUs that share each layer [default: the smallest number that fits; 1 on CPUs]
    #[arg(long, visible_alias = "tensor-parallel-size", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) tp: Option<u32>,
    /// Stages of layers, each on `--tp` GPUs of its own
    #[arg(long, visible_alias = "pipeline-parallel-size", value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) pp: u32,
    /// Copies of the model behind one address, each on `--tp` x `--pp` GPUs of its own
    #[arg(long, visible_alias = "data-parallel-size", value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) replicas: u32,
    /// Longest sequence, prompt and answer together, in tokens [default: the model's]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_model_len: Option<u32>,
    /// Most tokens of one step
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_num_batched_tokens: Option<u32>,
    /// Longest time between two tokens of a stream while prompts are computed [default: 50, or 8 times a step without prompts]
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u32).range(1..=600_000))]
    pub(crate) max_inter_token_ms: Option<u32>,
    /// Share of the memory that is free after loading, for the KV cache [default: 0.9 on GPUs, 0.25 on CPUs]
    #[arg(long, value_name = "SHARE", value_parser = share)]
    pub(crate) kv_memory_fraction: Option<f64>,
    /// Tokens of a request never depend on what runs beside it, bit for bit, on GPUs too, where some kernels are slower for it
    #[arg(long)]
    pub(crate) batch_invariant: bool,
    /// `POST /sleep` frees the memory of the devices until `POST /wake_up`
    #[arg(long)]
    pub(crate) enable_sleep_mode: bool,
    /// `POST /update_weights_from_disk` replaces the weights by those of a checkpoint in this directory
    #[arg(long, value_name = "DIR")]
    pub(crate) weight_updates_dir: Option<PathBuf>,
    /// Prompts with a common beginning do not share KV blocks
    #[arg(long)]
    pub(crate) no_enable_prefix_caching: bool,
    /// Adapters (LoRA) to serve beside the model, each a folder that PEFT has saved; requests choose one by NAME. More can be loaded
    /// while the server runs (`POST /v1/load_lora_adapter`)
    #[arg(long, value_name = "NAME=PATH", num_args = 1.., value_parser = lora_module)]
    pub(crate) lora_modules: Vec<(String, PathBuf)>,
    /// Takes adapters that are loaded while the server runs; `--lora-modules` and `--max-loras` do so as well
    #[arg(long)]
    pub(crate) enable_lora: bool,
    /// Most adapters that the requests of one step use [default: 4]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) max_loras: Option<u32>,
    /// Largest rank of an adapter [default: 16]
    #[arg(long, value_name = "RANK", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) max_lora_rank: Option<u32>,
    /// Address to serve on
    #[arg(long, default_value = "0.0.0.0")]
    pub(crate) host: String,
    /// Port of OpenAI's, Anthropic's and Triton's protocols over HTTP
    #[arg(long, visible_alias = "http-port", default_value_t = 8000, value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) port: u16,
    /// Port of gRPC [default: the one after --port]
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) grpc_port: Option<u16>,
    /// Port of the metrics [default: the second after --port]
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) metrics_port: Option<u16>,
    /// Inference needs one of the keys in this file, one a line; TRIREME_API_KEYS holds further keys
    #[arg(long, value_name = "FILE")]
    pub(crate) api_key_file: Option<String>,
    /// Sampling settings of requests that have none: those of the model (`checkpoint`) or OpenAI's (`none`)
    #[arg(long, value_parser = ["checkpoint", "none"], value_name = "SOURCE")]
    pub(crate) generation_config: Option<String>,
    /// How the model writes reasoning and tool calls [default: as its checkpoint says]
    #[arg(long, value_name = "NAME")]
    pub(crate) chat_format: Option<String>,
    /// The device that the model computes on
    #[arg(long, value_enum, default_value_t = DeviceKind::Auto)]
    pub(crate) device: DeviceKind,
    /// Quantizes linear layers while they are loaded: fp8, int8, int4 or none. A method, such as awq, must be that of
    /// the checkpoint
    #[arg(long, visible_alias = "weight-only-precision", value_name = "PRECISION")]
    pub(crate) quantization: Option<Quantization>,
    /// The type of keys and values in the KV cache: auto (what the checkpoint names, else bf16), bf16, fp8 (e4m3) or int8
    #[arg(long, value_name = "TYPE", value_parser = str::parse::<KvCacheType>)]
    pub(crate) kv_cache_dtype: Option<KvCacheType>,
    /// Drafts, as users of vLLM say it: {"method": "mtp", "num_speculative_tokens": 3} for the model's MTP head, "ngram" for prompt look-up,
    /// "draft_model" or "eagle3" with "model": DIR for a smaller model with the same tokenizer, or an EAGLE-3 head
    #[arg(long, value_name = "JSON", value_parser = str::parse::<SpeculativeConfig>)]
    pub(crate) speculative_config: Option<SpeculativeConfig>,
    /// Host memory of each rank for KV blocks that are evicted from the device, such as 16GiB [default: on GPUs an equal share of a quarter of the host's free memory, 16GiB at most; 0 on CPUs and with sleep]
    #[arg(long, value_name = "SIZE", value_parser = str::parse::<ByteSize>)]
    pub(crate) kv_cache_host_memory: Option<ByteSize>,
    /// File of each rank for KV blocks that leave host memory, such as 200GiB [default: 0]
    #[arg(long, value_name = "SIZE", value_parser = str::parse::<ByteSize>, requires_all = ["kv_cache_host_memory", "kv_cache_disk_dir"])]
    pub(crate) kv_cache_disk: Option<ByteSize>,
    /// Directory of these files, on a local disk
    #[arg(long, value_name = "DIR")]
    pub(crate) kv_cache_disk_dir: Option<PathBuf>,
    /// Serve in the background: return once the model serves; `launch stop` ends it
    #[arg(long)]
    pub(crate) detach: bool,
    /// Seconds in which the model must serve
    #[arg(long, value_name = "SECONDS")]
    pub(crate) wait_ready: Option<u64>,
    /// Print what fits and the command of the world, and start nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Flags for the server (`trireme rank --help`), after a bare `--`
    #[arg(last = true, value_name = "RANK FLAGS")]
    pub(crate) rank_flags: Vec<String>,
}

/// The value of `--quantization`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Quantization {
    /// What linear layers become.
    AtLoad(WeightPrecision),
    /// How the checkpoint is quantized already, as users of vLLM say it.
    Stored(String),
}

impl FromStr for Quantization {
    type Err = String;

    fn from_str(name: &str) -> std::result::Result<Self, String> {
        /// vLLM's names, of which some name a kernel, too.
        const METHODS: [&str; 6] = ["awq", "compressed-tensors", "gptq", "modelopt", "modelopt_fp4", "mxfp4"];
        let method = name.strip_suffix("_marlin").unwrap_or(name);
        if METHODS.contains(&method) {
            return Ok(Self::Stored(method.to_owned()));
        }
        name.parse().map(Self::AtLoad).map_err(|message| format!("{message}, or one of: {}", METHODS.join(", ")))
    }
}

impl ServeArgs {
    /// What linear layers become while `checkpoint` is loaded.
    ///
    /// # Errors
    /// When a method is named that is not the checkpoint's.
    pub(crate) fn precision(&self, checkpoint: &Checkpoint) -> Result<Option<WeightPrecision>> {
        let asked = match &self.quantization {
            None => return Ok(None),
            Some(Quantization::AtLoad(precision)) => return Ok(Some(*precision)),
            Some(Quantization::Stored(method)) => method,
        };
        let config = models::Config::from_dir(&checkpoint.dir)?;
        let found = config.stored_quantization().map_or("none", |stored| stored.method.as_str());
        match found == asked {
            true => Ok(None),
            false => bail!(
                "`--quantization` names `{asked}`, and the checkpoint has `quant_method` {found}; leave it out, or name `fp8`, \
                 `int8` or `int4` to quantize a checkpoint in bf16 while it is loaded"
            ),
        }
    }
}

/// An adapter: `NAME=PATH`. Relative paths start at the current directory.
fn lora_module(text: &str) -> std::result::Result<(String, PathBuf), String> {
    let pair = text.split_once('=').filter(|(name, path)| !name.is_empty() && !path.is_empty());
    let (name, path) = pair.ok_or("expected NAME=PATH")?;
    if text.contains(',') {
        return Err("a name or path with a comma cannot be given here; load the adapter by a request".to_owned());
    }
    let path = std::path::absolute(path).map_err(|error| error.to_string())?;
    Ok((name.to_owned(), path))
}

fn share(text: &str) -> std::result::Result<f64, String> {
    let share = text.parse().ok().filter(|share| *share > 0.0 && *share <= 1.0);
    share.ok_or_else(|| "expected a number above 0 and at most 1".to_owned())
}

/// Flags of other servers, and what to do here.
const OTHERS: [(&str, &str); 25] = [
    ("--allowed-origins", "`-- --http-allowed-origins=ORIGIN,…`"),
    ("--api-key", "give the keys in a file with `--api-key-file`, or in the variable TRIREME_API_KEYS"),
    ("--chat-template", "put the template into the checkpoint as `chat_template.jinja`"),
    ("--cpu-offload-gb", "weights stay on the device; raise `--tp`"),
    ("--download-dir", "set HF_HUB_CACHE to the directory"),
    ("--disable-log-requests", "`-- --log-requests=none`"),
    (
        "--distributed-executor-backend",
        "leave it out: `--tp`, `--pp` and `--replicas` say how GPUs are used, `launch` takes several machines",
    ),
    ("--dtype", "leave it out: the model computes in the type of its weights; `--quantization` makes it smaller"),
    ("--enable-auto-tool-choice", "leave it out: tools are on for models whose chat template takes them"),
    ("--enable-chunked-prefill", "leave it out: long prompts are always divided over steps"),
    ("--enable-log-requests", "leave it out: each request that generates text has a line in the log"),
    ("--enable-prefix-caching", "leave it out: it is on"),
    ("--enforce-eager", "leave it out: a start takes seconds"),
    ("--gpu-memory-utilization", "`--kv-memory-fraction` is the share of what is free after loading"),
    ("--kv-offloading-size", "`--kv-cache-host-memory`, with the size of each rank, such as `64GiB`"),
    ("--load-format", "leave it out: the files of the checkpoint say what they are"),
    (
        "--max-num-seqs",
        "leave it out: 128 sequences run at once, others wait; `launch` with a repository of `trireme init` takes other numbers",
    ),
    (
        "--reasoning-parser",
        "`--chat-format` names the form of reasoning and tool calls, which is found by itself for known models",
    ),
    ("--seed", "leave it out: a request has its own `seed`"),
    ("--ssl-certfile", "`-- --http-use-ssl=true --http-server-cert=FILE --http-server-key=FILE`"),
    ("--ssl-keyfile", "`-- --http-use-ssl=true --http-server-cert=FILE --http-server-key=FILE`"),
    ("--swap-space", "leave it out: a sequence that loses its KV blocks is computed again"),
    ("--tokenizer", "leave it out: that of the checkpoint is used"),
    (
        "--tool-call-parser",
        "`--chat-format` names the form of reasoning and tool calls, which is found by itself for known models",
    ),
    ("--trust-remote-code", "leave it out: code of a checkpoint is never run"),
];

/// What to do about a flag of another server that `error` refuses.
pub fn advice(error: &clap::Error) -> Option<String> {
    let Some(ContextValue::String(flag)) = error.get(ContextKind::InvalidArg) else { return None };
    let (name, words) = OTHERS.iter().find(|(name, _)| name == flag)?;
    (error.kind() == ErrorKind::UnknownArgument).then(|| format!("`{name}` is not a flag of `trireme serve`: {words}"))
}

#[cfg(test)]
mod tests {
    use clap::Command;

    use super::*;

    #[test]
    fn advice_names_flags_that_are_there() {
        let (serve, rank) = (ServeArgs::augment_args(Command::new("serve")), rank::command());
        let has = |command: &Command, name: &str| command.get_arguments().any(|arg| arg.get_long() == Some(name));
        for (flag, words) in OTHERS {
            assert!(!has(&serve, flag.trim_start_matches('-')), "`serve` has {flag}");
            for named in words.split('`').skip(1).step_by(2).filter(|words| words.starts_with("--")) {
                let (command, named) = named.strip_prefix("-- ").map_or((&serve, named), |named| (&rank, named));
                for word in named.split(' ').filter_map(|word| word.strip_prefix("--")) {
                    let name = word.split('=').next().unwrap_or_default();
                    assert!(has(command, name), "{flag}: no flag --{name}");
                }
            }
        }
    }
}
