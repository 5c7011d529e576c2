//! `launch doctor`: checks whether a world with the same flags could start here, and reports problems with their fix.
//!
//! Checks return findings and change nothing. What a start checks is checked by the same code: [`crate::plan`], [`crate::check`],
//! [`crate::control::port_in_use`], and the server program's `lint` and `plan`.

mod checkpoint;
mod finding;
mod gpu;
mod machine;
mod models;
mod mpi;
mod nccl_rate;

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::Result;

use crate::flags::{DEFAULT_REPOSITORY, DoctorFlags, WorldFlags};
use crate::plan::{Site, plan};
use crate::state::RunDir;
use crate::{check, site};
use finding::{Finding, Level};

/// What was checked before, by the command that calls this one: the name of the check, and what was found or an error.
pub type Earlier = (&'static str, Result<String, String>);

/// Runs all checks and prints the findings. The exit code is 1 if one of them is [`Level::Fail`].
pub(crate) fn run(flags: &DoctorFlags, run_dir: &RunDir, earlier: &[Earlier]) -> Result<u8> {
    let of = |(check, result): &Earlier| match result {
        Ok(found) => Finding::ok(check, found),
        Err(error) => Finding::of_error(check, error, "give another model"),
    };
    let mut findings: Vec<Finding> = earlier.iter().map(of).collect();
    findings.extend(examine(&flags.world, &site(run_dir, &flags.world)?, run_dir));
    match flags.json {
        true => println!("{}", serde_json::to_string_pretty(&findings)?),
        false => print!("{}", report(&findings)),
    }
    Ok(u8::from(findings.iter().any(|finding| finding.level == Level::Fail)))
}

fn examine(flags: &WorldFlags, site: &Site, run_dir: &RunDir) -> Vec<Finding> {
    let wants_gpus = gpu::are_wanted(flags);
    let mut findings = of_start(flags, site);
    findings.extend([machine::cores(flags.world_size), machine::memory(), machine::huge_pages()]);
    findings.extend([machine::shared_memory(flags, site), machine::locked_memory(wants_gpus)]);
    findings.extend([machine::open_files(), machine::clock_source(), machine::run_directory(run_dir)]);
    findings.extend(machine::ports(flags, run_dir));
    findings.extend(gpu::check(flags));
    match is_unnamed(flags) {
        true => findings.extend(of_device(flags, site, run_dir, wants_gpus)),
        false => findings.extend(of_models(flags, site, wants_gpus)),
    }
    findings
}

/// The flags as a whole, the server program, and what starts its ranks.
fn of_start(flags: &WorldFlags, site: &Site) -> Vec<Finding> {
    let plan = match plan(flags, site) {
        Ok(plan) => plan,
        Err(error) => return vec![Finding::of_error("flags", format!("{error:#}"), "correct the flag it names")],
    };
    let mut findings =
        vec![Finding::ok("flags", plan.placement.clone().unwrap_or_else(|| format!("{} rank(s)", flags.world_size)))];
    findings.push(match check::program(flags, site) {
        Ok(()) => mpi::program(flags, site),
        Err(error) => Finding::of_error("server program", format!("{error:#}"), ""),
    });
    match check::starter(flags, site, &plan) {
        Ok(()) => findings.extend(mpi::check(site, &plan)),
        Err(error) => findings.push(Finding::of_error("MPI", format!("{error:#}"), "")),
    }
    findings
}

/// The repository, the files of its checkpoints, its models and their memory.
fn of_models(flags: &WorldFlags, site: &Site, wants_gpus: bool) -> Vec<Finding> {
    let repository = "model repository";
    if let Err(error) = check::repository(flags) {
        return vec![Finding::of_error(repository, format!("{error:#}"), "")];
    }
    let mut findings = match check::has_folder(&flags.model_repo) {
        Ok(true) => vec![Finding::ok(repository, flags.model_repo.display().to_string())],
        _ => Vec::new(),
    };
    findings.extend(checkpoint::check(&flags.model_repo));
    if flags.container_image.is_none() && check::program(flags, site).is_ok() {
        findings.extend(models::check(flags, site, wants_gpus));
    }
    findings
}

/// Whether no repository is named, and none lies where the default says.
fn is_unnamed(flags: &WorldFlags) -> bool {
    flags.model_repo == Path::new(DEFAULT_REPOSITORY) && !flags.model_repo.exists() && !flags.may_have_no_model()
}

/// The device of workers and the kernels of this build, without models.
fn of_device(flags: &WorldFlags, site: &Site, run_dir: &RunDir, wants_gpus: bool) -> Vec<Finding> {
    let advice = "name one with --model_repo=DIR, or a model: `trireme doctor MODEL`";
    let mut findings = vec![Finding::warn("model repository", "none is named: the machine alone is checked", advice)];
    let empty = run_dir.path().join(format!("doctor-{}", std::process::id()));
    if fs::create_dir(&empty).is_ok() {
        let mut flags = WorldFlags { model_repo: empty.clone(), ..flags.clone() };
        flags.rank_flags.push("--model-control-mode=explicit".to_owned());
        if check::program(&flags, site).is_ok() {
            findings.extend(models::check(&flags, site, wants_gpus));
        }
        // What is left is empty.
        let _ = fs::remove_dir(&empty);
    }
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
