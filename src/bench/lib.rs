//! `trireme bench`: measures any server with Triton's or OpenAI's protocol.
//!
//! [`BenchArgs`] is the command line, [`run`] executes it. A [`Prompt`] is sent to a [`Target`], and the responses are summarized in
//! [`Figures`]. The tool uses public protocols only, so that Triton, vLLM, SGLang and Trireme are measured alike.
//!
//! ```
//! use bench::Percentiles;
//! use std::time::Duration;
//!
//! let latencies = [1, 2, 3].map(Duration::from_millis);
//! assert_eq!(Percentiles::of(&mut latencies.to_vec()).p50, 2.0);
//! ```
#![forbid(unsafe_code)]

mod agents;
mod agents_figures;
mod compare;
mod core_model;
mod core_table;
mod dataset;
mod figures;
mod files;
mod http;
mod identity;
mod infer;
mod infer_http;
mod load;
mod metrics;
mod outcome;
mod percentiles;
mod progress;
mod random;
mod replay;
mod report;
mod report_chart;
mod report_recording;
mod serving;
mod target;
mod target_grpc;
mod target_http;

use clap::{Args, Subcommand};
use client::ClientError;

pub use dataset::Prompt;
pub use figures::Figures;
pub use percentiles::Percentiles;
pub use replay::{ReplayArgs, replay};
pub use target::Target;

/// `trireme bench`
#[derive(Debug, Clone, Args)]
pub struct BenchArgs {
    /// What to measure.
    #[command(subcommand)]
    pub command: BenchCommand,
}

/// What to measure.
#[derive(Debug, Clone, Subcommand)]
#[allow(missing_docs)] // The help of each command is the doc of its arguments.
pub enum BenchCommand {
    Serving(serving::ServingArgs),
    Agents(agents::AgentsArgs),
    Core(core_model::CoreArgs),
    Identity(identity::IdentityArgs),
    Infer(infer::InferArgs),
    Compare(compare::CompareArgs),
    Report(report::ReportArgs),
    Simulate(simulate::SimulateArgs),
}

/// Runs a benchmark and prints its figures.
///
/// # Errors
/// When the server cannot be reached, a request fails, or a file cannot be read or written.
pub fn run(args: BenchArgs) -> Result<(), ClientError> {
    let runtime = client::runtime()?;
    match args.command {
        BenchCommand::Serving(args) => runtime.block_on(serving::run(args)),
        BenchCommand::Agents(args) => runtime.block_on(agents::run(args)),
        BenchCommand::Core(args) => runtime.block_on(core_model::run(args)),
        BenchCommand::Identity(args) => runtime.block_on(identity::run(args)),
        BenchCommand::Infer(args) => runtime.block_on(infer::run(args)),
        BenchCommand::Compare(args) => runtime.block_on(compare::run(args)),
        BenchCommand::Report(args) => report::run(&args),
        BenchCommand::Simulate(args) => simulate::run(&args).map_err(|error| ClientError::Usage(error.to_string())),
    }
}

/// Converts the option names of older tools: `--num_prompts` to `--num-prompts`, `-topk` to `--topk`.
pub fn with_dashes(args: Vec<std::ffi::OsString>) -> Vec<std::ffi::OsString> {
    let convert = |arg: std::ffi::OsString| {
        let Some(text) = arg.to_str() else { return arg };
        match text {
            "-beam" | "-topk" | "-topp" => format!("-{text}").into(),
            _ if text.starts_with("--") => {
                let (name, value) = text.split_once('=').map_or((text, None), |(name, value)| (name, Some(value)));
                let name = name.replace('_', "-");
                value.map_or(name.clone(), |value| format!("{name}={value}")).into()
            }
            _ => arg,
        }
    };
    args.into_iter().map(convert).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_of_older_tools_are_understood() {
        let args = ["trireme", "bench", "--num_prompts=5", "-topk", "a_b"].map(Into::into).to_vec();
        let expected = ["trireme", "bench", "--num-prompts=5", "--topk", "a_b"];
        assert_eq!(with_dashes(args), expected);
    }
}
