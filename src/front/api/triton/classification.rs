//! The classification extension: the largest values of an output, as `value:index[:label]` strings.

use serving::{DataType, InferError, Tensor};

/// The `num_classes` largest values of each row of `output` as a BYTES tensor.
///
/// With `is_batched` the outermost dimension counts rows; otherwise all elements are one row.
///
/// # Errors
/// When the output is not numeric, or its data is not what its shape says.
pub fn classify(
    output: &Tensor,
    num_classes: usize,
    is_batched: bool,
    labels: Option<&[String]>,
) -> Result<Tensor, InferError> {
    let values = numbers(output)?;
    let num_rows = if is_batched { output.shape.first().map_or(1, |&rows| rows.max(0) as usize) } else { 1 };
    let row_len = values.len().checked_div(num_rows).unwrap_or(0);
    let kept = num_classes.min(row_len);
    let mut classes = Vec::with_capacity(num_rows * kept);
    for row in values.chunks(row_len.max(1)).take(num_rows) {
        let mut order: Vec<usize> = (0..row.len()).collect();
        order.sort_by(|&a, &b| row[b].order().total_cmp(&row[a].order()));
        classes.extend(order[..kept].iter().map(|&index| describe(row[index], index, labels)));
    }
    let shape = if is_batched { vec![num_rows as i64, kept as i64] } else { vec![kept as i64] };
    Ok(Tensor::from_byte_strings(output.name.clone(), &shape, &classes))
}

fn describe(value: Value, index: usize, labels: Option<&[String]>) -> String {
    let value = match value {
        Value::Float(value) => format!("{value:.6}"),
        Value::Integer(value) => value.to_string(),
    };
    match labels.and_then(|labels| labels.get(index)).filter(|label| !label.is_empty()) {
        Some(label) => format!("{value}:{index}:{label}"),
        None => format!("{value}:{index}"),
    }
}

#[derive(Clone, Copy)]
enum Value {
    Integer(i128),
    Float(f64),
}

impl Value {
    fn order(self) -> f64 {
        match self {
            Value::Integer(value) => value as f64,
            Value::Float(value) => value,
        }
    }
}

fn numbers(output: &Tensor) -> Result<Vec<Value>, InferError> {
    macro_rules! read {
        ($type:ty, $value:expr) => {
            output
                .data
                .as_chunks::<{ size_of::<$type>() }>()
                .0
                .iter()
                .map(|bytes| $value(<$type>::from_le_bytes(*bytes)))
                .collect()
        };
    }
    let integer = |value: i128| Value::Integer(value);
    Ok(match output.datatype {
        DataType::Uint8 => read!(u8, |value| integer(i128::from(value))),
        DataType::Uint16 => read!(u16, |value| integer(i128::from(value))),
        DataType::Uint32 => read!(u32, |value| integer(i128::from(value))),
        DataType::Uint64 => read!(u64, |value| integer(i128::from(value))),
        DataType::Int8 => read!(i8, |value| integer(i128::from(value))),
        DataType::Int16 => read!(i16, |value| integer(i128::from(value))),
        DataType::Int32 => read!(i32, |value| integer(i128::from(value))),
        DataType::Int64 => read!(i64, |value| integer(i128::from(value))),
        DataType::Fp32 => read!(f32, |value| Value::Float(f64::from(value))),
        DataType::Fp64 => read!(f64, Value::Float),
        DataType::Bool | DataType::Bytes | DataType::Fp16 | DataType::Bf16 => {
            return Err(InferError::invalid(format!(
                "class result not available for output due to unsupported type '{}' of '{}'",
                output.datatype.name(),
                output.name
            )));
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_values_come_first_with_their_labels() {
        let output = Tensor::from_f32("OUT", &[1, 4], &[0.1, 0.7, 0.05, 0.15]);
        let labels = ["ant", "bee", "cat", ""].map(str::to_owned);
        let classes = classify(&output, 2, true, Some(&labels)).unwrap();
        assert_eq!(classes.shape[..], [1, 2]);
        assert_eq!(classes.to_byte_strings().unwrap(), ["0.700000:1:bee", "0.150000:3"]);
    }

    #[test]
    fn each_row_of_a_batch_is_ranked_on_its_own() {
        let output = Tensor::from_i32("OUT", &[2, 2], &[1, 2, 4, 3]);
        let classes = classify(&output, 9, true, None).unwrap();
        assert_eq!(classes.shape[..], [2, 2]);
        assert_eq!(classes.to_byte_strings().unwrap(), ["2:1", "1:0", "4:0", "3:1"]);
    }

    #[test]
    fn an_empty_output_has_no_classes() {
        assert_eq!(classify(&Tensor::from_i32("OUT", &[0], &[]), 3, true, None).unwrap().shape[..], [0, 0]);
    }

    #[test]
    fn strings_have_no_classes() {
        assert!(classify(&Tensor::from_byte_strings("OUT", &[1], &["a"]), 1, false, None).is_err());
    }
}
