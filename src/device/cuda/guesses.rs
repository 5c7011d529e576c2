//! Guesses at the tokens behind those of a step, by a head of the model or another model.
//!
//! Nothing waits for the host: the chosen tokens, and so the number of accepted drafts, are read on the GPU, which makes the inputs of
//! each pass. The first pass has the shape of the step, with the tokens that follow. Each further pass has one token of each row that
//! guesses, as decodes have; rows that have all of their guesses become padding. Passes are recorded as steps are.
//!
//! In a group each worker has a part of the drafter, as it has of the model. A whole drafter on each worker would need no sums, but
//! read `tp` times the weights: the layer of an EAGLE-3 head for Llama 3 8B has 0.49 GB, which takes 150 us at 3.3 TB/s, and a sum of
//! a row takes 3 us (`kernels/README.md`). It would also still need an exchange, because the words of the model's head are divided. So a
//! pass has the sums of its layers and of the embedding, and a guess is chosen as the tokens of a step are: from the best word of
//! each worker, or from all logits if it is drawn. Every worker computes it from the same numbers and so gets the same guess.
//! Sums of many rows leave each worker with the residual of its own rows; the others come by [`ops::Device::make_whole`].

use bytemuck::Zeroable;
use engine::RowId;
use kernels::cuda::Span;
use kernels::cuda::gather_rows::gather_rows;
use kernels::cuda::guess::{self, FollowRow, Followed, GuessRows, MAX_SAMPLES, NO_GUESS, Newest, NextPass, Results};
use kernels::cuda::sample::{Outputs, Samples};
use ops::{DeviceError, DrafterKind, SampleInput, StepInputs};

use super::graphs::Pass;
use super::guess_buffers::{FOLLOW_WORDS, Passes, arrays, pairs_at};
use super::sampling::Choice;
use super::step::{self, StepShape, StepSpans};
use super::{CudaDevice, CudaTensor, CudaWeight, Current, device_error, drafters, verify};

impl CudaDevice {
    /// Marks the end of a step's tokens. What guesses behind them comes before the end of the step.
    pub(super) fn end_step(&mut self, slot: usize, samples: Vec<(usize, SampleInput)>) -> Result<(), DeviceError> {
        match self.guesses.as_mut().and_then(|guesses| guesses.passes.as_mut()) {
            Some(passes) => {
                passes.samples = samples;
                Ok(())
            }
            None => self.finish_step(slot, &samples, Vec::new()),
        }
    }

    /// Whether what guesses drafts reads the hidden states of the current step, or is what runs.
    pub(super) fn feeds_drafter(&self) -> bool {
        self.current().runs_drafter || self.guesses.as_ref().is_some_and(|guesses| guesses.passes.is_some())
    }

    pub(super) fn passes(&self) -> &Passes {
        self.guesses.as_ref().and_then(|guesses| guesses.passes.as_ref()).expect("passes belong to a step")
    }

    /// Uploads the inputs of guesses behind the step in `slot`. `whole` is the step as it is in the plan; `inputs` may have positions as
    /// decodes of their own.
    pub(super) fn begin_guesses(
        &mut self,
        [inputs, whole]: [&StepInputs; 2],
        slot: usize,
        is_recorded: bool,
    ) -> Result<(), DeviceError> {
        let refuse = |reason: String| DeviceError::Call { call: format!("step {}", whole.step), reason };
        let (bounds, shape) = (self.bounds()?, self.current().shape);
        let mut follow = vec![FollowRow::zeroed(); shape.rows];
        let mut next = StepInputs { step: whole.step, max_blocks: whole.max_blocks, ..StepInputs::default() };
        let (mut wanted, mut guessing, mut are_own) = (Vec::new(), Vec::new(), true);
        for (index, (&row, starts)) in whole.rows.iter().zip(whole.row_starts.windows(2)).enumerate() {
            let own = whole.samples.partition_point(|sample| sample.token_index < starts[0]);
            let end = whole.samples.partition_point(|sample| sample.token_index < starts[1]);
            let samples = &whole.samples[own..end];
            let are_last = (starts[1] - samples.len() as u32..).zip(samples).all(|(index, s)| s.token_index == index);
            if !are_last || samples.len() > MAX_SAMPLES {
                let count = samples.len();
                return Err(refuse(format!("row {} chooses {count} tokens, not at its last positions", row.0)));
            }
            let drafts = starts[1] as usize + 1 - samples.len().max(1)..starts[1] as usize;
            if !drafts.is_empty() {
                self.await_guesses(row)?;
            }
            are_own &= self.guesses.as_mut().expect("as above").take_last(row, &whole.token_ids[drafts]);
            let next_position = whole.positions[starts[1] as usize - 1] as usize + 1;
            let output = |sample: &SampleInput| verify::sample_at(inputs, sample.token_index).unwrap_or(0) as u32;
            let count = whole.guesses.get(index).copied().unwrap_or(0).min(self.config.max_drafts as u32);
            let guesses = count > 0 && !samples.is_empty();
            follow[index] = FollowRow {
                first: starts[0],
                end: starts[1],
                first_sample: samples.first().map_or(0, output),
                num_samples: samples.len() as u32,
                next_token: self.rows.known_token(row.0 as usize, next_position).unwrap_or(0),
                num_generated: samples.first().map_or(0, |sample| sample.num_generated),
                guess: if guesses { next.rows.len() as u32 } else { NO_GUESS },
                reserved: 0,
            };
            if guesses {
                wanted.extend([count, whole.reach[index].min(bounds.max_positions as u32)]);
                next.samples.push(SampleInput { row, token_index: next.rows.len() as u32, num_generated: 0 });
                next.rows.push(row);
                guessing.push(index);
            }
        }
        let count = self.graphs.bucket_of(guessing.len()).unwrap_or(guessing.len());
        let (layout, [wanted_at, index_at, follow_at]) = arrays(count, bounds.tables);
        let words = follow_at + shape.rows * FOLLOW_WORDS;
        let most = wanted.iter().step_by(2).copied().max().unwrap_or(0) as usize;
        let num_rows = next.rows.len();
        next.row_starts = (0..=num_rows as u32).collect();
        (next.token_ids, next.positions, next.context_lens) = (vec![0; num_rows], vec![0; num_rows], vec![0; num_rows]);
        next.slots = vec![0; bounds.tables.num_groups * num_rows];
        for group in 0..bounds.tables.num_groups {
            guessing.iter().for_each(|&row| next.block_tables.extend_from_slice(whole.block_table(group, row)));
        }
        let all_guess = guessing.len() == whole.num_rows();
        let pair = self.pair_inputs(&next, count).filter(|_| all_guess && are_own && !self.has_chunks(whole));
        let guesses = self.guesses.as_mut().expect("as above");
        let pinned: &mut [u32] = bytemuck::cast_slice_mut(&mut guesses.pinned[slot]);
        let shape = StepShape::decode(count, false);
        step::pack_guesses(&next, &bounds, shape, slot as u32, pinned);
        pinned[wanted_at..follow_at].fill(0);
        pinned[wanted_at..wanted_at + wanted.len()].copy_from_slice(&wanted);
        pinned[follow_at..words].copy_from_slice(bytemuck::cast_slice(&follow));
        let block = guesses.block.span();
        let (mut words, mut pair_spans) = (words, None);
        if let Some(inputs) = pair {
            let (start, shape) = (pairs_at(follow_at, follow.len()), drafters::pair_shape(count));
            let layout = step::pack_guesses(&inputs, &bounds, shape, slot as u32, &mut pinned[start..]);
            words = start + layout.words;
            let spans = StepSpans::new(block.elements::<u32>(start, layout.words), &layout, shape, bounds.tables);
            pair_spans = Some((shape, spans));
        }
        // SAFETY: the slot's last step was collected, so its copy is complete; the buffer is not written again before this copy is.
        let copied = unsafe { self.queue.upload(block, pinned.as_ptr().cast(), words * 4) };
        copied.map_err(device_error)?;
        let step = *self.current();
        let pair = pair_spans.map(|(shape, spans)| Current { spans, ..self.step_at(shape, step.is_greedy) });
        let guesses = self.guesses.as_mut().expect("as above");
        guesses.passes = Some(Passes {
            step,
            pair,
            slot,
            samples: Vec::new(),
            rows: next.rows,
            count,
            most,
            num_done: 0,
            is_recorded,
            spans: StepSpans::new(block, &layout, shape, bounds.tables),
            wanted: block.elements::<u32>(wanted_at, 2 * count),
            index: block.elements::<u32>(index_at, count),
            follow: block.elements::<FollowRow>(follow_at / FOLLOW_WORDS, follow.len()),
        });
        Ok(())
    }

    /// Reads what is guessed for a row behind a step that this worker has not collected. The step that verifies it may come before,
    /// because rank 0 has it from another worker of the group; all of them must take the same passes.
    fn await_guesses(&mut self, row: RowId) -> Result<(), DeviceError> {
        let Some(guesses) = self.guesses.as_mut().filter(|guesses| guesses.kind == DrafterKind::Model) else {
            return Ok(());
        };
        for step in self.in_flight.iter_mut().filter(|step| step.guessed.is_none() && step.guesses.contains(&row)) {
            step.done.wait().map_err(device_error)?;
            step.guessed = Some(guesses.read(step.slot, &step.guesses));
        }
        Ok(())
    }

    /// Runs a pass of guesses, or replays its recording. The first time, runs it op by op and then records it.
    pub(super) fn run_pass(
        &mut self,
        pass: &mut dyn FnMut(&mut Self) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let Passes { count, num_done, is_recorded, spans, pair, .. } = *self.passes();
        let is_first = num_done == 0;
        if !is_first {
            self.is_split = true;
            let shape = StepShape::decode(count, false);
            let is_greedy = self.current().is_greedy;
            self.current = Some(Current { spans, ..self.step_at(shape, is_greedy) });
        }
        let has_bucket = self.graphs.bucket_of(count.max(1)) == Some(count.max(1));
        match if is_first { is_recorded && (has_bucket || count == 0) } else { has_bucket } {
            true => {
                let kind = match (is_first, pair) {
                    (false, _) => Pass::NextGuess,
                    (true, None) => Pass::FirstGuess(count),
                    (true, Some(_)) => Pass::FirstPair(count),
                };
                self.run_recorded_pass(kind, pass)
            }
            false => {
                self.wait_for_inputs()?;
                pass(self)
            }
        }
    }

    /// Lets the kernels that follow wait for those in front. They read positions and slots before the work in front of them is complete,
    /// as those of a step are known before. A graph waits for that work, and so does filling memory.
    pub(super) fn wait_for_inputs(&self) -> Result<(), DeviceError> {
        let zero = self.guesses.as_ref().expect("the model has a drafter").zero.span();
        self.queue.fill(zero, 0).map_err(device_error)
    }

    pub(super) fn guess_rows(&self) -> GuessRows {
        let guesses = self.guesses.as_ref().expect("the model has a drafter");
        let Passes { wanted, spans, count, .. } = *self.passes();
        let (made, num_generated) = (guesses.made.span(), spans.num_generated);
        GuessRows { wanted, made, positions: spans.positions, num_generated, count }
    }

    /// The tokens of the step become those that follow them.
    pub(super) fn op_follow(&mut self) -> Result<(), DeviceError> {
        let followed = self.follow_tokens()?;
        self.current.as_mut().expect("passes belong to a step").spans.token_ids = followed;
        Ok(())
    }

    /// The tokens that follow those of the step.
    pub(super) fn follow_tokens(&self) -> Result<Span, DeviceError> {
        let guesses = self.guesses.as_ref().expect("the model has a drafter");
        let (current, passes) = (self.current(), self.passes());
        let outputs = self.workspace().outputs(current.spans.slot, 0);
        let step = Followed {
            rows: passes.follow,
            num_rows: current.shape.rows,
            token_ids: self.step_at(current.shape, false).spans.token_ids,
            positions: current.spans.positions,
            outputs: outputs.base,
            slot: outputs.slot,
            slot_bytes: Outputs::slot_bytes(outputs.max_samples, outputs.max_top),
        };
        let followed = guesses.followed.span().elements::<u32>(0, current.shape.tokens);
        guess::follow(&self.queue, &step, followed, passes.index, &self.guess_rows()).map_err(device_error)?;
        Ok(followed)
    }

    /// Guesses a token for each row that needs one, and makes the inputs of the next pass.
    pub(super) fn op_guess(&mut self, x: CudaTensor, head: &CudaWeight) -> Result<(), DeviceError> {
        let Passes { count, num_done, index, spans, pair, .. } = *self.passes();
        self.run_deferred()?;
        self.flush()?;
        if count == 0 {
            return Ok(());
        }
        let chosen = match (num_done, self.drafter) {
            (0, Some(DrafterKind::Model)) if pair.is_none() => return self.begin_newest(),
            (0, Some(DrafterKind::Model)) => x.values.part(2 * count * x.cols, 2 * count * x.cols),
            (0, _) => self.gather(x, index, count)?,
            _ => x.values,
        };
        let head = &self.head_for_guesses(head, count);
        let all = self.all_logits(chosen, head, count)?;
        let guesses = self.guesses.as_ref().expect("the model has a drafter");
        let (base, slot) = (guesses.guessed.span(), guesses.zero.span());
        let choice = Choice {
            samples: Samples { rows: spans.sample_rows, num_generated: spans.num_generated, count },
            masks: None,
            outputs: Outputs { base, slot, max_samples: guesses.max_rows, max_top: 0, first: 0 },
        };
        self.choose_from(all, head, choice)?;
        self.advance_guesses(Newest::Guessed(base))
    }

    /// Reports guesses, and makes the inputs of the next pass.
    pub(super) fn advance_guesses(&self, newest: Newest) -> Result<(), DeviceError> {
        let guesses = self.guesses.as_ref().expect("the model has a drafter");
        let results = Results {
            base: guesses.results.span(),
            slot: self.passes().spans.slot,
            max_rows: guesses.max_rows,
            most: guesses.most,
        };
        let next = self.next_pass()?;
        guess::advance(&self.queue, newest, &self.guess_rows(), &next, &results).map_err(device_error)
    }

    /// The inputs of the next pass.
    pub(super) fn next_pass(&self) -> Result<NextPass, DeviceError> {
        let spans = self.passes().spans;
        let (bounds, [slots, block_tables]) = (self.bounds()?, [spans.slots, spans.block_tables]);
        Ok(NextPass {
            token_ids: spans.token_ids,
            context_lens: spans.context_lens,
            slots: slots.all,
            slot_stride: slots.stride,
            block_tables: block_tables.all,
            table_stride: block_tables.stride,
            max_blocks: bounds.tables.stride,
            block_size: bounds.block_size,
            num_groups: bounds.tables.num_groups,
        })
    }

    /// Rows of `x`, one after the other.
    fn gather(&self, x: CudaTensor, index: Span, count: usize) -> Result<Span, DeviceError> {
        let gathered = self.workspace().gathered.span();
        gather_rows(&self.queue, gathered, x.values, index, count, x.cols).map_err(device_error)?;
        Ok(gathered)
    }

    /// Prepares the next pass, for which `hidden` keeps the rows that guess; returns false, and ends the step, if there is none.
    pub(super) fn op_next_guess(&mut self, hidden: Option<CudaTensor>) -> Result<bool, DeviceError> {
        let guesses = self.guesses.as_mut().expect("the model has a drafter");
        let passes = guesses.passes.as_mut().expect("passes belong to a step");
        passes.num_done += 1;
        let Passes { num_done, most, count, index, pair, .. } = *passes;
        // A draft model's first pass over all of the step guesses nothing.
        let num_passes = most + usize::from(guesses.kind == DrafterKind::Model && pair.is_none());
        if num_done >= num_passes {
            let Passes { slot, samples, rows, .. } = guesses.passes.take().expect("as above");
            self.finish_step(slot, &samples, rows)?;
            return Ok(false);
        }
        if let Some(hidden) = hidden.filter(|_| num_done == 1) {
            let rows = self.gather(hidden, index, count)?;
            let bytes = count * hidden.cols * 2;
            self.queue.copy(hidden.values.part(0, bytes), rows.part(0, bytes)).map_err(device_error)?;
        }
        Ok(true)
    }
}
