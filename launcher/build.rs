//! Tells `launch` and `trireme` the commit that they are built from, for `--version`: the variable `TRIREME_COMMIT`, or else that of
//! the checkout. Builds for development have none, because each commit would compile their tests again.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-env-changed=TRIREME_COMMIT");
    let given = std::env::var("TRIREME_COMMIT").ok().filter(|commit| !commit.is_empty());
    let is_release = std::env::var("PROFILE").is_ok_and(|profile| profile == "release");
    let commit = given.or_else(|| if is_release { of_checkout() } else { None });
    let version = std::env::var("CARGO_PKG_VERSION").unwrap_or_default();
    let version = commit.map_or(version.clone(), |commit| format!("{version} ({commit})"));
    println!("cargo::rustc-env=TRIREME_VERSION={version}");
}

/// The commit of the checkout; `None` outside of one.
fn of_checkout() -> Option<String> {
    // The log of HEAD grows with each commit and change of branch.
    let log = git(&["rev-parse", "--git-path", "logs/HEAD"]).filter(|log| Path::new(log).exists());
    log.into_iter().for_each(|log| println!("cargo::rerun-if-changed={log}"));
    git(&["rev-parse", "--short=10", "HEAD"])
}

fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}
