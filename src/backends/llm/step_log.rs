//! The steps of a replica, for a recording.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use engine::{RowId, StepPlan};
use record::{Recorder, StepItem};

/// Steps in flight whose plans are kept; there are fewer.
const MAX_IN_FLIGHT: usize = 64;

/// Keeps the plan of each step in flight, and passes it to the recorder when the step is settled.
pub(crate) struct StepLog {
    recorder: Arc<Recorder>,
    model: Arc<str>,
    replica: u32,
    in_flight: VecDeque<StepItem>,
}

impl StepLog {
    /// The log of a replica.
    pub(crate) fn new(recorder: Arc<Recorder>, model: &str, replica: u32) -> Self {
        Self { recorder, model: model.into(), replica, in_flight: VecDeque::new() }
    }

    /// A plan, when planning began and when it ended.
    pub(crate) fn planned(&mut self, plan: &StepPlan, began: Instant, ended: Instant) {
        if !self.recorder.takes_steps() || self.in_flight.len() >= MAX_IN_FLIGHT {
            return;
        }
        let number = |row: &RowId| row.0;
        let joined = plan.joined.iter().map(|row| [number(&row.row), row.tokens.len() as u32, row.num_computed]);
        self.in_flight.push_back(StepItem {
            model: Arc::clone(&self.model),
            replica: self.replica,
            step: plan.step,
            times: [began, ended, ended, ended, ended, ended],
            joined: joined.collect(),
            left: plan.left.iter().map(number).collect(),
            rows: plan.work.iter().map(|work| [number(&work.row), work.start, work.num_tokens]).collect(),
        });
    }

    /// The last plan has been sent.
    pub(crate) fn sent(&mut self, at: Instant) {
        if let Some(last) = self.in_flight.back_mut() {
            last.times[2] = at;
        }
    }

    /// A step has ended: when its output arrived, was settled, and was delivered.
    pub(crate) fn ended(&mut self, step: u64, times: [Instant; 3]) {
        // Steps before this one were in flight when the workers were lost.
        while let Some(mut item) = self.in_flight.pop_front_if(|first| first.step <= step) {
            if item.step == step {
                item.times[3..].copy_from_slice(&times);
                self.recorder.step(item);
            }
        }
    }
}
