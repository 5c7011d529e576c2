//! The workers of one replica. They start together, and the loss of one ends all.

mod link;
mod loss;
mod worker_spec;

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use engine::{Adapter, StepPlan, plan};
use ipc::{Doorbell, Prefix, Received, RecvError};
use supervision::{
    AdapterPiece, Agents, DeviceChoice, FromAgent, FromWorker, HostMemoryLease, MAX_ADAPTER_PIECE, Nodes, PassedMemory,
    RelayedWorker, ShmName, ToAgent, ToWorker, WorkerId, WorkerSettings, WorkerSpec,
};

use super::config::LlmConfig;
use super::metrics::WorkerStatus;
use link::Link;
pub(crate) use loss::{LossKind, WorkerLoss};
use worker_spec::spec;

/// Timeout for sending a plan to a worker. A worker that does not read plans for this long hangs.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);

/// The workers of one start of a replica. Dropping it ends them.
pub(crate) struct WorkerGroup {
    agents: Arc<Agents>,
    instance: u64,
    /// The rank of worker 0; the others follow.
    first_rank: u32,
    /// In order of stages, then of tensor parallel ranks.
    links: Vec<Option<Link>>,
    /// The first rank of each node except rank 0's. It relays messages of the workers on its node.
    leaders: Vec<u32>,
    /// The worker that reports tokens.
    reporter: usize,
    exchange: Vec<Option<Vec<u8>>>,
    /// The stacks of each worker's threads; `None` until they arrive.
    stacks: Vec<Option<String>>,
    /// Workers whose processes run.
    workers: Vec<WorkerStatus>,
    devices: Vec<String>,
    bytes: Vec<u8>,
}

impl WorkerGroup {
    /// Starts a worker on each rank of the replica, with its part of `host_memory`. `listener` gets the events of their agents.
    pub(crate) fn start(
        config: &LlmConfig,
        replica: u32,
        agents: &Arc<Agents>,
        prefix: &Prefix,
        next_step: u64,
        host_memory: Option<&HostMemoryLease>,
        listener: impl Fn(FromAgent) + Send + 'static,
    ) -> Self {
        let instance = agents.new_instance(listener);
        let name = format!("{}_{instance}_group", std::process::id());
        let group_region = ShmName { prefix: prefix.to_string(), name };
        let (first_rank, num_workers) = (config.first_rank(replica), config.group_size());
        let nodes: Vec<u32> = (0..num_workers).map(|index| agents.nodes().of(first_rank + index)).collect();
        let node_names = agents.nodes().names().to_vec();
        let host_memory = host_memory.map(|lease| PassedMemory { id: lease.id(), descriptor: -1 });
        let spec = WorkerSpec { group_region, nodes, node_names, host_memory, ..spec(config, next_step) };
        let group = Self {
            agents: Arc::clone(agents),
            instance,
            first_rank,
            links: (0..num_workers).map(|_| None).collect(),
            leaders: leaders(agents.nodes(), first_rank, num_workers),
            reporter: (num_workers - config.tp_size) as usize,
            exchange: vec![None; num_workers as usize],
            stacks: vec![None; num_workers as usize],
            workers: Vec::new(),
            devices: (0..num_workers).map(|index| device_name(config, agents.nodes(), first_rank + index)).collect(),
            bytes: Vec::new(),
        };
        group.log_placement(config, replica);
        let num_ranks = config.num_replicas * num_workers;
        for index in 0..num_workers {
            let rank = first_rank + index;
            let device = config.worker.device.of_local_rank(agents.nodes().local_rank(rank));
            let (stage, tp_rank) = (index / config.tp_size, index % config.tp_size);
            let on_its_node = |&other: &u32| agents.nodes().of(other) == agents.nodes().of(rank);
            let num_local_workers = (0..num_ranks).filter(on_its_node).count();
            let settings = WorkerSettings { device, ..spec.settings.clone() };
            let spec = WorkerSpec { rank, stage, tp_rank, settings, num_local_workers, ..spec.clone() };
            agents.send(rank, ToAgent::Start(WorkerId { instance, tp_rank: index }, Box::new(spec)));
        }
        group
    }

    /// Handles an event of an agent. Opens the rings of a worker that started.
    ///
    /// # Errors
    /// When a worker or a rank has ended.
    pub(crate) fn handle_event(&mut self, event: FromAgent) -> Result<(), WorkerLoss> {
        match event {
            FromAgent::Started { worker, .. }
            | FromAgent::Relayed { worker, .. }
            | FromAgent::Ended { worker, .. }
            | FromAgent::Stacks { worker, .. }
            | FromAgent::Activity { worker, .. }
                if worker.instance != self.instance =>
            {
                Ok(())
            }
            FromAgent::Started { worker, plan_ring, output_ring, rank_pid, pid, node } => {
                let rank = self.rank_of(worker.tp_rank as usize);
                if rank_pid != std::process::id() && self.agents.nodes().of(rank) == self.agents.nodes().of(0) {
                    self.agents.watch_rank(rank, rank_pid);
                }
                self.open_worker(RelayedWorker { worker, plan_ring, output_ring }, pid, node)
            }
            FromAgent::Relayed { worker, bytes } => {
                if let Some(Some(Link::Relayed { received, .. })) = self.links.get_mut(worker.tp_rank as usize) {
                    received.push_back(bytes);
                }
                Ok(())
            }
            FromAgent::Ended { worker, reason, by_signal, .. } => {
                let failure = self.reported_failure(worker.tp_rank as usize);
                let kind = if by_signal { LossKind::BySignal } else { LossKind::Failed };
                let reason = format!("{} ended: {reason}", self.name_of(worker.tp_rank as usize));
                let rank = self.rank_of(worker.tp_rank as usize);
                self.workers.retain(|worker| worker.index != rank);
                Err(failure.unwrap_or(WorkerLoss { reason, kind }))
            }
            FromAgent::Stacks { worker, text } => {
                self.stacks[worker.tp_rank as usize] = Some(text);
                Ok(())
            }
            // Noted when they arrived.
            FromAgent::Activity { .. } | FromAgent::Disk { .. } => Ok(()),
            FromAgent::ReplicaLost { rank, reason } => match self.ranks().contains(&rank) {
                true => Err(WorkerLoss { reason, kind: LossKind::ReplicaLost }),
                false => Ok(()),
            },
            FromAgent::RankLost { reason } => {
                let reason = format!("{reason}, and the world ends with it; try again later");
                Err(WorkerLoss { reason, kind: LossKind::RankLost })
            }
        }
    }

    /// Opens the rings of a worker that started.
    fn open_worker(&mut self, rings: RelayedWorker, pid: u32, node: String) -> Result<(), WorkerLoss> {
        let worker = rings.worker;
        let index = worker.tp_rank as usize;
        let link = self.link(rings)?;
        let (device, backlog) = (self.devices[index].clone(), link.backlog());
        self.workers.push(WorkerStatus { index: self.rank_of(index), pid, node, device, memory_bytes: 0, backlog });
        self.links[index] = Some(link);
        self.relay_node(worker);
        Ok(())
    }

    /// Logs the ranks and nodes of each stage, except for a single stage of a single replica on a single node.
    fn log_placement(&self, config: &LlmConfig, replica: u32) {
        let names = self.agents.nodes().names();
        if config.pp_size == 1 && config.num_replicas == 1 && names.len() == 1 {
            return;
        }
        let of_replica = match config.num_replicas {
            1 => String::new(),
            count => format!("replica {} of {count}, ", replica + 1),
        };
        for stage in 0..config.pp_size {
            let first = (stage * config.tp_size) as usize;
            let workers = (first..first + config.tp_size as usize)
                .map(|index| format!("{} on `{}`", self.rank_of(index), names[self.node_of(index) as usize]))
                .collect::<Vec<_>>()
                .join(", ");
            let layers = format!("stage {} of {}", stage + 1, config.pp_size);
            tracing::info!(model = %config.name, "placement: {of_replica}{layers}: workers {workers}");
        }
    }

    fn node_of(&self, index: usize) -> u32 {
        self.agents.nodes().of(self.first_rank + index as u32)
    }

    fn ranks(&self) -> Range<u32> {
        self.first_rank..self.first_rank + self.links.len() as u32
    }

    /// Fails if a rank of the replica was lost before its workers were asked to start.
    pub(crate) fn check_ranks(&self) -> Result<(), WorkerLoss> {
        let lost = self.ranks().find_map(|rank| self.agents.loss_of(rank));
        lost.map_or(Ok(()), |reason| Err(WorkerLoss { reason, kind: LossKind::ReplicaLost }))
    }

    /// The rank of worker `index`.
    pub(crate) fn rank_of(&self, index: usize) -> u32 {
        self.first_rank + index as u32
    }

    /// The name of a worker in messages, with its node where the world has several.
    fn name_of(&self, index: usize) -> String {
        let (names, rank) = (self.agents.nodes().names(), self.rank_of(index));
        match names.len() {
            1 => format!("worker {rank}"),
            _ => format!("worker {rank} on node `{}`", names[self.node_of(index) as usize]),
        }
    }

    fn link(&self, rings: RelayedWorker) -> Result<Link, WorkerLoss> {
        if self.node_of(rings.worker.tp_rank as usize) != self.agents.nodes().of(0) {
            return Ok(Link::Relayed { rings, received: VecDeque::new() });
        }
        let RelayedWorker { plan_ring, output_ring, .. } = &rings;
        Link::open(plan_ring, output_ring).map_err(|error| WorkerLoss::new(error.to_string()))
    }

    /// Starts the relay on the node of `worker` when all workers on that node run.
    fn relay_node(&self, worker: WorkerId) {
        let node = self.node_of(worker.tp_rank as usize);
        let links = self.links.iter().enumerate().filter(|&(index, _)| self.node_of(index) == node);
        let relayed = |(_, link): (usize, &Option<Link>)| match link {
            Some(Link::Relayed { rings, .. }) => Some(rings.clone()),
            _ => None,
        };
        if let Some(workers) = links.map(relayed).collect::<Option<Vec<_>>>()
            && let Some(&leader) = self.leaders.iter().find(|&&rank| self.agents.nodes().of(rank) == node)
        {
            self.agents.send(leader, ToAgent::Relay(workers));
        }
    }

    /// Requests the stacks of every worker's threads. They arrive as events.
    pub(crate) fn request_stacks(&self) {
        for tp_rank in 0..self.links.len() as u32 {
            let worker = WorkerId { instance: self.instance, tp_rank };
            self.agents.send(self.first_rank + tp_rank, ToAgent::Stacks(worker));
        }
    }

    /// The stacks of each worker's threads, as far as they have arrived.
    pub(crate) fn stacks(&self) -> &[Option<String>] {
        &self.stacks
    }

    /// Sets the memory size of worker `index`.
    pub(crate) fn set_memory(&mut self, index: usize, bytes: u64) {
        let rank = self.rank_of(index);
        for worker in self.workers.iter_mut().filter(|worker| worker.index == rank) {
            worker.memory_bytes = bytes;
        }
    }

    /// The status of the running workers.
    pub(crate) fn workers(&self) -> &[WorkerStatus] {
        &self.workers
    }

    /// Whether every worker runs and can be reached.
    pub(crate) fn is_linked(&self) -> bool {
        self.links.iter().all(Option::is_some)
    }

    pub(crate) fn num_workers(&self) -> usize {
        self.links.len()
    }

    /// The doorbell that makes [`WorkerGroup::next_report`] return early; `None` when tokens arrive through the inbox.
    pub(crate) fn doorbell(&self) -> Option<Doorbell> {
        match &self.links[self.reporter] {
            Some(Link::Rings { outputs, .. }) => Some(outputs.doorbell()),
            _ => None,
        }
    }

    /// The next message of the worker that reports tokens, like [`WorkerGroup::receive`].
    pub(crate) fn next_report(&mut self, timeout: Duration) -> Result<Option<FromWorker>, WorkerLoss> {
        self.receive(self.reporter, timeout)
    }

    /// Stores one worker's part of an all-gather. Sends all parts to every worker when they are complete.
    pub(crate) fn exchange(&mut self, index: usize, bytes: Vec<u8>) -> Result<(), WorkerLoss> {
        self.exchange[index] = Some(bytes);
        if self.exchange.iter().any(Option::is_none) {
            return Ok(());
        }
        let all = self.exchange.iter_mut().filter_map(Option::take).collect();
        self.broadcast(&ToWorker::Exchanged { all })
    }

    /// Sends a message to every worker.
    pub(crate) fn broadcast(&mut self, message: &ToWorker) -> Result<(), WorkerLoss> {
        plan::encode(message, &mut self.bytes);
        for index in 0..self.links.len() {
            let link = self.links[index].as_mut().expect("plans are sent once workers are linked");
            let Link::Rings { plans, .. } = link else { continue };
            let sent = plans.send(&self.bytes, SEND_TIMEOUT);
            sent.map_err(|error| WorkerLoss::new(format!("{} does not receive plans: {error}", self.name_of(index))))?;
        }
        if !self.leaders.is_empty() {
            let message = ToAgent::ToWorkers { instance: self.instance, bytes: self.bytes.clone() };
            self.agents.send_to(&self.leaders, message);
        }
        Ok(())
    }

    /// Sends the weights of an adapter to every worker, before the plan that puts it into a slot.
    pub(crate) fn send_adapter(&mut self, adapter: &Adapter) -> Result<(), WorkerLoss> {
        let len = adapter.weights.len() as u64;
        let mut pieces = adapter.weights.chunks(MAX_ADAPTER_PIECE);
        pieces.try_for_each(|bytes| {
            self.broadcast(&ToWorker::Adapter(AdapterPiece { adapter: adapter.id, len, bytes: bytes.to_vec() }))
        })
    }

    pub(crate) fn step(&mut self, plan: StepPlan) -> Result<(), WorkerLoss> {
        self.broadcast(&ToWorker::Step(plan))
    }

    /// A message of one worker; `None` after `timeout` or when the doorbell rings. It does not wait for a worker on another node, whose
    /// messages arrive through the inbox.
    pub(crate) fn receive(&mut self, index: usize, timeout: Duration) -> Result<Option<FromWorker>, WorkerLoss> {
        match &mut self.links[index] {
            None => return Ok(None),
            Some(Link::Relayed { received, .. }) => match received.pop_front() {
                Some(bytes) => self.bytes = bytes,
                None => return Ok(None),
            },
            Some(Link::Rings { outputs, .. }) => match outputs.recv(&mut self.bytes, timeout) {
                Ok(Received::Message) => {}
                Ok(_) => return Ok(None),
                // The agent will report the reason.
                Err(RecvError::PeerGone { .. }) => {
                    std::thread::sleep(Duration::from_millis(1));
                    return Ok(None);
                }
                Err(error) => {
                    return Err(WorkerLoss::new(format!("cannot receive from {}: {error}", self.name_of(index))));
                }
            },
        }
        match plan::decode(&self.bytes) {
            Ok(FromWorker::Failed { message }) => Err(WorkerLoss::new(format!("{}: {message}", self.name_of(index)))),
            Ok(message) => Ok(Some(message)),
            Err(error) => {
                Err(WorkerLoss::new(format!("a message of {} does not decode: {error}", self.name_of(index))))
            }
        }
    }

    /// The failure that an ended worker reported, if it did.
    fn reported_failure(&mut self, tp_rank: usize) -> Option<WorkerLoss> {
        loop {
            match self.receive(tp_rank, Duration::ZERO) {
                Ok(Some(_)) => {}
                Ok(None) => return None,
                Err(failure) => return Some(failure),
            }
        }
    }

    /// Ends the workers: with a stop message when `gracefully`, otherwise by a signal.
    pub(crate) fn end(&self, gracefully: bool) {
        for tp_rank in 0..self.links.len() as u32 {
            let worker = WorkerId { instance: self.instance, tp_rank };
            self.agents.send(
                self.first_rank + tp_rank,
                if gracefully { ToAgent::Stop(worker) } else { ToAgent::Kill(worker) },
            );
        }
    }
}

fn device_name(config: &LlmConfig, nodes: &Nodes, rank: u32) -> String {
    match config.worker.device.of_local_rank(nodes.local_rank(rank)) {
        DeviceChoice::Cpu { .. } => "cpu".to_owned(),
        DeviceChoice::Cuda { ordinal } => format!("cuda:{ordinal}"),
    }
}

impl Drop for WorkerGroup {
    fn drop(&mut self) {
        self.end(false);
        self.agents.forget(self.instance);
    }
}

/// The first of these ranks on each node other than rank 0's.
fn leaders(nodes: &Nodes, first_rank: u32, num_workers: u32) -> Vec<u32> {
    let mut leaders: Vec<u32> = Vec::new();
    for rank in first_rank..first_rank + num_workers {
        let node = nodes.of(rank);
        if node != nodes.of(0) && leaders.iter().all(|&leader| nodes.of(leader) != node) {
            leaders.push(rank);
        }
    }
    leaders
}
