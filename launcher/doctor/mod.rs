//! `launch doctor`: checks whether this machine can run a world, and reports problems with their fix.
//!
//! Checks return findings and change nothing. What cannot be known without loading a model, such as device memory, is left to
//! `launch --plan`.

mod checkpoint;
mod gpu;
mod machine;
mod mpi;
mod nccl_rate;

use std::fmt::Write as _;

use anyhow::Result;
use serde::Serialize;

use crate::flags::DoctorFlags;
use crate::state::RunDir;

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Level {
    Ok,
    /// It works, but slowly or not with every model.
    Warn,
    /// A world with these flags cannot start, or will not serve.
    Fail,
}

/// One line of the report.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Finding {
    pub(crate) check: &'static str,
    pub(crate) level: Level,
    /// What was found.
    pub(crate) found: String,
    /// What to do about it; empty if nothing is wrong.
    pub(crate) advice: String,
}

impl Finding {
    fn ok(check: &'static str, found: impl Into<String>) -> Self {
        Self { check, level: Level::Ok, found: found.into(), advice: String::new() }
    }

    fn warn(check: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { check, level: Level::Warn, found: found.into(), advice: advice.into() }
    }

    fn fail(check: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { check, level: Level::Fail, found: found.into(), advice: advice.into() }
    }
}

/// Runs all checks and prints the findings. The exit code is 1 if one of them is [`Level::Fail`].
pub(crate) fn run(flags: &DoctorFlags, run_dir: &RunDir) -> Result<u8> {
    let findings = examine(flags, run_dir);
    match flags.json {
        true => println!("{}", serde_json::to_string_pretty(&findings)?),
        false => print!("{}", report(&findings)),
    }
    Ok(u8::from(findings.iter().any(|finding| finding.level == Level::Fail)))
}

fn examine(flags: &DoctorFlags, run_dir: &RunDir) -> Vec<Finding> {
    let needs_gpus = gpu::are_wanted(flags);
    let mut findings = vec![mpi::program(flags)];
    findings.extend(mpi::check(flags));
    findings.push(machine::cores(flags.world_size));
    findings.push(machine::memory());
    findings.push(machine::shared_memory(flags.world_size));
    findings.push(machine::locked_memory(needs_gpus));
    findings.push(machine::open_files());
    findings.push(machine::clock_source());
    findings.extend(machine::ports(flags, run_dir));
    findings.extend(gpu::check(flags));
    findings.extend(checkpoint::check(&flags.model_repo));
    findings
}

/// The findings as a table, with totals in the last line.
fn report(findings: &[Finding]) -> String {
    let width = findings.iter().map(|finding| finding.check.len()).max().unwrap_or(0);
    let mut text = String::new();
    for Finding { check, level, found, advice } in findings {
        let level = match level {
            Level::Ok => "ok  ",
            Level::Warn => "warn",
            Level::Fail => "FAIL",
        };
        let _ = writeln!(text, "{level}  {check:width$}  {found}");
        if !advice.is_empty() {
            let _ = writeln!(text, "      {:width$}  → {advice}", "");
        }
    }
    let count = |level| findings.iter().filter(|finding| finding.level == level).count();
    let (ok, warn, fail) = (count(Level::Ok), count(Level::Warn), count(Level::Fail));
    let _ = writeln!(text, "{ok} ok, {warn} to look at, {fail} to mend");
    text
}

/// `1.5 GiB`.
fn size(bytes: u64) -> String {
    match bytes {
        0..0x10_0000 => format!("{} KiB", bytes >> 10),
        0x10_0000..0x4000_0000 => format!("{} MiB", bytes >> 20),
        _ => format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_shows_the_advice_of_each_finding() {
        let findings = [
            Finding::ok("clock", "tsc"),
            Finding::warn("files", "1024", "raise it"),
            Finding::fail("mpirun", "not found", "install it"),
        ];
        let text = report(&findings);
        assert!(text.contains("ok    clock   tsc\n"), "{text}");
        assert!(text.contains("FAIL  mpirun  not found\n              → install it\n"), "{text}");
        assert!(text.ends_with("1 ok, 1 to look at, 1 to mend\n"), "{text}");
    }

    #[test]
    fn sizes_are_formatted_with_one_unit() {
        assert_eq!([2048, 3 << 20, 3 << 29].map(size), ["2 KiB", "3 MiB", "1.5 GiB"]);
    }
}
