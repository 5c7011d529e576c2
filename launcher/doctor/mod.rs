//! `launch doctor`: checks whether this machine can run a world, and reports problems with their fix.
//!
//! Checks return findings and change nothing. What cannot be known without loading a model, such as device memory, is left to
//! `launch --plan`.

mod checkpoint;
mod finding;
mod gpu;
mod machine;
mod mpi;
mod nccl_rate;

use std::fmt::Write as _;

use anyhow::Result;

use crate::flags::DoctorFlags;
use crate::state::RunDir;
use finding::{Finding, Level};

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
}
