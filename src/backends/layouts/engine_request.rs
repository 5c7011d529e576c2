//! The tensors of a layout's request under the engine's names.

use serving::{InferError, InferRequest, Name, Shape, Tensor};

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

/// The inputs that one row of `request` has under the layout's names, with the engine's.
///
/// # Errors
/// When a tensor has neither one value nor one for each row.
pub(super) fn row_inputs(request: &InferRequest, names: &Names, row: Row) -> Result<Vec<Tensor>, InferError> {
    let input = |(name, aliases): &(&'static str, &[&str])| Some(row.of(find(request, aliases)?, name));
    names.iter().filter_map(input).collect()
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
        let names =
            [("temperature", &["temperature", "TEMPERATURE"][..]), ("runtime_top_k", &["top_k"]), ("seed", &["seed"])];
        let mut inputs = row_inputs(&request, &names, Row { index: 0, count: 1 }).unwrap();
        let defaults = [Tensor::from_i32("runtime_top_k", &[1, 1], &[1]), Tensor::from_i32("end_id", &[1, 1], &[2])];
        add_missing(&mut inputs, defaults);
        let found: Vec<Name> = inputs.into_iter().map(|tensor| tensor.name).collect();
        assert_eq!(found, ["temperature", "runtime_top_k", "end_id"]);
        assert_eq!([renamed(&[("a", "b")], "a"), renamed(&[("a", "b")], "c")], ["b", "c"]);
    }
}
