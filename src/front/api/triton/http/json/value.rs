//! A JSON value and its accessors.

use std::borrow::Cow;

use serving::InferError;

type Result<T> = std::result::Result<T, InferError>;

/// A JSON value. Numbers and arrays are kept as text.
#[derive(Debug, Clone, PartialEq)]
pub enum Value<'a> {
    /// `null`.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// The text of a number.
    Number(&'a str),
    /// A string without escapes.
    String(Cow<'a, str>),
    /// A well-formed array.
    Array(Array<'a>),
    /// Members in the order of the text.
    Object(Vec<(Cow<'a, str>, Value<'a>)>),
}

/// The text of a well-formed array.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Array<'a>(pub(super) &'a str);

/// Adds the name of the field to an error.
pub fn in_field(field: &str, error: InferError) -> InferError {
    InferError::new(error.kind, format!("Unable to parse '{field}': {}", error.message))
}

impl<'a> Value<'a> {
    /// The member called `name` of an object.
    pub fn member(&self, name: &str) -> Option<&Value<'a>> {
        match self {
            Value::Object(members) => members.iter().find(|(key, _)| key == name).map(|(_, value)| value),
            _ => None,
        }
    }

    /// The member called `name`, which is required.
    pub fn required(&self, name: &str) -> Result<&Value<'a>> {
        self.member(name).ok_or_else(|| {
            InferError::internal(format!(
                "Unable to parse '{name}': attempt to access non-existing object member '{name}'"
            ))
        })
    }

    /// The string.
    pub fn as_str(&self) -> Result<&str> {
        match self {
            Value::String(value) => Ok(value),
            _ => Err(wrong_type("string")),
        }
    }

    /// The boolean.
    pub fn as_bool(&self) -> Result<bool> {
        match self {
            Value::Bool(value) => Ok(*value),
            _ => Err(wrong_type("boolean")),
        }
    }

    /// Whether the value is a number that consists of digits only.
    pub fn is_whole(&self) -> bool {
        matches!(self, Value::Number(text) if text.bytes().all(|byte| byte.is_ascii_digit()))
    }

    /// The number as an unsigned integer.
    pub fn as_u64(&self) -> Result<u64> {
        match self {
            Value::Number(text) => integer(text, "unsigned-integer"),
            _ => Err(wrong_type("unsigned-integer")),
        }
    }

    /// The number as a signed integer.
    pub fn as_i64(&self) -> Result<i64> {
        match self {
            Value::Number(text) => integer(text, "signed-integer"),
            _ => Err(wrong_type("signed-integer")),
        }
    }

    /// The number as a double.
    pub fn as_f64(&self) -> Result<f64> {
        match self {
            Value::Number(text) => Ok(double(text)),
            _ => Err(InferError::internal("attempt to access JSON non-number as double")),
        }
    }

    /// The array.
    pub fn as_array(&self) -> Result<Array<'a>> {
        match self {
            Value::Array(array) => Ok(*array),
            _ => Err(wrong_type("array")),
        }
    }

    /// The object's members.
    pub fn as_object(&self) -> Result<&[(Cow<'a, str>, Value<'a>)]> {
        match self {
            Value::Object(members) => Ok(members),
            _ => Err(wrong_type("object")),
        }
    }
}

fn wrong_type(expected: &str) -> InferError {
    InferError::internal(format!("attempt to access JSON non-{expected} as {expected}"))
}

fn integer<T: std::str::FromStr>(text: &str, expected: &str) -> Result<T> {
    text.parse().map_err(|_| wrong_type(expected))
}

pub(super) fn double(text: &str) -> f64 {
    text.parse().unwrap_or(f64::NAN) // The parser has checked the number.
}
