//! A JSON writer for responses.
//!
//! `serde_json` writes numbers and non-finite values in another form than Triton, and would need a tree for the elements of a tensor.

use std::io::Write;

use serving::{DataType, InferError, Parameter, Tensor};

/// A JSON text under construction. Commas are inserted automatically.
pub struct JsonWriter {
    text: Vec<u8>,
}

impl JsonWriter {
    /// An empty text with capacity for `capacity` bytes.
    pub fn with_capacity(capacity: usize) -> Self {
        Self { text: Vec::with_capacity(capacity) }
    }

    /// The text.
    pub fn finish(self) -> Vec<u8> {
        self.text
    }

    /// Inserts a comma between siblings.
    fn separate(&mut self) {
        if !matches!(self.text.last(), None | Some(b'{' | b'[' | b':')) {
            self.text.push(b',');
        }
    }

    /// Starts an object.
    pub fn begin_object(&mut self) {
        self.separate();
        self.text.push(b'{');
    }

    /// Ends an object.
    pub fn end_object(&mut self) {
        self.text.push(b'}');
    }

    /// Starts an array.
    pub fn begin_array(&mut self) {
        self.separate();
        self.text.push(b'[');
    }

    /// Ends an array.
    pub fn end_array(&mut self) {
        self.text.push(b']');
    }

    /// Writes a key. Its value must follow.
    pub fn key(&mut self, key: &str) {
        self.string(key.as_bytes());
        self.text.push(b':');
    }

    /// Writes a string member.
    pub fn member(&mut self, key: &str, value: &[u8]) {
        self.key(key);
        self.string(value);
    }

    /// Writes a string. As in Triton, bytes that are not UTF-8 are not changed.
    pub fn string(&mut self, value: &[u8]) {
        self.separate();
        self.text.push(b'"');
        let mut rest = value;
        while let Some(at) = rest.iter().position(|&byte| byte < 0x20 || byte == b'"' || byte == b'\\') {
            self.text.extend_from_slice(&rest[..at]);
            self.escape(rest[at]);
            rest = &rest[at + 1..];
        }
        self.text.extend_from_slice(rest);
        self.text.push(b'"');
    }

    fn escape(&mut self, byte: u8) {
        match byte {
            b'"' | b'\\' => self.text.extend([b'\\', byte]),
            b'\n' => self.text.extend(b"\\n"),
            b'\r' => self.text.extend(b"\\r"),
            b'\t' => self.text.extend(b"\\t"),
            _ => self.display(format_args!("\\u{byte:04x}")),
        }
    }

    /// Writes an integer.
    pub fn integer(&mut self, value: impl std::fmt::Display) {
        self.separate();
        self.display(format_args!("{value}"));
    }

    /// Writes a boolean.
    pub fn boolean(&mut self, value: bool) {
        self.separate();
        self.text.extend_from_slice(if value { b"true" } else { b"false" });
    }

    /// Writes a number. Values that are not finite are `NaN`, `Infinity` and `-Infinity`.
    pub fn float(&mut self, value: f64) {
        self.separate();
        match value {
            value if value.is_nan() => self.text.extend(b"NaN"),
            f64::INFINITY => self.text.extend(b"Infinity"),
            f64::NEG_INFINITY => self.text.extend(b"-Infinity"),
            // In these ranges `{:?}` has an exponent, and Triton has none.
            value if (1e16..1e21).contains(&value.abs()) => self.display(format_args!("{value}.0")),
            value if (1e-6..1e-4).contains(&value.abs()) => self.display(format_args!("{value}")),
            value => self.display(format_args!("{value:?}")),
        }
    }

    fn display(&mut self, value: std::fmt::Arguments<'_>) {
        self.text.write_fmt(value).expect("writing to a Vec cannot fail");
    }

    /// Writes an array of integers.
    pub fn integers(&mut self, values: &[i64]) {
        self.begin_array();
        values.iter().for_each(|value| self.integer(value));
        self.end_array();
    }

    /// Writes a parameter as a member.
    pub fn parameter(&mut self, key: &str, value: &Parameter) {
        self.key(key);
        match value {
            Parameter::Bool(value) => self.boolean(*value),
            Parameter::Int(value) => self.integer(value),
            Parameter::Double(value) => self.float(*value),
            Parameter::String(value) => self.string(value.as_bytes()),
        }
    }

    /// Writes the elements of a tensor as a flat array.
    ///
    /// # Errors
    /// When the datatype has no JSON form, or the data is invalid for it.
    pub fn tensor(&mut self, tensor: &Tensor) -> Result<(), InferError> {
        self.begin_array();
        self.elements(tensor)?;
        self.end_array();
        Ok(())
    }

    /// Writes the elements of a tensor; a single element is written without an array.
    ///
    /// # Errors
    /// As [`JsonWriter::tensor`].
    pub fn tensor_or_scalar(&mut self, tensor: &Tensor) -> Result<(), InferError> {
        if tensor.num_elements() == Some(1) { self.elements(tensor) } else { self.tensor(tensor) }
    }

    fn elements(&mut self, tensor: &Tensor) -> Result<(), InferError> {
        macro_rules! each {
            ($type:ty, $write:ident) => {
                for bytes in tensor.data.as_chunks::<{ size_of::<$type>() }>().0 {
                    self.$write(<$type>::from_le_bytes(*bytes).into());
                }
            };
        }
        match tensor.datatype {
            DataType::Bool => tensor.data.iter().for_each(|&byte| self.boolean(byte != 0)),
            DataType::Uint8 => each!(u8, unsigned),
            DataType::Uint16 => each!(u16, unsigned),
            DataType::Uint32 => each!(u32, unsigned),
            DataType::Uint64 => each!(u64, unsigned),
            DataType::Int8 => each!(i8, signed),
            DataType::Int16 => each!(i16, signed),
            DataType::Int32 => each!(i32, signed),
            DataType::Int64 => each!(i64, signed),
            DataType::Fp32 => each!(f32, float),
            DataType::Fp64 => each!(f64, float),
            DataType::Bytes => {
                let strings = tensor.to_byte_strings().ok_or_else(|| {
                    InferError::internal(format!("output '{}' has broken string lengths", tensor.name))
                })?;
                strings.iter().for_each(|string| self.string(string));
            }
            DataType::Fp16 | DataType::Bf16 => {
                return Err(InferError::invalid(format!(
                    "sending {} data via JSON is not supported. Please use the binary data format for output",
                    tensor.datatype.name()
                )));
            }
        }
        Ok(())
    }

    fn unsigned(&mut self, value: u64) {
        self.integer(value);
    }

    fn signed(&mut self, value: i64) {
        self.integer(value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn siblings_are_separated_and_strings_escaped() {
        let mut writer = JsonWriter::with_capacity(0);
        writer.begin_object();
        writer.member("a\"", "é\\\n\u{1}".as_bytes());
        writer.key("b");
        writer.integers(&[1, -2]);
        writer.key("c");
        writer.begin_object();
        writer.end_object();
        writer.key("d");
        writer.float(16_777_217f32.into());
        writer.end_object();
        assert_eq!(
            String::from_utf8(writer.finish()).unwrap(),
            "{\"a\\\"\":\"é\\\\\\n\\u0001\",\"b\":[1,-2],\"c\":{},\"d\":16777216.0}"
        );
    }

    #[test]
    fn a_comma_inside_a_string_is_no_separator() {
        let mut writer = JsonWriter::with_capacity(0);
        writer.begin_array();
        writer.string(b"[");
        writer.string(b"{");
        writer.string(b":");
        writer.end_array();
        assert_eq!(writer.finish(), br#"["[","{",":"]"#);
    }

    #[test]
    fn floats_read_back_as_they_were() {
        let tensor = Tensor::from_f32("x", &[6], &[0.1, 1e30, 1e18, 2f32.powi(-16), f32::NAN, f32::NEG_INFINITY]);
        let mut writer = JsonWriter::with_capacity(0);
        writer.tensor(&tensor).unwrap();
        let text = String::from_utf8(writer.finish()).unwrap();
        assert_eq!(
            text,
            "[0.10000000149011612,1.0000000150474662e30,999999984306749400.0,0.0000152587890625,NaN,-Infinity]"
        );
    }

    #[test]
    fn one_element_can_stand_alone() {
        let mut writer = JsonWriter::with_capacity(0);
        writer.tensor_or_scalar(&Tensor::from_i32("x", &[1, 1], &[7])).unwrap();
        assert_eq!(writer.finish(), b"7");
    }
}
