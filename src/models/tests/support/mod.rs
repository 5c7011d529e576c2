//! Runs a model on the CPU device without an engine: packs steps by hand, in one process.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use device::cpu::{CpuConfig, CpuDevice, GroupConfig, Peers, WeightPrecision};
use device::{Estimator, FileExchange};
use engine::{RevisedRow, RowId, SampledToken, SamplingParams, TokenId};
use models::{Adapter, Config, Model, ModelError};
use ops::{
    Device, NO_ADAPTER, PipelineStage, SampleInput, StepInputs, StepLimits, TOKEN_ON_DEVICE, Target, TensorParallel,
};

pub const BLOCK_SIZE: usize = 16;
const MAX_LEN: usize = 128;
/// How long a worker waits for another one.
const TIMEOUT: Duration = Duration::from_secs(20);
pub const MAX_ROWS: usize = 32;
const MAX_BLOCKS: usize = MAX_LEN / BLOCK_SIZE;

/// A model on one worker of a group.
pub struct Runner {
    device: CpuDevice,
    model: Box<dyn Model<CpuDevice>>,
    /// Of the KV groups.
    windows: Vec<Option<usize>>,
    step: u64,
    /// How many tokens are guessed behind each new one.
    pub num_guesses: u32,
    /// Of decode steps, what guesses runs behind each of this number.
    pub steps_between_guesses: u64,
    /// The guesses of each row, in the order of its new tokens.
    guesses: Vec<Vec<Vec<u32>>>,
    /// How tokens reach all stages of a pipeline.
    stage: Stage,
}

/// A place in a pipeline of two stages.
enum Stage {
    Whole,
    First(Receiver<Vec<SampledToken>>),
    Last(Sender<Vec<SampledToken>>),
}

/// The work of one row.
#[derive(Clone)]
pub struct Sequence {
    pub prompt: Vec<u32>,
    pub num_tokens: usize,
    pub sampling: SamplingParams,
    pub chunk: usize, // prompt tokens per step
    pub start: usize, // joins at this step
    pub adapter: Option<u32>,
}

/// A sequence that is running.
struct Progress {
    computed: usize,
    output: Vec<SampledToken>,
}

pub fn golden_dir(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens").join(case)
}

impl Runner {
    pub fn new(case: &str, threads: usize, group: Option<GroupConfig>) -> Self {
        Self::of(&golden_dir(case), threads, group, WeightPrecision::Checkpoint)
    }

    pub fn of(dir: &Path, threads: usize, group: Option<GroupConfig>, precision: WeightPrecision) -> Self {
        let config = Config::from_dir(dir).unwrap().in_precision(precision, Target::Cpu).unwrap();
        Self::with(dir, config, threads, group, precision)
    }

    pub fn with(
        dir: &Path,
        config: Config,
        threads: usize,
        group: Option<GroupConfig>,
        precision: WeightPrecision,
    ) -> Self {
        let limits = Self::limits(&config);
        let mut device = CpuDevice::new(CpuConfig { threads, limits, kv_memory_bytes: None, group }).unwrap();
        device.set_weight_precision(precision);
        Self::on(device, dir, &config).unwrap()
    }

    /// Loads the model to a device.
    fn on(mut device: CpuDevice, dir: &Path, config: &Config) -> Result<Self, ModelError> {
        let model = models::load(dir, config, &mut device)?;
        let spec = model.attention_spec(BLOCK_SIZE, MAX_LEN);
        device.allocate_cache(&spec, spec.kv_windows.len() * MAX_ROWS * MAX_BLOCKS).unwrap();
        if !spec.states.is_empty() {
            device.allocate_states(&spec, MAX_ROWS).unwrap();
        }
        let (windows, guesses) = (spec.kv_windows, vec![Vec::new(); MAX_ROWS]);
        Ok(Self {
            device,
            model,
            windows,
            step: 0,
            num_guesses: 0,
            steps_between_guesses: 1,
            guesses,
            stage: Stage::Whole,
        })
    }

    /// A model of one worker; `None` if it cannot be loaded.
    pub fn try_of(dir: &Path, precision: WeightPrecision) -> Option<Self> {
        let config = Config::from_dir(dir).ok()?;
        let limits = Self::limits(&config);
        let mut device = CpuDevice::new(CpuConfig { threads: 1, limits, kv_memory_bytes: None, group: None }).ok()?;
        device.set_weight_precision(precision);
        Self::on(device, dir, &config).ok()
    }

    fn limits(config: &Config) -> StepLimits {
        StepLimits { max_tokens: 256, max_rows: MAX_ROWS, max_sequence_len: MAX_LEN, vocab_size: config.vocab_size }
    }

    /// Whether some layers have a recurrent state.
    pub fn has_states(&self) -> bool {
        !self.model.attention_spec(BLOCK_SIZE, MAX_LEN).states.is_empty()
    }

    /// Puts an adapter into a slot.
    pub fn set_adapter(&mut self, slot: u32, adapter: &Adapter) {
        self.model.set_adapter(&mut self.device, slot, adapter).unwrap();
    }

    pub fn device(&mut self) -> &mut CpuDevice {
        &mut self.device
    }

    /// Runs all sequences together to their end; sequence `i` has row and blocks of its own.
    pub fn run(&mut self, sequences: &[Sequence]) -> Vec<Vec<SampledToken>> {
        self.run_cached(sequences, 0)
    }

    /// The same, where an earlier run has left keys and values of the first `cached` positions in the blocks.
    pub fn run_cached(&mut self, sequences: &[Sequence], cached: usize) -> Vec<Vec<SampledToken>> {
        let mut progress: Vec<Progress> =
            sequences.iter().map(|_| Progress { computed: cached, output: Vec::new() }).collect();
        for step in 0.. {
            for (row, sequence) in sequences.iter().enumerate().filter(|(_, s)| s.start == step) {
                let prompt: Vec<TokenId> = sequence.prompt.iter().map(|t| TokenId(*t)).collect();
                self.device.join_row(RowId(row as u32), &prompt, prompt.len() as u32, &sequence.sampling).unwrap();
            }
            let inputs = self.pack(sequences, &mut progress, step);
            if inputs.num_rows() == 0 && sequences.iter().all(|s| s.start <= step) {
                break;
            }
            let model = &mut self.model;
            self.device.run_step(&inputs, &mut |device| model.forward(device)).unwrap();
            model.guess(&mut self.device).unwrap();
            for token in self.collect() {
                progress[token.row.0 as usize].output.push(token);
            }
            for (row, guesses) in self.device.take_guesses() {
                self.guesses[row.0 as usize].push(guesses.into_iter().map(|token| token.0).collect());
            }
        }
        progress.into_iter().map(|p| p.output).collect()
    }

    /// The tokens of a step, which the last stage chooses.
    fn collect(&mut self) -> Vec<SampledToken> {
        match &self.stage {
            Stage::Whole => self.device.collect(true).unwrap().unwrap(),
            Stage::Last(others) => {
                let tokens = self.device.collect(true).unwrap().unwrap();
                others.send(tokens.clone()).unwrap();
                tokens
            }
            Stage::First(last) => {
                let tokens = last.recv_timeout(TIMEOUT).expect("the last stage chooses tokens");
                // The next step embeds the last token of each row.
                let added = |sampled: &SampledToken| {
                    let (row, num_kept) = (sampled.row, MAX_LEN as u32);
                    RevisedRow { row, parent: row, num_kept, tokens: vec![sampled.token] }
                };
                self.device.revise(&tokens.iter().map(added).collect::<Vec<_>>(), &[]).unwrap();
                tokens
            }
        }
    }

    /// Takes the guesses of each row in the runs so far, in the order of its new tokens.
    pub fn take_guesses(&mut self) -> Vec<Vec<Vec<u32>>> {
        std::mem::replace(&mut self.guesses, vec![Vec::new(); MAX_ROWS])
    }

    fn pack(&mut self, sequences: &[Sequence], progress: &mut [Progress], step: usize) -> StepInputs {
        self.step += 1;
        let mut inputs = StepInputs { step: self.step, row_starts: vec![0], ..StepInputs::default() };
        inputs.max_blocks = MAX_BLOCKS;
        let prefills: Vec<bool> = sequences.iter().zip(&*progress).map(|(s, p)| p.computed < s.prompt.len()).collect();
        // Prefill rows first, then decodes.
        for prefill in [true, false] {
            for (row, (sequence, p)) in sequences.iter().zip(&mut *progress).enumerate() {
                let left = sequence.prompt.len().saturating_sub(p.computed);
                let done = p.output.len() >= sequence.num_tokens;
                if sequence.start > step || done || prefills[row] != prefill {
                    continue;
                }
                let num_tokens = left.min(sequence.chunk).max(1);
                for position in p.computed..p.computed + num_tokens {
                    inputs.token_ids.push(sequence.prompt.get(position).copied().unwrap_or(TOKEN_ON_DEVICE));
                    inputs.positions.push(position as u32);
                }
                p.computed += num_tokens;
                inputs.rows.push(RowId(row as u32));
                inputs.states.push((MAX_ROWS - 1 - row) as u32);
                inputs.adapters.push(sequence.adapter.unwrap_or(NO_ADAPTER));
                inputs.num_prefill_rows += usize::from(prefill);
                inputs.row_starts.push(inputs.token_ids.len() as u32);
                inputs.context_lens.push(p.computed as u32);
                if p.computed >= sequence.prompt.len() {
                    let token_index = inputs.token_ids.len() as u32 - 1;
                    let num_generated = p.output.len() as u32;
                    inputs.samples.push(SampleInput { row: RowId(row as u32), token_index, num_generated });
                }
            }
        }
        (0..self.windows.len()).for_each(|group| self.pack_tables(group, &mut inputs));
        let is_due = self.step.is_multiple_of(self.steps_between_guesses) || inputs.num_prefill_rows > 0;
        inputs.runs_drafter = self.num_guesses > 0 && is_due;
        if inputs.runs_drafter {
            inputs.guesses = vec![self.num_guesses; inputs.num_rows()];
            inputs.reach = vec![MAX_LEN as u32; inputs.num_rows()];
        }
        inputs
    }

    /// Each row has blocks of its own in each KV group. Blocks that it no longer sees belong to another row.
    fn pack_tables(&self, group: usize, inputs: &mut StepInputs) {
        let block = |row: RowId, index: usize| ((group * MAX_ROWS + row.0 as usize) * MAX_BLOCKS + index) as u32;
        for (row, starts) in inputs.rows.iter().zip(inputs.row_starts.windows(2)) {
            let positions = &inputs.positions[starts[0] as usize..starts[1] as usize];
            let slot = |p: &u32| block(*row, *p as usize / BLOCK_SIZE) * BLOCK_SIZE as u32 + p % BLOCK_SIZE as u32;
            inputs.slots.extend(positions.iter().map(slot));
            let seen = self.windows[group].map_or(0, |window| (positions[0] as usize + 1).saturating_sub(window));
            let other = RowId((row.0 + 1) % MAX_ROWS as u32);
            let owner = |index: usize| if index < seen / BLOCK_SIZE { other } else { *row };
            inputs.block_tables.extend((0..MAX_BLOCKS).map(|index| block(owner(index), index)));
        }
    }
}

/// A prefix and a name of shared memory that no other group has.
fn new_region() -> (ipc::Prefix, String) {
    static GROUPS: AtomicU32 = AtomicU32::new(0);
    let prefix = format!("golden{}_", std::process::id()).parse().unwrap();
    (prefix, format!("g{}", GROUPS.fetch_add(1, Ordering::Relaxed)))
}

/// Runs `job` on both stages of a pipeline, each a thread, with the configuration that `change` makes. Returns what both have returned.
///
/// # Errors
/// When a stage cannot be loaded.
pub fn on_stages<T: PartialEq + Send + std::fmt::Debug>(
    case: &str,
    change: impl Fn(Config) -> Config,
    job: impl Fn(&mut Runner) -> T + Sync,
) -> Result<T, ModelError> {
    let (dir, (prefix, name)) = (golden_dir(case), new_region());
    let config = change(Config::from_dir(&dir).unwrap());
    let place = TensorParallel { rank: 0, size: 1 };
    // Both stages run, or none.
    for index in 0..2 {
        let estimator = Estimator::new(Target::Cpu, place, Runner::limits(&config));
        models::load(&dir, &config, &mut estimator.in_stage(PipelineStage { index, count: 2 }))?;
    }
    let exchange = FileExchange::new(PathBuf::new(), place, TIMEOUT);
    let peers = Peers {
        me: 0,
        num_stages: 2,
        nodes: vec![0, 0],
        addresses: Vec::new(),
        exchange: Arc::new(exchange),
        prefix,
        name,
        timeout: TIMEOUT,
    };
    let worker = |me: u32, stage: Stage| {
        let device_config =
            CpuConfig { threads: 1, limits: Runner::limits(&config), kv_memory_bytes: None, group: None };
        let peers = Peers { me, ..peers.clone() };
        let device = CpuDevice::new_distributed(device_config, &peers, config.hidden_size).unwrap();
        job(&mut Runner { stage, ..Runner::on(device, &dir, &config).unwrap() })
    };
    let (sender, receiver) = channel();
    std::thread::scope(|scope| {
        let last = scope.spawn(|| worker(1, Stage::Last(sender)));
        let first = worker(0, Stage::First(receiver));
        let last = last.join().unwrap();
        assert_eq!(first, last, "{case}: stages differ");
        Ok(first)
    })
}

/// Runs `job` on every worker of a group of `size`, each a thread, and returns what the first returned.
/// All must return the same.
pub fn on_group<T: PartialEq + Send + std::fmt::Debug>(
    case: &str,
    size: u32,
    job: impl Fn(&mut Runner) -> T + Sync,
) -> T {
    on_parts(case, size, 1, job)
}

/// The same, where the workers form `parts` with different experts.
pub fn on_parts<T: PartialEq + Send + std::fmt::Debug>(
    case: &str,
    size: u32,
    parts: u32,
    job: impl Fn(&mut Runner) -> T + Sync,
) -> T {
    on_changed(case, size, |config| config.in_expert_groups(parts), job)
}

/// The same with another configuration.
pub fn on_changed<T: PartialEq + Send + std::fmt::Debug>(
    case: &str,
    size: u32,
    change: impl Fn(Config) -> Config + Sync,
    job: impl Fn(&mut Runner) -> T + Sync,
) -> T {
    let (prefix, name) = new_region();
    let group = |rank| GroupConfig {
        prefix: prefix.clone(),
        name: name.clone(),
        tensor_parallel: TensorParallel { rank, size },
        timeout: TIMEOUT,
        spin: false,
    };
    let worker = |rank| {
        let group = (size > 1).then(|| group(rank));
        let dir = golden_dir(case);
        let config = change(Config::from_dir(&dir).unwrap());
        job(&mut Runner::with(&dir, config, 1, group, WeightPrecision::Checkpoint))
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..size).map(|rank| scope.spawn(move || worker(rank))).collect();
        let mut results = workers.into_iter().map(|worker| worker.join().unwrap());
        let first = results.next().unwrap();
        assert!(results.all(|other| other == first), "workers of a group of {size} differ");
        first
    })
}
