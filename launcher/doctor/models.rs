//! Checks of the models of the repository and of the memory that they need, by the programs that a start uses: `trireme lint` loads
//! the repository as rank 0 does, but without workers, and `trireme plan` computes the memory.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::finding::Finding;
use crate::check::has_folder;
use crate::flags::WorldFlags;
use crate::plan::{Site, memory_command};

/// Reasons that are shown at most.
const MAX_REASONS: usize = 8;

/// The part of `trireme lint --json` that is used.
#[derive(Deserialize)]
struct Lint {
    findings: Vec<Wrong>,
}

#[derive(Deserialize)]
struct Wrong {
    verdict: String,
    model: String,
    file: PathBuf,
    line: Option<usize>,
    why: String,
}

/// `trireme plan --json`
#[derive(Deserialize)]
struct Memory {
    /// `cpu` or `cuda`.
    device: String,
    /// Why the workers compute there.
    why: String,
    /// The version of NVRTC that compiled the GPU kernels.
    nvrtc: Option<String>,
    models: Vec<ModelMemory>,
    failures: Vec<String>,
}

#[derive(Deserialize)]
struct ModelMemory {
    name: String,
    summary: String,
    missing_bytes: u64,
    advice: String,
}

/// Checks the models, the device of the workers and its memory.
pub(super) fn check(flags: &WorldFlags, site: &Site, wants_gpus: bool) -> Vec<Finding> {
    let memory = memory_command(flags, site);
    let mut lint = Command::new(&memory.program);
    lint.args(["lint", "--json", "--quiet", "--world-size", &flags.world_size.to_string()]).arg(&flags.model_repo);
    let mut findings = match has_folder(&flags.model_repo).unwrap_or(false).then(|| report::<Lint>(&mut lint)) {
        None => Vec::new(),
        Some(Ok(lint)) => of_lint(&lint),
        Some(Err(why)) => vec![unknown("models", why)],
    };
    let are_whole = findings.iter().all(|finding| finding.advice.is_empty());
    match report::<Memory>(Command::new(&memory.program).args(&memory.args).arg("--json")) {
        Ok(memory) => findings.extend(of_memory(&memory, wants_gpus, are_whole)),
        Err(why) => findings.push(unknown("device", why)),
    }
    findings
}

/// The JSON that a command prints; else its last line of errors.
fn report<T: DeserializeOwned>(command: &mut Command) -> Result<T, String> {
    let output = command.stdin(Stdio::null()).output().map_err(|error| format!("it does not start: {error}"))?;
    serde_json::from_slice(&output.stdout).map_err(|_| {
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        let line =
            errors.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("the server program gave no report");
        line.trim().trim_start_matches("error: ").to_owned()
    })
}

fn unknown(check: &'static str, why: String) -> Finding {
    Finding::of_error(check, why, "see what `launch --plan` and `trireme lint` print with the same flags")
}

fn of_lint(lint: &Lint) -> Vec<Finding> {
    let wrong: Vec<&Wrong> = lint.findings.iter().filter(|finding| finding.verdict == "wrong").collect();
    if wrong.is_empty() {
        return vec![Finding::ok("models", "each can be loaded")];
    }
    // Models that need another one that cannot be loaded say less than that one.
    let is_consequence = |wrong: &&Wrong| wrong.why.contains("which has no loaded version");
    let (consequences, mut causes): (Vec<&Wrong>, Vec<&Wrong>) = wrong.into_iter().partition(is_consequence);
    if causes.is_empty() {
        causes = consequences;
    }
    let of = |wrong: &&Wrong| {
        let place = wrong.line.map(|line| format!("{}:{line}: ", wrong.file.display())).unwrap_or_default();
        let why = wrong.why.rsplit_once(" is at UNAVAILABLE state: ").map_or(wrong.why.as_str(), |(_, why)| why);
        let why = why.trim_start_matches("Invalid argument: ");
        let name = format!("`{}`", wrong.model);
        let name = if why.contains(&name) { String::new() } else { name + ": " };
        let otherwise = "`trireme lint` explains every file and key of the repository";
        Finding::of_error("models", format!("{place}{name}{why}"), otherwise)
    };
    causes.iter().take(MAX_REASONS).map(of).collect()
}

fn of_memory(memory: &Memory, wants_gpus: bool, are_whole: bool) -> Vec<Finding> {
    let mut findings = vec![match wants_gpus && memory.device == "cpu" {
        true => Finding::of_warning("device", &memory.why, "GPUs are there, and models would run on the CPU"),
        false => Finding::ok("device", &memory.why),
    }];
    findings.push(match &memory.nvrtc {
        Some(version) => Finding::ok("GPU kernels", format!("in this build, compiled by NVRTC {version}")),
        None if wants_gpus => Finding::warn(
            "GPU kernels",
            "not in this build",
            "run `scripts/install_nvrtc`, then `cargo build --release`, or install a package",
        ),
        None => Finding::ok("GPU kernels", "not in this build: it serves on CPUs alone"),
    });
    for model in &memory.models {
        let found = format!("`{}`: {}", model.name, model.summary);
        findings.push(match model.missing_bytes {
            0 => Finding::ok("memory of models", found),
            _ => Finding::fail("memory of models", found, &model.advice),
        });
    }
    // What keeps a model from loading has been reported already.
    for failure in memory.failures.iter().filter(|_| are_whole) {
        findings.push(unknown("memory of models", failure.clone()));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::super::finding::Level;
    use super::*;

    #[test]
    fn a_model_that_does_not_fit_is_a_failure_with_the_world_that_would() {
        let memory: Memory = serde_json::from_value(serde_json::json!({
            "device": "cuda", "why": "CUDA: 2 devices for 1 workers", "nvrtc": "13.0", "failures": [],
            "models": [{"name": "m", "summary": "1 worker(s)", "missing_bytes": 7, "advice": "a world of 2 would fit"}]
        }))
        .unwrap();
        let findings = of_memory(&memory, true, true);
        assert_eq!(
            findings.last().unwrap(),
            &Finding::fail("memory of models", "`m`: 1 worker(s)", "a world of 2 would fit")
        );
        assert!(findings[..2].iter().all(|finding| finding.level == Level::Ok), "{findings:?}");
    }

    #[test]
    fn the_cause_is_shown_without_the_models_that_depend_on_it() {
        let lint: Lint = serde_json::from_value(serde_json::json!({"findings": [
            {"verdict": "wrong", "model": "a", "file": "a/config.pbtxt", "line": null,
             "why": "load failed: version 1 is at UNAVAILABLE state: Invalid argument: ensemble 'a' depends on 'b' which has no loaded version"},
            {"verdict": "wrong", "model": "b", "file": "b/config.pbtxt", "line": null,
             "why": "load failed: version 1 is at UNAVAILABLE state: Invalid argument: model `b`: no tokenizer; copy one"},
        ]}))
        .unwrap();
        assert_eq!(of_lint(&lint), [Finding::fail("models", "model `b`: no tokenizer", "copy one")]);
    }

    #[test]
    fn gpus_that_stay_unused_are_a_warning_with_the_reason() {
        let why = "CPU with 2 threads a worker: the driver is too old; update it".to_owned();
        let memory = Memory { device: "cpu".into(), why, nvrtc: Some("13.0".into()), models: vec![], failures: vec![] };
        let device = &of_memory(&memory, true, true)[0];
        let expected = ("CPU with 2 threads a worker: the driver is too old", "update it");
        assert_eq!(
            (device.level, device.found.as_str(), device.advice.as_str()),
            (Level::Warn, expected.0, expected.1)
        );
        assert_eq!(of_memory(&memory, false, true)[0].level, Level::Ok);
    }
}
