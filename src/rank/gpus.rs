//! Metrics of the GPUs of this node, from NVIDIA's management library, which needs no device context.

use front::{Family, FamilyKind, Sample};
use nvml_wrapper::{Device, Nvml};

/// The loaded library.
pub(crate) struct Gpus(Nvml);

/// One metric of a GPU: name, help, kind, and value if the GPU supports it.
type Metric = (&'static str, &'static str, FamilyKind, fn(&Device<'_>) -> Option<f64>);

const METRICS: [Metric; 6] = [
    ("nv_gpu_utilization", "GPU utilization rate [0.0 - 1.0)", FamilyKind::Gauge, |gpu| {
        Some(f64::from(gpu.utilization_rates().ok()?.gpu) / 100.0)
    }),
    ("nv_gpu_memory_total_bytes", "GPU total memory, in bytes", FamilyKind::Gauge, |gpu| {
        Some(gpu.memory_info().ok()?.total as f64)
    }),
    ("nv_gpu_memory_used_bytes", "GPU used memory, in bytes", FamilyKind::Gauge, |gpu| {
        Some(gpu.memory_info().ok()?.used as f64)
    }),
    ("nv_gpu_power_usage", "GPU power usage in watts", FamilyKind::Gauge, |gpu| {
        Some(f64::from(gpu.power_usage().ok()?) / 1e3)
    }),
    ("nv_gpu_power_limit", "GPU power management limit in watts", FamilyKind::Gauge, |gpu| {
        Some(f64::from(gpu.enforced_power_limit().ok()?) / 1e3)
    }),
    (
        "nv_energy_consumption",
        "GPU energy consumption in joules since the driver was loaded",
        FamilyKind::Counter,
        |gpu| Some(gpu.total_energy_consumption().ok()? as f64 / 1e3),
    ),
];

impl Gpus {
    /// `None` without the library or the driver.
    pub(crate) fn find() -> Option<Self> {
        match Nvml::init() {
            Ok(library) => Some(Self(library)),
            Err(error) => {
                tracing::debug!("no metrics of GPUs: {error}");
                None
            }
        }
    }

    /// The current values. Metrics that a GPU does not support are left out.
    pub(crate) fn families(&self) -> Vec<Family> {
        let devices: Vec<(String, Device<'_>)> = (0..self.0.device_count().unwrap_or(0))
            .filter_map(|index| self.0.device_by_index(index).ok())
            .filter_map(|gpu| Some((gpu.uuid().ok()?, gpu)))
            .collect();
        let family = |&(name, help, kind, value): &Metric| {
            let sample = |(uuid, gpu): &(String, Device<'_>)| {
                Some(Sample::new(vec![("gpu_uuid".into(), uuid.clone())], value(gpu)?))
            };
            Family { name, help, kind, samples: devices.iter().filter_map(sample).collect() }
        };
        METRICS.iter().map(family).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_gpu_of_this_machine_has_metrics_of_its_memory() {
        let Some(gpus) = Gpus::find() else {
            println!("skipped: no CUDA device");
            return;
        };
        let families = gpus.families();
        let of = |name: &str| &families.iter().find(|family| family.name == name).unwrap().samples;
        let (total, used) = (of("nv_gpu_memory_total_bytes"), of("nv_gpu_memory_used_bytes"));
        assert!(!total.is_empty() && total.len() == used.len());
        for (total, used) in total.iter().zip(used) {
            assert!(total.labels[0].1.starts_with("GPU-"), "{total:?}");
            assert!(used.value > 0.0 && used.value <= total.value, "{used:?} of {total:?}");
        }
    }
}
