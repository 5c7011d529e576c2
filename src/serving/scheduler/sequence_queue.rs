//! The queue of stateful models: each sequence is bound to one instance, and its requests run one at a time, in order.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use repository::ModelConfig;
use repository::proto::ModelSequenceBatching;
use repository::proto::model_sequence_batching::{StrategyChoice, StrategyDirect};

use super::batch_policy::{BatchDecision, BatchPolicy};
use super::control_inputs::ControlInputs;
use super::queue::{NextBatch, Queue, QueuedRequest};
use super::sequence_state::{self, StateSpec};
use crate::{CorrelationId, DataType, InferError, InferRequest, Tensor};

pub(crate) type SequenceId = CorrelationId;

/// Size limit of the queue, over all sequences.
const MAX_WAITING: usize = 65_536;

/// The queue of a model with `sequence_batching`.
#[derive(Debug)]
pub(crate) struct SequenceQueue {
    model: String,
    policy: BatchPolicy,
    controls: ControlInputs,
    states: Vec<StateSpec>,
    /// A sequence without a request for this long is ended.
    max_idle: Duration,
    /// Sequences that can be bound to one instance at the same time.
    max_bound: usize,
    /// Whether a request without a sequence gets its own sequence, which ends when the model does not reschedule the request.
    is_iterative: bool,
    /// The last id that such a sequence got.
    last_id: u64,
    /// Whether a sequence has a fixed slot in the batches of its instance.
    has_slots: bool,
    sequences: HashMap<SequenceId, Sequence>,
    instances: Vec<Instance>,
    /// Sequences that are not bound to an instance yet, in the order of arrival.
    backlog: VecDeque<SequenceId>,
    num_waiting: usize,
}

#[derive(Debug)]
struct Sequence {
    waiting: VecDeque<QueuedRequest>,
    instance: Option<usize>,
    is_running: bool,
    /// Whether the last request so far was the end of the sequence.
    is_ended: bool,
    last_used: Instant,
    state: Vec<Tensor>,
}

#[derive(Debug, Default)]
struct Instance {
    /// Sequences that are bound to the instance, in the order of arrival.
    bound: Vec<SequenceId>,
    /// The bound sequences by their slots, where slots are fixed.
    slots: Vec<Option<SequenceId>>,
    running: Vec<SequenceId>,
}

impl SequenceQueue {
    pub fn new(
        config: &ModelConfig,
        sequences: &ModelSequenceBatching,
        num_instances: usize,
        states: Vec<StateSpec>,
    ) -> Self {
        let max_rows = usize::try_from(config.max_batch_size).unwrap_or(0).max(1);
        let has_slots = !matches!(sequences.strategy_choice, Some(StrategyChoice::Oldest(_)));
        let (policy, max_bound) = match &sequences.strategy_choice {
            Some(StrategyChoice::Oldest(oldest)) => {
                let candidates = usize::try_from(oldest.max_candidate_sequences).unwrap_or(0);
                let delay_us = oldest.max_queue_delay_microseconds;
                (BatchPolicy::new(config, &oldest.preferred_batch_size, delay_us), candidates.max(1))
            }
            strategy => {
                let direct = match strategy {
                    Some(StrategyChoice::Direct(direct)) => *direct,
                    _ => StrategyDirect::default(),
                };
                let slots = (f64::from(direct.minimum_slot_utilization.clamp(0.0, 1.0)) * max_rows as f64).ceil();
                let policy = BatchPolicy::new(config, &[], direct.max_queue_delay_microseconds);
                (policy.with_max_sufficient_rows((slots as u64).max(1)), max_rows)
            }
        };
        Self {
            model: config.name.clone(),
            policy: policy.with_max_sufficient_rows(max_bound as u64),
            controls: ControlInputs::new(config, sequences),
            states,
            max_idle: Duration::from_micros(sequences.max_sequence_idle_microseconds),
            max_bound,
            is_iterative: sequences.iterative_sequence,
            last_id: 0,
            has_slots,
            sequences: HashMap::new(),
            instances: (0..num_instances).map(|_| Instance::default()).collect(),
            backlog: VecDeque::new(),
            num_waiting: 0,
        }
    }

    fn check(&self, queued: &QueuedRequest) -> Result<(), InferError> {
        let (model, id) = (&self.model, &queued.request.correlation_id);
        if queued.num_rows > 1 {
            return Err(InferError::invalid(format!(
                "inference request to model '{model}' must specify batch-size 1 due to requirements of sequence batcher"
            )));
        }
        let shown = match id {
            CorrelationId::Number(0) => None,
            CorrelationId::Number(number) => Some(number.to_string()),
            CorrelationId::Text(text) => Some(text.clone()).filter(|text| !text.is_empty()),
        };
        let Some(shown) = shown else {
            return Err(InferError::invalid(format!(
                "inference request to model '{model}' must specify a non-zero or non-empty correlation ID"
            )));
        };
        let is_open = self.sequences.get(id).is_some_and(|sequence| !sequence.is_ended);
        if !queued.request.sequence_start && !is_open {
            return Err(InferError::invalid(format!(
                "inference request for sequence {shown} to model '{model}' must specify the START flag on the first \
                 request of the sequence"
            )));
        }
        if self.num_waiting >= MAX_WAITING {
            return Err(InferError::unavailable("Exceeds maximum queue size"));
        }
        Ok(())
    }

    /// Binds sequences of the backlog to instances with room, to the least loaded first.
    fn bind_backlog(&mut self) {
        while !self.backlog.is_empty() {
            let least_loaded = self.instances.iter_mut().enumerate().min_by_key(|(_, instance)| instance.bound.len());
            let Some((index, instance)) = least_loaded.filter(|(_, instance)| instance.bound.len() < self.max_bound)
            else {
                return;
            };
            let Some(id) = self.backlog.pop_front() else { return };
            if let Some(sequence) = self.sequences.get_mut(&id) {
                sequence.instance = Some(index);
                instance.bind(id, self.has_slots);
            }
        }
    }

    /// Whether the sequence had no request for too long.
    fn is_idle(&self, id: &SequenceId, now: Instant) -> bool {
        self.sequences.get(id).and_then(|sequence| self.idle_at(sequence)).is_some_and(|at| at <= now)
    }

    /// When a sequence is ended, unless it gets a request; `None` while it has one.
    fn idle_at(&self, sequence: &Sequence) -> Option<Instant> {
        (sequence.waiting.is_empty() && !sequence.is_running).then_some(sequence.last_used + self.max_idle)
    }

    fn remove(&mut self, id: &SequenceId) {
        if let Some(instance) = self.sequences.remove(id).and_then(|sequence| sequence.instance) {
            self.instances[instance].release(id);
        }
    }

    /// Ends bound sequences that had no request for too long.
    fn remove_idle(&mut self, now: Instant) {
        let bound = self.instances.iter().flat_map(|instance| &instance.bound);
        let idle: Vec<SequenceId> = bound.filter(|id| self.is_idle(id, now)).cloned().collect();
        idle.iter().for_each(|id| self.remove(id));
    }

    /// The next requests of the sequences of an instance that are not running, the oldest first.
    fn candidates(&self, instance: usize) -> Vec<&QueuedRequest> {
        let bound = self.instances[instance].bound.iter().filter_map(|id| self.sequences.get(id));
        let free = bound.filter(|sequence| !sequence.is_running);
        let mut candidates: Vec<&QueuedRequest> = free.filter_map(|sequence| sequence.waiting.front()).collect();
        candidates.sort_by_key(|queued| queued.arrived);
        candidates
    }

    /// Removes the next request of a sequence from the queue, and adds control and state inputs.
    fn begin(&mut self, id: &SequenceId) -> Option<QueuedRequest> {
        let sequence = self.sequences.get_mut(id)?;
        let mut queued = sequence.waiting.pop_front()?;
        self.num_waiting -= 1;
        sequence.is_running = true;
        if queued.request.sequence_start {
            sequence.state = sequence_state::initial_states(&self.states);
        }
        self.controls.add_to(&mut queued.request, true);
        queued.request.inputs.extend(sequence.state.iter().cloned());
        queued.stateful = (!self.states.is_empty()).then(|| id.clone());
        Some(queued)
    }
}

impl SequenceQueue {
    /// Adds a request to its sequence, and creates an unknown sequence.
    fn enqueue(&mut self, queued: QueuedRequest) {
        let (id, now) = (queued.request.correlation_id.clone(), queued.arrived);
        let is_new = !self.sequences.contains_key(&id);
        let sequence = self.sequences.entry(id.clone()).or_insert_with(|| Sequence {
            waiting: VecDeque::new(),
            instance: None,
            is_running: false,
            is_ended: false,
            last_used: now,
            state: Vec::new(),
        });
        sequence.is_ended = queued.request.sequence_end;
        sequence.last_used = now;
        sequence.waiting.push_back(queued);
        self.num_waiting += 1;
        if is_new {
            self.backlog.push_back(id);
            self.remove_idle(now);
            self.bind_backlog();
        }
    }

    /// The batch with each request in its sequence's slot. Null requests fill the slots without a request, so that a model may
    /// store the state of a sequence by its slot.
    fn in_slots(&self, instance: usize, requests: Vec<QueuedRequest>) -> Vec<QueuedRequest> {
        let Some(null) = requests.first().map(|queued| self.null_request(&queued.request)) else { return requests };
        let slots = &self.instances[instance].slots;
        let mut batch = Vec::with_capacity(slots.len());
        let mut by_sequence: HashMap<SequenceId, QueuedRequest> =
            requests.into_iter().map(|queued| (queued.request.correlation_id.clone(), queued)).collect();
        for slot in slots {
            let queued = slot.as_ref().and_then(|id| by_sequence.remove(id));
            batch.push(queued.unwrap_or_else(|| QueuedRequest::null(null.clone())));
        }
        batch
    }

    /// A null request: the inputs of `request` filled with zeros, and READY false.
    fn null_request(&self, request: &InferRequest) -> InferRequest {
        let is_own = |tensor: &&Tensor| {
            !self.controls.has(&tensor.name) && !self.states.iter().any(|state| state.has_input(&tensor.name))
        };
        let inputs = request.inputs.iter().filter(is_own).map(|tensor| zeros_like(request, tensor)).collect();
        let mut null = InferRequest {
            model_name: request.model_name.clone(),
            model_version: request.model_version.clone(),
            inputs,
            requested_outputs: request.requested_outputs.clone(),
            ..InferRequest::default()
        };
        self.controls.add_to(&mut null, false);
        null.inputs.extend(sequence_state::initial_states(&self.states));
        null
    }
}

impl Instance {
    fn bind(&mut self, id: SequenceId, has_slots: bool) {
        if has_slots {
            match self.slots.iter_mut().find(|slot| slot.is_none()) {
                Some(free) => *free = Some(id.clone()),
                None => self.slots.push(Some(id.clone())),
            }
        }
        self.bound.push(id);
    }

    fn release(&mut self, id: &SequenceId) {
        self.bound.retain(|bound| bound != id);
        self.slots.iter_mut().filter(|slot| slot.as_ref() == Some(id)).for_each(|slot| *slot = None);
        while self.slots.pop_if(|slot| slot.is_none()).is_some() {}
    }
}

fn has_id(request: &InferRequest) -> bool {
    match &request.correlation_id {
        CorrelationId::Number(number) => *number != 0,
        CorrelationId::Text(text) => !text.is_empty(),
    }
}

/// An input with the shape of `tensor`, filled with zeros or empty texts.
fn zeros_like(request: &InferRequest, tensor: &Tensor) -> Tensor {
    let length = match request.client_memory.input(&tensor.name) {
        Some(slice) => usize::try_from(slice.byte_size).unwrap_or(0),
        None if tensor.datatype == DataType::Bytes => tensor.num_elements().unwrap_or(0) * 4,
        None => tensor.data.len(),
    };
    Tensor { data: vec![0; length].into(), ..tensor.clone() }
}

impl Queue for SequenceQueue {
    fn push(&mut self, mut queued: QueuedRequest) -> Result<(), InferError> {
        if self.is_iterative && !has_id(&queued.request) {
            self.last_id += 1;
            queued.request.correlation_id = CorrelationId::Number(self.last_id);
            queued.request.sequence_start = true;
        }
        let id = queued.request.correlation_id.clone();
        let now = queued.arrived;
        if self.is_idle(&id, now) {
            self.remove(&id);
        }
        self.check(&queued)?;
        self.enqueue(queued);
        Ok(())
    }

    fn push_again(&mut self, mut queued: QueuedRequest) {
        let request = &mut queued.request;
        // Control and state inputs are added again for the next execution.
        let is_state = |tensor: &Tensor| self.states.iter().any(|state| state.has_input(&tensor.name));
        request.inputs.retain(|tensor| !self.controls.has(&tensor.name) && !is_state(tensor));
        (request.sequence_start, request.sequence_end) = (false, false);
        self.enqueue(queued);
    }

    fn take(&mut self, instance: usize, now: Instant) -> NextBatch {
        let candidates = self.candidates(instance);
        match self.policy.decide(candidates.iter().map(|&queued| Some(queued)), now) {
            BatchDecision::Empty => NextBatch::Empty,
            BatchDecision::WaitUntil(until) => NextBatch::WaitUntil(until),
            BatchDecision::Run(length) => {
                let ids = candidates[..length].iter().map(|queued| queued.request.correlation_id.clone());
                let ids: Vec<SequenceId> = ids.collect();
                let requests: Vec<QueuedRequest> = ids.iter().filter_map(|id| self.begin(id)).collect();
                let batch = if self.has_slots { self.in_slots(instance, requests) } else { requests };
                self.instances[instance].running = ids;
                NextBatch::Run(batch)
            }
        }
    }

    fn finish_batch(&mut self, instance: usize, now: Instant) {
        for id in std::mem::take(&mut self.instances[instance].running) {
            let Some(sequence) = self.sequences.get_mut(&id) else { continue };
            (sequence.is_running, sequence.last_used) = (false, now);
            if (sequence.is_ended || self.is_iterative) && sequence.waiting.is_empty() {
                self.remove(&id);
            }
        }
        self.remove_idle(now);
        self.bind_backlog();
    }

    fn update_state(&mut self, sequence: &SequenceId, state: Vec<Tensor>) {
        let Some(sequence) = self.sequences.get_mut(sequence) else { return };
        for tensor in state {
            if let Some(state) = sequence.state.iter_mut().find(|state| state.name == tensor.name) {
                *state = tensor;
            }
        }
    }

    fn len(&self) -> usize {
        self.num_waiting
    }

    fn has_timeouts(&self) -> bool {
        true
    }

    /// Idle sequences have a deadline only while other sequences wait to be bound.
    fn first_deadline(&self) -> Option<Instant> {
        if self.backlog.is_empty() {
            return None;
        }
        let bound = self.instances.iter().flat_map(|instance| &instance.bound);
        bound.filter_map(|id| self.idle_at(self.sequences.get(id)?)).min()
    }

    fn expire(&mut self, now: Instant) -> Vec<QueuedRequest> {
        if !self.backlog.is_empty() {
            self.remove_idle(now);
            self.bind_backlog();
        }
        Vec::new()
    }
}
