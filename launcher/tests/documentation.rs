//! Checks that the documentation lists every flag that `launch --help` shows.

use std::process::Command;

fn flags(action: Option<&str>) -> Vec<String> {
    let output = Command::new(env!("CARGO_BIN_EXE_launch")).args(action).arg("--help").output().expect("launch runs");
    let help = String::from_utf8(output.stdout).expect("help is text");
    let names = help.lines().filter_map(|line| {
        let line = line.trim_start();
        let long = if line.starts_with("--") { line } else { line.strip_prefix('-')?.split_once(", ")?.1 };
        Some(long.strip_prefix("--")?.split([' ', '=', '[']).next()?.to_owned())
    });
    names.filter(|name| !["help", "version"].contains(&name.as_str())).collect()
}

#[test]
fn the_documentation_holds_every_flag_of_every_action() {
    let documentation = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/configuration.md");
    let documentation = std::fs::read_to_string(documentation).unwrap();
    let (_, ours) =
        documentation.split_once("## Flags of `launch`").expect("docs/configuration.md has a section on `launch`");
    let world = flags(None);
    assert!(world.iter().any(|flag| flag == "world-size") && world.iter().any(|flag| flag == "force"), "{world:?}");
    for action in [None, Some("stop"), Some("restart"), Some("logs"), Some("status"), Some("doctor"), Some("sbatch")] {
        for flag in flags(action) {
            let row = match action {
                None => format!("| `--{flag}` |"),
                // These take the world's flags too, which are documented once.
                Some("doctor" | "sbatch") if world.contains(&flag) => continue,
                Some(action) => format!("| `{action} --{flag}` |"),
            };
            assert!(ours.contains(&row), "docs/configuration.md lacks {row}: run scripts/configuration_doc");
        }
    }
}

#[test]
fn the_version_is_that_of_the_package_and_names_a_known_commit() {
    let output = Command::new(env!("CARGO_BIN_EXE_launch")).arg("--version").output().expect("launch runs");
    let version = String::from_utf8(output.stdout).expect("a version is text");
    assert_eq!(version.trim_end(), format!("launch {}", env!("TRIREME_VERSION")));
    let rest = version.trim_end().strip_prefix(concat!("launch ", env!("CARGO_PKG_VERSION"))).expect("the version");
    let commit = rest.strip_prefix(" (").and_then(|rest| rest.strip_suffix(')'));
    let is_commit = |commit: &str| commit.len() >= 7 && commit.bytes().all(|byte| byte.is_ascii_hexdigit());
    assert!(rest.is_empty() || commit.is_some_and(is_commit), "{version}");
}
