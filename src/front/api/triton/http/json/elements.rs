//! Elements of JSON arrays, as values and as raw tensor data.

use serving::{DataType, InferError};

use super::parser::Parser;
use super::value::{Array, Value, in_field};

type Result<T> = std::result::Result<T, InferError>;

/// Upper bound of the tensor data of the numbers in `body`, in bytes. Strings are not larger than in the text.
pub fn tensor_bytes(body: &[u8]) -> usize {
    // Commas separate numbers, and a growing buffer has up to twice the necessary capacity.
    2 * size_of::<u64>() * body.iter().filter(|byte| **byte == b',').count()
}

impl<'a> Array<'a> {
    /// Calls `visit` with each element.
    ///
    /// # Errors
    /// The first error of `visit`.
    pub fn for_each(self, visit: impl FnMut(Value<'a>) -> Result<()>) -> Result<()> {
        Parser::of_checked(self.0).array(visit)
    }

    /// The number of elements, without nested ones.
    ///
    /// # Errors
    /// None, because the text is well-formed.
    pub fn count(self) -> Result<usize> {
        let mut count = 0;
        self.for_each(|_| {
            count += 1;
            Ok(())
        })?;
        Ok(count)
    }

    /// Appends the elements, nested ones in row-major order, as raw tensor data. Returns their number.
    ///
    /// # Errors
    /// When an element is not of `datatype`, or there are more than `limit`.
    pub fn flatten(self, datatype: DataType, limit: usize, data: &mut Vec<u8>) -> Result<usize> {
        let mut count = 0;
        let mut parser = Parser::of_checked(self.0);
        // In well-formed text everything between scalars can be skipped, so nesting needs no recursion.
        while let Some(byte) = parser.peek() {
            if matches!(byte, b'[' | b']' | b',' | b' ' | b'\n' | b'\r' | b'\t') {
                parser.at += 1;
                continue;
            }
            let value = parser.value()?;
            if count == limit {
                return Err(shape_mismatch());
            }
            count += 1;
            push_element(&value, datatype, data)?;
        }
        Ok(count)
    }
}

/// The error of data with more or fewer elements than its shape.
pub fn shape_mismatch() -> InferError {
    InferError::internal("Unable to parse 'data': Shape does not match true shape of 'data' field")
}

/// Appends a scalar as raw tensor data.
///
/// # Errors
/// When the value does not have the type, or is out of its range.
pub fn push_element(value: &Value<'_>, datatype: DataType, data: &mut Vec<u8>) -> Result<()> {
    let parsed = match datatype {
        DataType::Bytes => return push_string(value, data),
        DataType::Bool => value.as_bool().map(|value| data.push(u8::from(value))),
        DataType::Uint8 => unsigned(value, datatype).map(|value: u8| data.push(value)),
        DataType::Uint16 => unsigned(value, datatype).map(|value: u16| data.extend(value.to_le_bytes())),
        DataType::Uint32 => unsigned(value, datatype).map(|value: u32| data.extend(value.to_le_bytes())),
        DataType::Uint64 => value.as_u64().map(|value| data.extend(value.to_le_bytes())),
        DataType::Int8 => signed(value, datatype).map(|value: i8| data.extend(value.to_le_bytes())),
        DataType::Int16 => signed(value, datatype).map(|value: i16| data.extend(value.to_le_bytes())),
        DataType::Int32 => signed(value, datatype).map(|value: i32| data.extend(value.to_le_bytes())),
        DataType::Int64 => value.as_i64().map(|value| data.extend(value.to_le_bytes())),
        DataType::Fp32 => value.as_f64().map(|value| data.extend((value as f32).to_le_bytes())),
        DataType::Fp64 => value.as_f64().map(|value| data.extend(value.to_le_bytes())),
        DataType::Fp16 | DataType::Bf16 => Err(InferError::invalid(format!(
            "receiving {} data via JSON is not supported. Please use the binary data format",
            datatype.name()
        ))),
    };
    parsed.map_err(|error| in_field("data", error))
}

fn push_string(value: &Value<'_>, data: &mut Vec<u8>) -> Result<()> {
    let text = value
        .as_str()
        .map_err(|error| InferError::new(error.kind, format!("Unable to parse JSON bytes array: {}", error.message)))?;
    let length = u32::try_from(text.len()).map_err(|_| InferError::invalid("a string is longer than 4 GiB"))?;
    data.extend(length.to_le_bytes());
    data.extend(text.as_bytes());
    Ok(())
}

fn unsigned<T: TryFrom<u64>>(value: &Value<'_>, datatype: DataType) -> Result<T> {
    let wide = value.as_u64()?;
    T::try_from(wide).map_err(|_| out_of_range(wide, datatype))
}

fn signed<T: TryFrom<i64>>(value: &Value<'_>, datatype: DataType) -> Result<T> {
    let wide = value.as_i64()?;
    T::try_from(wide).map_err(|_| out_of_range(wide, datatype))
}

fn out_of_range(value: impl std::fmt::Display, datatype: DataType) -> InferError {
    InferError::invalid(format!("{value} does not fit in {}", datatype.name()))
}
