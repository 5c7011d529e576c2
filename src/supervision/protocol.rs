//! The protocol between rank 0 and a worker: a spec at start, then messages in two rings.
//!
//! ```text
//! rank 0 ── ToWorker ──► plan ring of every worker
//! rank 0 ◄─ FromWorker ─ output ring of every worker   (tokens from the first worker of the last stage only)
//! ```

use std::path::PathBuf;
use std::time::Duration;

use engine::{AdapterId, SampleMask, SequenceId, StepOutput, StepPlan};
use serde::{Deserialize, Serialize};
pub use settings::{DeviceDrafter, KvCacheType, WeightPrecision};

/// The device that a worker computes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeviceChoice {
    /// The CPU.
    Cpu {
        /// Number of threads of the worker.
        threads: usize,
        /// Core of the first thread, as an index into the cores that the process may use; the other threads get the next ones. `None`:
        /// threads are not pinned.
        first_core: Option<usize>,
    },
    /// A CUDA device.
    Cuda {
        /// Ordinal among the devices that the process can see.
        ordinal: usize,
    },
}

impl DeviceChoice {
    /// The device of the node's worker `local_rank`, where `self` is the device of worker 0.
    pub fn of_local_rank(self, local_rank: u32) -> Self {
        match self {
            DeviceChoice::Cpu { threads, first_core } => {
                DeviceChoice::Cpu { threads, first_core: first_core.map(|first| first + local_rank as usize * threads) }
            }
            DeviceChoice::Cuda { ordinal } => DeviceChoice::Cuda { ordinal: ordinal + local_rank as usize },
        }
    }
}

/// Name of a ring or region in shared memory: `/dev/shm/<prefix><name>`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ShmName {
    /// Prefix of the rank that created it.
    pub prefix: String,
    /// Name under that prefix.
    pub name: String,
}

/// Memory that a rank holds and passes to a worker, and to the one that replaces it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PassedMemory {
    /// Names it among all of the rank; see [`Agents::lease_host_memory`](crate::Agents::lease_host_memory).
    pub id: u64,
    /// Its descriptor in the worker, which the rank sets.
    pub descriptor: i32,
}

/// The configuration of a worker process, which it reads as JSON from standard input.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkerSpec {
    /// Model name, for the process title and logs.
    pub model: String,
    /// Hugging Face checkpoint directory.
    pub checkpoint: PathBuf,
    /// Settings that the operator of the world chooses.
    pub settings: WorkerSettings,
    /// Number of the rank that starts it.
    pub rank: u32,
    /// Number of workers of the model on this node, other replicas included.
    pub num_local_workers: usize,
    /// Rank in the tensor-parallel group.
    pub tp_rank: u32,
    /// Size of the tensor-parallel group.
    pub tp_size: u32,
    /// Pipeline stage, which determines the layers of this worker.
    pub stage: u32,
    /// Number of pipeline stages, each of one tensor-parallel group.
    pub num_stages: u32,
    /// Parts of the tensor-parallel group that have different experts.
    pub expert_groups: u32,
    /// `[num_stages * tp_size]` node of each worker of the model, in the order of stages.
    pub nodes: Vec<u32>,
    /// `[nodes]` host names, for messages.
    pub node_names: Vec<String>,
    /// [`fingerprint`](crate::fingerprint) of the checkpoint on rank 0's node; `None` in a world of one node.
    pub checkpoint_fingerprint: Option<Vec<u8>>,
    /// The same of the checkpoint of the draft model; `None` without one.
    pub draft_fingerprint: Option<Vec<u8>>,
    /// Shared-memory region of the tensor-parallel group; unused in a group of one.
    pub group_region: ShmName,
    /// Host memory of `settings.kv_host_memory_bytes` that outlives the worker; `None` if there are no such bytes.
    pub host_memory: Option<PassedMemory>,
    /// Ring of [`ToWorker`] messages, created by this worker's rank.
    pub plan_ring: ShmName,
    /// Ring of [`FromWorker`] messages, created by this worker's rank.
    pub output_ring: ShmName,
    /// Capacity of each ring in bytes, at least that of the largest message.
    pub ring_bytes: usize,
    /// Most tokens in a step.
    pub max_step_tokens: usize,
    /// Most rows in a step.
    pub max_rows: usize,
    /// Most draft tokens that a row verifies in a step.
    pub max_drafts: usize,
    /// What guesses these drafts, if rank 0 does not.
    pub drafter: Option<DeviceDrafter>,
    /// Slots for the weights of adapters; 0 if the model takes none.
    pub max_adapters: usize,
    /// Largest rank of an adapter.
    pub max_adapter_rank: usize,
    /// Longest sequence in tokens.
    pub max_sequence_len: usize,
    /// Positions in a KV block.
    pub block_size: usize,
    /// Memory for the KV cache.
    pub kv_memory: KvMemory,
    /// The number of the first plan.
    pub next_step: u64,
}

/// Settings of a worker that are the same for all workers of a model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkerSettings {
    /// The device to compute on.
    pub device: DeviceChoice,
    /// The network between the nodes: an interface, or an address with its prefix length. `None`: any.
    pub network: Option<String>,
    /// Storage of the weights of linear layers. Only CPUs use it; other devices store them as the checkpoint has them.
    pub weight_precision: WeightPrecision,
    /// Whether the tokens of a request must not depend on what runs beside it. They never do on CPUs.
    pub batch_invariant: bool,
    /// The type of keys and values.
    pub kv_cache_type: KvCacheType,
    /// Bytes of host memory of each worker for KV blocks and recurrent states that are evicted from the device; 0 for none.
    pub kv_host_memory_bytes: u64,
    /// Whether these bytes are the default, and so an upper limit: a worker without room uses none. With a size that was set it fails.
    pub kv_host_memory_is_share: bool,
    /// Duration of a step after which its workers count as hung. A worker waits this long for its group in a collective operation.
    pub step_timeout: Duration,
    /// Whether the model can sleep. Memory of a GPU is then taken in a way that can give it back for a time.
    pub sleep_mode: bool,
    /// Directories that are searched first for NVIDIA's libraries.
    pub library_dirs: Vec<PathBuf>,
    /// Directory that keeps measurements between starts.
    pub cache_dir: Option<PathBuf>,
}

impl WorkerSpec {
    /// Index among all workers of the model.
    pub fn index(&self) -> usize {
        (self.stage * self.tp_size + self.tp_rank) as usize
    }

    /// Whether the model's workers are on more than one node.
    pub fn spans_nodes(&self) -> bool {
        self.nodes.iter().any(|&node| node != self.nodes[0])
    }

    /// Whether this worker sends the tokens to rank 0. The first of the last stage does.
    pub fn reports(&self) -> bool {
        self.tp_rank == 0 && self.stage + 1 == self.num_stages
    }
}

/// How much memory the KV cache takes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub enum KvMemory {
    /// A share, in (0, 1], of the memory that is free after weights and workspace are allocated.
    FreeFraction(f64),
    /// Room for this number of positions.
    Tokens(u64),
}

/// Rank 0 to a worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[allow(clippy::large_enum_variant)] // Nearly every message is a step.
pub enum ToWorker {
    /// Allocate the KV cache. Workers may have room for different numbers of blocks, so rank 0 chooses one number for all.
    Configure {
        /// Number of blocks, each of which spans all layers.
        num_blocks: usize,
        /// Number of slots for recurrent states; 0 if the model has none.
        num_states: usize,
        /// Number of slots in host memory for evicted blocks.
        num_host_blocks: usize,
        /// The same for evicted snapshots of recurrent states.
        num_host_states: usize,
    },
    /// The bytes of every worker's [`FromWorker::Exchange`], in the order of workers.
    Exchanged {
        /// `[workers]`.
        all: Vec<Vec<u8>>,
    },
    /// Part of the weights of an adapter. All parts come in order, before the plan that puts it into a slot.
    Adapter(AdapterPiece),
    /// Run a step.
    Step(StepPlan),
    /// The tokens that samples of a step may choose. One or more follow the step's plan: together they have a mask for each of
    /// its constrained samples, in plan order.
    Masks(Vec<SampleMask>),
    /// Free the memory of the device, with the weights kept in host memory. No step is in flight; [`FromWorker::Slept`] answers.
    Sleep,
    /// Take the memory of the device again, with empty rows and KV blocks. [`FromWorker::Ready`] answers.
    Wake {
        /// The number of the next plan.
        next_step: u64,
    },
    /// End, exit code 0.
    Stop,
}

impl ToWorker {
    /// The name of the kind of message, for errors.
    pub fn name(&self) -> &'static str {
        match self {
            ToWorker::Configure { .. } => "Configure",
            ToWorker::Exchanged { .. } => "Exchanged",
            ToWorker::Adapter(_) => "Adapter",
            ToWorker::Step(_) => "Step",
            ToWorker::Masks(_) => "Masks",
            ToWorker::Sleep => "Sleep",
            ToWorker::Wake { .. } => "Wake",
            ToWorker::Stop => "Stop",
        }
    }
}

/// Most bytes in an [`AdapterPiece`].
pub const MAX_ADAPTER_PIECE: usize = 64 * 1024;

/// Part of the weights of an adapter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AdapterPiece {
    /// The adapter.
    pub adapter: AdapterId,
    /// Bytes of all its parts.
    pub len: u64,
    /// At most [`MAX_ADAPTER_PIECE`].
    pub bytes: Vec<u8>,
}

/// Most logits in a [`LogitsPiece`], so that a ring need not hold a row of a large vocabulary.
pub const MAX_LOGITS_PIECE: usize = 16 * 1024;

/// Most words in [`ToWorker::Masks`] of several samples; a single mask may have more, one bit for each token of a vocabulary.
pub const MAX_MASK_WORDS: usize = 16 * 1024;

/// Part of the raw logits `[V]` at one position of a sequence.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LogitsPiece {
    /// The sequence.
    pub sequence: SequenceId,
    /// The position.
    pub place: LogitsPlace,
    /// The token whose logit is `values[0]`. A row begins with 0, and its pieces come in order.
    pub first_token: u32,
    /// At most [`MAX_LOGITS_PIECE`].
    pub values: Vec<f32>,
}

/// The position that logits belong to. A position that is computed again, after a preemption or a rejected draft, is sent again;
/// the last values are valid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum LogitsPlace {
    /// The logits at this position of the prompt.
    Context(u32),
    /// The logits from which this token of the output was sampled.
    Generation(u32),
}

/// A worker to rank 0.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum FromWorker {
    /// Bytes for the other workers of the model. [`ToWorker::Exchanged`] answers once all workers have sent theirs.
    Exchange {
        /// Opaque to rank 0.
        bytes: Vec<u8>,
    },
    /// Weights and workspace are allocated.
    Loaded {
        /// Bytes of weights.
        weights_bytes: u64,
        /// Bytes of activations and scratch.
        workspace_bytes: u64,
        /// Bytes of one KV block in all layers.
        block_bytes: u64,
        /// KV blocks that fit, and slots for recurrent states beside them.
        fits: [usize; 2],
        /// The same where as many were taken before: with less memory left to others.
        fits_again: [usize; 2],
        /// Bytes of one slot for the recurrent states of a sequence; 0 if the model has none.
        state_bytes: u64,
        /// Whether the worker can use its host memory; always true if the size was set.
        has_host_room: bool,
        /// Whether its host memory has what workers before it have stored there. Else the memory is new.
        has_host_copies: bool,
        /// Phases of the start and their durations, in order.
        phases: Vec<(String, Duration)>,
    },
    /// The KV cache is allocated, at the start or after a sleep: a step can run now.
    Ready {
        /// At the start, bytes of a slot in host memory for a KV block and for a recurrent state; else 0.
        slot_bytes: [u64; 2],
    },
    /// The memory of the device is free, or the worker goes on as before.
    Slept {
        /// Why the worker does not sleep, if it does not.
        refused: Option<String>,
    },
    /// The tokens of a step. Only the worker that [reports](WorkerSpec::reports) sends it.
    Output(StepOutput),
    /// Raw logits that a request wants; sent before the [`FromWorker::Output`] of the step that computed them.
    Logits(LogitsPiece),
    /// The worker ends because of an error.
    Failed {
        /// What, where, and what to do.
        message: String,
    },
}
