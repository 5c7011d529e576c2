//! Python's marshal format, version 2, which the interpreter reads and writes in C.
//!
//! Version 2 has no references, and every Python 3 reads it. Only the types that messages need are implemented.

use bytes::Bytes;

/// Deepest nesting of tuples. Messages need five levels.
const MAX_DEPTH: usize = 16;

/// Size in bytes of the length before a message.
pub(super) const LENGTH: usize = 4;

/// A message, or a part of one.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Value {
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Bytes(Bytes),
    Text(String),
    Tuple(Vec<Value>),
    Dict(Vec<(Value, Value)>),
}

/// Why bytes are not a valid message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // Fields are named in the messages.
pub(super) enum WireError {
    #[error("the message ends at byte {at}, inside a value")]
    Short { at: usize },
    #[error("byte {at} of the message begins no known type: {found:#04x}")]
    Type { at: usize, found: u8 },
    #[error("the message is nested deeper than {MAX_DEPTH} levels")]
    Deep,
    #[error("the message has {found} where {expected} is expected")]
    Shape { expected: &'static str, found: String },
}

impl Value {
    /// Reads one value. Bytes share the memory of `message`.
    pub fn read(message: &Bytes) -> Result<Self, WireError> {
        Reader { message, at: 0 }.value(0)
    }

    fn wrong<T>(self, expected: &'static str) -> Result<T, WireError> {
        let mut found = format!("{self:?}");
        found.truncate(found.floor_char_boundary(80));
        Err(WireError::Shape { expected, found })
    }

    pub fn bool(self) -> Result<bool, WireError> {
        match self {
            Value::Bool(value) => Ok(value),
            other => other.wrong("a bool"),
        }
    }

    pub fn int<N: TryFrom<i128>>(self) -> Result<N, WireError> {
        match self {
            Value::Int(value) => N::try_from(value).or_else(|_| Value::Int(value).wrong("an integer in range")),
            other => other.wrong("an integer"),
        }
    }

    pub fn float(self) -> Result<f64, WireError> {
        match self {
            Value::Float(value) => Ok(value),
            other => other.wrong("a float"),
        }
    }

    pub fn text(self) -> Result<String, WireError> {
        match self {
            Value::Text(value) => Ok(value),
            other => other.wrong("a string"),
        }
    }

    pub fn bytes(self) -> Result<Bytes, WireError> {
        match self {
            Value::Bytes(value) => Ok(value),
            other => other.wrong("bytes"),
        }
    }

    pub fn tuple(self) -> Result<Vec<Value>, WireError> {
        match self {
            Value::Tuple(values) => Ok(values),
            other => other.wrong("a tuple"),
        }
    }

    /// A tuple of exactly `N` values.
    pub fn parts<const N: usize>(self) -> Result<[Value; N], WireError> {
        self.tuple()?.try_into().or_else(|values| Value::Tuple(values).wrong("a tuple of another length"))
    }

    pub fn dict(self) -> Result<Vec<(Value, Value)>, WireError> {
        match self {
            Value::Dict(pairs) => Ok(pairs),
            other => other.wrong("a dict"),
        }
    }

    /// `None` for Python's None.
    pub fn optional(self) -> Option<Value> {
        (self != Value::None).then_some(self)
    }
}

struct Reader<'a> {
    message: &'a Bytes,
    at: usize,
}

impl Reader<'_> {
    fn take(&mut self, count: usize) -> Result<&[u8], WireError> {
        let start = self.at;
        let end = start.checked_add(count).filter(|&end| end <= self.message.len());
        self.at = end.ok_or(WireError::Short { at: self.message.len() })?;
        Ok(&self.message[start..self.at])
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        Ok(self.take(N)?.try_into().expect("`take` returns `N` bytes"))
    }

    fn length(&mut self) -> Result<usize, WireError> {
        Ok(u32::from_le_bytes(self.array()?) as usize)
    }

    fn value(&mut self, depth: usize) -> Result<Value, WireError> {
        if depth > MAX_DEPTH {
            return Err(WireError::Deep);
        }
        let at = self.at;
        Ok(match self.array::<1>()?[0] {
            b'N' => Value::None,
            b'T' => Value::Bool(true),
            b'F' => Value::Bool(false),
            b'i' => Value::Int(i32::from_le_bytes(self.array()?).into()),
            b'l' => Value::Int(self.long(at)?),
            b'g' => Value::Float(f64::from_le_bytes(self.array()?)),
            b's' => {
                let length = self.length()?;
                self.take(length)?;
                Value::Bytes(self.message.slice(self.at - length..self.at))
            }
            b'u' | b't' => {
                let length = self.length()?;
                Value::Text(String::from_utf8_lossy(self.take(length)?).into_owned())
            }
            b'(' | b'[' => {
                let count = self.length()?;
                // A value takes at least one byte, so the message bounds the allocation.
                let mut values = Vec::with_capacity(count.min(self.message.len() - self.at));
                for _ in 0..count {
                    values.push(self.value(depth + 1)?);
                }
                Value::Tuple(values)
            }
            b'{' => {
                let mut pairs = Vec::new();
                while self.message.get(self.at) != Some(&b'0') {
                    let key = self.value(depth + 1)?;
                    pairs.push((key, self.value(depth + 1)?));
                }
                self.at += 1;
                Value::Dict(pairs)
            }
            found => return Err(WireError::Type { at, found }),
        })
    }

    /// An integer of more than 32 bits: digits of 15 bits, lowest first. The sign is that of their count.
    fn long(&mut self, at: usize) -> Result<i128, WireError> {
        let count = i32::from_le_bytes(self.array()?);
        if count.unsigned_abs() > 8 {
            return Err(WireError::Type { at, found: b'l' });
        }
        let mut value = 0i128;
        for index in 0..count.unsigned_abs() {
            value |= i128::from(u16::from_le_bytes(self.array()?) & 0x7fff) << (15 * index);
        }
        Ok(if count < 0 { -value } else { value })
    }
}

/// Writes one message after its length.
#[derive(Debug, Default)]
pub(super) struct Writer {
    bytes: Vec<u8>,
}

impl Writer {
    /// Begins the message: a tuple of `count` values.
    pub fn begin(count: usize) -> Self {
        let mut writer = Self { bytes: vec![0; 4] };
        writer.tuple(count);
        writer
    }

    /// The bytes to send.
    pub fn finish(mut self) -> Vec<u8> {
        let length = u32::try_from(self.bytes.len() - 4).expect("large tensors are in shared memory");
        self.bytes[..4].copy_from_slice(&length.to_le_bytes());
        self.bytes
    }

    fn head(&mut self, kind: u8, length: usize) {
        self.bytes.push(kind);
        let length = u32::try_from(length).expect("large tensors are in shared memory");
        self.bytes.extend(length.to_le_bytes());
    }

    pub fn none(&mut self) {
        self.bytes.push(b'N');
    }

    pub fn bool(&mut self, value: bool) {
        self.bytes.push(if value { b'T' } else { b'F' });
    }

    pub fn int(&mut self, value: impl Into<i128>) {
        let value = value.into();
        if let Ok(small) = i32::try_from(value) {
            self.bytes.push(b'i');
            self.bytes.extend(small.to_le_bytes());
            return;
        }
        let mut rest = value.unsigned_abs();
        let count = (128 - rest.leading_zeros()).div_ceil(15).cast_signed();
        self.bytes.push(b'l');
        self.bytes.extend((if value < 0 { -count } else { count }).to_le_bytes());
        while rest > 0 {
            self.bytes.extend(((rest & 0x7fff) as u16).to_le_bytes());
            rest >>= 15;
        }
    }

    pub fn float(&mut self, value: f64) {
        self.bytes.push(b'g');
        self.bytes.extend(value.to_le_bytes());
    }

    pub fn bytes(&mut self, value: &[u8]) {
        self.head(b's', value.len());
        self.bytes.extend_from_slice(value);
    }

    pub fn text(&mut self, value: &str) {
        self.head(b'u', value.len());
        self.bytes.extend_from_slice(value.as_bytes());
    }

    /// The next `count` values form a tuple.
    pub fn tuple(&mut self, count: usize) {
        self.head(b'(', count);
    }

    /// Keys and values follow, alternating, and then [`Writer::end_dict`].
    pub fn begin_dict(&mut self) {
        self.bytes.push(b'{');
    }

    pub fn end_dict(&mut self) {
        self.bytes.push(b'0');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_back(write: impl FnOnce(&mut Writer)) -> Value {
        let mut writer = Writer::begin(1);
        write(&mut writer);
        let bytes = Bytes::from(writer.finish());
        assert_eq!(u32::from_le_bytes(bytes[..4].try_into().unwrap()) as usize, bytes.len() - 4);
        let [value] = Value::read(&bytes.slice(4..)).unwrap().parts().unwrap();
        value
    }

    #[test]
    fn integers_of_every_size_are_read_back() {
        for value in [0, -1, i32::MAX as i128, i32::MIN as i128 - 1, u64::MAX.into(), i64::MIN.into(), 1 << 45] {
            assert_eq!(read_back(|writer| writer.int(value)), Value::Int(value));
        }
    }

    #[test]
    fn what_the_interpreter_writes_is_read() {
        // marshal.dumps((1, b"x", "é", 2**40, -5, 1.5, None, True, {"a": 1}), 2)
        let message = b"(\x09\0\0\0i\x01\0\0\0s\x01\0\0\0xu\x02\0\0\0\xc3\xa9l\x03\0\0\0\0\0\0\0\0\x04\
                        i\xfb\xff\xff\xffg\0\0\0\0\0\0\xf8?NT{u\x01\0\0\0ai\x01\0\0\x000";
        let expected = Value::Tuple(vec![
            Value::Int(1),
            Value::Bytes(Bytes::from_static(b"x")),
            Value::Text("é".into()),
            Value::Int(1 << 40),
            Value::Int(-5),
            Value::Float(1.5),
            Value::None,
            Value::Bool(true),
            Value::Dict(vec![(Value::Text("a".into()), Value::Int(1))]),
        ]);
        assert_eq!(Value::read(&Bytes::from_static(message)), Ok(expected));
    }

    #[test]
    fn broken_messages_are_errors() {
        let read = |bytes: &'static [u8]| Value::read(&Bytes::from_static(bytes));
        assert_eq!(read(b"(\xff\xff\xff\xff"), Err(WireError::Short { at: 5 }));
        assert_eq!(read(b"s\x09\0\0\0abc"), Err(WireError::Short { at: 8 }));
        assert_eq!(read(b"?"), Err(WireError::Type { at: 0, found: b'?' }));
        assert_eq!(read(b"(\x01\0\0\0").unwrap_err(), WireError::Short { at: 5 });
        let deep: &'static [u8] = b"(\x01\0\0\0".repeat(1000).leak();
        assert_eq!(read(deep), Err(WireError::Deep));
    }
}
