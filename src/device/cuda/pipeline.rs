//! Pipeline stages on GPUs: activations go through NCCL from each worker to the worker of the same rank in the next
//! stage, within and between nodes.

use std::sync::Arc;

use half::bf16;
use kernels::cuda::{DeviceBuffer, Gpu, Queue, Span};
use ops::{DeviceError, PipelineStage};

use super::group::Group;
use super::nccl::{Nccl, unlink_shared_memory};
use super::{CudaConfig, CudaDevice, CudaTensor, device_error};

/// A worker's connection to the neighbouring stages; empty for a model with one stage.
pub(crate) struct Pipeline {
    pub(crate) stage: PipelineStage,
    /// Over the workers of all stages with this worker's rank in their groups, in order of stages.
    nccl: Option<Nccl>,
}

impl Pipeline {
    /// Joins the stages; returns after all workers have joined and neighbours have connected.
    ///
    /// Waits for the group's communicator first, so that every worker creates the two in the same order.
    pub(crate) fn new(config: &CudaConfig, group: &Group, gpu: &Arc<Gpu>, q: &Queue) -> Result<Self, DeviceError> {
        let stage = config.stage;
        if stage.count == 1 {
            return Ok(Self { stage, nccl: None });
        }
        group.join()?;
        let exchange = config.stage_exchange.as_ref().ok_or_else(|| DeviceError::Unavailable {
            device: "cuda".into(),
            reason: format!("{} pipeline stages need a way to exchange NCCL's id", stage.count),
        })?;
        let nccl = Nccl::new(stage.index, stage.count, exchange.as_ref(), &config.library_dirs)?;
        let pipeline = Self { stage, nccl: Some(nccl) };
        pipeline.meet(gpu, q)?;
        exchange.gather(&[])?;
        unlink_shared_memory();
        Ok(pipeline)
    }

    /// Sends a few bytes from each stage to the next, so that connections exist before a step is recorded.
    fn meet(&self, gpu: &Arc<Gpu>, q: &Queue) -> Result<(), DeviceError> {
        let buffer = DeviceBuffer::from_slice(gpu, &[0u32; 128]).map_err(device_error)?;
        if !self.stage.is_first() {
            self.receive(q, buffer.span())?;
        }
        if !self.stage.is_last() {
            self.send(q, buffer.span())?;
        }
        q.wait().map_err(device_error)
    }

    fn send(&self, q: &Queue, values: Span) -> Result<(), DeviceError> {
        self.nccl().send(q, values, self.stage.index + 1)
    }

    fn receive(&self, q: &Queue, values: Span) -> Result<(), DeviceError> {
        self.nccl().receive(q, values, self.stage.index - 1)
    }

    fn nccl(&self) -> &Nccl {
        self.nccl.as_ref().expect("only a stage of a pipeline hands on or takes over")
    }
}

impl CudaDevice {
    pub(crate) fn op_recv_hidden(&mut self, out: CudaTensor) -> Result<(), DeviceError> {
        self.rounded = None;
        match self.current().only_products {
            true => Ok(()),
            false => self.pipeline.receive(&self.queue, self.activations(out)),
        }
    }

    pub(crate) fn op_send_hidden(&mut self, x: CudaTensor) -> Result<(), DeviceError> {
        match self.current().only_products {
            true => Ok(()),
            false => self.pipeline.send(&self.queue, self.activations(x)),
        }
    }

    /// The rows of the step's tokens, padding included; all stages pad in the same way.
    fn activations(&self, tensor: CudaTensor) -> Span {
        tensor.values.elements::<bf16>(0, self.current().shape.tokens * tensor.cols)
    }
}
