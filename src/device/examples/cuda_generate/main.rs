//! Generates greedily from fixed prompts on one GPU, a group, or pipeline stages. Writes tokens and log-probabilities
//! as JSON, which `scripts/check_gpu_model.py` compares with transformers.
//!
//! `cuda_generate CHECKPOINT OUT.json [--tp-size N --rank R [--ep N]] [--stages N --stage I] [--exchange DIR] [--tokens N] [--simple]
//! [--no-graphs] [--logits] [--masks] [--drafts PLAIN.json] [--guesses N [--eagle3 DIR | --draft-model DIR]]
//! [--kv-cache bf16|fp8|int8] [--adapters DIR,DIR…] [--batch-invariant] [--alone] [--chunk N] [--again PLAIN.json]`
//!
//! With `--ep`, experts are divided among N parts of the group, as the parameter `ep` of a model does.
//! Prompts join two at a time while earlier ones decode, in chunks of at most 96 tokens, so that every kind of step
//! runs: prefill with and without a cached prefix, mixed steps, recorded decodes. With `--alone`, each joins when the one before has
//! ended. With `--again`, rows join with the first tokens of an earlier run, which are computed again, as after a preemption. With
//! `--batch-invariant`, these options, `--chunk` (a multiple of 64) and `--drafts` change no bit of the output. With `--logits`, log-probabilities
//! are computed from the raw logits that steps report. With `--masks`, every step waits for masks, which allow all tokens.
//! With `--drafts`, rows verify right and wrong drafts: the tokens of an earlier run, some of them changed. With `--guesses`, the
//! model's MTP head, an EAGLE-3 head or a draft model guesses so many tokens behind each new one, which are written, too
//! (`scripts/check_gpu_guesses.py`), and every second step verifies them instead. If the model has recurrent states, one is copied to another slot before each step. With `--adapters`, folders that PEFT has saved, rows have them in turn, and then none; slots are filled before the step in which their
//! first row joins, while others run, and at first with another adapter.

mod states;

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use device::cuda::{CudaConfig, CudaDevice};
use device::{Exchange, FileExchange};
use engine::{RevisedRow, RowId, SampleMask, SampledToken, SamplingParams, TokenId};
use models::{Adapter, AdapterBounds, MAX_ADAPTER_RANK};
use ops::{
    AttentionSpec, Device, KvElements, NO_ADAPTER, PipelineStage, SampleInput, StepInputs, StepLimits, TOKEN_ON_DEVICE,
    Target, TensorParallel,
};
use serde_json::json;
use settings::{DeviceDrafter, WeightPrecision};
use states::Slots;

const PROMPT_LENS: [usize; 10] = [1, 3, 17, 64, 130, 300, 500, 97, 33, 2];
const BLOCK: usize = 16;
const MAX_LEN: usize = 640;
const MAX_BLOCKS: usize = MAX_LEN / BLOCK;
const MAX_DRAFTS: usize = 4;
/// Tokens that are computed again.
const NUM_AGAIN: usize = 9;
const TOP: u32 = 20;

struct Row {
    /// The prompt, and the output if the host knows it.
    tokens: Vec<u32>,
    num_prompt: usize,
    /// Number of positions in the KV blocks.
    computed: usize,
    /// Number of tokens whose choice was queued.
    queued: usize,
    /// The output of an earlier run, used as drafts.
    earlier: Vec<u32>,
    /// Drafts of the step in flight.
    guesses: Vec<u32>,
    /// What the device has guessed behind the newest token, and all that it has guessed, with the number of outputs then.
    guessed: Vec<u32>,
    all_guessed: Vec<(usize, Vec<u32>)>,
    /// Number of positions before the drafts of its last step, whose recurrent state was saved.
    saved_at: usize,
    /// Whether the recurrent state has seen a rejected draft.
    must_restore: bool,
    outputs: Vec<SampledToken>,
}

struct Options {
    checkpoint: PathBuf,
    out: PathBuf,
    tp: TensorParallel,
    /// Parts of the group that have different experts.
    ep: u32,
    stage: PipelineStage,
    exchange: PathBuf,
    tokens: usize,
    simple: bool,
    graphs: bool,
    logits: bool,
    masks: bool,
    drafts: Option<PathBuf>,
    guesses: usize,
    drafter: DeviceDrafter,
    kv_elements: KvElements,
    adapters: Vec<PathBuf>,
    batch_invariant: bool,
    alone: bool,
    /// Tokens of a prompt in a step, at most.
    chunk: usize,
    again: Option<PathBuf>,
}

impl Options {
    /// The adapter of a row, as the index of its folder and its slot: slots are in reverse.
    fn adapter(&self, row: usize) -> Option<(usize, u32)> {
        let index = row % (self.adapters.len() + 1);
        (index < self.adapters.len()).then(|| (index, (self.adapters.len() - 1 - index) as u32))
    }

    /// Whether every step waits for the tokens of the last one, which the host sends.
    fn sends_tokens(&self) -> bool {
        self.drafts.is_some() || self.guesses > 0 || self.masks || self.stage.count > 1
    }
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
        ep: number("--ep", 1) as u32,
        stage: PipelineStage { index: number("--stage", 0) as u32, count: number("--stages", 1) as u32 },
        exchange: value("--exchange").unwrap_or_default().into(),
        tokens: number("--tokens", 24),
        simple: arguments.iter().any(|a| a == "--simple"),
        graphs: !arguments.iter().any(|a| a == "--no-graphs"),
        logits: arguments.iter().any(|a| a == "--logits"),
        masks: arguments.iter().any(|a| a == "--masks"),
        batch_invariant: arguments.iter().any(|a| a == "--batch-invariant"),
        alone: arguments.iter().any(|a| a == "--alone"),
        chunk: number("--chunk", 96),
        again: value("--again").map(PathBuf::from),
        drafts: value("--drafts").map(PathBuf::from),
        guesses: number("--guesses", 0),
        drafter: match (value("--eagle3"), value("--draft-model")) {
            (Some(dir), _) => DeviceDrafter::Eagle3(dir.into()),
            (None, Some(dir)) => DeviceDrafter::Model(dir.into()),
            (None, None) => DeviceDrafter::Mtp,
        },
        adapters: value("--adapters").map(|list| list.split(',').map(PathBuf::from).collect()).unwrap_or_default(),
        kv_elements: match value("--kv-cache").as_deref() {
            None | Some("bf16") => KvElements::Plain,
            Some("fp8") => KvElements::Fp8,
            Some("int8") => KvElements::Int8,
            Some(other) => panic!("--kv-cache {other}; expected bf16, fp8 or int8"),
        },
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

impl Row {
    fn new(index: usize, length: usize, vocab: usize, earlier: Vec<u32>) -> Self {
        let tokens = prompt(index, length, vocab);
        Self {
            tokens,
            num_prompt: length,
            computed: 0,
            queued: 0,
            earlier,
            guesses: Vec::new(),
            guessed: Vec::new(),
            all_guessed: Vec::new(),
            saved_at: 0,
            must_restore: false,
            outputs: Vec::new(),
        }
    }

    /// The same with the first tokens of the earlier run, of which only the numbers are known.
    fn again(mut self, row: u32) -> Self {
        let known = &self.earlier[..NUM_AGAIN.min(self.earlier.len())];
        self.tokens.extend_from_slice(known);
        let output =
            |&token: &u32| SampledToken { row: RowId(row), token: TokenId(token), logprob: None, top: Vec::new() };
        self.outputs = known.iter().map(output).collect();
        self.queued = known.len();
        self
    }

    /// Number of tokens before drafts that a decode computes: several if a recurrent state was restored.
    fn num_known(&self) -> usize {
        self.tokens.len().saturating_sub(self.computed).max(1)
    }

    fn is_prefilling(&self) -> bool {
        self.computed < self.num_prompt
    }

    /// Guesses the tokens after the newest one; every third time one guess is wrong. Every second time the device has guessed them.
    fn guess(&mut self, step: u64, max_output: usize) {
        let known = self.outputs.len();
        let count = (known % (MAX_DRAFTS + 1)).min(max_output.saturating_sub(known + 1));
        let guessed = std::mem::take(&mut self.guessed);
        if step.is_multiple_of(2) && !guessed.is_empty() {
            self.guesses = guessed.into_iter().take(max_output.saturating_sub(known + 1)).collect();
            return;
        }
        self.guesses = self.earlier.iter().skip(known).take(count).copied().collect();
        if known.is_multiple_of(3)
            && let Some(guess) = self.guesses.last_mut()
        {
            *guess = guess.saturating_sub(1);
        }
    }

    /// Processes a step's choices: one token, or those of the drafts up to the first wrong one.
    fn settle(
        &mut self,
        row: u32,
        sampled: Vec<SampledToken>,
        sends_tokens: bool,
        has_states: bool,
    ) -> Option<RevisedRow> {
        let num_kept = self.tokens.len() as u32;
        let guesses = std::mem::take(&mut self.guesses);
        let num_right = guesses.iter().zip(&sampled).take_while(|(guess, found)| **guess == found.token.0).count();
        let accepted = sampled.into_iter().take(1 + num_right);
        let tokens: Vec<TokenId> =
            accepted.inspect(|found| self.outputs.push(found.clone())).map(|f| f.token).collect();
        if !sends_tokens {
            return None;
        }
        self.tokens.extend(tokens.iter().map(|token| token.0));
        // A recurrent state that has seen a rejected draft becomes the one before the drafts.
        self.must_restore = num_right < guesses.len();
        self.computed = if self.must_restore && has_states { self.saved_at } else { self.tokens.len() - 1 };
        self.queued = self.outputs.len();
        Some(RevisedRow { row: RowId(row), parent: RowId(row), num_kept, tokens })
    }
}

/// The kind of work of a row in a step. Steps contain chunks first, then rows that verify, then decodes.
fn kind(row: &Row) -> usize {
    match (row.is_prefilling(), row.guesses.is_empty() && row.num_known() == 1) {
        (true, _) => 0,
        (false, false) => 1,
        (false, true) => 2,
    }
}

/// The next step over all rows that have joined, and the rows that choose tokens with their number.
fn plan(
    step: u64,
    rows: &mut [Row],
    options: &Options,
    windows: &[Option<usize>],
) -> (StepInputs, Vec<(usize, usize)>) {
    let mut inputs = StepInputs::default();
    inputs.clear(step);
    inputs.max_blocks = MAX_BLOCKS;
    let mut sampling = Vec::new();
    if options.drafts.is_some() || options.guesses > 0 {
        rows.iter_mut().filter(|row| !row.is_prefilling()).for_each(|row| row.guess(step, options.tokens));
    }
    let kinds: Vec<usize> = rows.iter().map(kind).collect();
    for wanted in 0..3 {
        for (index, row) in rows.iter_mut().enumerate() {
            if kinds[index] == wanted && row.queued < options.tokens {
                add_row(&mut inputs, index, row, (wanted, options.chunk), &mut sampling);
            }
        }
        if options.batch_invariant && wanted == 0 {
            inputs.num_prompt_rows = Some(inputs.rows.len());
        }
    }
    windows.iter().enumerate().for_each(|(group, &window)| add_tables(&mut inputs, group, window));
    if !options.adapters.is_empty() {
        let slot = |row: &RowId| options.adapter(row.0 as usize).map_or(NO_ADAPTER, |(_, slot)| slot);
        inputs.adapters = inputs.rows.iter().map(slot).collect();
    }
    if options.guesses > 0 {
        let of_row = |row: &RowId| sampling.iter().any(|&(index, _)| index == row.0 as usize);
        inputs.runs_drafter = true;
        inputs.guesses = inputs.rows.iter().map(|row| if of_row(row) { options.guesses as u32 } else { 0 }).collect();
        let reach = |&len: &u32| (len as usize + options.guesses).next_multiple_of(BLOCK).min(MAX_LEN) as u32;
        inputs.reach = inputs.context_lens.iter().map(reach).collect();
    }
    if options.logits {
        inputs.logits = inputs.samples.iter().map(|sample| sample.token_index).collect();
    }
    (inputs, sampling)
}

/// Adds slots and block tables of a KV group. Each row has blocks of its own in each group. Blocks before the window
/// are those of another row, so that a device that uses them chooses other tokens.
fn add_tables(inputs: &mut StepInputs, group: usize, window: Option<usize>) {
    // The order of the blocks differs from that of the positions.
    let block = |row: usize, index: usize| (group * PROMPT_LENS.len() + row) * MAX_BLOCKS + (index * 7) % MAX_BLOCKS;
    for (row, starts) in inputs.rows.iter().map(|row| row.0 as usize).zip(inputs.row_starts.windows(2)) {
        let positions = &inputs.positions[starts[0] as usize..starts[1] as usize];
        let slot = |&p: &u32| (block(row, p as usize / BLOCK) * BLOCK + p as usize % BLOCK) as u32;
        inputs.slots.extend(positions.iter().map(slot));
        let first_seen = window.map_or(0, |window| (positions[0] as usize + 1).saturating_sub(window) / BLOCK);
        let owner = |index: usize| if index < first_seen { (row + 1) % PROMPT_LENS.len() } else { row };
        inputs.block_tables.extend((0..MAX_BLOCKS).map(|index| block(owner(index), index) as u32));
    }
}

fn add_row(
    inputs: &mut StepInputs,
    index: usize,
    row: &mut Row,
    (kind, chunk): (usize, usize),
    sampling: &mut Vec<(usize, usize)>,
) {
    let count = if kind == 0 { chunk.min(row.num_prompt - row.computed) } else { row.num_known() + row.guesses.len() };
    row.saved_at = row.computed + count - row.guesses.len();
    let first_guess = row.computed + count - row.guesses.len();
    for position in row.computed..row.computed + count {
        let guess = position.checked_sub(first_guess).map(|at| row.guesses[at]);
        let known = row.tokens.get(position).copied();
        inputs.token_ids.push(guess.or(known).unwrap_or(TOKEN_ON_DEVICE));
        inputs.positions.push(position as u32);
    }
    row.computed += count;
    inputs.rows.push(RowId(index as u32));
    inputs.num_prefill_rows += usize::from(kind < 2);
    inputs.row_starts.push(inputs.token_ids.len() as u32);
    inputs.context_lens.push(row.computed as u32);
    if row.computed < row.tokens.len() {
        return;
    }
    let num_samples = 1 + row.guesses.len();
    for sample in 0..num_samples {
        inputs.samples.push(SampleInput {
            row: RowId(index as u32),
            token_index: (inputs.token_ids.len() - num_samples + sample) as u32,
            num_generated: (row.queued + sample) as u32,
        });
    }
    row.queued += num_samples;
    sampling.push((index, num_samples));
}

/// The likeliest tokens under raw logits, as the device reports them.
fn likeliest(logits: &[f32]) -> Vec<(TokenId, f32)> {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let total = logits.iter().map(|&x| f64::from(x - most).exp()).sum::<f64>().ln() + f64::from(most);
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    order.truncate(TOP as usize);
    order.into_iter().map(|token| (TokenId(token as u32), (f64::from(logits[token]) - total) as f32)).collect()
}

/// Shares the tokens of the last stage with all stages.
fn share(exchange: &FileExchange, tokens: Vec<SampledToken>, rows: &[(usize, usize)]) -> Vec<SampledToken> {
    let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.token.0.to_le_bytes()).collect();
    let all = exchange.gather(&bytes).expect("the other stages take part");
    let sent = all.last().expect("there is a stage").chunks_exact(4);
    if !tokens.is_empty() {
        return tokens;
    }
    let rows = rows.iter().flat_map(|&(row, count)| std::iter::repeat_n(RowId(row as u32), count));
    let token = |bytes: &[u8]| TokenId(u32::from_le_bytes(bytes.try_into().expect("four bytes")));
    rows.zip(sent).map(|(row, t)| SampledToken { row, token: token(t), logprob: None, top: Vec::new() }).collect()
}

fn exchange(folder: PathBuf, place: TensorParallel) -> Result<Arc<FileExchange>, Box<dyn std::error::Error>> {
    if place.size > 1 {
        std::fs::create_dir_all(&folder)?;
    }
    Ok(Arc::new(FileExchange::new(folder, place, Duration::from_secs(60))))
}

/// The output of an earlier run for each prompt.
fn earlier(path: Option<&PathBuf>) -> Result<Vec<Vec<u32>>, Box<dyn std::error::Error>> {
    let Some(path) = path else { return Ok(vec![Vec::new(); PROMPT_LENS.len()]) };
    let json: serde_json::Value = serde_json::from_slice(&std::fs::read(path)?)?;
    let tokens = |sequence: &serde_json::Value| serde_json::from_value(sequence["tokens"].clone());
    let sequences = json["sequences"].as_array().ok_or("the earlier run has no sequences")?;
    Ok(sequences.iter().map(tokens).collect::<Result<_, _>>()?)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let options = options();
    let mut config = models::Config::from_dir(&options.checkpoint)?.in_expert_groups(options.ep);
    if options.guesses > 0 {
        config = config.with_drafter(&options.drafter, WeightPrecision::Checkpoint, Target::Cuda)?;
    }
    let limits = StepLimits {
        max_tokens: 1024,
        // Of rows with drafts, as many positions become decodes of their own: those drafts, and before them tokens that are known again.
        max_rows: PROMPT_LENS.len()
            * match (options.guesses > 0, options.batch_invariant) {
                (_, true) => 2 * (MAX_DRAFTS + 1),
                (true, false) => 8,
                (false, false) => 1,
            },
        max_sequence_len: MAX_LEN,
        vocab_size: config.vocab_size,
    };
    let library_dirs =
        std::env::var_os("TRIREME_CUDA_LIBS").map(|d| std::env::split_paths(&d).collect()).unwrap_or_default();
    let (tp, stage) = (options.tp, options.stage);
    let across = TensorParallel { rank: stage.index, size: stage.count };
    let stage_exchange = exchange(options.exchange.join(format!("place{}", tp.rank)), across)?;
    let mut device = CudaDevice::new(CudaConfig {
        tensor_parallel: tp,
        exchange: Some(exchange(options.exchange.join(format!("stage{}", stage.index)), tp)?),
        stage,
        stage_exchange: Some(stage_exchange.clone()),
        library_dirs,
        use_fast_kernels: !options.simple,
        use_graphs: options.graphs,
        batch_invariant: options.batch_invariant,
        max_drafts: MAX_DRAFTS.max(options.guesses),
        ..CudaConfig::new((stage.index * tp.size + tp.rank) as usize, limits)
    })?;
    let mut model = models::load(&options.checkpoint, &config, &mut device)?;
    let spec = AttentionSpec { kv_elements: options.kv_elements, ..model.attention_spec(BLOCK, MAX_LEN) };
    let windows = spec.kv_windows.clone();
    let needed = windows.len() * PROMPT_LENS.len() * MAX_BLOCKS;
    assert!(device.memory_plan(&spec)?.max_blocks >= needed, "too little memory");
    device.allocate_cache(&spec, needed)?;
    let mut slots = (!spec.states.is_empty()).then(|| Slots::new(PROMPT_LENS.len()));
    if let Some(slots) = &slots {
        device.allocate_states(&spec, slots.count())?;
    }

    let bounds = AdapterBounds { max_rank: MAX_ADAPTER_RANK, max_bytes: u64::MAX };
    let adapters =
        options.adapters.iter().map(|dir| Adapter::read(dir, &config, bounds)).collect::<Result<Vec<_>, _>>()?;
    if !adapters.is_empty() {
        model.allocate_adapters(&mut device, adapters.len(), MAX_ADAPTER_RANK)?;
    }

    let (mut rows, earlier) = (Vec::<Row>::new(), earlier(options.drafts.as_ref().or(options.again.as_ref()))?);
    let mut waiting: VecDeque<usize> = PROMPT_LENS.into();
    let mut in_flight: VecDeque<Vec<(usize, usize)>> = VecDeque::new();
    let sampling = SamplingParams { num_logprobs: Some(TOP), ..SamplingParams::default() };
    let max_in_flight = if options.sends_tokens() { 0 } else { 1 };
    for step in 0.. {
        let has_ended = rows.iter().all(|row| row.queued >= options.tokens);
        let num_joining = if options.alone { usize::from(has_ended) } else { 2 };
        for length in waiting.drain(..waiting.len().min(num_joining)) {
            let row = Row::new(rows.len(), length, config.vocab_size, earlier[rows.len()].clone());
            let row = if options.again.is_some() { row.again(rows.len() as u32) } else { row };
            let tokens: Vec<TokenId> = row.tokens.iter().map(|&t| TokenId(t)).collect();
            if let Some((index, slot)) = options.adapter(rows.len()).filter(|_| rows.len() < adapters.len()) {
                model.set_adapter(&mut device, slot, &adapters[adapters.len() - 1 - index])?;
                model.set_adapter(&mut device, slot, &adapters[index])?;
            }
            device.join_row(RowId(rows.len() as u32), &tokens, length as u32, &sampling)?;
            rows.push(row);
        }
        let (mut inputs, sampled) = plan(step, &mut rows, &options, &windows);
        let is_done = inputs.rows.is_empty();
        if !is_done {
            if let Some(slots) = &mut slots {
                let restored = (0..rows.len()).filter(|&row| std::mem::take(&mut rows[row].must_restore));
                let restored: Vec<_> = restored.map(|row| slots.restored(row)).collect();
                device.copy_states(&restored)?;
                device.copy_states(&[slots.rotate(step)])?;
                inputs.states = inputs.rows.iter().map(|row| slots.of_rows[row.0 as usize]).collect();
                for (index, starts) in inputs.row_starts.windows(2).enumerate() {
                    let row = inputs.rows[index].0 as usize;
                    let num_drafts = rows[row].guesses.len() as u32;
                    if num_drafts > 0 {
                        let saved = [index as u32, starts[1] - starts[0] - num_drafts, slots.before_drafts[row]];
                        inputs.saved_states.push(saved);
                    }
                }
            }
            if options.masks {
                inputs.masked = (0..inputs.samples.len() as u32).collect();
            }
            device.run_step(&inputs, &mut |device| model.forward(device))?;
            if !inputs.masked.is_empty() {
                let words = vec![u32::MAX; config.vocab_size.div_ceil(32)];
                let mask = |&sample: &u32| SampleMask { step, sample, words: words.clone() };
                device.choose(&inputs.masked.iter().map(mask).collect::<Vec<_>>())?;
            }
            model.guess(&mut device)?;
            in_flight.push_back(sampled);
        }
        while in_flight.len() > max_in_flight || (is_done && !in_flight.is_empty()) {
            let sampled = in_flight.pop_front().ok_or("a step is in flight")?;
            let mut outputs = device.collect(true)?.ok_or("a queued step gives its tokens")?;
            let guessed = device.take_guesses();
            for (output, logits) in outputs.iter_mut().zip(device.take_logits()) {
                output.top = likeliest(&logits);
            }
            if stage.count > 1 {
                outputs = share(&stage_exchange, outputs, &sampled);
            }
            let mut outputs = outputs.into_iter();
            for (index, count) in sampled {
                let choices = outputs.by_ref().take(count).collect();
                if let Some(revised) =
                    rows[index].settle(index as u32, choices, options.sends_tokens(), slots.is_some())
                {
                    device.revise(&[revised], &[])?;
                }
            }
            for (row, tokens) in guessed {
                let row = &mut rows[row.0 as usize];
                row.guessed = tokens.iter().map(|token| token.0).collect();
                row.all_guessed.push((row.outputs.len(), row.guessed.clone()));
            }
        }
        if is_done {
            break;
        }
    }
    let sequences: Vec<_> = rows
        .iter()
        .enumerate()
        .map(|(index, row)| {
            let adapter = options.adapter(index).map(|(index, _)| &options.adapters[index]);
            let tokens: Vec<u32> = row.outputs.iter().map(|o| o.token.0).collect();
            let top: Vec<Vec<(u32, f32)>> =
                row.outputs.iter().map(|o| o.top.iter().map(|(t, p)| (t.0, *p)).collect()).collect();
            let (prompt, guesses) = (&row.tokens[..row.num_prompt], &row.all_guessed);
            json!({ "prompt": prompt, "tokens": tokens, "top": top, "adapter": adapter, "guesses": guesses })
        })
        .collect();
    std::fs::write(&options.out, serde_json::to_vec(&json!({ "sequences": sequences }))?)?;
    Ok(())
}
