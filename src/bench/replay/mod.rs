//! `trireme replay`: sends the requests of a recording again, at the same times, and compares answers and latencies.

mod answer;
mod comparison;
mod messages;
mod send;
mod world;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use client::ClientError;
use record::{Contents, Recording};

use crate::files::{print_text, write_json};
use comparison::Comparison;
use send::{Addresses, Sender};
use world::World;

/// `trireme replay`
#[derive(Debug, Clone, Args)]
pub struct ReplayArgs {
    /// A recording of `launch --record=DIR`, or the directory of one
    #[arg(value_name = "RECORDING")]
    recording: PathBuf,
    /// The HTTP address of a running server [default: localhost:8000]
    #[arg(short, long, value_name = "ADDRESS")]
    url: Option<String>,
    /// The gRPC address of the server [default: the port after that of HTTP]
    #[arg(long, value_name = "ADDRESS")]
    grpc_url: Option<String>,
    /// Send the requests so many times as fast as they arrived
    #[arg(long, default_value_t = 1.0, value_parser = speed, value_name = "FACTOR")]
    speed: f64,
    /// Send only the first requests
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    limit: Option<u32>,
    /// The key for requests: the first line of this file
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Seconds after which a request without its whole answer counts as failed
    #[arg(long, default_value_t = 600, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    timeout: u64,
    /// Differences that are printed
    #[arg(long, default_value_t = 10, value_name = "N")]
    show: usize,
    /// Write the comparison as JSON too; `-` is standard output
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Start a world with these flags of `launch` on free ports, and end it afterwards
    #[arg(last = true, value_name = "FLAGS OF LAUNCH", conflicts_with_all = ["url", "grpc_url"])]
    launch_flags: Vec<String>,
}

fn speed(text: &str) -> Result<f64, String> {
    let speed = text.parse().ok().filter(|speed: &f64| *speed > 0.0 && *speed <= 1e6);
    speed.ok_or_else(|| "expected a number above 0 and at most 1000000".to_owned())
}

/// Replays a recording and prints the comparison. The exit code is 1 if an answer differs or a request failed.
///
/// # Errors
/// When the recording cannot be read or has no bodies, or no server answers.
pub fn replay(args: &ReplayArgs) -> Result<ExitCode, ClientError> {
    let usage = |error: record::RecordError| ClientError::Usage(error.to_string());
    let mut recording = Recording::open(&args.recording).map_err(usage)?;
    recording.requests.truncate(args.limit.map_or(usize::MAX, |limit| limit as usize));
    check(&recording)?;
    let world = (!args.launch_flags.is_empty()).then(|| World::start(&args.launch_flags)).transpose()?;
    let addresses = match &world {
        Some(world) => world.addresses(),
        None => Addresses::new(args.url.as_deref().unwrap_or("localhost:8000"), args.grpc_url.as_deref()),
    };
    let sender = Sender::new(&addresses, args.api_key_file.as_deref(), Duration::from_secs(args.timeout))?;
    let results = client::runtime()?.block_on(sender.send_all(&recording.requests, args.speed))?;
    drop(world);
    let comparison = Comparison::of(&recording, &results);
    print_text(args.json.as_ref(), comparison.text(args.show).trim_end());
    args.json.iter().try_for_each(|path| write_json(path, &comparison))?;
    Ok(ExitCode::from(u8::from(!comparison.is_alike())))
}

/// Refuses a recording that cannot be replayed.
fn check(recording: &Recording) -> Result<(), ClientError> {
    let path = recording.path.display();
    if recording.head.contents == Contents::Ids {
        return Err(ClientError::Usage(format!(
            "{path} has no bodies; record with `--record-contents=bodies` or `redacted`"
        )));
    }
    if recording.requests.iter().all(|request| request.body.is_none()) {
        return Err(ClientError::Usage(format!("{path} has no request that can be sent again")));
    }
    Ok(())
}
