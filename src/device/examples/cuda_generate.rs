//! Generates greedily from fixed prompts of a checkpoint on one GPU or a group, and writes tokens and log-probabilities as JSON
//! for `scripts/check_gpu_model.py` to compare with transformers.
//!
//! `cuda_generate CHECKPOINT OUT.json [--tp-size N --rank R --exchange DIR] [--tokens N] [--simple] [--no-graphs]
//! [--trials NAMES]`
//!
//! Prompts join two at a time while earlier ones decode, in chunks of at most 96 tokens, so that every kind of step runs:
//! prefill with and without a cached prefix, mixed steps, recorded decodes.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use device::cuda::{CudaConfig, CudaDevice, FileExchange, Trials};
use device::{Device, SampleInput, StepInputs, StepLimits, TOKEN_ON_DEVICE, TensorParallel};
use engine::{RowId, SampledToken, SamplingParams, TokenId};
use serde_json::json;

const PROMPT_LENS: [usize; 10] = [1, 3, 17, 64, 130, 300, 500, 97, 33, 2];
const CHUNK: usize = 96;
const BLOCK: usize = 16;
const MAX_LEN: usize = 640;
const TOP: u32 = 20;

struct Row {
    prompt: Vec<u32>,
    computed: usize,
    queued: usize,
    outputs: Vec<SampledToken>,
}

struct Options {
    checkpoint: PathBuf,
    out: PathBuf,
    tp: TensorParallel,
    exchange: PathBuf,
    tokens: usize,
    simple: bool,
    graphs: bool,
    trials: Trials,
}

fn options() -> Options {
    let arguments: Vec<String> = std::env::args().collect();
    let value = |name: &str| arguments.iter().position(|a| a == name).and_then(|at| arguments.get(at + 1).cloned());
    let number = |name: &str, default: usize| value(name).and_then(|v| v.parse().ok()).unwrap_or(default);
    assert!(arguments.len() >= 3, "usage: cuda_generate CHECKPOINT OUT.json [--tp-size N --rank R --exchange DIR]");
    Options {
        checkpoint: arguments[1].clone().into(),
        out: arguments[2].clone().into(),
        tp: TensorParallel { rank: number("--rank", 0) as u32, size: number("--tp-size", 1) as u32 },
        exchange: value("--exchange").unwrap_or_default().into(),
        tokens: number("--tokens", 24),
        simple: arguments.iter().any(|a| a == "--simple"),
        graphs: !arguments.iter().any(|a| a == "--no-graphs"),
        trials: value("--trials").unwrap_or_default().parse().expect("names of kernels on trial"),
    }
}

fn prompt(index: usize, length: usize, vocab: usize) -> Vec<u32> {
    let mut state = index as u64 + 1;
    let mut next = || {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        3 + (state >> 33) as u32 % (vocab as u32 - 3)
    };
    (0..length).map(|_| next()).collect()
}

/// The next step over all rows that have joined: chunks of prompts first, then one token of each decoding row.
fn plan(step: u64, rows: &mut [Row], tokens: usize) -> (StepInputs, Vec<usize>) {
    let max_blocks = MAX_LEN / BLOCK;
    let mut inputs = StepInputs::default();
    inputs.clear(step);
    inputs.max_blocks = max_blocks;
    let mut sampling = Vec::new();
    let was_decoding: Vec<bool> = rows.iter().map(|row| row.computed >= row.prompt.len()).collect();
    for decoding in [false, true] {
        for (index, row) in rows.iter_mut().enumerate() {
            if was_decoding[index] != decoding || row.queued == tokens {
                continue;
            }
            let count = if decoding { 1 } else { CHUNK.min(row.prompt.len() - row.computed) };
            for position in row.computed..row.computed + count {
                inputs.token_ids.push(row.prompt.get(position).copied().unwrap_or(TOKEN_ON_DEVICE));
                inputs.positions.push(position as u32);
                // Blocks in an order that is not the sequence's.
                let block = index * max_blocks + (position / BLOCK * 7) % max_blocks;
                inputs.slots.push((block * BLOCK + position % BLOCK) as u32);
            }
            row.computed += count;
            inputs.rows.push(RowId(index as u32));
            inputs.num_prefill_rows += usize::from(!decoding);
            inputs.row_starts.push(inputs.token_ids.len() as u32);
            inputs.context_lens.push(row.computed as u32);
            inputs.block_tables.extend((0..max_blocks).map(|b| (index * max_blocks + b * 7 % max_blocks) as u32));
            if row.computed >= row.prompt.len() {
                let token_index = inputs.token_ids.len() as u32 - 1;
                inputs.samples.push(SampleInput {
                    row: RowId(index as u32),
                    token_index,
                    num_generated: row.queued as u32,
                });
                row.queued += 1;
                sampling.push(index);
            }
        }
    }
    (inputs, sampling)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let options = options();
    let config = models::Config::from_dir(&options.checkpoint)?;
    let limits = StepLimits {
        max_tokens: 1024,
        max_rows: PROMPT_LENS.len(),
        max_sequence_len: MAX_LEN,
        vocab_size: config.vocab_size,
    };
    let library_dirs =
        std::env::var_os("TRIREME_CUDA_LIBS").map(|d| std::env::split_paths(&d).collect()).unwrap_or_default();
    let mut device = CudaDevice::new(CudaConfig {
        tensor_parallel: options.tp,
        exchange: Some(Arc::new(FileExchange::new(options.exchange.clone(), options.tp, Duration::from_secs(60)))),
        library_dirs,
        use_fast_kernels: !options.simple,
        use_graphs: options.graphs,
        trials: options.trials,
        ..CudaConfig::new(options.tp.rank as usize, limits)
    })?;
    let mut model = models::load(&options.checkpoint, &config, &mut device)?;
    let spec = model.attention_spec(BLOCK);
    let needed = PROMPT_LENS.len() * MAX_LEN / BLOCK;
    assert!(device.memory_plan(&spec)?.max_blocks >= needed, "too little memory");
    device.allocate_cache(&spec, needed)?;

    let mut rows: Vec<Row> = Vec::new();
    let mut waiting: VecDeque<usize> = PROMPT_LENS.into();
    let mut in_flight: VecDeque<Vec<usize>> = VecDeque::new();
    let sampling = SamplingParams { num_logprobs: Some(TOP), ..SamplingParams::default() };
    for step in 0.. {
        for length in waiting.drain(..waiting.len().min(2)) {
            let prompt = prompt(rows.len(), length, config.vocab_size);
            let tokens: Vec<TokenId> = prompt.iter().map(|&t| TokenId(t)).collect();
            device.join_row(RowId(rows.len() as u32), &tokens, length as u32, &sampling)?;
            rows.push(Row { prompt, computed: 0, queued: 0, outputs: Vec::new() });
        }
        let (inputs, sampled) = plan(step, &mut rows, options.tokens);
        let is_done = inputs.rows.is_empty();
        if !is_done {
            device.run_step(&inputs, &mut |device| model.forward(device))?;
            in_flight.push_back(sampled);
        }
        if in_flight.len() > 1 || is_done {
            let Some(sampled) = in_flight.pop_front() else { break };
            let outputs = device.collect(true)?.ok_or("a queued step gives its tokens")?;
            for (index, output) in sampled.into_iter().zip(outputs) {
                rows[index].outputs.push(output);
            }
        }
    }
    let sequences: Vec<_> = rows
        .iter()
        .map(|row| {
            let tokens: Vec<u32> = row.outputs.iter().map(|o| o.token.0).collect();
            let top: Vec<Vec<(u32, f32)>> =
                row.outputs.iter().map(|o| o.top.iter().map(|(t, p)| (t.0, *p)).collect()).collect();
            json!({ "prompt": row.prompt, "tokens": tokens, "top": top })
        })
        .collect();
    std::fs::write(&options.out, serde_json::to_vec(&json!({ "sequences": sequences }))?)?;
    Ok(())
}
