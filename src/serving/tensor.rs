//! Tensors between protocols, models and ensemble steps. Their bytes are shared, not copied.

use bytes::Bytes;
use smallvec::SmallVec;

/// A name or an id. It is cheap to clone, because every response and every step of an ensemble clones names.
pub type Name = smol_str::SmolStr;

/// Sizes of a tensor, outermost first. Up to four need no allocation.
pub type Shape = SmallVec<[i64; 4]>;

/// Element type, with the protocol's names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // The protocol's own names.
pub enum DataType {
    Bool,
    Uint8,
    Uint16,
    Uint32,
    Uint64,
    Int8,
    Int16,
    Int32,
    Int64,
    Fp16,
    Fp32,
    Fp64,
    Bytes,
    Bf16,
}

impl DataType {
    /// The name on the wire, such as `FP32`.
    pub fn name(self) -> &'static str {
        match self {
            DataType::Bool => "BOOL",
            DataType::Uint8 => "UINT8",
            DataType::Uint16 => "UINT16",
            DataType::Uint32 => "UINT32",
            DataType::Uint64 => "UINT64",
            DataType::Int8 => "INT8",
            DataType::Int16 => "INT16",
            DataType::Int32 => "INT32",
            DataType::Int64 => "INT64",
            DataType::Fp16 => "FP16",
            DataType::Fp32 => "FP32",
            DataType::Fp64 => "FP64",
            DataType::Bytes => "BYTES",
            DataType::Bf16 => "BF16",
        }
    }

    /// The type of a wire name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|datatype| datatype.name() == name)
    }

    /// The type of a model's configuration; `None` for `TYPE_INVALID`.
    pub fn from_config(datatype: repository::proto::DataType) -> Option<Self> {
        use repository::proto::DataType as Config;
        Some(match datatype {
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

    /// Every type.
    pub const ALL: [Self; 14] = [
        DataType::Bool,
        DataType::Uint8,
        DataType::Uint16,
        DataType::Uint32,
        DataType::Uint64,
        DataType::Int8,
        DataType::Int16,
        DataType::Int32,
        DataType::Int64,
        DataType::Fp16,
        DataType::Fp32,
        DataType::Fp64,
        DataType::Bytes,
        DataType::Bf16,
    ];

    /// Bytes of one element; `None` for BYTES, whose elements have different sizes.
    pub fn size(self) -> Option<usize> {
        match self {
            DataType::Bool | DataType::Uint8 | DataType::Int8 => Some(1),
            DataType::Uint16 | DataType::Int16 | DataType::Fp16 | DataType::Bf16 => Some(2),
            DataType::Uint32 | DataType::Int32 | DataType::Fp32 => Some(4),
            DataType::Uint64 | DataType::Int64 | DataType::Fp64 => Some(8),
            DataType::Bytes => None,
        }
    }
}

/// BYTES elements up to this total size share one allocation with their reference count. A token's text fits.
const SMALL_TEXT_BYTES: usize = 32;

/// A named tensor. `data` is raw and little-endian, row-major; each BYTES element is a 4-byte length and its bytes.
///
/// The code that makes a tensor must ensure that `data` matches `datatype` and `shape`.
#[derive(Debug, PartialEq)]
pub struct Tensor {
    /// The model's name for it.
    pub name: Name,
    /// Element type.
    pub datatype: DataType,
    /// Sizes, outermost first, batch dimension included.
    pub shape: Shape,
    /// The elements.
    pub data: Bytes,
}

impl Clone for Tensor {
    fn clone(&self) -> Self {
        // A `SmallVec` clones its elements one by one.
        let shape = Shape::from_slice(&self.shape);
        Self { name: self.name.clone(), datatype: self.datatype, shape, data: self.data.clone() }
    }
}

macro_rules! typed {
    ($make:ident, $read:ident, $type:ty, $datatype:ident) => {
        #[doc = concat!("A ", stringify!($datatype), " tensor of `values`.")]
        pub fn $make(name: impl Into<Name>, shape: &[i64], values: &[$type]) -> Self {
            let data = match values {
                [value] => one_element(&value.to_le_bytes()),
                // Exact capacity: with spare capacity the bytes would be copied when they become shared.
                values => {
                    let mut data = Vec::with_capacity(size_of_val(values));
                    values.iter().for_each(|value| data.extend_from_slice(&value.to_le_bytes()));
                    data.into()
                }
            };
            Self { name: name.into(), datatype: DataType::$datatype, shape: Shape::from_slice(shape), data }
        }

        #[doc = concat!("The elements of a ", stringify!($datatype), " tensor; `None` for another type.")]
        pub fn $read(&self) -> Option<Vec<$type>> {
            const SIZE: usize = std::mem::size_of::<$type>();
            (self.datatype == DataType::$datatype)
                .then(|| self.data.as_chunks::<SIZE>().0.iter().map(|bytes| <$type>::from_le_bytes(*bytes)).collect())
        }
    };
}

impl Tensor {
    typed!(from_i32, to_i32, i32, Int32);
    typed!(from_i64, to_i64, i64, Int64);
    typed!(from_u32, to_u32, u32, Uint32);
    typed!(from_u64, to_u64, u64, Uint64);
    typed!(from_f32, to_f32, f32, Fp32);
    typed!(from_f64, to_f64, f64, Fp64);

    /// A BOOL tensor of `values`.
    pub fn from_bool(name: impl Into<Name>, shape: &[i64], values: &[bool]) -> Self {
        let data = match values {
            &[value] => one_element(&[u8::from(value)]),
            values => values.iter().map(|&value| u8::from(value)).collect::<Vec<u8>>().into(),
        };
        Self { name: name.into(), datatype: DataType::Bool, shape: Shape::from_slice(shape), data }
    }

    /// The elements of a BOOL tensor; `None` for another type.
    pub fn to_bool(&self) -> Option<Vec<bool>> {
        (self.datatype == DataType::Bool).then(|| self.data.iter().map(|&byte| byte != 0).collect())
    }

    /// A BYTES tensor of `values`.
    pub fn from_byte_strings<V: AsRef<[u8]>>(name: impl Into<Name>, shape: &[i64], values: &[V]) -> Self {
        let data = byte_strings(values);
        Self { name: name.into(), datatype: DataType::Bytes, shape: Shape::from_slice(shape), data }
    }

    /// The elements of a BYTES tensor, which share its memory; `None` for another type or invalid lengths.
    pub fn to_byte_strings(&self) -> Option<Vec<Bytes>> {
        if self.datatype != DataType::Bytes {
            return None;
        }
        let (mut values, mut at) = (Vec::new(), 0);
        while at < self.data.len() {
            let length = u32::from_le_bytes(*self.data[at..].first_chunk::<4>()?) as usize;
            let end = (at + 4).checked_add(length).filter(|&end| end <= self.data.len())?;
            values.push(self.data.slice(at + 4..end));
            at = end;
        }
        Some(values)
    }

    /// Product of the shape; `None` when a size is negative or the product overflows.
    pub fn num_elements(&self) -> Option<usize> {
        self.shape.iter().try_fold(1usize, |product, &size| product.checked_mul(usize::try_from(size).ok()?))
    }
}

/// The elements of a BYTES tensor of `values`.
///
/// # Panics
/// When one of them has 4 GiB or more.
pub fn byte_strings<V: AsRef<[u8]>>(values: &[V]) -> Bytes {
    let mut data = SmallVec::<[u8; SMALL_TEXT_BYTES]>::new();
    data.reserve_exact(values.iter().map(|value| 4 + value.as_ref().len()).sum());
    for value in values {
        let value = value.as_ref();
        data.extend_from_slice(&u32::try_from(value.len()).expect("an element is under 4 GiB").to_le_bytes());
        data.extend_from_slice(value);
    }
    // One allocation holds a few bytes and their reference count. A `Vec` needs a second one to become shared.
    if data.spilled() { data.into_vec().into() } else { Bytes::from_owner(data) }
}

/// The bytes of one element. Small numbers are static, because most tensors of a streamed token hold one.
fn one_element(bytes: &[u8]) -> Bytes {
    match bytes {
        [first, rest @ ..] if bytes.len() <= 8 && rest.iter().all(|&byte| byte == 0) => {
            Bytes::from_static(&SMALL_NUMBERS[usize::from(*first)][..bytes.len()])
        }
        // One allocation holds the bytes and their reference count. A `Vec` needs a second one to become shared.
        _ => Bytes::from_owner(SmallVec::<[u8; 8]>::from_slice(bytes)),
    }
}

/// The numbers from 0 to 255, little-endian.
static SMALL_NUMBERS: [[u8; 8]; 256] = {
    let mut numbers = [[0; 8]; 256];
    let mut number = 0;
    while number < 256 {
        numbers[number][0] = number as u8;
        number += 1;
    }
    numbers
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_single_element_reads_back_for_every_size() {
        for value in [0, 1, 255, 256, -1, i32::MIN] {
            assert_eq!(Tensor::from_i32("x", &[1], &[value]).data, value.to_le_bytes()[..], "{value}");
            assert_eq!(Tensor::from_i64("x", &[], &[value.into()]).to_i64().unwrap(), [i64::from(value)]);
        }
        assert_eq!(Tensor::from_f64("x", &[1], &[0.0]).data, [0; 8][..]);
        assert_eq!(Tensor::from_f32("x", &[1], &[-0.0]).data, (-0.0f32).to_le_bytes()[..]);
        assert_eq!(Tensor::from_bool("x", &[1], &[true]).to_bool().unwrap(), [true]);
    }

    #[test]
    fn byte_strings_keep_their_lengths() {
        let tensor = Tensor::from_byte_strings("text", &[3], &["", "a", "two words"]);
        assert_eq!(tensor.to_byte_strings().unwrap(), ["", "a", "two words"]);
    }

    #[test]
    fn invalid_lengths_are_refused() {
        let tensor = Tensor {
            data: Bytes::from_static(&[9, 0, 0, 0, 1]),
            ..Tensor::from_byte_strings::<&str>("text", &[1], &[])
        };
        assert_eq!(tensor.to_byte_strings(), None);
    }

    #[test]
    fn a_shape_that_overflows_has_no_element_count() {
        let tensor = Tensor { shape: Shape::from_slice(&[4, 1 << 62]), ..Tensor::from_i32("x", &[], &[]) };
        assert_eq!(tensor.num_elements(), None);
    }
}
