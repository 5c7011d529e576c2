//! Language models that are served together with a detokenizer, for models that send requests to other models.

use std::sync::Arc;

use super::Server;
use crate::{
    CallCounter, DetokenizerModel, InferError, InferRequest, Name, ResponseStream, TextModel, TextOutput, TextOutputs,
};

impl Server {
    /// How the language model `model` makes `outputs` with the text that the model `detokenizer` would make of its tokens; `None` where
    /// the two cannot be served together. Each response counts as a request to `detokenizer`.
    ///
    /// # Errors
    /// When a model is unknown or not ready.
    pub fn text_outputs(
        &self,
        model: &str,
        detokenizer: &str,
        outputs: Vec<(Name, TextOutput)>,
    ) -> Result<Option<TextOutputs>, InferError> {
        let (model, detokenizer) = (self.resolve(model, "")?, self.resolve(detokenizer, "")?);
        let (Some(TextModel::Generator), Some(TextModel::Detokenizer(DetokenizerModel { decoder, is_nested, .. }))) =
            (model.text_model(), detokenizer.text_model())
        else {
            return Ok(None);
        };
        let calls = CallCounter::new(detokenizer.statistics.clone());
        Ok(Some(TextOutputs { outputs, decoder, is_nested, calls, parameters: Arc::default() }))
    }

    /// Serves a request of another model like [`Server::infer_for_model`], with the outputs of [`Server::text_outputs`].
    ///
    /// # Errors
    /// As [`Server::infer`].
    pub fn infer_text_for_model(
        &self,
        request: InferRequest,
        outputs: TextOutputs,
    ) -> Result<ResponseStream, InferError> {
        self.resolve(&request.model_name, &request.model_version)?.infer_text(request, outputs)
    }
}
