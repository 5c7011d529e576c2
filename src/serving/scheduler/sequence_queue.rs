//! Requests that belong to sequences: each sequence keeps to one instance and runs one request at a time, in order.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use repository::ModelConfig;
use repository::proto::ModelSequenceBatching;
use repository::proto::model_sequence_batching::{StrategyChoice, StrategyDirect};

use super::batch_policy::{Choice, Grouping};
use super::control_inputs::Controls;
use super::sequence_state::{self, StateSpec};
use super::{Queue, Take, Waiting};
use crate::{CorrelationId, DataType, InferError, InferRequest, Tensor};

pub(crate) type SequenceId = CorrelationId;

/// Requests that may wait, over all sequences.
const MAX_WAITING: usize = 65_536;

/// The queue of a model that keeps a state for each sequence.
#[derive(Debug)]
pub(crate) struct Sequences {
    model: String,
    grouping: Grouping,
    controls: Controls,
    states: Vec<StateSpec>,
    /// A sequence without a request for so long has ended.
    max_idle: Duration,
    /// Sequences an instance can hold at once.
    max_held: usize,
    /// Whether a request without a sequence is one of its own, which ends when the model does not ask for it again.
    is_iterative: bool,
    /// The last id that was given to one.
    last_id: u64,
    /// Whether a sequence keeps its place in the batches of its instance.
    has_slots: bool,
    sequences: HashMap<SequenceId, Sequence>,
    instances: Vec<Instance>,
    /// Sequences without an instance, in the order they came.
    backlog: VecDeque<SequenceId>,
    num_waiting: usize,
}

#[derive(Debug)]
struct Sequence {
    waiting: VecDeque<Waiting>,
    instance: Option<usize>,
    is_running: bool,
    /// Its last request so far was its end.
    is_ended: bool,
    last_used: Instant,
    state: Vec<Tensor>,
}

#[derive(Debug, Default)]
struct Instance {
    /// Sequences bound to it, in the order they came.
    held: Vec<SequenceId>,
    /// The same by their places in a batch, where they keep them.
    slots: Vec<Option<SequenceId>>,
    running: Vec<SequenceId>,
}

impl Sequences {
    pub fn new(
        config: &ModelConfig,
        sequences: &ModelSequenceBatching,
        num_instances: usize,
        states: Vec<StateSpec>,
    ) -> Self {
        let max_rows = usize::try_from(config.max_batch_size).unwrap_or(0).max(1);
        let has_slots = !matches!(sequences.strategy_choice, Some(StrategyChoice::Oldest(_)));
        let (grouping, max_held) = match &sequences.strategy_choice {
            Some(StrategyChoice::Oldest(oldest)) => {
                let candidates = usize::try_from(oldest.max_candidate_sequences).unwrap_or(0);
                let delay_us = oldest.max_queue_delay_microseconds;
                (Grouping::new(config, &oldest.preferred_batch_size, delay_us), candidates.max(1))
            }
            strategy => {
                let direct = match strategy {
                    Some(StrategyChoice::Direct(direct)) => *direct,
                    _ => StrategyDirect::default(),
                };
                let slots = (f64::from(direct.minimum_slot_utilization.clamp(0.0, 1.0)) * max_rows as f64).ceil();
                let grouping = Grouping::new(config, &[], direct.max_queue_delay_microseconds);
                (grouping.enough_at((slots as u64).max(1)), max_rows)
            }
        };
        Self {
            model: config.name.clone(),
            grouping: grouping.enough_at(max_held as u64),
            controls: Controls::new(config, sequences),
            states,
            max_idle: Duration::from_micros(sequences.max_sequence_idle_microseconds),
            max_held,
            is_iterative: sequences.iterative_sequence,
            last_id: 0,
            has_slots,
            sequences: HashMap::new(),
            instances: (0..num_instances).map(|_| Instance::default()).collect(),
            backlog: VecDeque::new(),
            num_waiting: 0,
        }
    }

    fn check(&self, waiting: &Waiting) -> Result<(), InferError> {
        let (model, id) = (&self.model, &waiting.request.correlation_id);
        if waiting.num_rows > 1 {
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
        let is_under_way = self.sequences.get(id).is_some_and(|sequence| !sequence.is_ended);
        if !waiting.request.sequence_start && !is_under_way {
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

    /// Gives sequences of the backlog to instances with room, the emptiest first.
    fn bind(&mut self) {
        while !self.backlog.is_empty() {
            let emptiest = self.instances.iter_mut().enumerate().min_by_key(|(_, instance)| instance.held.len());
            let Some((index, instance)) = emptiest.filter(|(_, instance)| instance.held.len() < self.max_held) else {
                return;
            };
            let Some(id) = self.backlog.pop_front() else { return };
            if let Some(sequence) = self.sequences.get_mut(&id) {
                sequence.instance = Some(index);
                instance.bind(id, self.has_slots);
            }
        }
    }

    fn is_idle(&self, id: &SequenceId, now: Instant) -> bool {
        self.sequences.get(id).and_then(|sequence| self.idle_at(sequence)).is_some_and(|at| at <= now)
    }

    /// When a sequence is given up, unless it gets a request.
    fn idle_at(&self, sequence: &Sequence) -> Option<Instant> {
        (sequence.waiting.is_empty() && !sequence.is_running).then_some(sequence.last_used + self.max_idle)
    }

    fn remove(&mut self, id: &SequenceId) {
        if let Some(instance) = self.sequences.remove(id).and_then(|sequence| sequence.instance) {
            self.instances[instance].release(id);
        }
    }

    /// Ends sequences without a request for too long.
    fn forget_idle(&mut self, now: Instant) {
        let held = self.instances.iter().flat_map(|instance| &instance.held);
        let idle: Vec<SequenceId> = held.filter(|id| self.is_idle(id, now)).cloned().collect();
        idle.iter().for_each(|id| self.remove(id));
    }

    /// Sequences of an instance with a request to run, the oldest request first.
    fn candidates(&self, instance: usize) -> Vec<&Waiting> {
        let held = self.instances[instance].held.iter().filter_map(|id| self.sequences.get(id));
        let free = held.filter(|sequence| !sequence.is_running);
        let mut candidates: Vec<&Waiting> = free.filter_map(|sequence| sequence.waiting.front()).collect();
        candidates.sort_by_key(|waiting| waiting.since);
        candidates
    }

    /// Takes the next request of a sequence, with its controls and its state.
    fn begin(&mut self, id: &SequenceId) -> Option<Waiting> {
        let sequence = self.sequences.get_mut(id)?;
        let mut waiting = sequence.waiting.pop_front()?;
        self.num_waiting -= 1;
        sequence.is_running = true;
        if waiting.request.sequence_start {
            sequence.state = sequence_state::initial(&self.states);
        }
        self.controls.write(&mut waiting.request, true);
        waiting.request.inputs.extend(sequence.state.iter().cloned());
        waiting.stateful = (!self.states.is_empty()).then(|| id.clone());
        Some(waiting)
    }
}

impl Sequences {
    /// Puts a request behind those of its sequence, which is a new one if it is not known.
    fn let_wait(&mut self, waiting: Waiting) {
        let (id, now) = (waiting.request.correlation_id.clone(), waiting.since);
        let is_new = !self.sequences.contains_key(&id);
        let sequence = self.sequences.entry(id.clone()).or_insert_with(|| Sequence {
            waiting: VecDeque::new(),
            instance: None,
            is_running: false,
            is_ended: false,
            last_used: now,
            state: Vec::new(),
        });
        sequence.is_ended = waiting.request.sequence_end;
        sequence.last_used = now;
        sequence.waiting.push_back(waiting);
        self.num_waiting += 1;
        if is_new {
            self.backlog.push_back(id);
            self.forget_idle(now);
            self.bind();
        }
    }

    /// The batch with each request in its sequence's slot. A request that asks for nothing stands in the slots between that
    /// have none, so that a model may keep what belongs to a sequence by its place.
    fn in_slots(&self, instance: usize, begun: Vec<Waiting>) -> Vec<Waiting> {
        let Some(null) = begun.first().map(|waiting| self.null_request(&waiting.request)) else { return begun };
        let slots = &self.instances[instance].slots;
        let mut batch = Vec::with_capacity(slots.len());
        let mut begun: HashMap<SequenceId, Waiting> =
            begun.into_iter().map(|waiting| (waiting.request.correlation_id.clone(), waiting)).collect();
        for slot in slots {
            let real = slot.as_ref().and_then(|id| begun.remove(id));
            batch.push(real.unwrap_or_else(|| Waiting::null(null.clone())));
        }
        batch
    }

    /// A request shaped like `request`, all zeros, that is not READY.
    fn null_request(&self, request: &InferRequest) -> InferRequest {
        let is_own = |tensor: &&Tensor| {
            !self.controls.has(&tensor.name) && !self.states.iter().any(|state| state.has_input(&tensor.name))
        };
        let inputs = request.inputs.iter().filter(is_own).map(|tensor| zeros(request, tensor)).collect();
        let mut null = InferRequest {
            model_name: request.model_name.clone(),
            model_version: request.model_version.clone(),
            inputs,
            requested_outputs: request.requested_outputs.clone(),
            ..InferRequest::default()
        };
        self.controls.write(&mut null, false);
        null.inputs.extend(sequence_state::initial(&self.states));
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
        self.held.push(id);
    }

    fn release(&mut self, id: &SequenceId) {
        self.held.retain(|held| held != id);
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

/// An input like `tensor` that holds nothing: zeros, or empty texts.
fn zeros(request: &InferRequest, tensor: &Tensor) -> Tensor {
    let length = match request.client_memory.input(&tensor.name) {
        Some(slice) => usize::try_from(slice.byte_size).unwrap_or(0),
        None if tensor.datatype == DataType::Bytes => tensor.num_elements().unwrap_or(0) * 4,
        None => tensor.data.len(),
    };
    Tensor { data: vec![0; length].into(), ..tensor.clone() }
}

impl Queue for Sequences {
    fn push(&mut self, mut waiting: Waiting) -> Result<(), InferError> {
        if self.is_iterative && !has_id(&waiting.request) {
            self.last_id += 1;
            waiting.request.correlation_id = CorrelationId::Number(self.last_id);
            waiting.request.sequence_start = true;
        }
        let id = waiting.request.correlation_id.clone();
        let now = waiting.since;
        if self.is_idle(&id, now) {
            self.remove(&id);
        }
        self.check(&waiting)?;
        self.let_wait(waiting);
        Ok(())
    }

    fn take_back(&mut self, mut waiting: Waiting) {
        let request = &mut waiting.request;
        // What it got for the last execution it gets again.
        let is_state = |tensor: &Tensor| self.states.iter().any(|state| state.has_input(&tensor.name));
        request.inputs.retain(|tensor| !self.controls.has(&tensor.name) && !is_state(tensor));
        (request.sequence_start, request.sequence_end) = (false, false);
        self.let_wait(waiting);
    }

    fn take(&mut self, instance: usize, now: Instant) -> Take {
        let candidates = self.candidates(instance);
        match self.grouping.choose(candidates.iter().map(|&waiting| Some(waiting)), now) {
            Choice::Nothing => Take::Nothing,
            Choice::WaitUntil(until) => Take::WaitUntil(until),
            Choice::Run(length) => {
                let ids = candidates[..length].iter().map(|waiting| waiting.request.correlation_id.clone());
                let ids: Vec<SequenceId> = ids.collect();
                let begun: Vec<Waiting> = ids.iter().filter_map(|id| self.begin(id)).collect();
                let batch = if self.has_slots { self.in_slots(instance, begun) } else { begun };
                self.instances[instance].running = ids;
                Take::Batch(batch)
            }
        }
    }

    fn done(&mut self, instance: usize, now: Instant) {
        for id in std::mem::take(&mut self.instances[instance].running) {
            let Some(sequence) = self.sequences.get_mut(&id) else { continue };
            (sequence.is_running, sequence.last_used) = (false, now);
            if (sequence.is_ended || self.is_iterative) && sequence.waiting.is_empty() {
                self.remove(&id);
            }
        }
        self.forget_idle(now);
        self.bind();
    }

    fn keep_state(&mut self, sequence: &SequenceId, state: Vec<Tensor>) {
        let Some(sequence) = self.sequences.get_mut(sequence) else { return };
        for tensor in state {
            if let Some(kept) = sequence.state.iter_mut().find(|kept| kept.name == tensor.name) {
                *kept = tensor;
            }
        }
    }

    fn len(&self) -> usize {
        self.num_waiting
    }

    fn has_timeouts(&self) -> bool {
        true
    }

    /// Idle sequences matter while others wait for their place.
    fn first_deadline(&self) -> Option<Instant> {
        if self.backlog.is_empty() {
            return None;
        }
        let held = self.instances.iter().flat_map(|instance| &instance.held);
        held.filter_map(|id| self.idle_at(self.sequences.get(id)?)).min()
    }

    fn expire(&mut self, now: Instant) -> Vec<Waiting> {
        if !self.backlog.is_empty() {
            self.forget_idle(now);
            self.bind();
        }
        Vec::new()
    }
}
