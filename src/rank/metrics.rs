//! What backends tell Prometheus. LLMs: TensorRT-LLM's own names, and a set worth alerting on. Python models: what they made.

use std::sync::Arc;

use backends::llm::{LlmFactory, LlmStatus};
use backends::python::PythonFactory;
use front::{Family, FamilyKind, Labels, MetricsSource, Sample};

/// Reads every loaded LLM at each scrape.
pub(crate) struct LlmMetrics(pub(crate) Arc<LlmFactory>);

impl MetricsSource for LlmMetrics {
    fn families(&self) -> Vec<Family> {
        let models = self.0.status();
        let mut families: Vec<Family> = PLAIN.iter().map(|plain| plain.family(&models)).collect();
        families.extend(LABELLED.iter().map(|labelled| labelled.family(&models)));
        families
    }
}

/// Metrics that Python models have made.
pub(crate) struct PythonMetrics(pub(crate) Arc<PythonFactory>);

impl MetricsSource for PythonMetrics {
    fn families(&self) -> Vec<Family> {
        Vec::new()
    }

    fn text(&self) -> String {
        self.0.metrics_text()
    }
}

/// One value a model.
struct Plain {
    name: &'static str,
    help: &'static str,
    kind: FamilyKind,
    value: fn(&LlmStatus) -> f64,
}

/// Several values a model, told apart by one label, as TensorRT-LLM's backend reports them.
struct Labelled {
    name: &'static str,
    help: &'static str,
    label: &'static str,
    values: fn(&LlmStatus) -> Vec<(&'static str, f64)>,
}

const PLAIN: &[Plain] = &[
    Plain {
        name: "trireme_llm_ready",
        help: "1 when a step can run now",
        kind: FamilyKind::Gauge,
        value: |model| f64::from(u8::from(model.is_ready)),
    },
    Plain {
        name: "trireme_llm_worker_restarts_total",
        help: "Times the workers of the model were lost and started again",
        kind: FamilyKind::Counter,
        value: |model| model.num_restarts as f64,
    },
    Plain {
        name: "trireme_llm_requests_running",
        help: "Sequences in the current steps",
        kind: FamilyKind::Gauge,
        value: |model| model.engine.num_running as f64,
    },
    Plain {
        name: "trireme_llm_requests_waiting",
        help: "Sequences in the queue, preempted ones included",
        kind: FamilyKind::Gauge,
        value: |model| model.engine.num_waiting as f64,
    },
    Plain {
        name: "trireme_llm_kv_blocks_used",
        help: "KV blocks that running sequences use",
        kind: FamilyKind::Gauge,
        value: |model| model.engine.num_blocks_used as f64,
    },
    Plain {
        name: "trireme_llm_kv_blocks",
        help: "KV blocks in all",
        kind: FamilyKind::Gauge,
        value: |model| model.engine.num_blocks as f64,
    },
    Plain {
        name: "trireme_llm_preemptions_total",
        help: "Sequences that gave their KV blocks up and were computed again",
        kind: FamilyKind::Counter,
        value: |model| model.engine.total_preempted as f64,
    },
    Plain {
        name: "trireme_llm_steps_total",
        help: "Steps planned",
        kind: FamilyKind::Counter,
        value: |model| model.engine.total_steps as f64,
    },
    Plain {
        name: "trireme_llm_prompt_tokens_total",
        help: "Prompt tokens of accepted requests",
        kind: FamilyKind::Counter,
        value: |model| model.engine.total_prompt_tokens as f64,
    },
    Plain {
        name: "trireme_llm_output_tokens_total",
        help: "Tokens generated",
        kind: FamilyKind::Counter,
        value: |model| model.engine.total_output_tokens as f64,
    },
    Plain {
        name: "trireme_llm_prefix_cache_reused_blocks_total",
        help: "KV blocks found in the prefix cache",
        kind: FamilyKind::Counter,
        value: |model| model.engine.total_reused_blocks as f64,
    },
];

const LABELLED: &[Labelled] = &[
    Labelled {
        name: "nv_trt_llm_request_metrics",
        help: "TRT LLM request metrics",
        label: "request_type",
        values: |model| {
            let engine = &model.engine;
            vec![
                ("active", (engine.num_running + engine.num_waiting) as f64),
                ("max", model.max_rows as f64),
                ("scheduled", engine.num_running as f64),
                ("context", engine.num_prefilling as f64),
                ("waiting", engine.num_waiting as f64),
            ]
        },
    },
    Labelled {
        name: "nv_trt_llm_kv_cache_block_metrics",
        help: "TRT LLM KV cache block metrics",
        label: "kv_cache_block_type",
        values: |model| {
            let engine = &model.engine;
            vec![
                ("max", engine.num_blocks as f64),
                ("free", (engine.num_blocks - engine.num_blocks_used) as f64),
                ("used", engine.num_blocks_used as f64),
                ("tokens_per", model.block_size as f64),
                ("reused", engine.total_reused_blocks as f64),
                ("fraction", engine.num_blocks_used as f64 / engine.num_blocks.max(1) as f64),
            ]
        },
    },
    Labelled {
        name: "nv_trt_llm_inflight_batcher_metrics",
        help: "TRT LLM inflight_batcher-specific metrics",
        label: "inflight_batcher_specific_metric",
        values: |model| {
            let engine = &model.engine;
            vec![
                ("generation_requests", (engine.num_running - engine.num_prefilling) as f64),
                ("paused_requests", engine.total_preempted as f64),
            ]
        },
    },
    Labelled {
        name: "nv_trt_llm_general_metrics",
        help: "General TRT LLM metrics",
        label: "general_type",
        values: |model| vec![("iteration_counter", model.engine.total_steps as f64)],
    },
];

impl Plain {
    fn family(&self, models: &[LlmStatus]) -> Family {
        let sample = |model: &LlmStatus| Sample::new(labels(model, None), (self.value)(model));
        Family { name: self.name, help: self.help, kind: self.kind, samples: models.iter().map(sample).collect() }
    }
}

impl Labelled {
    fn family(&self, models: &[LlmStatus]) -> Family {
        let samples = models.iter().flat_map(|model| {
            let sample = |(value, number)| Sample::new(labels(model, Some((self.label, value))), number);
            (self.values)(model).into_iter().map(sample).collect::<Vec<_>>()
        });
        Family { name: self.name, help: self.help, kind: FamilyKind::Gauge, samples: samples.collect() }
    }
}

fn labels(model: &LlmStatus, further: Option<(&'static str, &'static str)>) -> Labels {
    let own = [("model", model.name.as_str()), ("version", model.version.as_str())];
    own.into_iter().chain(further).map(|(name, value)| (name.into(), value.to_owned())).collect()
}
