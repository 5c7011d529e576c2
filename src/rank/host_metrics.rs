//! Triton's metrics of the machine: CPU, memory, GPUs.

use std::fs;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use front::{Family, FamilyKind, MetricsSource, Sample};
use ipc::lock;

use crate::gpus::Gpus;

/// Metrics of this node, read on demand and cached for an interval.
pub(crate) struct HostMetrics {
    interval: Duration,
    gpus: Option<Gpus>,
    has_cpu: bool,
    cached: Mutex<Cached>,
}

struct Cached {
    at: Instant,
    cpu: CpuTime,
    utilization: Option<f64>,
    families: Vec<Family>,
}

/// CPU time of all cores together since the machine started, in ticks.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct CpuTime {
    busy: u64,
    all: u64,
}

impl HostMetrics {
    /// Metrics that are updated after `interval`: of CPU and memory with `has_cpu`, of GPUs with `has_gpus`.
    pub(crate) fn new(interval: Duration, has_cpu: bool, has_gpus: bool) -> Self {
        let cpu = CpuTime::now().unwrap_or_default();
        // In the first interval: the mean since the machine started.
        let utilization = cpu.utilization_since(CpuTime::default());
        let cached = Cached { at: Instant::now(), cpu, utilization, families: Vec::new() };
        Self { interval, gpus: has_gpus.then(Gpus::find).flatten(), has_cpu, cached: Mutex::new(cached) }
    }

    fn update(&self, cached: &mut Cached) {
        let mut families = vec![
            gauge("nv_pinned_memory_pool_total_bytes", "Pinned memory pool total memory size, in bytes", Some(0.0)),
            gauge("nv_pinned_memory_pool_used_bytes", "Pinned memory pool used memory size, in bytes", Some(0.0)),
        ];
        families.extend(self.gpus.iter().flat_map(Gpus::families));
        if self.has_cpu {
            let now = CpuTime::now().unwrap_or_default();
            if let Some(used) = now.utilization_since(cached.cpu) {
                (cached.utilization, cached.cpu) = (Some(used), now);
            }
            families.push(gauge("nv_cpu_utilization", "CPU utilization rate [0.0 - 1.0]", cached.utilization));
            families.extend(memory_families());
        }
        (cached.families, cached.at) = (families, Instant::now());
    }
}

impl MetricsSource for HostMetrics {
    fn families(&self) -> Vec<Family> {
        let mut cached = lock(&self.cached);
        if cached.families.is_empty() || cached.at.elapsed() >= self.interval {
            self.update(&mut cached);
        }
        cached.families.clone()
    }
}

impl CpuTime {
    fn now() -> Option<Self> {
        Self::parse(&fs::read_to_string("/proc/stat").ok()?)
    }

    /// Parses the line of all cores: user, nice, system, idle, iowait and more (proc_stat(5)).
    fn parse(stat: &str) -> Option<Self> {
        let line = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
        let ticks: Vec<u64> = line.split_whitespace().map_while(|field| field.parse().ok()).take(8).collect();
        let idle = ticks.get(3)? + ticks.get(4)?;
        let all = ticks.iter().sum();
        Some(Self { busy: all - idle, all })
    }

    /// `None` when no tick has passed.
    fn utilization_since(self, before: Self) -> Option<f64> {
        let all = self.all.checked_sub(before.all).filter(|&ticks| ticks > 0)?;
        Some(self.busy.saturating_sub(before.busy) as f64 / all as f64)
    }
}

fn gauge(name: &'static str, help: &'static str, value: Option<f64>) -> Family {
    let samples = value.into_iter().map(|value| Sample::new(Vec::new(), value)).collect();
    Family { name, help, kind: FamilyKind::Gauge, samples }
}

/// Metrics of the memory of the machine, from `/proc`; without samples where `/proc` has no value.
fn memory_families() -> Vec<Family> {
    let (total, available) = (meminfo("MemTotal:"), meminfo("MemAvailable:"));
    let used = total.zip(available).map(|(total, available)| total.saturating_sub(available));
    let gauge = |name, help, value: Option<u64>| gauge(name, help, value.map(|bytes| bytes as f64));
    vec![
        gauge("nv_cpu_memory_total_bytes", "CPU total memory (RAM), in bytes", total),
        gauge("nv_cpu_memory_used_bytes", "CPU used memory (RAM), in bytes", used),
    ]
}

/// Total memory of the machine in bytes; 16 GiB where it is unknown.
pub(crate) fn memory_bytes() -> usize {
    meminfo("MemTotal:").and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(16 << 30)
}

/// The value of a line of `/proc/meminfo`, in bytes.
fn meminfo(key: &str) -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn utilization_is_the_share_of_ticks_that_were_not_idle() {
        let before = CpuTime::parse("cpu  100 0 50 800 50 0 0 0 0 0\ncpu0 1 2 3 4\n").unwrap();
        assert_eq!(before, CpuTime { busy: 150, all: 1000 });
        let now = CpuTime::parse("cpu  160 10 60 910 60 0 0 0 7 7\n").unwrap();
        assert_eq!(now.utilization_since(before), Some(0.4));
        assert_eq!(before.utilization_since(before), None);
        assert_eq!(CpuTime::parse("intr 1 2 3\n"), None);
    }

    #[test]
    fn metrics_are_cached_within_the_interval() {
        let host = HostMetrics::new(Duration::from_secs(3600), true, false);
        let first = host.families();
        assert!(first.iter().any(|family| family.name == "nv_cpu_memory_used_bytes" && !family.samples.is_empty()));
        assert_eq!(host.families(), first);
    }
}
