//! What a rank and its workers say to each other: a spec at birth, then messages in two rings.
//!
//! ```text
//! rank 0 ── ToWorker ──► plan ring of every worker
//! rank 0 ◄─ FromWorker ─ output ring of every worker   (tokens from the first worker of the last stage only)
//! ```

use std::path::PathBuf;
use std::time::Duration;

use engine::{SequenceId, StepOutput, StepPlan};
use serde::{Deserialize, Serialize};
pub use settings::WeightPrecision;

/// Which device a worker computes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeviceChoice {
    /// The CPU, with so many threads.
    Cpu {
        /// Threads of this worker.
        threads: usize,
        /// Which of the cores that this process may use is the first thread's own, others following; none has one when not given.
        first_core: Option<usize>,
    },
    /// A CUDA device.
    Cuda {
        /// Its ordinal among the devices this process can see.
        ordinal: usize,
    },
}

impl DeviceChoice {
    /// The device of the node's worker number `local_rank`, when this is that of worker 0.
    pub fn of_local_rank(self, local_rank: u32) -> Self {
        match self {
            DeviceChoice::Cpu { threads, first_core } => {
                DeviceChoice::Cpu { threads, first_core: first_core.map(|first| first + local_rank as usize * threads) }
            }
            DeviceChoice::Cuda { ordinal } => DeviceChoice::Cuda { ordinal: ordinal + local_rank as usize },
        }
    }
}

/// A ring or region in shared memory: `/dev/shm/<prefix><name>`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ShmName {
    /// Prefix of the rank that made it.
    pub prefix: String,
    /// Its name under that prefix.
    pub name: String,
}

/// All that a worker process is told before it starts, as JSON on its standard input.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkerSpec {
    /// Model name, for the process title and logs.
    pub model: String,
    /// Hugging Face checkpoint directory.
    pub checkpoint: PathBuf,
    /// What to compute on.
    pub device: DeviceChoice,
    /// The rank that starts it: its number among the workers of the model.
    pub rank: u32,
    /// Workers of the model on this node, those of other replicas included.
    pub num_local_workers: usize,
    /// This worker's place in its tensor-parallel group.
    pub tp_rank: u32,
    /// Workers in the group.
    pub tp_size: u32,
    /// This worker's pipeline stage: which share of the layers it holds.
    pub stage: u32,
    /// Pipeline stages, each of one group.
    pub num_stages: u32,
    /// `[num_stages * tp_size]` node of each worker of the model, stage by stage.
    pub nodes: Vec<u32>,
    /// Host names of nodes, for messages.
    pub node_names: Vec<String>,
    /// What the checkpoint is on rank 0's node, where there are others: [`crate::fingerprint`].
    pub checkpoint_print: Option<Vec<u8>>,
    /// The network that joins the nodes: an interface, or an address with its prefix's length. Any when not given.
    pub network: Option<String>,
    /// Shared-memory region through which the group meets; unused by a worker alone.
    pub group_region: ShmName,
    /// Ring of [`ToWorker`] messages, made by this worker's rank.
    pub plan_ring: ShmName,
    /// Ring of [`FromWorker`] messages, made by this worker's rank.
    pub output_ring: ShmName,
    /// Capacity of each ring: the largest message fits.
    pub ring_bytes: usize,
    /// Most tokens in a step.
    pub max_step_tokens: usize,
    /// Most rows in a step.
    pub max_rows: usize,
    /// Most drafts that a row verifies in a step.
    pub max_drafts: usize,
    /// Longest sequence.
    pub max_sequence_len: usize,
    /// Positions in a KV block.
    pub block_size: usize,
    /// Memory for KV blocks.
    pub kv_memory: KvMemory,
    /// How weights of linear layers are held; a CPU's choice, others hold them as the checkpoint has them.
    pub weight_precision: WeightPrecision,
    /// The number of the first plan to come.
    pub next_step: u64,
    /// How long a worker waits for its group in a collective.
    pub collective_timeout: Duration,
    /// Where NVIDIA's libraries are looked for first.
    pub library_dirs: Vec<PathBuf>,
    /// Where measurements are kept between starts.
    pub cache_dir: Option<PathBuf>,
}

impl WorkerSpec {
    /// This worker's place among all workers of the model.
    pub fn index(&self) -> usize {
        (self.stage * self.tp_size + self.tp_rank) as usize
    }

    /// Whether the model's workers are on more than one node.
    pub fn spans_nodes(&self) -> bool {
        self.nodes.iter().any(|&node| node != self.nodes[0])
    }

    /// Whether this worker tells rank 0 the tokens: the first of the last stage does.
    pub fn reports(&self) -> bool {
        self.tp_rank == 0 && self.stage + 1 == self.num_stages
    }
}

/// How much memory KV blocks may take.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub enum KvMemory {
    /// A share of what is free once weights and workspace stand, in (0, 1].
    FreeFraction(f64),
    /// So many positions.
    Tokens(u64),
}

/// Rank 0 to a worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum ToWorker {
    /// Take the KV blocks; the group's workers may have room for different numbers, so rank 0 names one.
    Configure {
        /// Blocks, in all layers.
        num_blocks: usize,
    },
    /// What every worker gave in a [`FromWorker::Exchange`], in their order.
    Exchanged {
        /// `[workers]`.
        all: Vec<Vec<u8>>,
    },
    /// Run a step.
    Step(StepPlan),
    /// End, exit code 0.
    Stop,
}

/// Most logits in a [`LogitsPiece`]: a ring need not hold a whole row of a large vocabulary.
pub const MAX_LOGITS_PIECE: usize = 16 * 1024;

/// Part of the raw logits `[V]` at one position of a sequence.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LogitsPiece {
    /// Whose.
    pub sequence: SequenceId,
    /// Where in the sequence.
    pub place: LogitsPlace,
    /// The token whose logit is `values[0]`; 0 begins a row, and the pieces of a row come in order.
    pub first_token: u32,
    /// At most [`MAX_LOGITS_PIECE`].
    pub values: Vec<f32>,
}

/// What logits are of. A position that is computed again, after a preemption or a wrong guess, is told again; what was told
/// last counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum LogitsPlace {
    /// The prompt's token at this position.
    Context(u32),
    /// The choice of this token of the output.
    Generation(u32),
}

/// A worker to rank 0.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum FromWorker {
    /// Something that the other workers of the model need to know; answered once all have said theirs.
    Exchange {
        /// Theirs alone to understand.
        bytes: Vec<u8>,
    },
    /// Weights and workspace stand.
    Loaded {
        /// Bytes of weights.
        weights_bytes: u64,
        /// Bytes of activations and scratch.
        workspace_bytes: u64,
        /// Bytes of one KV block in all layers.
        block_bytes: u64,
        /// KV blocks that fit.
        max_blocks: usize,
        /// What took how long, in order.
        phases: Vec<(String, Duration)>,
    },
    /// KV blocks stand: a step can run now.
    Ready,
    /// The tokens of a step; from the first worker of the last stage only.
    Output(StepOutput),
    /// Raw logits that a request asked for, before the [`FromWorker::Output`] of the step that computed them.
    Logits(LogitsPiece),
    /// The worker ends; its last words.
    Failed {
        /// What, where, and what to do.
        message: String,
    },
}
