//! `trireme`: sub-commands become typed settings, settings become the right process.
#![forbid(unsafe_code)]

mod client_memory;
mod manual;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use bench::{BenchArgs, ReplayArgs};
use clap::{Arg, ArgAction, Args, Command, FromArgMatches};
use client::ClientArgs;
use hub::{PullArgs, RmArgs};
use lint::{InitArgs, LintArgs};
use quantize::QuantizeArgs;
use rank::Hardware;
use serve::{DoctorArgs, ServeArgs};
use top::TopArgs;

fn main() -> ExitCode {
    let mut args: Vec<_> = std::env::args_os().collect();
    if args.get(1).is_some_and(|command| command == launcher::SUB_COMMAND) {
        ipc::end_with_the_reader();
        return launcher::main(args.split_off(1));
    }
    if is_doctor_of_a_repository(&args) {
        ipc::end_with_the_reader();
        return launcher::main(args);
    }
    if args.get(1).is_some_and(|command| {
        command == "rank" || command == ipc::RELAY || command == "plan" || command == "serve" || command == "doctor"
    }) {
        args = rank::with_dashes(args);
    } else if args.get(1).is_some_and(|command| command == "bench") {
        args = bench::with_dashes(args);
    }
    let is_rank = args.get(1).is_some_and(|command| command == "rank");
    let outlives_reader = args.get(1).is_some_and(|command| command == "worker" || command == ipc::RELAY);
    if !is_rank && !outlives_reader {
        ipc::end_with_the_reader();
    }
    let matches = match command().try_get_matches_from(args) {
        Ok(matches) => matches,
        Err(error) if is_rank => return rank::usage_error(&error),
        Err(error) if serve::advice(&error).is_some() => {
            eprintln!("error: {}", serve::advice(&error).unwrap_or_default());
            return ExitCode::from(2);
        }
        Err(error) => error.exit(),
    };
    let result = match matches.subcommand() {
        Some(("rank", matches)) => run_rank(matches),
        Some(("rank-flags", _)) => {
            rank::flag_names().for_each(|line| println!("{line}"));
            Ok(ExitCode::SUCCESS)
        }
        Some((ipc::RELAY, matches)) => run_relay(matches),
        Some(("plan", matches)) => run_plan(matches),
        Some(("worker", _)) => worker::main().map(|()| ExitCode::SUCCESS).map_err(anyhow::Error::from),
        Some(("nccl-check", matches)) => run_nccl_check(matches),
        Some(("client", matches)) => run_client(matches),
        Some(("bench", matches)) => run_bench(matches),
        Some(("replay", matches)) => run_replay(matches),
        Some(("lint", matches)) => run_lint(matches),
        Some(("init", matches)) => run_init(matches),
        Some(("quantize", matches)) => run_quantize(matches),
        Some(("top", matches)) => run_top(matches),
        Some(("serve", matches)) => run_serve(matches),
        Some(("doctor", matches)) => run_doctor(matches),
        Some(("pull", matches)) => run_pull(matches),
        Some(("list", _)) => hub::run_list().map(|()| ExitCode::SUCCESS).map_err(anyhow::Error::from),
        Some(("rm", matches)) => run_rm(matches),
        Some(("completions", matches)) => manual::print_completions(matches, command()).map(|()| ExitCode::SUCCESS),
        Some(("man", matches)) => manual::write_pages(matches, command()).map(|()| ExitCode::SUCCESS),
        _ => unreachable!("clap knows the sub-commands"),
    };
    result.unwrap_or_else(|error| {
        eprintln!("error: {}", words(&error));
        ExitCode::FAILURE
    })
}

/// Whether a line is `trireme doctor` without a model, which is `launch doctor`.
fn is_doctor_of_a_repository(line: &[OsString]) -> bool {
    let word = |at: usize| line.get(at).map(|word| word.to_string_lossy());
    let is_help = word(2).is_some_and(|word| word == "--help" || word == "-h");
    word(1).is_some_and(|word| word == "doctor") && word(2).is_none_or(|word| word.starts_with('-')) && !is_help
}

/// An error with its causes, but for those whose words it holds already.
fn words(error: &anyhow::Error) -> String {
    error.chain().skip(1).map(ToString::to_string).fold(error.to_string(), |words, cause| {
        match words.contains(&cause) {
            true => words,
            false => words + ": " + &cause,
        }
    })
}

fn command() -> Command {
    Command::new("trireme")
        .version(env!("TRIREME_VERSION"))
        .about("Serves one language model over many GPUs behind Triton's protocols")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(described::<ServeArgs>(
            "serve",
            "Serves a checkpoint or a model of a hub: one command, no repository",
        ))
        .subcommand(
            described::<DoctorArgs>("doctor", "Checks whether a model could be served here, and says what to do")
                .after_help("Without MODEL it is `launch doctor`, and takes the flags of `launch`."),
        )
        .subcommand(described::<PullArgs>("pull", "Downloads a model from a hub into the cache"))
        .subcommand(Command::new("list").about("Lists the models in the hub's cache"))
        .subcommand(described::<RmArgs>("rm", "Removes a model from the hub's cache"))
        .subcommand(
            Command::new(launcher::SUB_COMMAND).about("The same as the program `launch`: starts and runs worlds"),
        )
        .subcommand(rank::command())
        .subcommand(relay_command())
        .subcommand(plan_command())
        .subcommand(Command::new("rank-flags").about("The flags of a rank, a line each; for `launch`").hide(true))
        .subcommand(Command::new("worker").about("A worker of a rank; started by its rank, never by hand").hide(true))
        .subcommand(nccl_check_command())
        .subcommand(described::<ClientArgs>("client", "Sends a prompt and prints the answer as it comes"))
        .subcommand(described::<BenchArgs>("bench", "Measures a running server"))
        .subcommand(described::<ReplayArgs>(
            "replay",
            "Sends the requests of a recording again, and compares answers and latencies",
        ))
        .subcommand(described::<LintArgs>(
            "lint",
            "Explains every file and key of a model repository, and what is wrong with it",
        ))
        .subcommand(described::<InitArgs>("init", "Makes a model repository of a published layout around a checkpoint"))
        .subcommand(described::<QuantizeArgs>("quantize", "Writes a checkpoint with quantized linear layers"))
        .subcommand(described::<TopArgs>("top", "Shows what a world does now, in a terminal"))
        .subcommand(manual::completions_command())
        .subcommand(manual::man_command())
}

/// A sub-command with its arguments. The description comes after them, because theirs would replace it.
fn described<A: Args>(name: &'static str, about: &'static str) -> Command {
    A::augment_args(Command::new(name)).about(about)
}

/// Takes the flags of a rank.
fn relay_command() -> Command {
    let wait = Arg::new("relay-wait").long("relay-wait").value_name("SECONDS").default_value("120");
    let idle = Arg::new("relay-idle").long("relay-idle").value_name("SECONDS");
    let journals = Arg::new("relay-journals").long("relay-journals").value_name("DIR");
    rank::command()
        .name(ipc::RELAY)
        .about("Holds the connections of clients while rank 0 is started again; started by `launch`, never by hand")
        .arg(wait.value_parser(clap::value_parser!(u64)).help("How long a request waits for a rank 0"))
        .arg(idle.value_parser(clap::value_parser!(u64)).help("Report when no request has come for this time"))
        .arg(journals.value_parser(clap::value_parser!(PathBuf)).help("Where answers outlive the relay"))
        .hide(true)
}

/// Takes the flags of a rank.
fn plan_command() -> Command {
    let size = Arg::new("world-size").long("world-size").value_name("N").default_value("1");
    let per_node = Arg::new("ranks-per-node").long("ranks-per-node").value_name("N");
    rank::command()
        .name("plan")
        .about("Prints the memory that a world's language models would take, and loads nothing")
        .arg(size.value_parser(clap::value_parser!(u32).range(1..)).help("Ranks of the world"))
        .arg(per_node.value_parser(clap::value_parser!(u32).range(1..)).help("Ranks of each node [default: all ranks]"))
        .arg(Arg::new("json").long("json").action(ArgAction::SetTrue).help("Print JSON"))
}

fn nccl_check_command() -> Command {
    let number = |name: &'static str| Arg::new(name).long(name).required(true).value_parser(clap::value_parser!(u32));
    let path = |name: &'static str| Arg::new(name).long(name).value_parser(clap::value_parser!(PathBuf));
    Command::new("nccl-check")
        .about("One process of a measurement of NCCL; started by `launch doctor`")
        .hide(true)
        .args([number("rank"), number("size"), path("folder").required(true), path("library-dir")])
}

fn run_nccl_check(matches: &clap::ArgMatches) -> anyhow::Result<ExitCode> {
    let number = |name: &str| *matches.get_one::<u32>(name).expect("it is required");
    let check = worker::NcclCheck {
        rank: number("rank"),
        size: number("size"),
        folder: matches.get_one::<PathBuf>("folder").expect("it is required").clone(),
        library_dirs: matches.get_one::<PathBuf>("library-dir").into_iter().cloned().collect(),
    };
    println!("{}", check.run()?);
    Ok(ExitCode::SUCCESS)
}

fn run_plan(matches: &clap::ArgMatches) -> anyhow::Result<ExitCode> {
    let (args, _) = rank::parse(matches)?;
    let world_size = *matches.get_one::<u32>("world-size").expect("it has a default");
    let ranks_per_node = matches.get_one::<u32>("ranks-per-node").copied().unwrap_or(world_size);
    let print = if matches.get_flag("json") { rank::print_plan_as_json } else { rank::print_plan };
    Ok(print(&args, world_size, ranks_per_node, &hardware())?)
}

/// The devices of this node, for a rank.
fn hardware() -> Hardware {
    Hardware {
        num_gpus: device::cuda::num_gpus,
        free_gpu_memory: |ordinal| device::cuda::free_memory(ordinal).map_err(|error| error.to_string()),
        free_cpu_memory: device::cpu::available_memory,
        num_allowed_cores: || device::cpu::allowed_cores().len(),
        nvrtc_version: kernels::cuda::NVRTC_VERSION,
        client_devices: Arc::new(client_memory::Gpus),
        estimate_memory: worker::estimate_memory,
    }
}

fn run_rank(matches: &clap::ArgMatches) -> anyhow::Result<ExitCode> {
    match rank::parse(matches) {
        Ok((args, ignored)) => Ok(rank::main(args, &ignored, hardware())?),
        Err(error) => Ok(rank::usage_error(&error)),
    }
}

fn run_relay(matches: &clap::ArgMatches) -> anyhow::Result<ExitCode> {
    let (args, _) = rank::parse(matches)?;
    let options = rank::RelayOptions {
        wait: Duration::from_secs(*matches.get_one("relay-wait").expect("it has a default")),
        idle: matches.get_one("relay-idle").copied().map(Duration::from_secs),
        journals: matches.get_one("relay-journals").cloned(),
    };
    Ok(rank::relay(&args, options, &hardware())?)
}

fn run_client(matches: &clap::ArgMatches) -> anyhow::Result<ExitCode> {
    client::run_client(ClientArgs::from_arg_matches(matches)?)?;
    Ok(ExitCode::SUCCESS)
}

fn run_bench(matches: &clap::ArgMatches) -> anyhow::Result<ExitCode> {
    bench::run(BenchArgs::from_arg_matches(matches)?)?;
    Ok(ExitCode::SUCCESS)
}

fn run_replay(matches: &clap::ArgMatches) -> anyhow::Result<ExitCode> {
    Ok(bench::replay(&ReplayArgs::from_arg_matches(matches)?)?)
}

fn run_lint(matches: &clap::ArgMatches) -> anyhow::Result<ExitCode> {
    Ok(lint::lint(&LintArgs::from_arg_matches(matches)?, worker::estimate_memory)?)
}

fn run_init(matches: &clap::ArgMatches) -> anyhow::Result<ExitCode> {
    lint::init(&InitArgs::from_arg_matches(matches)?, worker::estimate_memory)?;
    Ok(ExitCode::SUCCESS)
}

fn run_quantize(matches: &clap::ArgMatches) -> anyhow::Result<ExitCode> {
    quantize::run(&QuantizeArgs::from_arg_matches(matches)?)?;
    Ok(ExitCode::SUCCESS)
}

fn run_top(matches: &clap::ArgMatches) -> anyhow::Result<ExitCode> {
    top::run(&TopArgs::from_arg_matches(matches)?)?;
    Ok(ExitCode::SUCCESS)
}

fn run_serve(matches: &clap::ArgMatches) -> anyhow::Result<ExitCode> {
    serve::run(&ServeArgs::from_arg_matches(matches)?, &hardware())
}

fn run_doctor(matches: &clap::ArgMatches) -> anyhow::Result<ExitCode> {
    serve::doctor(&DoctorArgs::from_arg_matches(matches)?, &hardware())
}

fn run_pull(matches: &clap::ArgMatches) -> anyhow::Result<ExitCode> {
    serve::pull(&PullArgs::from_arg_matches(matches)?)?;
    Ok(ExitCode::SUCCESS)
}

fn run_rm(matches: &clap::ArgMatches) -> anyhow::Result<ExitCode> {
    serve::remove(&RmArgs::from_arg_matches(matches)?)?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_help_describes_every_sub_command() {
        for command in command().get_subcommands() {
            let about = command.get_about().map(ToString::to_string).unwrap_or_default();
            let words = about.split_whitespace().count();
            assert!(words > 3 && !about.starts_with('`') && !about.contains('\n'), "{}: {about}", command.get_name());
        }
    }
}
