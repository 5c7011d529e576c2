//! Scans a gRPC message before it is decoded: checks its content against the limits, and computes the memory of its decoded form.
//! Two bytes on the wire can become hundreds in memory.

use bytes::Bytes;
use serving::{InferError, Limit, Limits};

use crate::api::triton::grpc::proto::model_infer_request::{InferInputTensor, InferRequestedOutputTensor};

/// Memory of a map entry, including its share of the tree node.
const PARAMETER_BYTES: usize = 256;
/// A growing vector has up to twice the necessary capacity.
const GROWTH: usize = 2;

/// The kind of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A `ModelInferRequest`.
    Infer,
    /// A `RepositoryModelLoadRequest`.
    Load,
    /// A message with a few names and settings.
    Small,
}

/// Why a message is refused.
#[derive(Debug, PartialEq, Eq)]
pub enum ScanError {
    /// Its lengths are inconsistent.
    Malformed(&'static str),
    /// It exceeds a limit.
    Refused(InferError),
}

impl From<InferError> for ScanError {
    fn from(error: InferError) -> Self {
        Self::Refused(error)
    }
}

/// The memory in bytes of the decoded `message` in addition to its own bytes.
///
/// # Errors
/// When the message exceeds `limits`, or its lengths are inconsistent.
pub fn scan(kind: Kind, message: &[u8], limits: &Limits) -> Result<usize, ScanError> {
    let mut scan = Scan { limits, num_bytes: 0 };
    match kind {
        Kind::Infer => scan.infer(message)?,
        Kind::Load => scan.load(message)?,
        Kind::Small => {}
    }
    Ok(scan.num_bytes)
}

struct Scan<'a> {
    limits: &'a Limits,
    num_bytes: usize,
}

impl Scan<'_> {
    /// Counts one more item of `num_bytes` against `limit`.
    fn count(&mut self, limit: Limit, count: &mut usize, num_bytes: usize) -> Result<(), ScanError> {
        *count += 1;
        self.num_bytes += num_bytes;
        Ok(self.limits.check(limit, *count)?)
    }

    fn infer(&mut self, message: &[u8]) -> Result<(), ScanError> {
        let (mut inputs, mut outputs, mut raw, mut parameters) = (0, 0, 0, 0);
        for field in Fields(message) {
            match field? {
                (1 | 2, Value::Bytes(name)) => self.limits.check(Limit::NameBytes, name.len())?,
                (3, Value::Bytes(id)) => self.limits.check(Limit::IdBytes, id.len())?,
                (4, Value::Bytes(entry)) => self.parameter(entry, &mut parameters)?,
                (5, Value::Bytes(input)) => {
                    self.count(Limit::Inputs, &mut inputs, GROWTH * size_of::<InferInputTensor>())?;
                    self.input(input)?;
                }
                (6, Value::Bytes(output)) => {
                    self.count(Limit::Outputs, &mut outputs, GROWTH * size_of::<InferRequestedOutputTensor>())?;
                    self.output(output)?;
                }
                (7, Value::Bytes(_)) => self.count(Limit::Inputs, &mut raw, GROWTH * size_of::<Bytes>())?,
                _ => {}
            }
        }
        Ok(())
    }

    fn input(&mut self, input: &[u8]) -> Result<(), ScanError> {
        let (mut dimensions, mut parameters) = (0, 0);
        for field in Fields(input) {
            match field? {
                (1, Value::Bytes(name)) => self.limits.check(Limit::NameBytes, name.len())?,
                (2, Value::Bytes(datatype)) => self.limits.check(Limit::NameBytes, datatype.len())?,
                (3, sizes) => {
                    dimensions += num_elements(&sizes);
                    self.limits.check(Limit::Dimensions, dimensions)?;
                }
                (4, Value::Bytes(entry)) => self.parameter(entry, &mut parameters)?,
                (5, Value::Bytes(contents)) => self.contents(contents)?,
                _ => {}
            }
        }
        Ok(())
    }

    /// Typed elements. Their number is not limited here.
    fn contents(&mut self, contents: &[u8]) -> Result<(), ScanError> {
        for field in Fields(contents) {
            let (tag, value) = field?;
            // The size of a decoded element, and of the raw data that it is converted to.
            let element = match tag {
                1 => 1,
                2 | 4 | 6 => 4,
                3 | 5 | 7 => 8,
                8 => {
                    self.num_bytes += GROWTH * size_of::<Bytes>() + 4;
                    continue;
                }
                _ => continue,
            };
            let count = match (tag, &value) {
                (6 | 7, Value::Bytes(packed)) => packed.len() / element,
                _ => num_elements(&value),
            };
            self.num_bytes += count * element * (GROWTH + 1);
        }
        Ok(())
    }

    fn output(&mut self, output: &[u8]) -> Result<(), ScanError> {
        let mut parameters = 0;
        for field in Fields(output) {
            match field? {
                (1, Value::Bytes(name)) => self.limits.check(Limit::NameBytes, name.len())?,
                (2, Value::Bytes(entry)) => self.parameter(entry, &mut parameters)?,
                _ => {}
            }
        }
        Ok(())
    }

    fn parameter(&mut self, entry: &[u8], count: &mut usize) -> Result<(), ScanError> {
        self.count(Limit::Parameters, count, PARAMETER_BYTES)?;
        for field in Fields(entry) {
            match field? {
                (1, Value::Bytes(key)) => self.limits.check(Limit::NameBytes, key.len())?,
                // The lengths inside the value.
                (2, Value::Bytes(value)) => Fields(value).try_for_each(|field| field.map(drop))?,
                _ => {}
            }
        }
        Ok(())
    }

    fn load(&mut self, message: &[u8]) -> Result<(), ScanError> {
        let mut parameters = 0;
        for field in Fields(message) {
            match field? {
                (1 | 2, Value::Bytes(name)) => self.limits.check(Limit::NameBytes, name.len())?,
                (3, Value::Bytes(entry)) => self.parameter(entry, &mut parameters)?,
                _ => {}
            }
        }
        Ok(())
    }
}

/// The number of varints in a value: one, or all packed ones.
fn num_elements(value: &Value<'_>) -> usize {
    match value {
        Value::Number => 1,
        Value::Bytes(packed) => packed.iter().filter(|byte| **byte < 0x80).count(),
    }
}

/// A field's value, as far as the scan needs it.
enum Value<'a> {
    Number,
    Bytes(&'a [u8]),
}

/// The fields of a message. Messages that the decoder refuses may pass here, but not the reverse. The delimiters of a group are
/// skipped, and its fields count as fields of the message.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn number(&mut self) -> Result<u64, ScanError> {
        let mut number = 0;
        for (index, &byte) in self.0.iter().take(10).enumerate() {
            number |= u64::from(byte & 0x7f) << (7 * index);
            if byte < 0x80 {
                self.0 = &self.0[index + 1..];
                return Ok(number);
            }
        }
        Err(ScanError::Malformed("invalid varint"))
    }

    fn take(&mut self, count: u64) -> Result<&'a [u8], ScanError> {
        let count = usize::try_from(count).ok().filter(|count| *count <= self.0.len());
        let (taken, rest) = self.0.split_at(count.ok_or(ScanError::Malformed("delimited length exceeded"))?);
        self.0 = rest;
        Ok(taken)
    }

    fn field(&mut self) -> Result<(u64, Value<'a>), ScanError> {
        let key = self.number()?;
        let value = match key & 7 {
            0 => self.number().map(|_| Value::Number)?,
            1 => self.take(8).map(|_| Value::Number)?,
            2 => {
                let count = self.number()?;
                Value::Bytes(self.take(count)?)
            }
            3 | 4 => return Ok((0, Value::Number)),
            5 => self.take(4).map(|_| Value::Number)?,
            _ => return Err(ScanError::Malformed("invalid wire type value")),
        };
        Ok((key >> 3, value))
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Result<(u64, Value<'a>), ScanError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let field = self.field();
        if field.is_err() {
            self.0 = &[];
        }
        Some(field)
    }
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;
    use crate::api::triton::grpc::proto::{
        InferParameter, InferTensorContents, ModelInferRequest, infer_parameter::ParameterChoice,
    };

    fn input(name: &str) -> InferInputTensor {
        InferInputTensor { name: name.into(), datatype: "INT32".into(), shape: vec![1, 300], ..Default::default() }
    }

    fn scanned(message: &ModelInferRequest) -> Result<usize, String> {
        scan(Kind::Infer, &message.encode_to_vec(), &Limits::default()).map_err(|error| match error {
            ScanError::Refused(error) => error.message,
            ScanError::Malformed(why) => why.to_owned(),
        })
    }

    fn parameters(count: usize) -> std::collections::BTreeMap<String, InferParameter> {
        let value = InferParameter { parameter_choice: Some(ParameterChoice::Int64Param(1)) };
        (0..count).map(|index| (format!("p{index}"), value.clone())).collect()
    }

    #[test]
    fn every_list_has_a_limit() {
        let plain = || ModelInferRequest { model_name: "m".into(), inputs: vec![input("a")], ..Default::default() };
        assert!(scanned(&plain()).is_ok());
        type Change = fn(&mut ModelInferRequest);
        let cases: [(&str, Change); 10] = [
            ("1025 inputs", |message| message.inputs = vec![InferInputTensor::default(); 1025]),
            ("1025 inputs", |message| message.raw_input_contents = vec![Bytes::new(); 1025]),
            ("1025 outputs", |message| message.outputs = vec![InferRequestedOutputTensor::default(); 1025]),
            ("1025 parameters", |message| message.parameters = parameters(1025)),
            ("1025 parameters", |message| message.inputs[0].parameters = parameters(1025)),
            ("65 dimensions", |message| message.inputs[0].shape = vec![1; 65]),
            ("4097 bytes of name", |message| message.model_name = "m".repeat(4097)),
            ("4097 bytes of name", |message| message.inputs[0].name = "m".repeat(4097)),
            ("65537 bytes of request id", |message| message.id = "m".repeat(65537)),
            ("1025 parameters", |message| {
                let outputs = InferRequestedOutputTensor { parameters: parameters(1025), ..Default::default() };
                message.outputs = vec![outputs];
            }),
        ];
        for (words, change) in cases {
            let mut message = plain();
            change(&mut message);
            let error = scanned(&message).unwrap_err();
            assert!(error.contains(words), "{words}: {error}");
        }
    }

    #[test]
    fn the_decoded_size_is_computed() {
        let with = |contents: InferTensorContents| {
            let input = InferInputTensor { contents: Some(contents), ..input("a") };
            scanned(&ModelInferRequest { inputs: vec![input], ..Default::default() }).unwrap()
        };
        let empty = with(InferTensorContents::default());
        let added = |contents| with(contents) - empty;
        assert_eq!(added(InferTensorContents { int64_contents: vec![1, 300, -1], ..Default::default() }), 3 * 24);
        assert_eq!(added(InferTensorContents { fp32_contents: vec![1.0; 5], ..Default::default() }), 5 * 12);
        assert_eq!(added(InferTensorContents { bool_contents: vec![true; 5], ..Default::default() }), 5 * 3);
        let strings = InferTensorContents { bytes_contents: vec![Bytes::new(); 1000], ..Default::default() };
        assert_eq!(added(strings), 68_000);
    }

    #[test]
    fn every_message_that_decodes_passes_the_scan() {
        let message = ModelInferRequest {
            model_name: "m".into(),
            parameters: parameters(3),
            inputs: vec![input("a"), input("b")],
            raw_input_contents: vec![Bytes::from_static(b"abc")],
            ..Default::default()
        };
        let bytes = message.encode_to_vec();
        for end in 0..=bytes.len() {
            let is_malformed = scan(Kind::Infer, &bytes[..end], &Limits::default()).is_err();
            assert!(!is_malformed || ModelInferRequest::decode(&bytes[..end]).is_err(), "{end}");
            let mut twisted = bytes[..end].to_vec();
            for value in [0, 0x0b, 0x0c, 0xff] {
                if let Some(last) = twisted.last_mut() {
                    *last = value;
                }
                let _ = scan(Kind::Infer, &twisted, &Limits::default());
            }
        }
    }

    #[test]
    fn a_field_that_is_longer_than_its_message_is_refused() {
        // An input of two bytes whose contents claim to be longer.
        let message = [&[0x2a, 2, 0x2a, 100][..], &[0x42, 0].repeat(50)].concat();
        let error = scan(Kind::Infer, &message, &Limits::default()).unwrap_err();
        assert_eq!(error, ScanError::Malformed("delimited length exceeded"));
    }
}
