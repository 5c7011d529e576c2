//! `packaging/trireme.service` and `trireme.conf`: their commands parse as command lines of `launch`, and systemd accepts the unit.

use std::fs;
use std::path::Path;
use std::process::Command;

use launcher::flags::{Action, Flags};

fn packaged(name: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging").join(name)).unwrap()
}

fn unit() -> String {
    packaged("trireme.service")
}

/// The parsed command line of `key`, with the flags of `trireme.conf`.
fn flags(key: &str) -> Flags {
    let unit = unit();
    let line = unit.lines().find_map(|line| line.strip_prefix(key)).unwrap_or_else(|| panic!("no {key} in the unit"));
    let conf = packaged("trireme.conf");
    let words = conf.lines().find_map(|line| line.strip_prefix("TRIREME_FLAGS=\"")?.strip_suffix('"')).unwrap();
    let line = line.replace("$TRIREME_FLAGS", words);
    Flags::parse_from_line(line.split_whitespace().map(Into::into)).unwrap()
}

#[test]
fn the_service_starts_a_world_and_reloads_by_a_rolling_restart() {
    let start = flags("ExecStart=");
    assert!(start.action.is_none() && !start.world.detach, "systemd supervises the launcher itself");
    assert!(matches!(flags("ExecReload=").action, Some(Action::Restart { rolling: true, .. })));
    let seconds = |key: &str| unit().lines().find_map(|line| line.strip_prefix(key)?.parse::<u64>().ok()).unwrap();
    // `launch` gives ranks ten seconds beyond the time for requests before it kills them.
    assert!(seconds("TimeoutStopSec=") >= start.world.exit_timeout.unwrap() + 10);
}

#[test]
fn systemd_accepts_the_unit() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trireme.service");
    // systemd also checks that the programs exist, and they are not installed here.
    fs::write(&path, unit().replace("/opt/trireme/bin/launch", "/bin/true")).unwrap();
    match Command::new("systemd-analyze").arg("verify").arg(&path).output() {
        Ok(output) => {
            let stderr = String::from_utf8_lossy(&output.stderr);
            let ours: Vec<_> = stderr.lines().filter(|line| line.contains("trireme.service")).collect();
            assert!(ours.is_empty() && output.status.success(), "{stderr}");
        }
        Err(_) => println!("skipped: no systemd-analyze on this machine"),
    }
}
