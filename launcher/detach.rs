//! `--detach`: starts a launcher in the background; the foreground process waits until the world serves.

use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ipc::ProcessWatch;
use nix::sys::signal::Signal;

use crate::excerpt;
use crate::flags::WorldFlags;
use crate::state::{Phase, RunDir, WorldState};

/// The sub-command of `trireme` that is this program.
pub const SUB_COMMAND: &str = "launch";

/// How long `--detach` waits without `--wait-ready`.
const DEFAULT_READY_TIMEOUT: Duration = Duration::from_secs(600);

/// Starts this program again in the background with the same `arguments`. Returns once the world serves.
///
/// # Errors
/// If the world ends or times out before it serves, with what its log says.
pub(crate) fn detach(flags: &WorldFlags, arguments: &[OsString], run_dir: &RunDir) -> Result<()> {
    let log = run_dir.log_file(flags.http_port);
    let file = fs::File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
    let mut child = Command::new(std::env::current_exe().context("cannot find this program")?)
        .args(own_words())
        .arg("--detached")
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(file.try_clone()?)
        .stderr(file)
        .spawn()
        .context("cannot start the launcher in the background")?;

    let timeout = flags.wait_ready.map_or(DEFAULT_READY_TIMEOUT, Duration::from_secs);
    wait_until_ready(&mut child, run_dir, timeout, &log)?;
    println!(
        "serving: http {}, grpc {}, metrics {}; launcher {}, log {}; end it with `launch stop --http_port={}`",
        flags.http_port,
        flags.grpc_port,
        flags.metrics_port,
        child.id(),
        log.display(),
        flags.http_port,
    );
    flags.ready_message.iter().for_each(|message| println!("{message}"));
    Ok(())
}

/// What precedes the flags on the command line of this process: the name of the sub-command, in `trireme launch`.
fn own_words() -> Option<OsString> {
    std::env::args_os().nth(1).filter(|word| word == SUB_COMMAND)
}

fn wait_until_ready(child: &mut Child, run_dir: &RunDir, timeout: Duration, log: &Path) -> Result<()> {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().context("cannot wait for the launcher")? {
            let reason = excerpt::of(log);
            bail!("the world did not start ({}): {reason}\nlog: {}", ipc::describe_exit(status), log.display());
        }
        // A check of the port would not do: another program may serve there meanwhile.
        let serves = |world: &WorldState| world.launcher_pid == child.id() && world.phase == Phase::Serving;
        if run_dir.worlds().iter().any(serves) {
            return Ok(());
        }
        if start.elapsed() > timeout {
            end(child)?;
            let reason = excerpt::of(log);
            bail!("the world does not serve after {timeout:?}: {reason}\nlog: {}", log.display());
        }
        thread::sleep(Duration::from_millis(50));
    }
}

/// Stops a launcher whose world was not ready in time. No request is in flight there, so the waits are short.
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
