"""Element types: names in configurations and on the wire, NumPy's dtypes, and the numbers that travel."""

import numpy as np

# Index = number in model_config.proto, which is also what travels between server and model process.
_WIRE_NAMES = (
    None, "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64",
    "BYTES", "BF16",
)
_NUMPY_TYPES = (
    None, np.bool_, np.uint8, np.uint16, np.uint32, np.uint64, np.int8, np.int16, np.int32, np.int64, np.float16,
    np.float32, np.float64, np.object_, None,
)
BYTES, BF16 = 13, 14

DTYPES = tuple(None if kind is None else np.dtype(kind) for kind in _NUMPY_TYPES)
CODES = {dtype: code for code, dtype in enumerate(DTYPES) if dtype is not None}

TRITON_STRING_TO_NUMPY = {
    "TYPE_" + ("STRING" if name == "BYTES" else name): _NUMPY_TYPES[code]
    for code, name in enumerate(_WIRE_NAMES)
    if _NUMPY_TYPES[code] is not None
}
TRITON_TO_NUMPY_TYPE = {code: kind for code, kind in enumerate(_NUMPY_TYPES) if kind is not None}
NUMPY_TO_TRITON_TYPE = {kind: code for code, kind in TRITON_TO_NUMPY_TYPE.items()}
NUMPY_TO_TRITON_TYPE[np.bytes_] = BYTES


def wire_name(code):
    """`FP32` for 11."""
    return _WIRE_NAMES[code]


def code_of(dtype):
    """The number of a NumPy dtype; strings of any kind are BYTES. TypeError for what no tensor can hold."""
    code = CODES.get(dtype)
    if code is not None:
        return code
    if dtype.kind in "SUO":
        return BYTES
    code = CODES.get(dtype.newbyteorder("="))
    if code is None:
        raise TypeError("NumPy dtype `%s` has no tensor type; convert with `.astype`" % dtype)
    return code


def triton_string_to_numpy(triton_type_string):
    """The NumPy type of a configuration's `TYPE_…`; None for TYPE_BF16, which NumPy lacks."""
    return TRITON_STRING_TO_NUMPY.get(triton_type_string)


def triton_to_numpy_type(data_type):
    """The NumPy type of a data type's number."""
    return TRITON_TO_NUMPY_TYPE[data_type]


def numpy_to_triton_type(data_type):
    """The data type's number of a NumPy type."""
    return NUMPY_TO_TRITON_TYPE[data_type]


def _element(value):
    if isinstance(value, bytes):
        return value
    return value.encode("utf-8") if isinstance(value, str) else str(value).encode("utf-8")


def serialize_strings(array):
    """The elements in row-major order, each as its length (4 bytes, little-endian) and its bytes."""
    if array.size == 1:
        element = _element(array.item())
        return len(element).to_bytes(4, "little") + element
    parts = []
    for value in array.ravel().tolist():
        element = _element(value)
        parts.append(len(element).to_bytes(4, "little"))
        parts.append(element)
    return b"".join(parts)


def deserialize_strings(data):
    """A flat object array of the elements that `serialize_strings` wrote."""
    data = bytes(data)
    size = len(data)
    values, at = [], 0
    while at < size:
        end = at + 4 + int.from_bytes(data[at:at + 4], "little")
        if end > size or at + 4 > size:
            raise ValueError("a BYTES tensor ends inside an element, at byte %d of %d" % (at, size))
        values.append(data[at + 4:end])
        at = end
    array = np.empty(len(values), dtype=np.object_)
    array[:] = values
    return array


def serialize_byte_tensor(input_tensor):
    """A BYTES tensor as one bytes object in an array; None for an empty one. TritonModelException for other types."""
    from ._errors import TritonModelException

    if input_tensor.size == 0:
        return None
    if input_tensor.dtype.kind not in "SO":
        raise TritonModelException("cannot serialize bytes tensor: invalid datatype")
    return serialize_strings(input_tensor)


def deserialize_bytes_tensor(encoded_tensor):
    """A flat object array from the bytes of a BYTES tensor."""
    return deserialize_strings(encoded_tensor)
