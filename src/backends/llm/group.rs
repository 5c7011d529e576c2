//! The workers of one model: started together, lost together.

use std::sync::Arc;
use std::time::Duration;

use engine::{EngineConfig, StepPlan, plan};
use ipc::{Doorbell, Prefix, Received, RecvError, RingReceiver, RingSender};
use worker::{Agents, FromAgent, FromWorker, ShmName, ToAgent, ToWorker, WorkerId, WorkerSpec};

use super::config::LlmConfig;

/// How long a plan may wait for a worker to take plans before it; longer means that the worker hangs.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);

/// Why workers are gone or useless, in words for the log and for clients.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{reason}")]
pub(crate) struct Lost {
    pub(crate) reason: String,
    pub(crate) kind: LostKind,
}

/// What may help after a loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LostKind {
    /// A fault of the worker's own, or silence.
    Failed,
    /// A signal ended it: the same may go well the next time, even its first load.
    BySignal,
    /// Its rank has ended: only a new world helps.
    RankEnded,
}

impl Lost {
    pub(crate) fn new(reason: String) -> Self {
        Self { reason, kind: LostKind::Failed }
    }
}

/// One start of a model's workers. Dropping it ends them.
pub(crate) struct Group {
    agents: Arc<Agents>,
    instance: u64,
    links: Vec<Option<Link>>,
    /// Where the threads of each worker are, once they were asked.
    stacks: Vec<Option<String>>,
    bytes: Vec<u8>,
}

struct Link {
    plans: RingSender,
    outputs: RingReceiver,
}

impl Group {
    /// Tells the agents of ranks `0..tp_size` to start a worker each; `listener` hears how it goes.
    pub(crate) fn start(
        config: &LlmConfig,
        agents: &Arc<Agents>,
        prefix: &Prefix,
        next_step: u64,
        listener: impl Fn(FromAgent) + Send + 'static,
    ) -> Self {
        let instance = agents.new_instance(listener);
        let name = format!("{}_{instance}_group", std::process::id());
        let group_region = ShmName { prefix: prefix.to_string(), name };
        let spec = WorkerSpec { group_region, ..spec(config, next_step) };
        let links = (0..config.tp_size).map(|_| None).collect();
        let stacks = vec![None; config.tp_size as usize];
        let group = Self { agents: Arc::clone(agents), instance, links, stacks, bytes: Vec::new() };
        for tp_rank in 0..config.tp_size {
            let worker = WorkerId { instance, tp_rank };
            let device = config.device.of_local_rank(tp_rank);
            agents.send(tp_rank, ToAgent::Start(worker, Box::new(WorkerSpec { tp_rank, device, ..spec.clone() })));
        }
        group
    }

    /// Takes an agent's news: opens the rings of a started worker, or tells why one ended.
    pub(crate) fn hear(&mut self, news: FromAgent) -> Result<(), Lost> {
        match news {
            FromAgent::Started { worker, .. } | FromAgent::Ended { worker, .. } | FromAgent::Stacks { worker, .. }
                if worker.instance != self.instance =>
            {
                Ok(())
            }
            FromAgent::Started { worker, plan_ring, output_ring, rank_pid, node, .. } => {
                if rank_pid != std::process::id() && node == this_node() {
                    self.agents.watch_rank(worker.tp_rank, rank_pid);
                }
                let link = Link::open(&plan_ring, &output_ring).map_err(|error| Lost::new(error.to_string()))?;
                self.links[worker.tp_rank as usize] = Some(link);
                Ok(())
            }
            FromAgent::Ended { worker, reason, by_signal, .. } => {
                let words = self.last_words(worker.tp_rank as usize);
                let kind = if by_signal { LostKind::BySignal } else { LostKind::Failed };
                let reason = format!("worker {} ended: {reason}", worker.tp_rank);
                Err(words.unwrap_or(Lost { reason, kind }))
            }
            FromAgent::Stacks { worker, text } => {
                self.stacks[worker.tp_rank as usize] = Some(text);
                Ok(())
            }
            FromAgent::RankEnded { rank, pid } => {
                let reason = format!("rank {rank} (process {pid}) has ended, and the world with it; try again later");
                Err(Lost { reason, kind: LostKind::RankEnded })
            }
        }
    }

    /// Asks every worker where its threads are; answers come as news.
    pub(crate) fn ask_for_stacks(&self) {
        for tp_rank in 0..self.links.len() as u32 {
            self.agents.send(tp_rank, ToAgent::Stacks(WorkerId { instance: self.instance, tp_rank }));
        }
    }

    /// Where the threads of each worker are, as far as known.
    pub(crate) fn stacks(&self) -> &[Option<String>] {
        &self.stacks
    }

    /// Whether every worker runs and its rings are open.
    pub(crate) fn is_linked(&self) -> bool {
        self.links.iter().all(Option::is_some)
    }

    pub(crate) fn num_workers(&self) -> usize {
        self.links.len()
    }

    /// Rung to make [`Group::receive`] return early.
    pub(crate) fn doorbell(&self) -> Doorbell {
        self.links[0].as_ref().expect("a doorbell is asked for once workers are linked").outputs.doorbell()
    }

    /// The same bytes to every worker.
    pub(crate) fn broadcast(&mut self, message: &ToWorker) -> Result<(), Lost> {
        plan::encode(message, &mut self.bytes);
        for (tp_rank, link) in self.links.iter_mut().enumerate() {
            let link = link.as_mut().expect("plans are sent once workers are linked");
            let sent = link.plans.send(&self.bytes, SEND_TIMEOUT);
            sent.map_err(|error| Lost::new(format!("worker {tp_rank} takes no plans: {error}")))?;
        }
        Ok(())
    }

    pub(crate) fn step(&mut self, plan: StepPlan) -> Result<(), Lost> {
        self.broadcast(&ToWorker::Step(plan))
    }

    /// A message of one worker, if there is one within `timeout` and nobody rings before.
    pub(crate) fn receive(&mut self, tp_rank: usize, timeout: Duration) -> Result<Option<FromWorker>, Lost> {
        let Some(link) = &mut self.links[tp_rank] else {
            return Ok(None);
        };
        match link.outputs.recv(&mut self.bytes, timeout) {
            Ok(Received::Message) => {}
            Ok(_) => return Ok(None),
            // Its agent will say why; until then there is nothing to hear.
            Err(RecvError::PeerGone { .. }) => {
                std::thread::sleep(Duration::from_millis(1));
                return Ok(None);
            }
            Err(error) => return Err(Lost::new(format!("worker {tp_rank} cannot be heard: {error}"))),
        }
        match plan::decode(&self.bytes) {
            Ok(FromWorker::Failed { message }) => Err(Lost::new(format!("worker {tp_rank}: {message}"))),
            Ok(message) => Ok(Some(message)),
            Err(error) => Err(Lost::new(format!("worker {tp_rank} cannot be understood: {error}"))),
        }
    }

    /// What a worker that ended said of it, if it could.
    fn last_words(&mut self, tp_rank: usize) -> Option<Lost> {
        loop {
            match self.receive(tp_rank, Duration::ZERO) {
                Ok(Some(_)) => {}
                Ok(None) => return None,
                Err(words) => return Some(words),
            }
        }
    }

    /// Ends the workers: asks them first when `kindly`.
    pub(crate) fn end(&self, kindly: bool) {
        for tp_rank in 0..self.links.len() as u32 {
            let worker = WorkerId { instance: self.instance, tp_rank };
            self.agents.send(tp_rank, if kindly { ToAgent::Stop(worker) } else { ToAgent::Kill(worker) });
        }
    }
}

fn this_node() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

impl Drop for Group {
    fn drop(&mut self) {
        self.end(false);
        self.agents.forget(self.instance);
    }
}

impl Link {
    fn open(plan_ring: &ShmName, output_ring: &ShmName) -> Result<Self, ipc::IpcError> {
        Ok(Self {
            plans: RingSender::open(&plan_ring.prefix.parse()?, &plan_ring.name)?,
            outputs: RingReceiver::open(&output_ring.prefix.parse()?, &output_ring.name)?,
        })
    }
}

fn spec(config: &LlmConfig, next_step: u64) -> WorkerSpec {
    WorkerSpec {
        model: config.name.clone(),
        checkpoint: config.checkpoint.clone(),
        device: config.device,
        tp_rank: 0,
        tp_size: config.tp_size,
        group_region: ShmName::default(),
        plan_ring: ShmName::default(),
        output_ring: ShmName::default(),
        ring_bytes: ring_bytes(&config.engine),
        max_step_tokens: config.engine.max_step_tokens,
        max_rows: config.engine.max_rows,
        max_sequence_len: config.engine.max_sequence_len,
        block_size: config.engine.block_size,
        kv_memory: config.kv_memory,
        next_step,
        collective_timeout: config.step_timeout,
        library_dirs: config.library_dirs.clone(),
        cache_dir: config.cache_dir.clone(),
    }
}

/// Candidates that a row of a beam search returns at most, and the bytes of one.
const MAX_CANDIDATES_BYTES: usize = 256 * 16;

/// Twice the largest plan or output, so that one can be written while another is read.
fn ring_bytes(config: &EngineConfig) -> usize {
    2 * config.max_plan_bytes().max(config.max_rows * MAX_CANDIDATES_BYTES)
}
