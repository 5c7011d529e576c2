//! The metrics of a language model, each with the value that it has.

use std::time::{SystemTime, UNIX_EPOCH};

use backends::llm::{FINISH_REASONS, LlmStatus, PRIORITY_LEVELS, STEP_COSTS, STEP_KINDS, STEP_PHASES};
use front::{Family, FamilyKind, Sample};
use serving::HistogramValues;

use super::labels;

/// A metric with one value for each model.
pub(super) struct Plain {
    name: &'static str,
    help: &'static str,
    kind: FamilyKind,
    value: fn(&LlmStatus) -> f64,
}

/// A metric with several values for each model, distinguished by one label.
pub(super) struct Labelled {
    name: &'static str,
    help: &'static str,
    kind: FamilyKind,
    label: &'static str,
    values: fn(&LlmStatus) -> Vec<(&'static str, f64)>,
}

/// Histograms of each model, distinguished by a label if it is not empty.
pub(super) struct Histograms {
    name: &'static str,
    help: &'static str,
    label: &'static str,
    values: fn(&LlmStatus) -> Vec<(&'static str, &HistogramValues)>,
}

const fn gauge(name: &'static str, help: &'static str, value: fn(&LlmStatus) -> f64) -> Plain {
    Plain { name, help, kind: FamilyKind::Gauge, value }
}

const fn counter(name: &'static str, help: &'static str, value: fn(&LlmStatus) -> f64) -> Plain {
    Plain { name, help, kind: FamilyKind::Counter, value }
}

pub(super) const PLAIN: &[Plain] = &[
    gauge("trireme_llm_ready", "1 when a step can run now, or once the model is woken", |model| {
        f64::from(u8::from(model.is_ready))
    }),
    gauge("trireme_llm_sleeping", "1 while the model sleeps: its devices' memory is free", |model| {
        f64::from(u8::from(model.is_sleeping))
    }),
    gauge(
        "trireme_llm_replica_lost",
        "1 for a replica that has lost a rank and will not serve again in this world",
        |model| f64::from(u8::from(model.is_lost)),
    ),
    gauge("trireme_llm_requests_running", "Sequences in the current steps", |model| model.engine.num_running as f64),
    gauge("trireme_llm_requests_waiting", "Sequences in the queue, preempted ones included", |model| {
        model.engine.num_waiting as f64
    }),
    gauge("trireme_llm_requests_max", "Most sequences that run at once", |model| model.max_rows as f64),
    gauge("trireme_llm_kv_blocks", "KV blocks in all", |model| model.engine.num_blocks as f64),
    gauge("trireme_llm_kv_blocks_used", "KV blocks that running sequences use", |model| {
        model.engine.num_blocks_used as f64
    }),
    gauge("trireme_llm_kv_blocks_free", "KV blocks that no sequence uses, cached ones included", |model| {
        (model.engine.num_blocks - model.engine.num_blocks_used) as f64
    }),
    gauge("trireme_llm_kv_blocks_cached", "KV blocks that no sequence uses and whose content can be reused", |model| {
        model.engine.num_blocks_cached as f64
    }),
    gauge("trireme_llm_kv_block_tokens", "Positions in a KV block", |model| model.block_size as f64),
    gauge("trireme_llm_recurrent_states_used", "Recurrent states of running sequences", |model| {
        model.engine.num_states_used as f64
    }),
    gauge(
        "trireme_llm_recurrent_states_cached",
        "Snapshots of recurrent states that later sequences can start from",
        |model| model.engine.num_states_cached as f64,
    ),
    gauge("trireme_llm_steps_in_flight", "Steps planned and not settled", |model| model.engine.num_in_flight as f64),
    counter(
        "trireme_llm_worker_restarts_total",
        "Times the workers of the model were lost and started again",
        |model| model.num_restarts as f64,
    ),
    counter(
        "trireme_llm_preemptions_total",
        "Sequences that gave their KV blocks up and were computed again",
        |model| model.engine.total_preempted as f64,
    ),
    counter("trireme_llm_recoveries_total", "Sequences that went on after their workers were lost", |model| {
        model.engine.total_recovered as f64
    }),
    counter("trireme_llm_steps_total", "Steps planned", |model| model.engine.total_steps as f64),
    counter("trireme_llm_prompt_tokens_total", "Prompt tokens of accepted requests", |model| {
        model.engine.total_prompt_tokens as f64
    }),
    counter("trireme_llm_cached_prompt_tokens_total", "Prompt tokens that the prefix cache had", |model| {
        model.metrics.cached_tokens as f64
    }),
    counter("trireme_llm_reasoning_tokens_total", "Tokens generated as reasoning, in chats", |model| {
        model.metrics.reasoning_tokens as f64
    }),
    counter("trireme_llm_output_tokens_total", "Tokens generated", |model| model.engine.total_output_tokens as f64),
    counter(
        "trireme_llm_discarded_tokens_total",
        "Tokens computed for sequences that had ended, or whose mask was late",
        |model| model.engine.total_discarded_tokens as f64,
    ),
    counter(
        "trireme_llm_late_masks_total",
        "Steps that a constrained sequence sat out because its mask was late",
        |model| model.engine.total_late_masks as f64,
    ),
    counter("trireme_llm_drafted_tokens_total", "Tokens guessed ahead", |model| {
        model.engine.total_drafted_tokens as f64
    }),
    counter("trireme_llm_accepted_draft_tokens_total", "Tokens guessed ahead and right", |model| {
        model.engine.total_accepted_tokens as f64
    }),
    counter(
        "trireme_llm_prefix_cache_lookups_total",
        "Sequences whose prompt was looked for in the prefix cache",
        |model| model.metrics.prefix_lookups as f64,
    ),
    counter(
        "trireme_llm_prefix_cache_hits_total",
        "Sequences that found part of their prompt in the prefix cache",
        |model| model.metrics.prefix_hits as f64,
    ),
    counter("trireme_llm_prefix_cache_reused_blocks_total", "KV blocks found in the prefix cache", |model| {
        model.engine.total_reused_blocks as f64
    }),
    counter(
        "trireme_llm_prefix_cache_host_tokens_total",
        "Prompt tokens that the prefix cache had in host memory; part of trireme_llm_cached_prompt_tokens_total",
        |model| (model.engine.total_host_hit_blocks * model.block_size as u64) as f64,
    ),
    counter(
        "trireme_llm_host_cache_stored_blocks_total",
        "KV blocks copied to host memory when they were evicted",
        |model| model.engine.total_stored_blocks as f64,
    ),
    counter("trireme_llm_host_cache_loaded_blocks_total", "KV blocks copied back from host memory", |model| {
        model.engine.total_loaded_blocks as f64
    }),
    gauge(
        "trireme_llm_host_cache_used_bytes",
        "Host memory that holds evicted KV blocks and recurrent states, of all workers",
        |model| host_bytes(model, [model.engine.num_host_blocks_used, model.engine.num_host_states_used]),
    ),
    gauge(
        "trireme_llm_host_cache_limit_bytes",
        "Host memory for evicted KV blocks and recurrent states, of all workers",
        |model| host_bytes(model, [model.engine.num_host_blocks, model.engine.num_host_states]),
    ),
    counter(
        "trireme_llm_prefix_cache_disk_tokens_total",
        "Prompt tokens that the prefix cache had on disk; part of trireme_llm_prefix_cache_host_tokens_total",
        |model| (model.engine.total_disk_hit_blocks * model.block_size as u64) as f64,
    ),
    counter("trireme_llm_disk_cache_stored_blocks_total", "KV blocks copied from host memory to the disk", |model| {
        model.engine.total_disk_stored_blocks as f64
    }),
    counter("trireme_llm_disk_cache_loaded_blocks_total", "KV blocks copied from the disk to host memory", |model| {
        model.engine.total_disk_loaded_blocks as f64
    }),
    counter(
        "trireme_llm_disk_cache_failed_loads_total",
        "KV blocks and recurrent states on disk that were not what was written there, or could not be read",
        |model| model.engine.total_disk_failed as f64,
    ),
    gauge(
        "trireme_llm_disk_cache_used_bytes",
        "Bytes of files that hold KV blocks and recurrent states, of all workers",
        |model| host_bytes(model, [model.engine.num_disk_blocks_used, model.engine.num_disk_states_used]),
    ),
    gauge(
        "trireme_llm_disk_cache_limit_bytes",
        "Largest size of the files for KV blocks and recurrent states, of all workers; 0 without them, and once one has failed",
        |model| host_bytes(model, [model.engine.num_disk_blocks, model.engine.num_disk_states]),
    ),
    counter("trireme_llm_kv_blocks_allocated_total", "KV blocks allocated", |model| {
        model.engine.total_allocated_blocks as f64
    }),
];

/// Bytes of slots for KV blocks and recurrent states, of all workers.
fn host_bytes(model: &LlmStatus, slots: [usize; 2]) -> f64 {
    slots.iter().zip(model.metrics.start.slot_bytes).map(|(&slots, bytes)| slots as f64 * bytes as f64).sum()
}

pub(super) const LABELLED: &[Labelled] = &[
    Labelled {
        name: "trireme_llm_prefix_cache_saved_seconds_total",
        help: "Seconds of prefill that were not computed, because the prefix cache had the tokens, by where it had them",
        kind: FamilyKind::Counter,
        label: "tier",
        values: |model| ["device", "host", "disk"].into_iter().zip(model.engine.total_saved_seconds).collect(),
    },
    Labelled {
        name: "trireme_llm_sequences_ended_total",
        help: "Sequences by the reason of their end",
        kind: FamilyKind::Counter,
        label: "reason",
        values: |model| FINISH_REASONS.into_iter().zip(model.metrics.ends.map(|count| count as f64)).collect(),
    },
    Labelled {
        name: "nv_trt_llm_request_metrics",
        help: "TRT LLM request metrics",
        kind: FamilyKind::Gauge,
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
        name: "nv_trt_llm_runtime_memory_metrics",
        help: "TRT LLM runtime memory metrics",
        kind: FamilyKind::Gauge,
        label: "memory_type",
        values: |model| {
            let bytes = |on_gpu: bool| {
                let workers = model.metrics.start.workers.iter();
                let its = workers.filter(|worker| worker.device.starts_with("cuda") == on_gpu);
                its.map(|worker| worker.memory_bytes).sum::<u64>() as f64
            };
            vec![("cpu", bytes(false)), ("gpu", bytes(true)), ("pinned", 0.0)]
        },
    },
    Labelled {
        name: "nv_trt_llm_kv_cache_block_metrics",
        help: "TRT LLM KV cache block metrics",
        kind: FamilyKind::Gauge,
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
        kind: FamilyKind::Gauge,
        label: "inflight_batcher_specific_metric",
        values: |model| {
            let engine = &model.engine;
            // Of the last step; zero between steps.
            let context_tokens = if engine.num_in_flight > 0 { model.metrics.context_tokens } else { 0 };
            vec![
                ("total_context_tokens", context_tokens as f64),
                ("generation_requests", (engine.num_running - engine.num_prefilling) as f64),
                ("micro_batch_id", (engine.total_steps % 2) as f64),
                ("paused_requests", engine.total_preempted as f64),
            ]
        },
    },
    Labelled {
        name: "trireme_llm_step_cost_seconds",
        help: "What the scheduler has learned about the time of steps: of any step, and of each token, position and expert in it",
        kind: FamilyKind::Gauge,
        label: "part",
        values: |LlmStatus { engine, .. }| {
            let costs = engine.costs.unwrap_or_default();
            STEP_COSTS.into_iter().zip(costs.values()).collect()
        },
    },
    Labelled {
        name: "nv_trt_llm_general_metrics",
        help: "General TRT LLM metrics",
        kind: FamilyKind::Gauge,
        label: "general_type",
        values: |model| {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            vec![("timestamp", now.as_micros() as f64), ("iteration_counter", model.engine.total_steps as f64)]
        },
    },
];

pub(super) const HISTOGRAMS: &[Histograms] = &[
    Histograms {
        name: "trireme_llm_time_to_first_token_seconds",
        help: "Time from a request's arrival to its first token",
        label: "",
        values: |model| vec![("", &model.metrics.first_token)],
    },
    Histograms {
        name: "trireme_llm_priority_time_to_first_token_seconds",
        help: "Time from a request's arrival to its first token, by its priority level; 0 for models without levels",
        label: "priority",
        values: |model| {
            let all = PRIORITY_LEVELS.into_iter().zip(&model.metrics.first_token_of);
            all.filter(|(level, values)| values.count > 0 || *level == "0").collect()
        },
    },
    Histograms {
        name: "trireme_llm_inter_token_latency_seconds",
        help: "Time between two tokens of a sequence",
        label: "",
        values: |model| vec![("", &model.metrics.inter_token)],
    },
    Histograms {
        name: "trireme_llm_queue_time_seconds",
        help: "Time from a request's arrival until a step had room for it",
        label: "",
        values: |model| vec![("", &model.metrics.queue)],
    },
    Histograms {
        name: "trireme_llm_request_seconds",
        help: "Time from a request's arrival to its end, however it ended",
        label: "",
        values: |model| vec![("", &model.metrics.request)],
    },
    Histograms {
        name: "trireme_llm_step_seconds",
        help: "Time of a step by what it computed: from the step before it, or from its sending to idle workers",
        label: "kind",
        values: |model| STEP_KINDS.into_iter().zip(&model.metrics.steps).collect(),
    },
    Histograms {
        name: "trireme_llm_step_predicted_seconds",
        help: "Time of a step as the scheduler expected it when it planned the step, by what it computed",
        label: "kind",
        values: |model| STEP_KINDS.into_iter().zip(&model.metrics.predicted).collect(),
    },
    Histograms {
        name: "trireme_llm_step_prediction_error_ratio",
        help: "Difference between a step's expected and measured time, as a share of the measured time",
        label: "",
        values: |model| vec![("", &model.metrics.prediction_error)],
    },
    Histograms {
        name: "trireme_llm_step_phase_seconds",
        help: "Time of rank 0 in each phase of a step; wait is for the workers",
        label: "phase",
        values: |model| STEP_PHASES.into_iter().zip(&model.metrics.phases).collect(),
    },
    Histograms {
        name: "nv_llm_input_token_len",
        help: "Number of input tokens of requests",
        label: "response_metric_type",
        values: |model| vec![("total_input_tokens", &model.metrics.input_tokens)],
    },
    Histograms {
        name: "nv_llm_output_token_len",
        help: "Number of output tokens of requests",
        label: "response_metric_type",
        values: |model| vec![("total_output_tokens", &model.metrics.output_tokens)],
    },
];

impl Plain {
    pub(super) fn family(&self, models: &[LlmStatus]) -> Family {
        let sample = |model: &LlmStatus| Sample::new(labels(model, None), (self.value)(model));
        Family { name: self.name, help: self.help, kind: self.kind, samples: models.iter().map(sample).collect() }
    }
}

impl Labelled {
    pub(super) fn family(&self, models: &[LlmStatus]) -> Family {
        let samples = models.iter().flat_map(|model| {
            let sample = |(value, number)| Sample::new(labels(model, Some((self.label, value))), number);
            (self.values)(model).into_iter().map(sample).collect::<Vec<_>>()
        });
        Family { name: self.name, help: self.help, kind: self.kind, samples: samples.collect() }
    }
}

impl Histograms {
    pub(super) fn family(&self, models: &[LlmStatus]) -> Family {
        let samples = models.iter().flat_map(|model| {
            let of_one = |(value, histogram)| {
                let further = (!self.label.is_empty()).then_some((self.label, value));
                Sample::of_histogram(&labels(model, further), histogram)
            };
            (self.values)(model).into_iter().flat_map(of_one).collect::<Vec<_>>()
        });
        Family { name: self.name, help: self.help, kind: FamilyKind::Histogram, samples: samples.collect() }
    }
}
