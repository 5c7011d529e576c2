//! The request of a layout to its engine, and the engine's response.

use serving::{InferError, InferRequest, InferResponse, Name, Shape, Tensor};

use crate::tensor_values::{find, strings};

/// Inputs of the engine, each with the names that a layout has for it, in order of precedence.
pub(super) type Names = [(&'static str, &'static [&'static str])];

/// Tensors of a layout whose names differ from those of the engine: the layout's name and the engine's.
pub(super) type Renames = [(&'static str, &'static str)];

/// The name that a tensor has after `renames`.
pub(super) fn renamed<'a>(renames: &Renames, name: &'a str) -> &'a str {
    renames.iter().find(|(from, _)| *from == name).map_or(name, |&(_, to)| to)
}

/// Renames tensors.
pub(super) fn rename(renames: &Renames, tensors: &mut [Tensor]) {
    for tensor in tensors {
        if let Some(&(_, to)) = renames.iter().find(|(from, _)| tensor.name == *from) {
            tensor.name = to.into();
        }
    }
}

/// The listed tensors, renamed; those that are absent are left out.
pub(super) fn selected(renames: &Renames, tensors: &[Tensor]) -> Vec<Tensor> {
    let select = |&(from, to): &(&str, &str)| {
        let tensor = tensors.iter().find(|tensor| tensor.name == from)?;
        Some(Tensor { name: to.into(), ..tensor.clone() })
    };
    renames.iter().filter_map(select).collect()
}

/// The inputs of one request to the engine, which has one prompt.
pub(super) struct EngineInputs(Vec<Tensor>);

impl EngineInputs {
    /// The inputs `input_ids` and `streaming`.
    pub fn new(prompt: &[u32], streaming: bool) -> Self {
        let ids = Tensor::from_u32("input_ids", &[1, prompt.len() as i64], prompt);
        Self(vec![ids, Tensor::from_bool("streaming", &[1, 1], &[streaming])])
    }

    /// Adds the inputs that `request` has under the layout's names.
    ///
    /// # Errors
    /// When a tensor has neither one value nor one for each row.
    pub fn add_named(&mut self, request: &InferRequest, names: &Names, row: Row) -> Result<(), InferError> {
        for (name, aliases) in names {
            if let Some(tensor) = find(request, aliases) {
                self.0.push(row.of(tensor, name)?);
            }
        }
        Ok(())
    }

    /// Adds inputs.
    pub fn extend(&mut self, inputs: impl IntoIterator<Item = Tensor>) {
        self.0.extend(inputs);
    }

    /// Adds the inputs that are absent.
    pub fn add_defaults(&mut self, defaults: impl IntoIterator<Item = Tensor>) {
        add_missing(&mut self.0, defaults);
    }

    /// Replaces an input.
    pub fn replace(&mut self, input: Tensor) {
        self.0.retain(|tensor| tensor.name != input.name);
        self.0.push(input);
    }

    /// The input of this name.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.0.iter().find(|tensor| tensor.name == name)
    }

    /// The request to the engine: `request` with these inputs and all outputs.
    pub fn into_request(self, request: &InferRequest) -> InferRequest {
        InferRequest { inputs: self.0, requested_outputs: Vec::new(), ..request.clone() }
    }
}

/// Adds the tensors of `defaults` whose names are absent.
pub(super) fn add_missing(inputs: &mut Vec<Tensor>, defaults: impl IntoIterator<Item = Tensor>) {
    for default in defaults {
        if inputs.iter().all(|input| input.name != default.name) {
            inputs.push(default);
        }
    }
}

/// One row of a request, whose parameters have one value for all rows or one for each.
#[derive(Clone, Copy)]
pub(super) struct Row {
    pub index: usize,
    pub count: usize,
}

impl Row {
    /// This row's value of `tensor`, with the engine's name.
    fn of(self, tensor: &Tensor, name: &str) -> Result<Tensor, InferError> {
        match tensor.datatype.size() {
            Some(size) => {
                let at = self.index_of(tensor, tensor.data.len() / size)? * size;
                let (name, shape) = (Name::from(name), Shape::from_slice(&[1, 1]));
                Ok(Tensor { name, shape, data: tensor.data.slice(at..at + size), ..tensor.clone() })
            }
            None => {
                let strings = strings(tensor)?;
                let index = self.index_of(tensor, strings.len())?;
                Ok(Tensor::from_byte_strings(name, &[1, 1], &strings[index..=index]))
            }
        }
    }

    /// The index of this row's value among `count` values.
    fn index_of(self, tensor: &Tensor, count: usize) -> Result<usize, InferError> {
        match count {
            1 => Ok(0),
            count if count == self.count => Ok(self.index),
            count => Err(InferError::invalid(format!(
                "input `{}` has {count} values for {} prompts; send one, or one each",
                tensor.name, self.count
            ))),
        }
    }
}

/// The tokens of one response of the engine, and their natural log-probabilities where they are requested.
pub(super) struct EngineOutput {
    pub tokens: Vec<u32>,
    pub log_probs: Vec<f32>,
}

impl EngineOutput {
    /// The tokens of `response`.
    pub fn new(response: &InferResponse) -> Self {
        let output = |name: &str| response.outputs.iter().find(|tensor| tensor.name == name);
        let tokens = output("output_ids").and_then(Tensor::to_i32).unwrap_or_default();
        Self {
            tokens: tokens.into_iter().map(i32::cast_unsigned).collect(),
            log_probs: output("output_log_probs").and_then(Tensor::to_f32).unwrap_or_default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(tensor: &Tensor, index: usize, count: usize) -> Result<Tensor, InferError> {
        Row { index, count }.of(tensor, "name")
    }

    #[test]
    fn a_row_has_its_own_value_or_the_common_one() {
        let (common, own) = (Tensor::from_f32("a", &[1], &[0.5]), Tensor::from_i32("b", &[2, 1], &[3, 4]));
        assert_eq!(row(&common, 1, 2).unwrap().to_f32().unwrap(), [0.5]);
        let second = row(&own, 1, 2).unwrap();
        assert_eq!((second.name.as_str(), &second.shape[..], second.to_i32().unwrap()), ("name", &[1, 1][..], vec![4]));
        let error = row(&own, 0, 3).unwrap_err();
        assert_eq!(error.message, "input `b` has 2 values for 3 prompts; send one, or one each");
    }

    #[test]
    fn strings_of_rows_are_whole_strings() {
        let texts = Tensor::from_byte_strings("guide", &[2, 1], &["x", "yz"]);
        assert_eq!(row(&texts, 1, 2).unwrap().to_byte_strings().unwrap(), ["yz"]);
        let text = Tensor::from_byte_strings("guide", &[1], &["common"]);
        assert_eq!(row(&text, 1, 2).unwrap().to_byte_strings().unwrap(), ["common"]);
    }

    #[test]
    fn names_and_renames_are_those_of_the_tables() {
        let request = InferRequest {
            inputs: vec![Tensor::from_i32("top_k", &[1], &[7]), Tensor::from_f32("TEMPERATURE", &[1], &[0.5])],
            ..InferRequest::default()
        };
        let mut inputs = EngineInputs::new(&[1, 2], true);
        let names =
            [("temperature", &["temperature", "TEMPERATURE"][..]), ("runtime_top_k", &["top_k"]), ("seed", &["seed"])];
        inputs.add_named(&request, &names, Row { index: 0, count: 1 }).unwrap();
        inputs.add_defaults([
            Tensor::from_i32("runtime_top_k", &[1, 1], &[1]),
            Tensor::from_i32("end_id", &[1, 1], &[2]),
        ]);
        inputs.replace(Tensor::from_i32("end_id", &[1, 1], &[-1]));
        let found: Vec<Name> = inputs.into_request(&request).inputs.into_iter().map(|tensor| tensor.name).collect();
        assert_eq!(found, ["input_ids", "streaming", "temperature", "runtime_top_k", "end_id"]);
        assert_eq!([renamed(&[("a", "b")], "a"), renamed(&[("a", "b")], "c")], ["b", "c"]);
    }
}
