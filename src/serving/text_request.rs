//! Requests to models that generate text, in forms that Triton refuses and that some of its clients send.

use generation::input_names::other_release;

use crate::InferRequest;
use crate::check::Signature;

impl Signature {
    /// Changes a request to the form that the model expects: inputs with the name of another release of TensorRT-LLM get the
    /// model's, and tensors of one row without a batch dimension get one. Returns whether anything has changed.
    pub fn adapt_text_request(&self, request: &mut InferRequest) -> bool {
        let mut has_changed = false;
        for at in 0..request.inputs.len() {
            let name = request.inputs[at].name.clone();
            if self.input_rank(&name).is_none() {
                let is_free = |other: &&str| self.input_rank(other).is_some() && request.input(other).is_none();
                let Some(other) = other_release(&name).filter(is_free) else { continue };
                request.inputs[at].name = other.into();
                request.client_memory.rename_input(&name, other);
                has_changed = true;
            }
            let tensor = &mut request.inputs[at];
            if self.is_batched() && self.input_rank(&tensor.name) == Some(tensor.shape.len()) {
                tensor.shape.insert(0, 1);
                has_changed = true;
            }
        }
        has_changed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Tensor;
    use repository::ModelConfig;
    use repository::proto::{DataType, ModelInput};

    fn signature(max_batch_size: i32) -> Signature {
        let input = |name: &str| {
            let mut input =
                ModelInput { name: name.to_owned(), dims: vec![1], optional: true, ..ModelInput::default() };
            input.set_data_type(DataType::TypeInt32);
            input
        };
        let config = ModelConfig { max_batch_size, input: vec![input("seed"), input("n")], ..ModelConfig::default() };
        Signature::new(&config)
    }

    fn adapted(max_batch_size: i32, inputs: &[(&str, &[i64])]) -> Option<Vec<(String, Vec<i64>)>> {
        let inputs = inputs.iter().map(|&(name, shape)| Tensor::from_i32(name, shape, &[1])).collect();
        let mut request = InferRequest { inputs, ..InferRequest::default() };
        let has_changed = signature(max_batch_size).adapt_text_request(&mut request);
        let found = request.inputs.iter().map(|tensor| (tensor.name.to_string(), tensor.shape.to_vec()));
        has_changed.then(|| found.collect())
    }

    #[test]
    fn names_of_another_release_and_missing_batch_dimensions_are_adapted() {
        let named = |name: &str, shape: &[i64]| (name.to_owned(), shape.to_vec());
        assert_eq!(adapted(4, &[("random_seed", &[1, 1])]), Some(vec![named("seed", &[1, 1])]));
        assert_eq!(
            adapted(4, &[("n", &[1]), ("random_seed", &[1])]),
            Some(vec![named("n", &[1, 1]), named("seed", &[1, 1])])
        );
        assert_eq!(adapted(0, &[("random_seed", &[1])]), Some(vec![named("seed", &[1])]));
    }

    #[test]
    fn a_request_that_cannot_be_adapted_stays_as_it_is() {
        assert_eq!(adapted(4, &[("seed", &[1, 1])]), None);
        assert_eq!(adapted(4, &[("seed", &[1, 1]), ("random_seed", &[1, 1])]), None);
        assert_eq!(adapted(4, &[("other", &[1])]), None);
        assert_eq!(adapted(0, &[("n", &[1])]), None);
    }
}
