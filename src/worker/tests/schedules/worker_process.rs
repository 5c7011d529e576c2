//! A worker process, as the loop of `worker` behaves.

use engine::{SampledToken, plan};
use ops::StepInputs;
use supervision::{FromWorker, ToWorker};
use worker::RowTable;

use crate::device::Device;

/// Sizes of the rows and KV blocks of a worker.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    pub max_rows: usize,
    pub num_blocks: usize,
    pub block_size: usize,
}

pub struct WorkerProcess {
    sizes: Sizes,
    next_step: u64,
    /// `None` before the KV cache is allocated, and while the worker sleeps.
    rows: Option<(RowTable, Device)>,
    is_configured: bool,
    inputs: StepInputs,
    /// Steps that are computed and whose group has not finished them.
    num_queued: usize,
    pub is_dead: bool,
}

/// What a worker does about a message.
pub enum Reaction {
    Send(FromWorker),
    /// It has computed a step, which is done when its group has computed it.
    Computed {
        step: u64,
        tokens: Vec<SampledToken>,
    },
    /// It ends, after a report.
    Fail(String),
    Nothing,
}

impl WorkerProcess {
    pub fn new(sizes: Sizes, next_step: u64) -> Self {
        let inputs = StepInputs::default();
        Self { sizes, next_step, rows: None, is_configured: false, inputs, num_queued: 0, is_dead: false }
    }

    fn allocate(&mut self, next_step: u64) {
        let Sizes { max_rows, num_blocks, block_size } = self.sizes;
        let rows = RowTable::new(max_rows, vec![None], block_size, num_blocks, next_step);
        self.rows = Some((rows, Device::new(num_blocks, block_size, max_rows)));
    }

    /// A step of the group has ended.
    pub fn step_ended(&mut self) {
        self.num_queued -= 1;
    }

    pub fn receive(&mut self, bytes: &[u8]) -> Reaction {
        let message = match plan::decode::<ToWorker>(bytes) {
            Ok(message) => message,
            Err(error) => return Reaction::Fail(error.to_string()),
        };
        match message {
            ToWorker::Configure { num_blocks, .. } if !self.is_configured => {
                assert_eq!(num_blocks, self.sizes.num_blocks);
                self.is_configured = true;
                self.allocate(self.next_step);
                Reaction::Send(FromWorker::Ready { slot_bytes: [0; 2] })
            }
            ToWorker::Step(plan) => {
                let Some((rows, device)) = &mut self.rows else { return Reaction::Fail("no memory for a step".into()) };
                if let Err(error) = rows.apply(&plan, &mut self.inputs) {
                    return Reaction::Fail(error.to_string());
                }
                self.num_queued += 1;
                Reaction::Computed { step: plan.step, tokens: device.run(&self.inputs) }
            }
            ToWorker::Sleep if self.is_configured && self.num_queued == 0 => {
                self.rows = None;
                Reaction::Send(FromWorker::Slept { refused: None })
            }
            ToWorker::Wake { next_step } if self.is_configured && self.num_queued == 0 => {
                self.allocate(next_step);
                Reaction::Send(FromWorker::Ready { slot_bytes: [0; 2] })
            }
            ToWorker::Stop => Reaction::Nothing,
            other => Reaction::Fail(format!("rank 0 sent `{}` at a wrong time", other.name())),
        }
    }
}
