//! TensorRT-LLM's `tensorrt_llm` models on our engine: any batch size, in flight or one batch after another.

use std::sync::Arc;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use generation::Generator;
use repository::ModelConfig;
use repository::proto::DataType;
use serving::{
    Backend, BackendFactory, ErrorKind, GenerateCall, InferError, InferRequest, LoadRequest, MemoryUsage, Name,
    ResponseStream, Tensor, TextModel, TextOutputs,
};

use super::engine_config::{add_missing, engine_output, with_checkpoint};
use super::forward::mapped;
use super::keys::{self, LLM_INPUTS, Use};
use super::layout::Layout;
use super::rows::Rows;
use super::static_batch::StaticBatch;

/// Loads `tensorrt_llm` of the in-flight and of the Python `gpt` repository.
pub(super) struct EngineFactory {
    pub(super) llm: Arc<dyn BackendFactory>,
    pub(super) layout: Layout,
}

impl BackendFactory for EngineFactory {
    fn is_exclusive(&self) -> bool {
        true
    }

    fn load(&self, model: LoadRequest) -> BoxFuture<'static, Result<Arc<dyn Backend>, InferError>> {
        let (llm, layout) = (self.llm.clone(), self.layout);
        async move {
            let config = model.config.clone();
            let inner = llm.load(with_checkpoint(&model, |inner| fit(inner, layout))?).await?;
            let inner: Arc<dyn Backend> = Arc::new(Checked { inner, layout });
            let rows: Arc<dyn Backend> = Arc::new(Rows::new(inner, &config));
            let rows = if layout == Layout::FixedBatch { Arc::new(FixedNames(rows)) } else { rows };
            let is_v1 = config.parameter("gpt_model_type").is_some_and(|kind| kind.eq_ignore_ascii_case("v1"));
            Ok(match is_v1 || layout == Layout::FixedBatch {
                true => Arc::new(StaticBatch::new(rows, config.num_instances())),
                false => rows,
            })
        }
        .boxed()
    }
}

fn fit(config: &mut ModelConfig, layout: Layout) {
    if layout == Layout::FixedBatch {
        config.output.push(engine_output("output_log_probs", DataType::TypeFp32));
    }
}

/// Refuses inputs that would change the answer if they were ignored, and adds what a layout takes where nothing is sent.
struct Checked {
    inner: Arc<dyn Backend>,
    layout: Layout,
}

impl Checked {
    fn prepared(&self, mut request: InferRequest) -> Result<InferRequest, InferError> {
        for tensor in &request.inputs {
            if let Some(Use::Refused(reason)) = keys::find(LLM_INPUTS, &tensor.name) {
                let words = format!("input `{}` is not supported: {reason}; leave it out", tensor.name);
                return Err(InferError::new(ErrorKind::Unsupported, words));
            }
        }
        if self.layout == Layout::FixedBatch {
            add_missing(&mut request.inputs, python_runtimes_defaults());
        }
        Ok(request)
    }
}

impl Backend for Checked {
    fn infer(&self, request: InferRequest) -> Result<ResponseStream, InferError> {
        self.inner.infer(self.prepared(request)?)
    }

    fn generator(&self) -> Option<Generator> {
        self.inner.generator()
    }

    fn generate(&self, call: GenerateCall) -> Result<ResponseStream, InferError> {
        self.inner.generate(call)
    }

    fn text_model(&self) -> Option<TextModel> {
        self.inner.text_model()
    }

    fn infer_text(&self, request: InferRequest, outputs: TextOutputs) -> Result<ResponseStream, InferError> {
        self.inner.infer_text(self.prepared(request)?, outputs)
    }

    fn is_ready(&self) -> bool {
        self.inner.is_ready()
    }

    fn memory_usage(&self) -> Vec<MemoryUsage> {
        self.inner.memory_usage()
    }

    fn drain(&self) -> BoxFuture<'_, ()> {
        self.inner.drain()
    }
}

/// Where TensorRT-LLM's Python runtime, which the `gpt` repository runs, differs from its other one (`SamplingConfig` of
/// `tensorrt_llm.runtime`): greedy without a top-k, and beams are compared by their mean.
fn python_runtimes_defaults() -> [Tensor; 2] {
    [Tensor::from_i32("runtime_top_k", &[1, 1], &[1]), Tensor::from_f32("len_penalty", &[1, 1], &[1.0])]
}

/// The `gpt` repository's names for what the in-flight one calls otherwise.
struct FixedNames(Arc<dyn Backend>);

impl Backend for FixedNames {
    fn infer(&self, mut request: InferRequest) -> Result<ResponseStream, InferError> {
        rename(&mut request.inputs, "output_log_probs", "return_log_probs");
        rename_one(&mut request.requested_outputs, "log_probs", "output_log_probs");
        let stream = self.0.infer(request)?;
        Ok(mapped(stream, |mut response| {
            rename(&mut response.outputs, "output_log_probs", "log_probs");
            response.outputs.iter_mut().filter(|tensor| tensor.name == "log_probs").for_each(beams_last);
            response
        }))
    }

    fn generator(&self) -> Option<Generator> {
        self.0.generator()
    }

    fn generate(&self, call: GenerateCall) -> Result<ResponseStream, InferError> {
        self.0.generate(call)
    }

    fn is_ready(&self) -> bool {
        self.0.is_ready()
    }

    fn memory_usage(&self) -> Vec<MemoryUsage> {
        self.0.memory_usage()
    }

    fn drain(&self) -> BoxFuture<'_, ()> {
        self.0.drain()
    }
}

fn rename(tensors: &mut [Tensor], from: &str, to: &str) {
    tensors.iter_mut().filter(|tensor| tensor.name == from).for_each(|tensor| tensor.name = to.into());
}

fn rename_one(names: &mut [Name], from: &str, to: &str) {
    names.iter_mut().filter(|name| *name == from).for_each(|name| *name = to.into());
}

/// `[batch, beams, length]` to `[batch, length, beams]`.
fn beams_last(tensor: &mut Tensor) {
    let (Some(values), &[batch, beams, length]) = (tensor.to_f32(), tensor.shape.as_slice()) else { return };
    let size = |size: i64| usize::try_from(size).unwrap_or(0);
    let (num_beams, width) = (size(beams), size(length));
    let at = |row: usize, place: usize, beam: usize| values[(row * num_beams + beam) * width + place];
    let rows = 0..size(batch);
    let turned =
        rows.flat_map(|row| (0..width).flat_map(move |place| (0..num_beams).map(move |beam| (row, place, beam))));
    let turned: Vec<f32> = turned.map(|(row, place, beam)| at(row, place, beam)).collect();
    *tensor = Tensor::from_f32(tensor.name.clone(), &[batch, length, beams], &turned);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_probs_of_the_gpt_repository_have_their_beams_last() {
        let mut tensor = Tensor::from_f32("log_probs", &[1, 2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        beams_last(&mut tensor);
        assert_eq!(tensor.shape[..], [1, 3, 2]);
        assert_eq!(tensor.to_f32().unwrap(), [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
    }
}
