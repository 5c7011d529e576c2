//! tritonserver's options of TLS, keys, limits and traces, and the front's configuration from them.

use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgAction, Args};
use front::{
    Api, Collector, Compression, HeaderPattern, Origins, Restrictions, Tls, TraceBounds, TraceOptions, UnknownFields,
};

use settings::MAX_SECONDS;

use crate::boolean::boolean;
use crate::keys;

/// Prefix of the gRPC metadata with the key of a restricted protocol.
const GRPC_KEY_PREFIX: &str = "triton-grpc-protocol-";

/// Options of the front.
#[derive(Debug, Clone, Args)]
pub struct FrontArgs {
    /// TLS on the gRPC port
    #[arg(long, default_value = "false", value_parser = boolean, action = ArgAction::Set)]
    pub grpc_use_ssl: bool,
    /// TLS on the gRPC port, with client certificates
    #[arg(long, default_value = "false", value_parser = boolean, action = ArgAction::Set)]
    pub grpc_use_ssl_mutual: bool,
    /// Certificate of the server, PEM
    #[arg(long, value_name = "FILE")]
    pub grpc_server_cert: Option<PathBuf>,
    /// Private key of the server, PEM
    #[arg(long, value_name = "FILE")]
    pub grpc_server_key: Option<PathBuf>,
    /// Root certificates for client certificates, PEM
    #[arg(long, value_name = "FILE")]
    pub grpc_root_cert: Option<PathBuf>,
    /// TLS on the HTTP port
    #[arg(long, default_value = "false", value_parser = boolean, action = ArgAction::Set)]
    pub http_use_ssl: bool,
    /// TLS on the HTTP port, with client certificates
    #[arg(long, default_value = "false", value_parser = boolean, action = ArgAction::Set)]
    pub http_use_ssl_mutual: bool,
    /// Certificate of the server on the HTTP port, PEM
    #[arg(long, value_name = "FILE")]
    pub http_server_cert: Option<PathBuf>,
    /// Private key of the server on the HTTP port, PEM
    #[arg(long, value_name = "FILE")]
    pub http_server_key: Option<PathBuf>,
    /// Root certificates for client certificates on the HTTP port, PEM
    #[arg(long, value_name = "FILE")]
    pub http_root_cert: Option<PathBuf>,
    /// TLS on the metrics port, with the certificates of the HTTP port
    #[arg(long, default_value = "false", value_parser = boolean, action = ArgAction::Set)]
    pub metrics_use_ssl: bool,
    /// Protocols that need metadata `triton-grpc-protocol-KEY: VALUE`; may be given more than once, which adds keys. VALUE is
    /// `@FILE` for the keys in a file, one a line, `env:NAME` for those in a variable, or a key itself, which any local user sees
    #[arg(long, value_name = "PROTOCOLS:KEY=VALUE")]
    pub grpc_restricted_protocol: Vec<String>,
    /// APIs that need the header `KEY: VALUE`; may be given more than once, which adds keys. VALUE as in
    /// --grpc-restricted-protocol
    #[arg(long, value_name = "APIS:KEY=VALUE")]
    pub http_restricted_api: Vec<String>,
    /// Inference, over all protocols, needs one of the keys in this file, one a line: `Authorization: Bearer KEY` or
    /// `x-api-key: KEY`; may be given more than once, which adds keys. TRIREME_API_KEYS holds further keys, separated by commas
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Vec<PathBuf>,
    /// Metadata of gRPC that models see as parameters: a regular expression
    #[arg(long, default_value = "", hide_default_value = true, value_name = "PATTERN")]
    pub grpc_header_forward_pattern: String,
    /// Headers of HTTP that models see as parameters: a regular expression
    #[arg(long, default_value = "", hide_default_value = true, value_name = "PATTERN")]
    pub http_header_forward_pattern: String,
    /// Largest body of an HTTP request in bytes, before and after unpacking
    #[arg(long, default_value_t = 64 << 20, value_name = "BYTES")]
    pub http_max_input_size: usize,
    /// Largest gRPC message of a client in bytes, unpacked; at most 2147483647, which is tritonserver's
    #[arg(long, default_value_t = 256 << 20, value_name = "BYTES", value_parser = clap::value_parser!(u32).range(1..=i32::MAX as i64))]
    pub grpc_max_message_bytes: u32,
    /// gRPC calls that may be open at once, over all connections
    #[arg(long, default_value_t = 16_384, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub grpc_max_streams: u32,
    /// Bytes a second that the body of a request must bring, measured over 30 s
    #[arg(long, default_value_t = 1024, value_name = "BYTES")]
    pub min_body_rate: usize,
    /// Web pages of other servers that may use the HTTP port: `SCHEME://HOST[:PORT],...`, or `*` for all
    #[arg(long, default_value = "", hide_default_value = true, value_name = "ORIGINS")]
    pub http_allowed_origins: Origins,
    /// Bytes that the bodies of all requests in flight may have together; 0 is a quarter of this machine's memory
    #[arg(long, default_value_t = 0, value_name = "BYTES")]
    pub max_bytes_in_flight: usize,
    /// Connections of the HTTP port, and of the gRPC port: idle ones make room for new clients when four fifths are taken.
    /// Fewer where this process may not open as many files
    #[arg(long, default_value_t = 16_384, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_connections: u32,
    /// Connections of one client address (IPv6: of one /64 network) to a port; 0 is any number. Leave it at 0 behind a proxy,
    /// whose clients all have its address
    #[arg(long, default_value_t = 0, value_name = "COUNT")]
    pub max_connections_per_address: u32,
    /// Seconds in which a client must read some of its responses, or its connection or stream ends; 0: no limit
    #[arg(long, default_value_t = 300, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(..=MAX_SECONDS))]
    pub write_timeout: u64,
    /// Share the HTTP port with other servers that have this option
    #[arg(long, default_value = "false", value_parser = boolean, action = ArgAction::Set)]
    pub reuse_http_port: bool,
    /// Share the gRPC port with other servers that have this option
    #[arg(long, default_value = "false", value_parser = boolean, action = ArgAction::Set)]
    pub reuse_grpc_port: bool,
    /// Compression of gRPC responses: none, or gzip for low, medium and high
    #[arg(long, default_value = "none", value_parser = ["none", "low", "medium", "high"])]
    pub grpc_infer_response_compression_level: String,
    /// Milliseconds of silence after which a gRPC connection is probed
    #[arg(long, default_value_t = 7_200_000, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..))]
    pub grpc_keepalive_time: u64,
    /// Milliseconds that the response to a probe may take
    #[arg(long, default_value_t = 20_000, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..))]
    pub grpc_keepalive_timeout: u64,
    /// Milliseconds after which a gRPC connection accepts no further calls
    #[arg(long, value_name = "MS")]
    pub grpc_max_connection_age: Option<u64>,
    /// Milliseconds for its open calls after that
    #[arg(long, value_name = "MS", requires = "grpc_max_connection_age")]
    pub grpc_max_connection_age_grace: Option<u64>,
    /// Fields of OpenAI's and Anthropic's requests that are not known: `refuse` the request, or `ignore` them with a line in the log
    #[arg(long, default_value = "refuse", value_parser = ["refuse", "ignore"], value_name = "POLICY")]
    pub unknown_fields: String,
    /// Sampling settings of OpenAI's and Anthropic's requests that have none: those of the checkpoint's `generation_config.json`
    /// (`checkpoint`), or OpenAI's own (`none`)
    #[arg(long, default_value = "checkpoint", value_parser = ["checkpoint", "none"], value_name = "SOURCE")]
    pub generation_config: String,
    /// How models write reasoning and tool calls: `auto` reads it from the checkpoint, `none` takes all text as content, a name
    /// such as `hermes` is for all models; a model's parameter `chat_format` comes first
    #[arg(long, default_value = "auto", value_name = "NAME")]
    pub chat_format: String,
    /// Serve a page at `/` and `/ui` of the HTTP port: status, playground, reference and snippets for clients
    #[arg(long, default_value = "true", num_args = 0..=1, default_missing_value = "true", require_equals = true,
          value_parser = boolean, action = ArgAction::Set)]
    pub allow_page: bool,
    /// Clients may register shared memory: names under /dev/shm, this server's own excepted, and memory of GPUs
    #[arg(long, default_value = "false", value_parser = boolean, action = ArgAction::Set)]
    pub allow_client_shm: bool,
    /// Names of shared memory that clients may register begin so; may be given more than once. Without it: all names but those
    /// of this server, of MPI, NCCL and the like
    #[arg(long, value_name = "PREFIX")]
    pub client_shm_prefix: Vec<String>,
    /// Serve GET /debug/ledger on the metrics port: the queue slots, rows and KV blocks of each sequence
    #[arg(long, default_value = "false", num_args = 0..=1, default_missing_value = "true", require_equals = true,
          value_parser = boolean, action = ArgAction::Set)]
    pub debug_endpoints: bool,
    /// Traces: `triton,file=PATH`, `level=TIMESTAMPS`, `level=TENSORS`, `rate=N`, `count=N`, `triton,log-frequency=N`; or spans to
    /// a collector: `mode=opentelemetry`, `opentelemetry,url=http://HOST:PORT/PATH`, `opentelemetry,resource=NAME=VALUE`,
    /// `opentelemetry,bsp_max_queue_size=N`, `…bsp_schedule_delay=MS`, `…bsp_max_export_batch_size=N`
    #[arg(long, value_name = "SETTING=VALUE")]
    pub trace_config: Vec<String>,
    /// Most trace files at once; the oldest are removed
    #[arg(long, default_value_t = 1000, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    pub trace_max_files: u32,
    /// Most bytes of all trace files together; the oldest are removed. A file ends at an eighth of them
    #[arg(long, default_value_t = 1 << 30, value_name = "BYTES", value_parser = clap::value_parser!(u64).range(1..))]
    pub trace_max_bytes: u64,
    /// Tensors, prompts of other clients among them, are traced when any client asks for it. Without: when `level=TENSORS` is
    /// given at the start, or only clients with a key may change trace settings
    #[arg(long, default_value = "false", value_parser = boolean, action = ArgAction::Set)]
    pub allow_client_trace_tensors: bool,
    /// The same settings under tritonserver's old names
    #[arg(long, hide = true)]
    pub trace_file: Option<PathBuf>,
    /// See --trace-config
    #[arg(long, hide = true)]
    pub trace_level: Vec<String>,
    /// See --trace-config
    #[arg(long, hide = true)]
    pub trace_rate: Option<String>,
    /// See --trace-config
    #[arg(long, hide = true)]
    pub trace_count: Option<String>,
    /// See --trace-config
    #[arg(long, hide = true)]
    pub trace_log_frequency: Option<String>,
}

impl FrontArgs {
    /// The rules that restrict APIs and protocols to clients with a key.
    pub(crate) fn key_rules(&self) -> impl Iterator<Item = &String> {
        self.http_restricted_api.iter().chain(&self.grpc_restricted_protocol)
    }

    /// Sets the fields of `config`.
    ///
    /// # Errors
    /// With the option that is invalid.
    pub(crate) fn apply(&self, config: &mut front::Config) -> Result<(), String> {
        config.grpc_tls = self.grpc_tls()?;
        config.http_tls = self.http_tls()?;
        config.metrics_tls = match (&config.http_tls, self.metrics_use_ssl) {
            (None, true) => return Err("--metrics-use-ssl needs --http-use-ssl=true and its certificate".to_owned()),
            (tls, true) => tls.clone(),
            (_, false) => None,
        };
        let grpc = restrictions("grpc-restricted-protocol", &self.grpc_restricted_protocol, Api::Metrics)?;
        config.grpc_restrictions = grpc.with_prefix(GRPC_KEY_PREFIX);
        config.http_restrictions = restrictions("http-restricted-api", &self.http_restricted_api, Api::Reflection)?;
        let keys = keys::api_keys(&self.api_key_file)?;
        if !keys.is_empty() {
            config.grpc_restrictions.add_keys(Api::Inference, &keys);
            config.http_restrictions.add_keys(Api::Inference, &keys);
        }
        config.grpc_forward = pattern("grpc-header-forward-pattern", &self.grpc_header_forward_pattern)?;
        config.http_forward = pattern("http-header-forward-pattern", &self.http_header_forward_pattern)?;
        config.max_http_body_bytes = self.http_max_input_size;
        config.max_bytes_in_flight = match self.max_bytes_in_flight {
            0 => crate::host_metrics::memory_bytes() / 4,
            bytes => bytes,
        };
        config.max_connections = self.max_connections;
        config.max_connections_per_address = self.max_connections_per_address;
        config.write_timeout = (self.write_timeout > 0).then(|| Duration::from_secs(self.write_timeout));
        config.max_grpc_message_bytes = self.grpc_max_message_bytes as usize;
        config.max_grpc_streams = self.grpc_max_streams as usize;
        config.min_body_rate = self.min_body_rate;
        config.http_origins = self.http_allowed_origins.clone();
        (config.reuse_http_port, config.reuse_grpc_port) = (self.reuse_http_port, self.reuse_grpc_port);
        config.grpc_response_compression = match self.grpc_infer_response_compression_level.as_str() {
            "none" => Compression::None,
            _ => Compression::Gzip,
        };
        config.grpc_keepalive_time = Duration::from_millis(self.grpc_keepalive_time);
        config.grpc_keepalive_timeout = Duration::from_millis(self.grpc_keepalive_timeout);
        config.grpc_max_connection_age = self.grpc_max_connection_age.map(Duration::from_millis);
        config.grpc_max_connection_age_grace = self.grpc_max_connection_age_grace.map(Duration::from_millis);
        config.unknown_fields = match self.unknown_fields.as_str() {
            "ignore" => UnknownFields::Ignore,
            _ => UnknownFields::Refuse,
        };
        config.uses_generation_config = self.generation_config == "checkpoint";
        config.serves_page = self.allow_page;
        config.allow_client_shm = self.allow_client_shm;
        let prefixes = self.client_shm_prefix.iter().map(|prefix| prefix.trim_start_matches('/').to_owned());
        config.client_objects.allowed_prefixes = prefixes.collect();
        config.log = crate::log::control();
        config.trace = self.traces()?;
        Ok(())
    }

    fn traces(&self) -> Result<TraceOptions, String> {
        let bounds = TraceBounds { max_files: self.trace_max_files as usize, max_bytes: self.trace_max_bytes };
        let (file, allows_tensors) = (self.trace_file.clone(), self.allow_client_trace_tensors);
        let mut options = TraceOptions { file, bounds, allows_tensors, ..TraceOptions::default() };
        let (mut levels, mut collector, mut sends_spans) = (self.trace_level.clone(), Collector::default(), false);
        let old = [
            ("trace_rate", &self.trace_rate),
            ("trace_count", &self.trace_count),
            ("log_frequency", &self.trace_log_frequency),
        ];
        let set = |(key, value): (&str, &Option<String>)| Some((key.to_owned(), vec![value.clone()?]));
        options.settings.extend(old.into_iter().filter_map(set));
        for setting in &self.trace_config {
            let invalid = |why: &str| format!("--trace-config={setting}: {why}");
            let (key, value) = setting.split_once('=').ok_or_else(|| invalid("expected SETTING=VALUE"))?;
            if let Some(key) = key.strip_prefix("opentelemetry,") {
                collector.set(key, value).map_err(|why| invalid(&why))?;
                continue;
            }
            match key.strip_prefix("triton,").unwrap_or(key) {
                "mode" if value == "triton" || value == "opentelemetry" => sends_spans = value == "opentelemetry",
                "mode" => return Err(invalid("the modes are triton and opentelemetry")),
                "level" => levels.push(value.to_owned()),
                "rate" => options.settings.push(("trace_rate".into(), vec![value.into()])),
                "count" => options.settings.push(("trace_count".into(), vec![value.into()])),
                "log-frequency" => options.settings.push(("log_frequency".into(), vec![value.into()])),
                "file" => options.file = Some(value.into()),
                _ => return Err(invalid("expected file, level, rate, count, log-frequency or mode")),
            }
        }
        options.collector = sends_spans.then_some(collector);
        if !levels.is_empty() {
            options.settings.push(("trace_level".into(), levels));
        }
        Ok(options)
    }

    fn grpc_tls(&self) -> Result<Option<Tls>, String> {
        let files = (&self.grpc_server_cert, &self.grpc_server_key, &self.grpc_root_cert);
        tls("grpc", "gRPC", (self.grpc_use_ssl, self.grpc_use_ssl_mutual), files)
    }

    fn http_tls(&self) -> Result<Option<Tls>, String> {
        let files = (&self.http_server_cert, &self.http_server_key, &self.http_root_cert);
        tls("http", "HTTP", (self.http_use_ssl, self.http_use_ssl_mutual), files)
    }
}

type File = Option<PathBuf>;

/// TLS of a port by its flags, whose names begin with `port`. `--…-use-ssl-mutual` has priority over `--…-use-ssl`.
fn tls(
    port: &'static str,
    protocol: &str,
    (is_used, is_mutual): (bool, bool),
    (certificate, key, roots): (&File, &File, &File),
) -> Result<Option<Tls>, String> {
    if !is_used && !is_mutual {
        return Ok(None);
    }
    let needed = |file: &File, name: &str| {
        file.clone().ok_or_else(|| format!("--{port}-{name} is missing, which TLS on the {protocol} port needs"))
    };
    let client_roots = is_mutual.then(|| needed(roots, "root-cert")).transpose()?;
    let certificate = needed(certificate, "server-cert")?;
    Ok(Some(Tls { port, certificate, key: needed(key, "server-key")?, client_roots }))
}

/// The restrictions of `rules`. `elsewhere` is an API that only the other protocol serves.
fn restrictions(option: &str, rules: &[String], elsewhere: Api) -> Result<Restrictions, String> {
    let mut restrictions = Restrictions::default();
    for rule in rules {
        restrictions.add(rule, |value| keys::read(option, value)).map_err(|error| format!("--{option}: {error}"))?;
    }
    match restrictions.restricts(elsewhere) {
        true if elsewhere == Api::Metrics => {
            Err(format!("--{option}: `metrics` is restricted by --http-restricted-api, for it is served over HTTP"))
        }
        true => Err(format!("--{option}: `reflection` is restricted by --grpc-restricted-protocol, for it is gRPC's")),
        false => Ok(restrictions),
    }
}

fn pattern(option: &str, text: &str) -> Result<HeaderPattern, String> {
    HeaderPattern::new(text).map_err(|error| format!("--{option}: {error}"))
}
