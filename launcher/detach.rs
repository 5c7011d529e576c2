//! `--detach`: a launcher in the background, and one in front that waits until the world serves.

use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ipc::ProcessWatch;
use nix::sys::signal::Signal;

use crate::crash;
use crate::flags::WorldFlags;
use crate::state::{Phase, RunDir, WorldState};

/// Without `--wait-ready`.
const DEFAULT_PATIENCE: Duration = Duration::from_secs(600);

/// Starts this program again with the same `arguments`, in the background; returns once the world serves, and errs
/// with the reason when it ends before.
pub(crate) fn detach(flags: &WorldFlags, arguments: &[OsString], run_dir: &RunDir) -> Result<()> {
    let log = run_dir.log_file(flags.http_port);
    let file = fs::File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
    let mut child = Command::new(std::env::current_exe().context("cannot find this program")?)
        .arg("--detached")
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(file.try_clone()?)
        .stderr(file)
        .spawn()
        .context("cannot start the launcher in the background")?;

    let patience = flags.wait_ready.map_or(DEFAULT_PATIENCE, Duration::from_secs);
    wait_until_ready(&mut child, run_dir, patience, &log)?;
    println!(
        "serving: http {}, grpc {}, metrics {}; launcher {}, log {}; end it with `launch stop --http_port={}`",
        flags.http_port,
        flags.grpc_port,
        flags.metrics_port,
        child.id(),
        log.display(),
        flags.http_port,
    );
    Ok(())
}

fn wait_until_ready(child: &mut Child, run_dir: &RunDir, patience: Duration, log: &Path) -> Result<()> {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().context("cannot wait for the launcher")? {
            let reason = last_lines(log);
            bail!("the world did not start ({}); the end of {}:\n{reason}", ipc::describe_exit(status), log.display());
        }
        // Not by its port: somebody else may serve there while it starts.
        let serves = |world: &WorldState| world.launcher_pid == child.id() && world.phase == Phase::Serving;
        if run_dir.worlds().iter().any(serves) {
            return Ok(());
        }
        if start.elapsed() > patience {
            end(child)?;
            let reason = last_lines(log);
            bail!("the world does not serve after {patience:?}; the end of {}:\n{reason}", log.display());
        }
        thread::sleep(Duration::from_millis(50));
    }
}

/// Ends a launcher whose world was not ready in time: nothing is in flight there, so it need not be patient.
fn end(child: &mut Child) -> Result<()> {
    let watch = ProcessWatch::new(child.id())?;
    for _ in 0..3 {
        watch.signal(Signal::SIGTERM as i32)?;
        if watch.wait(Duration::from_secs(3)) {
            break;
        }
    }
    child.wait().context("cannot wait for the launcher")?;
    Ok(())
}

/// The end of a log, for an error message.
pub(crate) fn last_lines(log: &Path) -> String {
    const NUM_LINES: usize = 15;
    let text = crash::end_of(log);
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(NUM_LINES)..].join("\n")
}
