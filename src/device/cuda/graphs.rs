//! Decode steps recorded as CUDA graphs.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use kernels::cuda::Graph;
use kernels::cuda::library_gemm::{FirstUse, measured_rows};
use ops::{DeviceError, StepInputs};

use super::step::StepShape;
use super::{CudaDevice, device_error};

/// Smallest number of tokens for which products are measured in advance; smaller steps mostly use the kernels of this
/// project.
const MIN_MEASURED: usize = 128;
/// Maximum time of one piece of measuring, so that a step that arrives meanwhile does not wait long.
const MAX_MEASURING_TIME: Duration = Duration::from_millis(50);
/// Largest number of rows that is recorded.
const MAX_BUCKET: usize = 256;

/// The kind of step that a recording contains.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    pass: Pass,
    /// Number of rows.
    bucket: usize,
    /// Whether sampling is plain greedy.
    is_greedy: bool,
    /// Whether the recording ends before sampling.
    is_masked: bool,
    kind: Kind,
}

/// What distinguishes decodes with the same number of rows besides how tokens are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
struct Kind {
    /// Whether rows have adapters.
    has_adapters: bool,
    /// Whether what guesses drafts takes hidden states of the step.
    runs_drafter: bool,
    /// Whether rows read keys and values that other rows of the step write.
    is_split: bool,
}

impl Kind {
    /// Those that may come: rows without adapters and with them; no drafts, guesses behind the step, and also drafts that it verifies.
    fn all(has_adapters: bool, has_drafter: bool) -> Vec<Self> {
        let of_drafts = [[false, false], [true, false], [true, true]];
        let of_drafts = &of_drafts[..if has_drafter { 3 } else { 1 }];
        let kind =
            |has_adapters: bool, &[runs_drafter, is_split]: &[bool; 2]| Self { has_adapters, runs_drafter, is_split };
        let adapters = [false, true].into_iter().take(1 + usize::from(has_adapters));
        adapters.flat_map(|adapters| of_drafts.iter().map(move |drafts| kind(adapters, drafts))).collect()
    }
}

/// What is recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Pass {
    Step,
    /// The first pass of guesses behind a step, in which so many rows guess, padding included.
    FirstGuess(usize),
    /// The same for a draft model that computes two tokens of each row.
    FirstPair(usize),
    /// A further one.
    NextGuess,
}

/// All recordings.
pub(crate) struct Graphs {
    buckets: Vec<usize>,
    recorded: HashMap<Key, Graph>,
    /// Work that remains to be done while no step is waiting.
    idle_work: VecDeque<IdleWork>,
}

/// A piece of work that would otherwise delay a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum IdleWork {
    /// Choose the algorithms for the products of a step with this number of tokens.
    Measure { tokens: usize },
    /// Record a decode step of a bucket.
    Record { bucket: usize, is_greedy: bool, kind: Kind },
}

impl Graphs {
    pub(crate) fn new(enabled: bool, max_rows: usize) -> Self {
        let buckets = if enabled { buckets(max_rows) } else { Vec::new() };
        Self { buckets, recorded: HashMap::new(), idle_work: VecDeque::new() }
    }

    /// Number of rows of the largest bucket; 0 if there is none.
    pub(crate) fn largest_bucket(&self) -> usize {
        self.buckets.last().copied().unwrap_or(0)
    }

    /// Lists the work to do before a step needs it, in this order: recordings of greedy decodes, largest first;
    /// products of chunks, smallest first; recordings of other decodes. Of each decode those follow in which rows have adapters, if they
    /// may have some, behind which drafts are guessed, and which verify drafts, if the model has a drafter.
    pub(crate) fn plan_idle_work(&mut self, max_tokens: usize, has_adapters: bool, has_drafter: bool) {
        let kinds = Kind::all(has_adapters, has_drafter);
        let record = |is_greedy| {
            let kinds = &kinds;
            move |&bucket: &usize| kinds.iter().map(move |&kind| IdleWork::Record { bucket, is_greedy, kind })
        };
        let next = |&tokens: &usize| (tokens < max_tokens).then(|| measured_rows(tokens + 1).min(max_tokens));
        let chunks = std::iter::successors(Some(MIN_MEASURED.min(max_tokens)), next);
        let greedy = self.buckets.iter().rev().flat_map(record(true));
        let others = self.buckets.iter().rev().flat_map(record(false));
        self.idle_work = greedy.chain(chunks.map(|tokens| IdleWork::Measure { tokens })).chain(others).collect();
    }

    /// The bucket of a decode step in which all rows sample; other steps are not recorded.
    pub(crate) fn bucket(&self, inputs: &StepInputs) -> Option<usize> {
        let rows = inputs.num_rows();
        let in_order = |(index, sample): (usize, &ops::SampleInput)| sample.token_index as usize == index;
        if inputs.num_prefill_rows != 0
            || inputs.samples.len() != rows
            || !inputs.logits.is_empty()
            || !inputs.samples.iter().enumerate().all(in_order)
        {
            return None;
        }
        self.bucket_of(rows)
    }

    /// The bucket of so many rows; none for 0.
    pub(crate) fn bucket_of(&self, rows: usize) -> Option<usize> {
        self.buckets.iter().copied().find(|&bucket| bucket >= rows).filter(|_| rows > 0)
    }
}

/// Number of rows of the largest bucket of a device with graphs.
pub(crate) fn largest_bucket(max_rows: usize) -> usize {
    buckets(max_rows).last().copied().unwrap_or(0)
}

/// 1, 2, 4, then multiples of 8, up to the first that is at least `max_rows`.
fn buckets(max_rows: usize) -> Vec<usize> {
    let mut buckets = Vec::new();
    for bucket in [1, 2, 4].into_iter().chain((8..=MAX_BUCKET).step_by(8)) {
        buckets.push(bucket);
        if bucket >= max_rows {
            break;
        }
    }
    buckets
}

impl CudaDevice {
    /// Replays the bucket's recording. The first time, runs the step op by op and then records it.
    pub(crate) fn run_recorded(
        &mut self,
        inputs: [&StepInputs; 2],
        bucket: usize,
        forward: &mut dyn FnMut(&mut Self) -> Result<(), DeviceError>,
    ) -> Result<usize, DeviceError> {
        let shape = StepShape::decode(bucket, StepShape::of(inputs[0]).has_adapters);
        let slot = self.begin_step(inputs, shape)?;
        self.replay_or_record(self.key(bucket), forward)?;
        Ok(slot)
    }

    /// The same for a pass of guesses.
    pub(super) fn run_recorded_pass(
        &mut self,
        kind: Pass,
        pass: &mut dyn FnMut(&mut Self) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let current = self.current();
        let key = Key { pass: kind, is_greedy: current.is_greedy, is_masked: false, ..self.key(current.shape.rows) };
        if !self.graphs.recorded.contains_key(&key) {
            self.wait_for_inputs()?;
        }
        self.replay_or_record(key, pass)
    }

    fn replay_or_record(
        &mut self,
        key: Key,
        ops: &mut dyn FnMut(&mut Self) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        if let Some(graph) = self.graphs.recorded.get(&key) {
            return self.queue.replay(graph).map_err(device_error);
        }
        // A recording stays in use, so its products are measured at once; they are small.
        self.gemm.set_first_use(FirstUse::Measure);
        let run = ops(self);
        self.gemm.set_first_use(FirstUse::Guess);
        run?;
        self.record(key, ops)
    }

    fn key(&self, bucket: usize) -> Key {
        Key {
            pass: Pass::Step,
            bucket,
            // The graph of a masked step ends before the sampler.
            is_greedy: self.current().is_greedy && !self.current().is_masked,
            is_masked: self.current().is_masked,
            kind: Kind {
                has_adapters: self.current().shape.has_adapters,
                runs_drafter: self.current().runs_drafter,
                is_split: self.is_split,
            },
        }
    }

    /// Records ops of the current decode step without running them.
    fn record(
        &mut self,
        key: Key,
        forward: &mut dyn FnMut(&mut Self) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let queue = self.queue.clone();
        let graph = queue.capture(|| forward(self).map_err(RecordError::from)).map_err(|RecordError(error)| error)?;
        self.graphs.recorded.insert(key, graph);
        Ok(())
    }

    /// Does the next piece of work listed by [`Graphs::plan_idle_work`]; returns true while there is more. A step that
    /// arrives meanwhile waits for it, so each piece is short.
    pub(crate) fn do_idle_work(
        &mut self,
        forward: &mut dyn FnMut(&mut Self) -> Result<(), DeviceError>,
    ) -> Result<bool, DeviceError> {
        self.is_split = false;
        let Some(&piece) = self.graphs.idle_work.front() else { return Ok(false) };
        let is_done = match piece {
            IdleWork::Measure { tokens } => {
                let chunk = StepShape { tokens, prefill_rows: 1, max_chunk: tokens, ..StepShape::decode(1, false) };
                self.measure_for_a_while(chunk, forward)?
            }
            IdleWork::Record { bucket, is_greedy, kind } => {
                let key = Key { pass: Pass::Step, bucket, is_greedy, is_masked: false, kind };
                let shape = StepShape::decode(bucket, kind.has_adapters);
                self.is_split = kind.is_split;
                let is_recorded = self.graphs.recorded.contains_key(&key);
                // Measuring waits for the GPU, which is not allowed during a recording.
                let is_done = is_recorded || self.measure_for_a_while(shape, forward)?;
                if is_done && !is_recorded {
                    let runs_drafter = kind.runs_drafter;
                    self.current = Some(super::Current { runs_drafter, ..self.step_at(shape, is_greedy) });
                    self.record(key, forward)?;
                }
                is_done
            }
        };
        if is_done {
            self.graphs.idle_work.pop_front();
        }
        Ok(!self.graphs.idle_work.is_empty())
    }

    /// Measures products of a step of this shape for a limited time, with arbitrary data; returns true when none is
    /// left.
    fn measure_for_a_while(
        &mut self,
        shape: StepShape,
        forward: &mut dyn FnMut(&mut Self) -> Result<(), DeviceError>,
    ) -> Result<bool, DeviceError> {
        let runs_drafter = self.guesses.is_some();
        self.current = Some(super::Current { only_products: true, runs_drafter, ..self.step_at(shape, true) });
        self.gemm.set_first_use(FirstUse::Prepare { until: Instant::now() + MAX_MEASURING_TIME, is_cut: false });
        let queued = forward(self);
        let first_use = self.gemm.set_first_use(FirstUse::Guess);
        queued?;
        Ok(!matches!(first_use, FirstUse::Prepare { is_cut: true, .. }))
    }
}

/// An error during a recording, from the device or the driver.
struct RecordError(DeviceError);

impl From<DeviceError> for RecordError {
    fn from(error: DeviceError) -> Self {
        Self(error)
    }
}

impl From<kernels::cuda::CudaError> for RecordError {
    fn from(error: kernels::cuda::CudaError) -> Self {
        Self(device_error(error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_cover_every_number_of_rows() {
        assert_eq!(buckets(1), [1]);
        assert_eq!(buckets(10), [1, 2, 4, 8, 16]);
        assert_eq!(buckets(1000).last(), Some(&256));
    }

    #[test]
    fn recordings_come_largest_first_and_greedy_ones_first_of_all() {
        let mut graphs = Graphs::new(true, 10);
        graphs.plan_idle_work(300, false, false);
        let record = |bucket, is_greedy| IdleWork::Record { bucket, is_greedy, kind: Kind::default() };
        let measure = |tokens| IdleWork::Measure { tokens };
        let greedy = [16, 8, 4, 2, 1].map(|bucket| record(bucket, true));
        let others = [16, 8, 4, 2, 1].map(|bucket| record(bucket, false));
        let chunks = [measure(128), measure(192), measure(256), measure(300)];
        assert_eq!(graphs.idle_work, [greedy.as_slice(), &chunks, &others].concat());
        graphs.plan_idle_work(100, true, true);
        assert_eq!(graphs.idle_work.len(), 2 * 6 * 5 + 1);
        let kinds = Kind::all(true, true).into_iter();
        let first = kinds.map(|kind| IdleWork::Record { bucket: 16, is_greedy: true, kind });
        assert!(graphs.idle_work.iter().copied().take(6).eq(first));
    }
}
