//! Buffers for the experts of a step, and their sizes.

use std::sync::Arc;

use kernels::cuda::route_few_tokens::{MAX_TOKENS, list_bytes};
use kernels::cuda::{CudaError, DeviceBuffer, Gpu, Queue, Residence};
use ops::ExpertSlices;

/// The sizes of the buffers of experts: the largest of all layers.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ExpertSizes {
    /// Number of experts.
    count: usize,
    /// Experts of a token.
    top_k: usize,
    /// Columns of an expert's inputs and outputs.
    width: usize,
    /// Columns of an expert's inner layer on this worker.
    inner: usize,
}

impl ExpertSizes {
    /// With room for another layer.
    pub(crate) fn fitting(self, layer: &ExpertSlices<'_>) -> Self {
        let inner = layer.experts.first().map_or(0, |expert| expert.down.cols.len());
        Self {
            count: self.count.max(layer.router.rows.len()),
            top_k: self.top_k.max(layer.routing.top_k),
            width: self.width.max(layer.width()),
            inner: self.inner.max(inner),
        }
    }

    /// Bytes of the buffers, as [`ExpertBuffers`] orders them.
    fn sizes(self, tokens: usize) -> [usize; 7] {
        let routes = tokens * self.top_k;
        let words = 4 * routes;
        [tokens * self.count * 4, words, words, words, words, routes * self.width * 2, routes * self.inner * 2]
    }

    /// Bytes of all buffers for steps of up to `tokens`; 0 if there are no experts.
    pub(crate) fn bytes(self, tokens: usize) -> usize {
        if !self.has_experts() {
            return 0;
        }
        let others = 4 * (self.count + 1) + 4 * tokens + self.list_bytes();
        self.sizes(tokens).iter().sum::<usize>() + others
    }

    /// Bytes of the list of the experts of few tokens.
    fn list_bytes(self) -> usize {
        list_bytes(MAX_TOKENS * self.top_k)
    }

    /// Whether a layer with experts was loaded.
    pub(crate) fn has_experts(self) -> bool {
        self.count > 0
    }
}

/// Buffers for the experts of a step, `R` routes of `T` tokens.
pub(crate) struct ExpertBuffers {
    pub(super) logits: DeviceBuffer,        // [T, experts] f32
    pub(super) experts: DeviceBuffer,       // [T, top_k] u32
    pub(super) probabilities: DeviceBuffer, // [T, top_k] f32
    pub(super) tokens: DeviceBuffer,        // [R] u32
    pub(super) places: DeviceBuffer,        // [R] u32
    pub(super) rows: DeviceBuffer,          // [R, L] bf16: inputs by expert, then outputs
    pub(super) inner: DeviceBuffer,         // [R, I] bf16
    pub(super) offsets: DeviceBuffer,       // [experts + 1] u32
    pub(super) factors: DeviceBuffer,       // [T] f32
    pub(super) list: DeviceBuffer,          // of the experts of few tokens
}

impl ExpertBuffers {
    pub(crate) fn new(
        gpu: &Arc<Gpu>,
        queue: &Queue,
        sizes: ExpertSizes,
        tokens: usize,
        residence: Residence,
    ) -> Result<Self, CudaError> {
        let [logits, experts, probabilities, token_indices, places, rows, inner] = sizes.sizes(tokens);
        let buffers = Self {
            logits: DeviceBuffer::new(gpu, logits)?,
            experts: DeviceBuffer::new(gpu, experts)?,
            probabilities: DeviceBuffer::new(gpu, probabilities)?,
            tokens: DeviceBuffer::new(gpu, token_indices)?,
            places: DeviceBuffer::new(gpu, places)?,
            rows: DeviceBuffer::with_residence(gpu, rows, residence)?,
            inner: DeviceBuffer::with_residence(gpu, inner, residence)?,
            offsets: DeviceBuffer::with_count::<u32>(gpu, sizes.count + 1)?,
            factors: DeviceBuffer::with_count::<f32>(gpu, tokens)?,
            list: DeviceBuffer::new(gpu, sizes.list_bytes())?,
        };
        // Rows behind those of the step are copied too: their tokens must exist.
        queue.fill(buffers.tokens.span(), 0)?;
        Ok(buffers)
    }

    /// Buffers without contents between steps.
    pub(crate) fn contentless(&mut self) -> [&mut DeviceBuffer; 2] {
        [&mut self.rows, &mut self.inner]
    }
}
