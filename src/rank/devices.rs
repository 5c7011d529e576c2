//! Chooses the device that workers compute on.

use settings::DeviceKind;
use supervision::DeviceChoice;

use crate::error::RankError;

/// The device of the first worker of a node with `num_workers` workers, and the reason for the log. With `pin`, each CPU thread gets
/// its own core, if there are enough cores and no quota shows that other processes use them.
pub(crate) fn choose(
    device: DeviceKind,
    threads: Option<usize>,
    pin: bool,
    num_workers: usize,
) -> Result<(DeviceChoice, String), RankError> {
    let num_cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = threads.unwrap_or(num_cores / num_workers).max(1);
    let enough = threads * num_workers <= num_cores && device::cpu::allowed_cores().len() == num_cores;
    let cpu = DeviceChoice::Cpu { threads, first_core: (pin && enough).then_some(0) };
    let pinned = match (pin, enough) {
        (true, true) => ", each on a core of its own",
        (true, false) => ", not pinned since rank 0 may not use a whole core for each of the node's",
        (false, _) => "",
    };
    let cpu_words = format!("CPU with {threads} threads a worker{pinned}");
    let cuda = match device {
        DeviceKind::Cpu => return Ok((cpu, format!("{cpu_words}: as requested"))),
        DeviceKind::Auto | DeviceKind::Cuda => match device::cuda::num_gpus() {
            0 => Err("no CUDA driver or device found".to_owned()),
            found => Ok(found),
        },
    };
    match (device, cuda) {
        (_, Ok(found)) if found >= num_workers => {
            Ok((DeviceChoice::Cuda { ordinal: 0 }, format!("CUDA: {found} devices for {num_workers} workers")))
        }
        (DeviceKind::Cuda, found) => {
            let reason = match found {
                Ok(found) => format!("{found} devices for {num_workers} workers; start with `--world_size={found}`"),
                Err(reason) => reason,
            };
            Err(RankError::Device { device: "cuda".to_owned(), reason })
        }
        (_, Ok(found)) => {
            let why = format!("only {found} CUDA devices for {num_workers} workers");
            Ok((cpu, format!("{cpu_words}: {why}")))
        }
        (_, Err(reason)) => Ok((cpu, format!("{cpu_words}: {reason}"))),
    }
}
