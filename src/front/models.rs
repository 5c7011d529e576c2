//! Small questions to a model's configuration.

use serving::DataType;

/// The wire type of a `data_type` in `config.pbtxt`; `None` for TYPE_INVALID.
pub fn datatype(config_type: i32) -> Option<DataType> {
    use repository::proto::DataType as Config;
    Some(match Config::try_from(config_type).ok()? {
        Config::TypeInvalid => return None,
        Config::TypeBool => DataType::Bool,
        Config::TypeUint8 => DataType::Uint8,
        Config::TypeUint16 => DataType::Uint16,
        Config::TypeUint32 => DataType::Uint32,
        Config::TypeUint64 => DataType::Uint64,
        Config::TypeInt8 => DataType::Int8,
        Config::TypeInt16 => DataType::Int16,
        Config::TypeInt32 => DataType::Int32,
        Config::TypeInt64 => DataType::Int64,
        Config::TypeFp16 => DataType::Fp16,
        Config::TypeFp32 => DataType::Fp32,
        Config::TypeFp64 => DataType::Fp64,
        Config::TypeString => DataType::Bytes,
        Config::TypeBf16 => DataType::Bf16,
    })
}

/// A shape of `count` elements for an input with `dims`: the first open size takes what the others leave.
/// With `is_batched` a batch dimension comes first.
pub fn fit_shape(dims: &[i64], is_batched: bool, count: usize) -> Vec<i64> {
    let fixed: i64 = dims.iter().filter(|&&size| size > 0).product();
    let mut rest = count as i64 / fixed.max(1);
    let mut shape: Vec<i64> = Vec::with_capacity(dims.len() + 1);
    shape.extend(is_batched.then_some(1));
    for &size in dims {
        shape.push(if size < 0 { std::mem::replace(&mut rest, 1) } else { size });
    }
    if is_batched && dims.iter().all(|&size| size >= 0) {
        shape[0] = rest.max(1);
    }
    shape
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_open_size_takes_what_the_others_leave() {
        assert_eq!(fit_shape(&[-1], true, 5), [1, 5]);
        assert_eq!(fit_shape(&[2, -1], false, 6), [2, 3]);
        assert_eq!(fit_shape(&[-1, -1], false, 6), [6, 1]);
        assert_eq!(fit_shape(&[1], true, 3), [3, 1]);
        assert_eq!(fit_shape(&[1], false, 1), [1]);
        assert_eq!(fit_shape(&[], true, 1), [1]);
    }
}
