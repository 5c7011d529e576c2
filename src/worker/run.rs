//! The main loop of a worker: load, allocate the KV cache, then run one step after the other.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use engine::{SampleMask, SequenceId, StepOutput, StepPlan, divide_memory, plan};
use ipc::{MappedMemory, Prefix, Received, RingReceiver, RingSender, lock};
use models::{Model, WorkerShape};
use ops::{AttentionSpec, Device, HostSlots, StepInputs};
use supervision::{
    DeviceChoice, FromWorker, KvMemory, LogitsPiece, LogitsPlace, MAX_LOGITS_PIECE, ShmName, ToWorker, WorkerSpec,
};

use crate::adapters::{self, ArrivingAdapters};
use crate::error::WorkerError;
use crate::rows::RowTable;
use crate::{estimate, memory};

/// How long the output ring may stay full before this worker fails.
const SEND_TIMEOUT: Duration = Duration::from_secs(30);

/// How long one wait for a message lasts; the wait is repeated, so any long time serves.
const IDLE_WAIT: Duration = Duration::from_secs(3600);

/// Time without a message after which a worker does idle work: preparation that later steps would wait for.
const IDLE_DELAY: Duration = Duration::from_millis(20);

/// Idle work that takes longer is logged: requests may have waited for it.
const LONG_IDLE_WORK: Duration = Duration::from_millis(250);

/// Both rings of this worker. Clones share the rings; only one thread uses them.
#[derive(Clone)]
pub(crate) struct Rings(Arc<Mutex<Ends>>);

struct Ends {
    plans: RingReceiver,
    outputs: RingSender,
    bytes: Vec<u8>,
}

impl Rings {
    pub(crate) fn open(spec: &WorkerSpec) -> Result<Self, WorkerError> {
        let prefix = |name: &ShmName| name.prefix.parse::<Prefix>();
        Ok(Self(Arc::new(Mutex::new(Ends {
            plans: RingReceiver::open(&prefix(&spec.plan_ring)?, &spec.plan_ring.name)?,
            outputs: RingSender::open(&prefix(&spec.output_ring)?, &spec.output_ring.name)?,
            bytes: Vec::new(),
        }))))
    }

    fn ends(&self) -> MutexGuard<'_, Ends> {
        lock(&self.0)
    }

    pub(crate) fn send(&self, message: &FromWorker) -> Result<(), WorkerError> {
        let Ends { outputs, bytes, .. } = &mut *self.ends();
        plan::encode(message, bytes);
        Ok(outputs.send(bytes, SEND_TIMEOUT)?)
    }

    pub(crate) fn receive(&self) -> Result<ToWorker, WorkerError> {
        let Ends { plans, bytes, .. } = &mut *self.ends();
        while plans.recv(bytes, IDLE_WAIT)? != Received::Message {}
        Ok(plan::decode(bytes)?)
    }

    /// The next message, if one arrives within `wait`.
    fn receive_within(&self, wait: Duration) -> Result<Option<ToWorker>, WorkerError> {
        let Ends { plans, bytes, .. } = &mut *self.ends();
        match plans.recv(bytes, wait)? {
            Received::Message => Ok(Some(plan::decode(bytes)?)),
            _ => Ok(None),
        }
    }

    fn try_receive(&self) -> Result<Option<ToWorker>, WorkerError> {
        let Ends { plans, bytes, .. } = &mut *self.ends();
        match plans.try_recv(bytes)? {
            true => Ok(Some(plan::decode(bytes)?)),
            false => Ok(None),
        }
    }
}

/// A worker with its weights loaded.
pub(crate) struct Worker<'a, D: Device> {
    pub(crate) spec: &'a WorkerSpec,
    pub(crate) device: D,
    model: Box<dyn Model<D>>,
    /// Whether the device has room for the buffers of copies to host memory.
    has_host_buffers: bool,
    phases: Vec<(String, Duration)>,
}

/// Rank 0 logs what a worker prints.
fn warn_of_unused(tensors: &[String]) {
    if let [first, ..] = tensors {
        let others = tensors.iter().skip(1).take(2).map(|name| format!(", `{name}`")).collect::<String>();
        eprintln!("{} tensors of the checkpoint are not used, for example `{first}`{others}", tensors.len());
    }
}

impl<'a, D: Device + 'static> Worker<'a, D> {
    pub(crate) fn load(
        spec: &'a WorkerSpec,
        config: &models::Config,
        shape: &WorkerShape,
        mut device: D,
    ) -> Result<Self, WorkerError> {
        let started = Instant::now();
        let model = models::load(&spec.checkpoint, config, &mut device)?;
        adapters::check(&device, spec.max_adapters)?;
        if shape.tp.rank == 0 && shape.stage.is_first() {
            // Other workers may have other layers or experts.
            match spec.num_stages == 1 && spec.expert_groups == 1 {
                true => warn_of_unused(model.unused_tensors()),
                false => warn_of_unused(&estimate::unused_tensors(&spec.checkpoint, config, shape)?),
            }
        }
        let has_host_buffers = shape.host_memory_bytes > 0;
        Ok(Self { spec, device, model, has_host_buffers, phases: vec![("weights".to_owned(), started.elapsed())] })
    }

    /// Runs steps until rank 0 sends [`ToWorker::Stop`].
    pub(crate) fn serve(mut self, rings: &Rings) -> Result<(), WorkerError> {
        let attention = self.model.attention_spec(self.spec.block_size, self.spec.max_sequence_len);
        let mut host_memory = memory::passed_host_memory(self.spec)?;
        let layout = self.report_memory(&attention, host_memory.as_ref(), rings)?;
        let (num_blocks, num_states, host) = match rings.receive()? {
            ToWorker::Configure { num_blocks, num_states, num_host_blocks, num_host_states } => {
                (num_blocks, num_states, HostSlots { num_blocks: num_host_blocks, num_states: num_host_states })
            }
            ToWorker::Stop => return Ok(()),
            other => return Err(WorkerError::Protocol { expected: "Configure", found: other.name() }),
        };
        self.device.allocate_cache(&attention, num_blocks)?;
        if !attention.states.is_empty() {
            self.device.allocate_states(&attention, num_states)?;
        }
        let mut slot_bytes = [0; 2];
        if host != HostSlots::default() {
            let Some(mut memory) = host_memory.take() else {
                return Err(WorkerError::Protocol { expected: "no slots in host memory", found: "Configure" });
            };
            // Rank 0 knows now whether this is the memory of the worker before.
            memory.set_layout(layout);
            slot_bytes = self.device.allocate_host(host, Box::new(memory))?.map(|bytes| bytes as u64);
        }
        if self.spec.max_adapters > 0 {
            let (num_slots, max_rank) = (self.spec.max_adapters, self.spec.max_adapter_rank);
            self.model.allocate_adapters(&mut self.device, num_slots, max_rank)?;
        }
        rings.send(&FromWorker::Ready { slot_bytes })?;

        let cache = CacheShape { windows: attention.kv_windows, num_blocks, num_states, host };
        let steps = Steps {
            rows: cache.empty_rows(self.spec, self.spec.next_step),
            cache,
            worker: self,
            inputs: StepInputs::default(),
            is_prepared: false,
            queued: VecDeque::new(),
            masks: Vec::new(),
            waiting: VecDeque::new(),
            adapters: ArrivingAdapters::default(),
            is_asleep: false,
        };
        steps.run(rings)
    }

    /// Returns the layout of the host memory.
    fn report_memory(
        &mut self,
        attention: &AttentionSpec,
        host_memory: Option<&MappedMemory>,
        rings: &Rings,
    ) -> Result<u64, WorkerError> {
        let allocated = host_memory.map_or(0, MappedMemory::allocated_bytes);
        let has_host_room = memory::host_fits(self.spec, allocated)? && self.has_host_buffers;
        let memory = self.device.memory_plan(attention)?;
        let wanted = |tokens: u64| tokens.div_ceil(self.spec.block_size as u64) * attention.kv_windows.len() as u64;
        let (fraction, max_blocks) = match self.spec.kv_memory {
            KvMemory::FreeFraction(fraction) => (fraction, None),
            KvMemory::Tokens(tokens) => (1.0, Some(wanted(tokens))),
        };
        let (num_slots, max_rank) = (self.spec.max_adapters, self.spec.max_adapter_rank);
        let adapter_bytes = adapters::slot_bytes(&*self.model, &self.device, num_slots, max_rank);
        let state_bytes = attention.state_bytes() as u64;
        let fits = |blocks: usize| {
            let room = (blocks as u64 * memory.block_bytes).saturating_sub(adapter_bytes);
            let (blocks, states) =
                divide_memory(room, [memory.block_bytes, state_bytes], self.spec.max_rows, max_blocks);
            [blocks as usize, states]
        };
        let layout = memory::layout([memory.block_bytes, state_bytes]);
        rings.send(&FromWorker::Loaded {
            weights_bytes: memory.weights_bytes,
            workspace_bytes: memory.workspace_bytes + adapter_bytes,
            block_bytes: memory.block_bytes,
            fits: fits((memory.max_blocks as f64 * fraction) as usize),
            fits_again: fits(memory.max_blocks_again),
            state_bytes,
            has_host_room,
            has_host_copies: host_memory.is_some_and(|memory| memory.layout() == layout),
            phases: std::mem::take(&mut self.phases),
        })?;
        Ok(layout)
    }
}

/// What plans may refer to besides rows.
pub(crate) struct CacheShape {
    /// Of the KV groups.
    windows: Vec<Option<usize>>,
    num_blocks: usize,
    num_states: usize,
    /// In host memory.
    host: HostSlots,
}

impl CacheShape {
    /// A table without rows. The first plan is number `next_step`.
    pub(crate) fn empty_rows(&self, spec: &WorkerSpec, next_step: u64) -> RowTable {
        RowTable::new(spec.max_rows, self.windows.clone(), spec.block_size, self.num_blocks, next_step)
            .with_states(self.num_states)
            .with_host(self.host)
            .with_adapters(spec.max_adapters)
            // On CPUs all tokens are computed in one way.
            .keeping_prompts_whole(
                spec.settings.batch_invariant && matches!(spec.settings.device, DeviceChoice::Cuda { .. }),
            )
    }
}

/// The step loop. Up to two steps are queued on the device; their outputs are sent in order.
pub(crate) struct Steps<'a, D: Device> {
    pub(crate) worker: Worker<'a, D>,
    pub(crate) cache: CacheShape,
    pub(crate) rows: RowTable,
    inputs: StepInputs,
    /// Whether no idle work is left.
    is_prepared: bool,
    /// Steps whose outputs are not sent yet.
    queued: VecDeque<Queued>,
    /// The masks that have arrived for the last step.
    masks: Vec<SampleMask>,
    /// Plans that arrived while the last step still needs masks.
    waiting: VecDeque<StepPlan>,
    /// Adapters that later plans put into slots.
    pub(crate) adapters: ArrivingAdapters<D>,
    /// Whether the device's memory is freed.
    pub(crate) is_asleep: bool,
}

struct Queued {
    step: u64,
    /// False for a plan without work, which only changes rows.
    on_device: bool,
    /// How many masks its tokens wait for.
    num_masks: usize,
    /// Whether it has guesses, which may be none.
    runs_drafter: bool,
    /// The sequence and position of each row of its logits.
    reported: Vec<(SequenceId, LogitsPlace)>,
}

impl<D: Device + 'static> Steps<'_, D> {
    fn run(mut self, rings: &Rings) -> Result<(), WorkerError> {
        loop {
            let message = match (self.queued.is_empty(), self.is_prepared || self.is_asleep) {
                (false, _) => rings.try_receive()?,
                (true, false) => rings.receive_within(IDLE_DELAY)?,
                (true, true) => Some(rings.receive()?),
            };
            match message {
                Some(ToWorker::Step(_)) if self.is_asleep => {
                    return Err(WorkerError::Protocol { expected: "Wake", found: "Step" });
                }
                Some(ToWorker::Step(plan)) => self.waiting.push_back(plan),
                Some(ToWorker::Adapter(piece)) => self.adapters.push(&piece, &*self.worker.model)?,
                Some(ToWorker::Masks(masks)) => self.take_masks(masks)?,
                Some(ToWorker::Stop) => return Ok(()),
                Some(ToWorker::Sleep) => self.sleep(rings)?,
                Some(ToWorker::Wake { next_step }) => self.wake(next_step, rings)?,
                Some(other @ (ToWorker::Exchanged { .. } | ToWorker::Configure { .. })) => {
                    return Err(WorkerError::Protocol { expected: "Step", found: other.name() });
                }
                None if self.queued.is_empty() => self.prepare()?,
                None => std::hint::spin_loop(),
            }
            while !self.needs_masks()
                && let Some(plan) = self.waiting.pop_front()
            {
                self.step(&plan)?;
            }
            while self.collect(rings)? {}
        }
    }

    /// Whether a step is not done.
    pub(crate) fn is_busy(&self) -> bool {
        !self.queued.is_empty() || !self.waiting.is_empty()
    }

    fn prepare(&mut self) -> Result<(), WorkerError> {
        let started = Instant::now();
        let Worker { device, model, .. } = &mut self.worker;
        self.is_prepared = !device.prepare(&mut |device| model.forward(device))?;
        let took = started.elapsed();
        if took > LONG_IDLE_WORK {
            eprintln!("idle warm-up work took {took:.1?}; requests may have waited"); // Rank 0 logs it.
        }
        Ok(())
    }

    fn step(&mut self, plan: &StepPlan) -> Result<(), WorkerError> {
        self.rows.apply(plan, &mut self.inputs)?;
        let Worker { device, model, .. } = &mut self.worker;
        self.adapters.fill(&plan.adapters, &**model, device)?;
        for joined in &plan.joined {
            device.join_row(joined.row, &joined.tokens, joined.num_prompt_tokens, &joined.sampling)?;
        }
        device.copy_states(&self.rows.restored_states(plan))?;
        device.copy_with_host(&plan.host)?;
        device.revise(&plan.revised, &plan.copied)?;
        device.copy_states(&plan.copied_states)?;
        let on_device = !plan.work.is_empty();
        if on_device {
            device.run_step(&self.inputs, &mut |device| model.forward(device))?;
            if self.inputs.masked.is_empty() {
                model.guess(device)?;
            }
        }
        // Only the last stage chooses tokens.
        let num_masks = if device.pipeline_stage().is_last() { self.inputs.masked.len() } else { 0 };
        let reported = self.rows.take_reported();
        let runs_drafter = on_device && plan.runs_drafter;
        self.queued.push_back(Queued { step: plan.step, on_device, num_masks, runs_drafter, reported });
        Ok(())
    }

    /// Whether the tokens of the last step wait for masks. No other step is run until they are chosen.
    fn needs_masks(&self) -> bool {
        self.queued.back().is_some_and(|last| last.num_masks > 0)
    }

    /// Adds masks of the last step, and chooses its tokens when all have arrived.
    fn take_masks(&mut self, masks: Vec<SampleMask>) -> Result<(), WorkerError> {
        let Worker { device, model, .. } = &mut self.worker;
        if !device.pipeline_stage().is_last() {
            return Ok(());
        }
        let Some(last) = self.queued.back_mut().filter(|last| last.num_masks > 0) else {
            return Err(WorkerError::Protocol { expected: "Step", found: "Masks" });
        };
        self.masks.extend(masks);
        if self.masks.len() >= last.num_masks {
            device.choose(&self.masks)?;
            model.guess(device)?;
            last.num_masks = 0;
            self.masks.clear();
        }
        Ok(())
    }

    /// Sends the tokens of the oldest step if it is done; returns whether it was.
    fn collect(&mut self, rings: &Rings) -> Result<bool, WorkerError> {
        let Some(&Queued { step, on_device, .. }) = self.queued.front().filter(|oldest| oldest.num_masks == 0) else {
            return Ok(false);
        };
        let tokens = match on_device {
            true => self.worker.device.collect(false)?,
            false => Some(Vec::new()),
        };
        let Some(tokens) = tokens else {
            return Ok(false);
        };
        let queued = self.queued.pop_front().expect("there is a front");
        let guesses = if queued.runs_drafter { self.worker.device.take_guesses() } else { Vec::new() };
        let logits = if queued.reported.is_empty() { Vec::new() } else { self.worker.device.take_logits() };
        if self.worker.spec.reports() {
            send_logits(&queued.reported, &logits, rings)?;
            rings.send(&FromWorker::Output(StepOutput { step, tokens, guesses }))?;
        }
        Ok(true)
    }
}

/// Sends each row of logits, in pieces that fit a ring.
fn send_logits(reported: &[(SequenceId, LogitsPlace)], logits: &[Vec<f32>], rings: &Rings) -> Result<(), WorkerError> {
    for (&(sequence, place), row) in reported.iter().zip(logits) {
        for (index, values) in row.chunks(MAX_LOGITS_PIECE).enumerate() {
            let first_token = (index * MAX_LOGITS_PIECE) as u32;
            rings.send(&FromWorker::Logits(LogitsPiece { sequence, place, first_token, values: values.to_vec() }))?;
        }
    }
    Ok(())
}
