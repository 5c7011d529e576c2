//! The command line.

use clap::Parser;

/// Simulates worlds of many ranks: the real scheduler and plans, a model of devices, network and front
#[derive(Debug, Clone, Parser)]
pub struct SimulateArgs {
    /// Sizes of the worlds
    #[arg(long, value_delimiter = ',', default_values_t = [8, 16, 32, 64, 128, 256, 512, 1024])]
    pub ranks: Vec<u32>,
    /// Ranks of a node; they serve one copy of the model together
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..))]
    pub ranks_per_node: u32,
    /// Measured steps of such a group: rows and milliseconds. [default: four H200s, llama2-7b shape]
    #[arg(long, default_value = "1:2.26,8:2.39,32:2.55,128:4.11", value_name = "ROWS:MS,...")]
    pub step_ms: String,
    /// Prompt tokens that such a group computes per second
    #[arg(long, default_value_t = 121_287.0, value_name = "N")]
    pub prefill_per_s: f64,
    /// Cores of rank 0
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..))]
    pub cores: u32,
    /// CPU time of rank 0 for each token sent to a client, in microseconds
    #[arg(long, default_value_t = 16.0, value_name = "US")]
    pub token_us: f64,
    /// Time of rank 0's MPI thread for each message, in microseconds
    #[arg(long, default_value_t = 10.0, value_name = "US")]
    pub message_us: f64,
    /// Network latency of a message, in microseconds
    #[arg(long, default_value_t = 50.0, value_name = "US")]
    pub latency_us: f64,
    /// Bandwidth of rank 0's network
    #[arg(long, default_value_t = 100.0, value_name = "GBIT/S")]
    pub gbit: f64,
    /// Requests in flight in each group
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub concurrency: u32,
    /// Tokens of a prompt
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    pub prompt: u32,
    /// Tokens of an output
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    pub output: u32,
    /// Drafts that a head guesses for each row and step, at most
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = clap::value_parser!(u32).range(..=64))]
    pub drafts: u32,
    /// Share of the drafts that are right, if those before them are
    #[arg(long, default_value_t = 0.5, value_name = "SHARE")]
    pub acceptance: f64,
    /// Milliseconds of a pass of the head, which runs for each guess and for prompts
    #[arg(long, default_value_t = 0.0, value_name = "MS")]
    pub guess_ms: f64,
    /// Time from the moment when a plan is sent until an idle device begins it, and until its output is back, in microseconds
    #[arg(long, default_value_t = 0.0, value_name = "US")]
    pub launch_us: f64,
    /// Steps of each group
    #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u32).range(1..))]
    pub steps: u32,
    /// Instead of worlds: prompt tokens a second that arrive beside `--concurrency` streams; prints the gap between the
    /// tokens of the streams
    #[arg(long, value_delimiter = ',', value_name = "N,...")]
    pub prompt_tokens_per_s: Vec<f64>,
    /// Instead of worlds: this number of requests in one group with `--concurrency` rows, of `--prompt` and `--output` tokens on
    /// average; prints what clients see
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub requests: u32,
    /// Of these, how many arrive in a second; 0: all at once
    #[arg(long, value_delimiter = ',', value_name = "N,...", default_values_t = [0.0])]
    pub request_rate: Vec<f64>,
    /// Bounds of the gap between two tokens in milliseconds; 0: the default bound
    #[arg(long, value_delimiter = ',', value_name = "MS,...", default_values_t = [0.0])]
    pub max_inter_token_ms: Vec<f64>,
}

impl Default for SimulateArgs {
    fn default() -> Self {
        Self::parse_from(["simulate"])
    }
}
