//! Chooses the device that workers compute on.

use settings::DeviceKind;
use supervision::DeviceChoice;

use crate::error::RankError;
use crate::hardware::Hardware;

const NO_DRIVER: &str = "no NVIDIA driver: libcuda.so.1 cannot be loaded; install the driver, or start the container with GPUs \
                         (`docker run --gpus all`)";

/// The device of the first worker of a node with `num_workers` workers, and the reason for the log. With `pin`, each
/// CPU thread gets its own core, if there are enough cores and no quota shows that other processes use them.
pub(crate) fn choose(
    hardware: &Hardware,
    device: DeviceKind,
    threads: Option<usize>,
    pin: bool,
    num_workers: usize,
) -> Result<(DeviceChoice, String), RankError> {
    let num_cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = threads.unwrap_or(num_cores / num_workers).max(1);
    let enough = threads * num_workers <= num_cores && (hardware.num_allowed_cores)() == num_cores;
    let cpu = DeviceChoice::Cpu { threads, first_core: (pin && enough).then_some(0) };
    let pinned = match (pin, enough) {
        (true, true) => ", each on a core of its own",
        (true, false) => ", not pinned since rank 0 may not use a whole core for each of the node's",
        (false, _) => "",
    };
    let cpu_words = format!("CPU with {threads} threads a worker{pinned}");
    let cuda = match device {
        DeviceKind::Cpu => return Ok((cpu, format!("{cpu_words}: as requested"))),
        DeviceKind::Auto | DeviceKind::Cuda => (hardware.num_gpus)(),
    };
    match (device, cuda) {
        (_, Ok(found)) if found > 0 && found >= num_workers => {
            Ok((DeviceChoice::Cuda { ordinal: 0 }, format!("CUDA: {found} devices for {num_workers} workers")))
        }
        (DeviceKind::Cuda, found) => {
            let reason = match found {
                Ok(0) => NO_DRIVER.to_owned(),
                Ok(found) => format!("{found} devices for {num_workers} workers; start with `--world_size={found}`"),
                Err(reason) => reason,
            };
            Err(RankError::Device { device: "cuda".to_owned(), reason })
        }
        (_, Ok(0)) => Ok((cpu, format!("{cpu_words}: no NVIDIA driver"))),
        (_, Ok(found)) => {
            let why = format!("only {found} CUDA devices for {num_workers} workers");
            Ok((cpu, format!("{cpu_words}: {why}")))
        }
        (_, Err(reason)) => {
            tracing::warn!("models run on the CPU: {reason}");
            Ok((cpu, format!("{cpu_words}: {reason}")))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use front::{ClientDevices, DeviceMemory};

    use super::*;

    #[derive(Debug)]
    struct NoDevices;

    impl ClientDevices for NoDevices {
        fn open(&self, _handle: &[u8; 64], _device: u64, _bytes: u64) -> Result<Arc<dyn DeviceMemory>, String> {
            Err("no test opens a device".to_owned())
        }
    }

    fn node(num_gpus: fn() -> Result<usize, String>) -> Hardware {
        Hardware {
            num_gpus,
            free_gpu_memory: |_| Err("no test asks for free memory".to_owned()),
            free_cpu_memory: || 0,
            num_allowed_cores: || std::thread::available_parallelism().map_or(1, usize::from),
            nvrtc_version: None,
            client_devices: Arc::new(NoDevices),
            estimate_memory: |_, _, _| unreachable!("no test estimates memory"),
        }
    }

    #[test]
    fn gpus_are_chosen_when_each_worker_gets_one() {
        let chosen = |gpus, kind, workers| choose(&node(gpus), kind, Some(1), false, workers);
        for kind in [DeviceKind::Auto, DeviceKind::Cuda] {
            assert!(matches!(chosen(|| Ok(2), kind, 2), Ok((DeviceChoice::Cuda { ordinal: 0 }, _))), "{kind:?}");
        }
        let (device, why) = chosen(|| Ok(2), DeviceKind::Auto, 3).unwrap();
        assert!(matches!(device, DeviceChoice::Cpu { threads: 1, .. }), "{device:?}");
        assert!(why.ends_with("only 2 CUDA devices for 3 workers"), "{why}");
        let error = chosen(|| Ok(2), DeviceKind::Cuda, 3).unwrap_err().to_string();
        assert!(error.contains("start with `--world_size=2`"), "{error}");
        let error = chosen(|| Err("no kernels".to_owned()), DeviceKind::Cuda, 1).unwrap_err().to_string();
        assert!(error.contains("no kernels"), "{error}");
        let error = chosen(|| Ok(0), DeviceKind::Cuda, 1).unwrap_err().to_string();
        assert!(error.contains("no NVIDIA driver: libcuda.so.1 cannot be loaded"), "{error}");
        let (device, why) = chosen(|| Err("no kernels".to_owned()), DeviceKind::Auto, 1).unwrap();
        assert!(matches!(device, DeviceChoice::Cpu { .. }) && why.ends_with("no kernels"), "{why}");
        assert!(matches!(chosen(|| Ok(2), DeviceKind::Cpu, 1), Ok((DeviceChoice::Cpu { .. }, _))));
    }

    #[test]
    fn threads_are_pinned_only_when_each_has_a_core_of_its_own() {
        let first_core = |hardware: &Hardware, threads| match choose(hardware, DeviceKind::Cpu, Some(threads), true, 1)
        {
            Ok((DeviceChoice::Cpu { first_core, .. }, _)) => first_core,
            other => panic!("{other:?}"),
        };
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        assert_eq!(first_core(&node(|| Ok(0)), cores), Some(0));
        assert_eq!(first_core(&node(|| Ok(0)), cores + 1), None);
        let with_quota = Hardware { num_allowed_cores: || usize::MAX, ..node(|| Ok(0)) };
        assert_eq!(first_core(&with_quota, cores), None);
    }
}
