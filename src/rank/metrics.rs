//! Metrics of the backends for Prometheus. LLMs have TensorRT-LLM's metrics and a set for alerts; Python models have their own.

mod tables;

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use backends::llm::{AdapterStatus, LlmFactory, LlmStatus};
use backends::python::PythonFactory;
use front::{Family, FamilyKind, Labels, MetricsSource, Sample};

use self::tables::{HISTOGRAMS, LABELLED, PLAIN};
use crate::control::Vitals;
use crate::startup::Startup;

/// Metrics of all loaded LLMs, read at each scrape.
pub(crate) struct LlmMetrics {
    pub(crate) factory: Arc<LlmFactory>,
    /// What every model needs to be ready.
    pub(crate) vitals: Arc<Vitals>,
}

impl MetricsSource for LlmMetrics {
    fn families(&self) -> Vec<Family> {
        let mut models = self.factory.status();
        let respond = self.vitals.respond();
        models.iter_mut().for_each(|model| model.is_ready &= respond);
        let mut families: Vec<Family> = PLAIN.iter().map(|plain| plain.family(&models)).collect();
        families.extend(LABELLED.iter().map(|labelled| labelled.family(&models)));
        families.extend(HISTOGRAMS.iter().map(|histogram| histogram.family(&models)));
        families.extend(worker_families(&models));
        families.push(startup_family(&models));
        families.push(queue_family(&models));
        families.push(weights_family(&models));
        families.extend(adapter_families(&models));
        families
    }
}

/// Metrics that Python models have created.
pub(crate) struct PythonMetrics(pub(crate) Arc<PythonFactory>);

impl MetricsSource for PythonMetrics {
    fn families(&self) -> Vec<Family> {
        Vec::new()
    }

    fn text(&self) -> String {
        self.0.metrics_text()
    }
}

/// The time that this server needed to start.
pub(crate) struct StartupMetrics(pub(crate) Arc<Startup>);

impl MetricsSource for StartupMetrics {
    fn families(&self) -> Vec<Family> {
        let sample = |(phase, time): (&'static str, f64)| Sample::new(vec![("phase".into(), phase.to_owned())], time);
        vec![Family {
            name: "trireme_startup_seconds",
            help: "Time from the start of rank 0's process until the world had met, models were loaded, requests were taken",
            kind: FamilyKind::Gauge,
            samples: self.0.read().into_iter().map(sample).collect(),
        }]
    }
}

/// Metrics of each worker: readiness, lag, memory.
fn worker_families(models: &[LlmStatus]) -> Vec<Family> {
    let (mut ready, mut lag, mut memory) = (Vec::new(), Vec::new(), Vec::new());
    for model in models {
        for worker in &model.metrics.start.workers {
            let index = worker.index.to_string();
            let mut all = labels(model, Some(("worker", &index)));
            lag.extend(worker.backlog.as_ref().map(|steps| Sample::new(all.clone(), steps.num_messages() as f64)));
            memory.push(Sample::new(all.clone(), worker.memory_bytes as f64));
            all.push(("pid".into(), worker.pid.to_string()));
            all.push(("node".into(), worker.node.clone()));
            all.push(("device".into(), worker.device.clone()));
            ready.push(Sample::new(all, f64::from(u8::from(model.is_ready))));
        }
    }
    vec![
        Family {
            name: "trireme_llm_worker_ready",
            help: "1 for a worker that can run a step now, 0 for one that loads",
            kind: FamilyKind::Gauge,
            samples: ready,
        },
        Family {
            name: "trireme_llm_worker_step_lag",
            help: "Steps sent to a worker of rank 0's node that it has not taken yet",
            kind: FamilyKind::Gauge,
            samples: lag,
        },
        Family {
            name: "trireme_llm_worker_memory_bytes",
            help: "Memory of a worker's device that weights, workspace and KV blocks take",
            kind: FamilyKind::Gauge,
            samples: memory,
        },
    ]
}

fn startup_family(models: &[LlmStatus]) -> Family {
    let samples = models.iter().flat_map(|model| {
        let sample = |(phase, time): &(String, std::time::Duration)| {
            Sample::new(labels(model, Some(("phase", phase))), time.as_secs_f64())
        };
        model.metrics.start.phases.iter().map(sample).collect::<Vec<_>>()
    });
    Family {
        name: "trireme_llm_startup_seconds",
        help: "Time of the last start of the model's workers by phase: weights, load (which holds weights), kv_blocks, total",
        kind: FamilyKind::Gauge,
        samples: samples.collect(),
    }
}

/// The adapters of requests, in the form of vLLM, and what adapters take in host memory. Models that take none have no series.
fn adapter_families(models: &[LlmStatus]) -> Vec<Family> {
    let with_adapters = || models.iter().filter(|model| model.adapters.num_slots > 0);
    let own = |model: &LlmStatus| vec![("model".into(), model.name.clone()), ("version".into(), model.version.clone())];
    let info = |model: &LlmStatus| {
        let AdapterStatus { num_slots, running, waiting, .. } = &model.adapters;
        let mut labels = own(model);
        labels.push(("max_lora".into(), num_slots.to_string()));
        labels.push(("running_lora_adapters".into(), running.join(",")));
        labels.push(("waiting_lora_adapters".into(), waiting.join(",")));
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Sample::new(labels, now.as_secs_f64())
    };
    vec![
        Family {
            name: "vllm:lora_requests_info",
            help: "Adapters that requests in flight use; the value is the present time in seconds since 1970",
            kind: FamilyKind::Gauge,
            samples: with_adapters().map(info).collect(),
        },
        Family {
            name: "trireme_llm_adapters",
            help: "Adapters (LoRA) in host memory",
            kind: FamilyKind::Gauge,
            samples: with_adapters().map(|model| Sample::new(own(model), model.adapters.num_loaded as f64)).collect(),
        },
        Family {
            name: "trireme_llm_adapter_bytes",
            help: "Bytes of the weights of adapters in host memory",
            kind: FamilyKind::Gauge,
            samples: with_adapters().map(|model| Sample::new(own(model), model.adapters.loaded_bytes as f64)).collect(),
        },
    ]
}

/// The queue in front of the replicas of a model. It is empty for a model without replicas, whose engine has a queue.
fn queue_family(models: &[LlmStatus]) -> Family {
    let first = models.iter().filter(|model| model.replica.unwrap_or(0) == 0);
    let sample = |model: &LlmStatus| {
        let own = [("model", model.name.as_str()), ("version", model.version.as_str())];
        let labels = own.into_iter().map(|(name, value)| (name.into(), value.to_owned())).collect();
        Sample::new(labels, model.num_queued as f64)
    };
    Family {
        name: "trireme_llm_requests_queued",
        help: "Sequences in the one queue before the replicas of a model",
        kind: FamilyKind::Gauge,
        samples: first.map(sample).collect(),
    }
}

fn weights_family(models: &[LlmStatus]) -> Family {
    let sample = |model: &LlmStatus| Sample::new(labels(model, Some(("weight_version", &model.weights_version))), 1.0);
    Family {
        name: "trireme_llm_weights_info",
        help: "1, with the version of the weights that the model serves",
        kind: FamilyKind::Gauge,
        samples: models.iter().map(sample).collect(),
    }
}

fn labels(model: &LlmStatus, further: Option<(&'static str, &str)>) -> Labels {
    let replica = model.replica.map(|replica| replica.to_string());
    let own = [("model", model.name.as_str()), ("version", model.version.as_str())];
    let own = own.into_iter().chain(replica.as_deref().map(|replica| ("replica", replica)));
    own.chain(further).map(|(name, value)| (name.into(), value.to_owned())).collect()
}
