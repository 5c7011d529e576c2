//! TensorRT-LLM's `tensorrt_llm` models: requests of any batch size, batched in flight or one batch after another.

use std::sync::Arc;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use repository::proto::DataType;
use serving::{Backend, BackendFactory, ErrorKind, InferError, InferRequest, LoadRequest, ResponseStream, Tensor};

use super::adapter::{Adapted, Adapter};
use super::engine_config::{check_engine, engine_output, with_checkpoint};
use super::engine_request::{Renames, add_missing, rename, renamed};
use super::forward::mapped;
use super::keys::{self, LLM_INPUTS, Use};
use super::layout::Layout;
use super::rows::Rows;
use super::static_batch::StaticBatch;

/// Inputs of the Python `gpt` repository.
const GPT_INPUTS: &Renames = &[("output_log_probs", "return_log_probs")];

/// Outputs of the Python `gpt` repository, with the engine's names first.
const GPT_OUTPUTS: &Renames = &[("output_log_probs", "log_probs")];

/// The engine's names of these outputs.
const REQUESTED_GPT_OUTPUTS: &Renames = &[("log_probs", "output_log_probs")];

/// Loads `tensorrt_llm` of the in-flight and of the Python `gpt` repository.
pub(super) struct EngineFactory {
    pub(super) llm: Arc<dyn BackendFactory>,
    pub(super) layout: Layout,
}

impl BackendFactory for EngineFactory {
    fn is_exclusive(&self) -> bool {
        true
    }

    fn check(&self, model: LoadRequest) -> BoxFuture<'static, Result<(), InferError>> {
        check_engine(&self.llm, engine_of(&model, self.layout))
    }

    fn load(&self, model: LoadRequest) -> BoxFuture<'static, Result<Arc<dyn Backend>, InferError>> {
        let (llm, layout) = (self.llm.clone(), self.layout);
        async move {
            let config = model.config.clone();
            let engine = llm.load(engine_of(&model, layout)?).await?;
            let checked: Arc<dyn Backend> = Arc::new(Adapted(Checked { engine, layout }));
            let mut rows: Arc<dyn Backend> = Arc::new(Adapted(Rows::new(checked, &config)));
            if layout == Layout::FixedBatch {
                rows = Arc::new(Adapted(GptNames(rows)));
            }
            let is_v1 = config.parameter("gpt_model_type").is_some_and(|kind| kind.eq_ignore_ascii_case("v1"));
            Ok(match is_v1 || layout == Layout::FixedBatch {
                true => Arc::new(StaticBatch::new(rows, config.num_instances())),
                false => rows,
            })
        }
        .boxed()
    }
}

/// The load of the engine in a model.
fn engine_of(model: &LoadRequest, layout: Layout) -> Result<LoadRequest, InferError> {
    with_checkpoint(model, |config| {
        if layout == Layout::FixedBatch {
            config.output.push(engine_output("output_log_probs", DataType::TypeFp32));
        }
    })
}

/// Refuses inputs that would change the output if they were ignored, and adds the defaults of the layout.
struct Checked {
    engine: Arc<dyn Backend>,
    layout: Layout,
}

impl Adapter for Checked {
    fn model(&self) -> &Arc<dyn Backend> {
        &self.engine
    }

    fn infer(&self, request: InferRequest) -> Result<ResponseStream, InferError> {
        self.engine.infer(self.prepare_text(request)?)
    }

    fn prepare_text(&self, mut request: InferRequest) -> Result<InferRequest, InferError> {
        for tensor in &request.inputs {
            if let Some(Use::Refused(reason)) = keys::find(LLM_INPUTS, &tensor.name) {
                let message = format!("input `{}` is not supported: {reason}; leave it out", tensor.name);
                return Err(InferError::new(ErrorKind::Unsupported, message));
            }
        }
        if self.layout == Layout::FixedBatch {
            add_missing(&mut request.inputs, gpt_defaults());
        }
        Ok(request)
    }
}

/// Defaults of TensorRT-LLM's Python runtime, which the `gpt` repository runs (`SamplingConfig` of `tensorrt_llm.runtime`): greedy
/// without a top-k, and beams are ranked by their mean log-probability.
fn gpt_defaults() -> [Tensor; 2] {
    [Tensor::from_i32("runtime_top_k", &[1, 1], &[1]), Tensor::from_f32("len_penalty", &[1, 1], &[1.0])]
}

/// Converts between the names of the `gpt` repository and those of the in-flight one.
struct GptNames(Arc<dyn Backend>);

impl Adapter for GptNames {
    fn model(&self) -> &Arc<dyn Backend> {
        &self.0
    }

    fn infer(&self, mut request: InferRequest) -> Result<ResponseStream, InferError> {
        rename(GPT_INPUTS, &mut request.inputs);
        for name in &mut request.requested_outputs {
            *name = renamed(REQUESTED_GPT_OUTPUTS, name.as_str()).into();
        }
        let stream = self.0.infer(request)?;
        Ok(mapped(stream, |mut response| {
            rename(GPT_OUTPUTS, &mut response.outputs);
            response.outputs.iter_mut().filter(|tensor| tensor.name == "log_probs").for_each(beams_last);
            response
        }))
    }
}

/// Transposes `[batch, beams, length]` to `[batch, length, beams]`.
fn beams_last(tensor: &mut Tensor) {
    let (Some(values), &[batch, beams, length]) = (tensor.to_f32(), tensor.shape.as_slice()) else { return };
    let size = |size: i64| usize::try_from(size).unwrap_or(0);
    let (num_beams, width) = (size(beams), size(length));
    let at = |row: usize, position: usize, beam: usize| values[(row * num_beams + beam) * width + position];
    let rows = 0..size(batch);
    let transposed =
        rows.flat_map(|row| (0..width).flat_map(move |position| (0..num_beams).map(move |beam| (row, position, beam))));
    let transposed: Vec<f32> = transposed.map(|(row, position, beam)| at(row, position, beam)).collect();
    *tensor = Tensor::from_f32(tensor.name.clone(), &[batch, length, beams], &transposed);
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
