//! Triton's metrics of the machine: CPU, memory, GPUs.

use std::fs;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use front::{Family, FamilyKind, MetricsSource, Sample};
use ipc::lock;

use crate::gpus::Gpus;

/// Looks at this node when asked, and not again before an interval has passed.
pub(crate) struct HostMetrics {
    interval: Duration,
    gpus: Option<Gpus>,
    has_cpu: bool,
    seen: Mutex<Seen>,
}

struct Seen {
    at: Instant,
    cpu: CpuTime,
    utilization: Option<f64>,
    families: Vec<Family>,
}

/// Time that all cores together have spent since the machine started, in ticks.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct CpuTime {
    busy: u64,
    all: u64,
}

impl HostMetrics {
    /// Metrics of what is wanted and there is.
    pub(crate) fn new(interval: Duration, has_cpu: bool, has_gpus: bool) -> Self {
        let cpu = CpuTime::now().unwrap_or_default();
        // Until a first interval has passed: since the machine started.
        let utilization = cpu.utilization_since(CpuTime::default());
        let seen = Seen { at: Instant::now(), cpu, utilization, families: Vec::new() };
        Self { interval, gpus: has_gpus.then(Gpus::find).flatten(), has_cpu, seen: Mutex::new(seen) }
    }

    fn look(&self, seen: &mut Seen) {
        let mut families = vec![
            gauge("nv_pinned_memory_pool_total_bytes", "Pinned memory pool total memory size, in bytes", Some(0.0)),
            gauge("nv_pinned_memory_pool_used_bytes", "Pinned memory pool used memory size, in bytes", Some(0.0)),
        ];
        families.extend(self.gpus.iter().flat_map(Gpus::families));
        if self.has_cpu {
            let now = CpuTime::now().unwrap_or_default();
            if let Some(used) = now.utilization_since(seen.cpu) {
                (seen.utilization, seen.cpu) = (Some(used), now);
            }
            families.push(gauge("nv_cpu_utilization", "CPU utilization rate [0.0 - 1.0]", seen.utilization));
            families.extend(memory_families());
        }
        (seen.families, seen.at) = (families, Instant::now());
    }
}

impl MetricsSource for HostMetrics {
    fn families(&self) -> Vec<Family> {
        let mut seen = lock(&self.seen);
        if seen.families.is_empty() || seen.at.elapsed() >= self.interval {
            self.look(&mut seen);
        }
        seen.families.clone()
    }
}

impl CpuTime {
    fn now() -> Option<Self> {
        Self::parse(&fs::read_to_string("/proc/stat").ok()?)
    }

    /// The line of all cores: user, nice, system, idle, waiting for disks, and more (proc_stat(5)).
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

/// Memory of the machine, as /proc tells it; nothing where it does not.
fn memory_families() -> Vec<Family> {
    let (total, available) = (meminfo("MemTotal:"), meminfo("MemAvailable:"));
    let used = total.zip(available).map(|(total, available)| total.saturating_sub(available));
    let gauge = |name, help, value: Option<u64>| gauge(name, help, value.map(|bytes| bytes as f64));
    vec![
        gauge("nv_cpu_memory_total_bytes", "CPU total memory (RAM), in bytes", total),
        gauge("nv_cpu_memory_used_bytes", "CPU used memory (RAM), in bytes", used),
    ]
}

/// All memory of the machine in bytes; 16 GiB where nothing tells it.
pub(crate) fn memory_bytes() -> usize {
    meminfo("MemTotal:").and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(16 << 30)
}

/// A line of `/proc/meminfo`, in bytes.
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
    fn a_second_look_within_the_interval_shows_the_first() {
        let host = HostMetrics::new(Duration::from_secs(3600), true, false);
        let first = host.families();
        assert!(first.iter().any(|family| family.name == "nv_cpu_memory_used_bytes" && !family.samples.is_empty()));
        assert_eq!(host.families(), first);
    }
}
