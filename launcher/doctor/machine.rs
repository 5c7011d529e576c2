//! Checks of cores, memory, limits, clock and ports.

use std::fs;

use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};
use nix::sys::statvfs::statvfs;

use super::finding::{Finding, size};
use crate::check;
use crate::control;
use crate::flags::WorldFlags;
use crate::plan::Site;
use crate::state::RunDir;

/// Shared memory that a rank and its workers take, with room for large models and many rows.
const SHM_PER_RANK: u64 = 64 << 20;
/// Connections, rings and files of a busy rank 0.
const MIN_OPEN_FILES: u64 = 4096;

/// Number of cores and their vector instructions.
pub(super) fn cores(world_size: u32) -> Finding {
    let num_cores = std::thread::available_parallelism().map_or(1, usize::from);
    #[cfg(target_arch = "x86_64")]
    let (is_fast, kind) = match (is_x86_feature_detected!("avx512f"), is_x86_feature_detected!("avx2")) {
        (true, _) => (true, if is_x86_feature_detected!("avx512bf16") { "AVX-512 BF16" } else { "AVX-512" }),
        (_, true) => (true, "AVX2"),
        _ => (false, "no AVX2"),
    };
    #[cfg(not(target_arch = "x86_64"))]
    let (is_fast, kind) = (true, std::env::consts::ARCH);
    let found = format!("{num_cores} for this process, {kind}");
    if !is_fast {
        return Finding::warn("cores", found, "models on the CPU will be slow; use a machine with AVX2, or a GPU");
    }
    if num_cores < world_size as usize {
        let advice = format!("{world_size} ranks take turns: start fewer, or free cores (`taskset`, cgroup)");
        return Finding::warn("cores", found, advice);
    }
    Finding::ok("cores", found)
}

/// Memory that is available for weights.
pub(super) fn memory() -> Finding {
    let Ok(mut system) = sysinfo::System::new() else {
        return Finding::warn("memory", "not known", "check why /proc/meminfo cannot be read");
    };
    system.refresh_memory();
    let limit = system.cgroup_limits().map_or(u64::MAX, |limits| limits.total_memory);
    let (total, free) = (system.total_memory().min(limit), system.available_memory());
    let found = format!("{} free of {}", size(free), size(total));
    match free {
        0..0x4000_0000 => Finding::warn("memory", found, "end what else uses memory: weights are mapped into it"),
        _ => Finding::ok("memory", found),
    }
}

/// Whether the run directory can be written to.
pub(super) fn run_directory(run_dir: &RunDir) -> Finding {
    match check::run_directory(run_dir.path()) {
        Ok(()) => Finding::ok("run directory", run_dir.path().display().to_string()),
        Err(error) => Finding::of_error("run directory", format!("{error:#}"), ""),
    }
}

/// Size of `/dev/shm`, which step plans and all-reduces within a node use, and whether a ring can be created there.
pub(super) fn shared_memory(flags: &WorldFlags, site: &Site) -> Finding {
    if let Err(error) = check::shared_memory(flags, site) {
        return Finding::of_error("shared memory", format!("{error:#}"), "mount a tmpfs at /dev/shm");
    }
    let needed = SHM_PER_RANK * u64::from(flags.world_size);
    let (total, free) = statvfs("/dev/shm").map_or((0, 0), |space| {
        (space.blocks() * space.fragment_size(), space.blocks_available() * space.fragment_size())
    });
    let found = format!("{} free of {} in /dev/shm", size(free), size(total));
    match free < needed {
        true => Finding::warn(
            "shared memory",
            format!("{found}; {} ranks may take {}", flags.world_size, size(needed)),
            "give it more: `docker run --shm-size=8g`, or `mount -o remount,size=8g /dev/shm`",
        ),
        false => Finding::ok("shared memory", found),
    }
}

/// Limit of locked memory, which buffers for GPUs and fast networks need.
pub(super) fn locked_memory(needs_gpus: bool) -> Finding {
    let soft = getrlimit(Resource::RLIMIT_MEMLOCK).map_or(0, |(soft, _)| soft);
    let advice =
        "`ulimit -l unlimited` (Docker: `--ulimit memlock=-1`; Slurm: `PropagateResourceLimitsExcept=MEMLOCK`)";
    match soft {
        RLIM_INFINITY => Finding::ok("locked memory", "unlimited"),
        soft if needs_gpus => Finding::warn("locked memory", format!("at most {}", size(soft)), advice),
        soft => Finding::ok("locked memory", format!("at most {}; only GPUs and fast networks need more", size(soft))),
    }
}

/// Limit of open files and connections of a process. Ranks raise it to the hard limit.
pub(super) fn open_files() -> Finding {
    let hard = getrlimit(Resource::RLIMIT_NOFILE).map_or(0, |(_, hard)| hard);
    match hard {
        RLIM_INFINITY => Finding::ok("open files", "any number of a process"),
        hard if hard < MIN_OPEN_FILES => {
            let advice = format!(
                "raise the hard limit to {MIN_OPEN_FILES} or more (`ulimit -Hn`; systemd: `LimitNOFILE`): each client connection is one"
            );
            Finding::warn("open files", format!("at most {hard} of a process"), advice)
        }
        hard => Finding::ok("open files", format!("at most {hard} of a process")),
    }
}

/// Whether the kernel gives huge pages to programs that ask for them, as the buffers of CPU workers do.
pub(super) fn huge_pages() -> Finding {
    let setting = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    match setting.split(['[', ']']).nth(1) {
        Some("never") => Finding::warn(
            "huge pages",
            "off, so models on the CPU are slower",
            "`echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`",
        ),
        Some(given) => Finding::ok("huge pages", format!("given: {given}")),
        None => Finding::ok("huge pages", "not known"),
    }
}

/// The kernel's clock source. Steps read the time often.
pub(super) fn clock_source() -> Finding {
    let path = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
    let Ok(source) = fs::read_to_string(path) else {
        return Finding::warn("clock source", "not known", format!("check why {path} cannot be read"));
    };
    match source.trim() {
        slow @ ("hpet" | "acpi_pm" | "jiffies") => Finding::warn(
            "clock source",
            format!("{slow}, which takes a microsecond or more to read"),
            "boot with `clocksource=tsc tsc=reliable` if the processor's counter is stable",
        ),
        source => Finding::ok("clock source", source),
    }
}

/// Whether the ports are free. A world of this user that serves there is no fault of the machine.
pub(super) fn ports(flags: &WorldFlags, run_dir: &RunDir) -> Vec<Finding> {
    let ports = [("http", flags.http_port), ("grpc", flags.grpc_port), ("metrics", flags.metrics_port)];
    let own = run_dir.worlds().into_iter().find(|world| world.http_port == flags.http_port);
    if let Some(world) = own {
        let found = format!("your world on http port {} has them: launcher {}", world.http_port, world.launcher_pid);
        return vec![Finding::warn(
            "ports",
            found,
            "a second world needs others (--http_port, --grpc_port, --metrics_port)",
        )];
    }
    let message = |(flag, port): &(&str, u16)| control::port_in_use(flag, *port, run_dir);
    let taken: Vec<_> = ports.iter().filter_map(message).collect();
    if taken.is_empty() {
        let all: Vec<_> = ports.iter().map(|(flag, port)| format!("{flag} {port}")).collect();
        return vec![Finding::ok("ports", format!("{} are free", all.join(", ")))];
    }
    taken.iter().map(|message| Finding::of_error("ports", message, "end it, or give another port")).collect()
}
