//! Measures the rate of NCCL between the GPUs of this machine, in separate processes that are killed if they hang.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use super::finding::Finding;
use crate::flags::WorldFlags;

/// Time limit of the measurement.
const TIMEOUT: Duration = Duration::from_secs(60);
/// An all-reduce of 8 KiB that takes longer goes through the host or through a slow network.
const SLOW_SECONDS: f64 = 60e-6;
/// Slower than this is neither NVLink nor PCIe 4.
const SLOW_BYTES: f64 = 10e9;

/// The output of the first process.
#[derive(Debug, Deserialize)]
struct Rate {
    small_seconds: f64,
    bus_bytes_per_second: f64,
}

/// Measures with `size` processes, one per GPU.
pub(super) fn measure(flags: &WorldFlags, size: u32, library_dir: Option<&Path>) -> Finding {
    match run(flags, size, library_dir) {
        Ok(rate) => judge(&rate),
        Err(error) => Finding::fail(
            "NCCL rate",
            format!("{error:#}"),
            "run again with NCCL_DEBUG=INFO and fix the error it reports; `nvidia-smi topo -m` shows how GPUs are joined",
        ),
    }
}

fn judge(rate: &Rate) -> Finding {
    let (micros, giga) = (rate.small_seconds * 1e6, rate.bus_bytes_per_second / 1e9);
    let found = format!("{micros:.0} us for 8 KiB, {giga:.0} GB/s for 64 MiB");
    match rate.small_seconds > SLOW_SECONDS || rate.bus_bytes_per_second < SLOW_BYTES {
        false => Finding::ok("NCCL rate", found),
        true => Finding::warn(
            "NCCL rate",
            found,
            "GPUs joined by NVLink take about 15 us and 100 GB/s or more: see `nvidia-smi topo -m`, and whether other programs use them",
        ),
    }
}

fn run(flags: &WorldFlags, size: u32, library_dir: Option<&Path>) -> Result<Rate> {
    let beside = || std::env::current_exe().map(|launch| launch.with_file_name("trireme")).unwrap_or_default();
    let program = flags.trireme.clone().unwrap_or_else(beside);
    let folder = std::env::temp_dir().join(format!("trireme-nccl-{}", std::process::id()));
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    // With NCCL_DEBUG set the user wants to read NCCL's messages.
    let stderr = || if std::env::var_os("NCCL_DEBUG").is_some() { Stdio::inherit() } else { Stdio::piped() };
    let start = |rank: u32| {
        let mut command = Command::new(&program);
        command.args(["nccl-check", "--rank", &rank.to_string(), "--size", &size.to_string(), "--folder"]);
        command.arg(&folder).env("NCCL_NVLS_ENABLE", "0").env("NCCL_DEBUG_FILE", "/dev/stderr");
        if let Some(dir) = library_dir {
            command.arg("--library-dir").arg(dir);
        }
        let spawned = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(stderr()).spawn();
        spawned.with_context(|| format!("cannot start `{}`", program.display()))
    };
    let mut processes = Vec::new();
    let mut started = Ok(());
    for rank in 0..size {
        match start(rank) {
            Ok(process) => processes.push(process),
            Err(error) => started = Err(error),
        }
    }
    let rate = started.and_then(|()| first_output(&mut processes));
    for mut process in processes {
        // It does not matter if it has ended already.
        let _ = process.kill();
        let _ = process.wait();
    }
    let _ = std::fs::remove_dir_all(&folder);
    rate
}

/// The output of the first process, once all have succeeded.
fn first_output(processes: &mut [Child]) -> Result<Rate> {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let mut all_done = true;
        for (rank, process) in processes.iter_mut().enumerate() {
            match process.try_wait()? {
                None => all_done = false,
                Some(status) if status.success() => {}
                Some(status) => {
                    let stderr = process.stderr.take().and_then(|text| std::io::read_to_string(text).ok());
                    let line = stderr.as_deref().and_then(|text| text.lines().last()).unwrap_or("no error message");
                    bail!("GPU {rank}: {line} ({})", ipc::describe_exit(status));
                }
            }
        }
        if all_done {
            break;
        }
        if Instant::now() >= deadline {
            bail!("no end within {TIMEOUT:?}");
        }
        thread::sleep(Duration::from_millis(20));
    }
    let text = processes.first_mut().and_then(|first| first.stdout.take()).context("no process was started")?;
    let text = std::io::read_to_string(text).context("cannot read the measurement")?;
    serde_json::from_str(&text).with_context(|| format!("cannot understand `{}`", text.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Level;

    #[test]
    fn a_rate_below_that_of_nvlink_is_a_warning() {
        let rate = |small_seconds, bus_bytes_per_second| judge(&Rate { small_seconds, bus_bytes_per_second });
        let good = rate(12.6e-6, 180e9);
        assert_eq!((good.level, good.found.as_str()), (Level::Ok, "13 us for 8 KiB, 180 GB/s for 64 MiB"));
        assert_eq!([rate(90e-6, 180e9).level, rate(12e-6, 3e9).level], [Level::Warn, Level::Warn]);
    }

    #[test]
    fn a_failed_process_is_named_with_the_last_line_it_wrote() {
        let fails = Command::new("sh")
            .args(["-c", "echo first >&2; echo no driver >&2; exit 3"])
            .stderr(Stdio::piped())
            .spawn();
        let sleeps = Command::new("sleep").arg("100").spawn();
        let mut processes = [sleeps.unwrap(), fails.unwrap()];
        let error = first_output(&mut processes).unwrap_err().to_string();
        assert_eq!(error, "GPU 1: no driver (exit code 3)");
        processes[0].kill().unwrap();
        processes[0].wait().unwrap();
    }
}
