"""Tensors: NumPy arrays and DLPack capsules on this side, bytes in messages or shared memory on the other."""

import ctypes

import numpy as np

from ._datatypes import BF16, BYTES, DTYPES, code_of, deserialize_strings, serialize_strings
from ._errors import TritonModelException
from ._memory import Block, ClientBlock
from ._runtime import INLINE_BYTES, runtime

_CPU, _CUDA, _CUDA_HOST = 1, 2, 3
# Offset of `dtype.code` in DLTensor: behind data, device (two int32) and ndim (int32).
_CODE_OFFSET = 20
_DL_UINT, _DL_BFLOAT = 1, 4


class Tensor:
    """A named tensor. `as_numpy` gives its elements; those of a BYTES tensor are `bytes` objects."""

    __slots__ = ("_name", "_code", "_shape", "_array", "_data")

    def __init__(self, name, array):
        if not isinstance(array, np.ndarray):
            raise TritonModelException(
                "tensor `%s`: expected a NumPy array, found %s; for others use `Tensor.from_dlpack`"
                % (name, type(array).__name__)
            )
        self._name, self._array, self._data = name, array, None
        try:
            self._code = code_of(array.dtype)
        except TypeError as error:
            raise TritonModelException("tensor `%s`: %s" % (name, error)) from None
        self._shape = array.shape

    @classmethod
    def _received(cls, wire):
        tensor = cls.__new__(cls)
        tensor._name, tensor._code, tensor._shape, data = wire
        tensor._array = None
        if data.__class__ is tuple:
            if len(data) == 3:
                region, offset, size = data
                # Whoever drops this block last gives it back, so it is claimed here and not when it is first used.
                data = Block(runtime.regions[region], offset, size)
            else:
                data = ClientBlock(data)
        tensor._data = data
        return tensor

    def name(self):
        """The tensor's name."""
        return self._name

    def shape(self):
        """Its sizes, outermost first."""
        return list(self._shape)

    def triton_dtype(self):
        """The number of its type in model_config.proto."""
        return self._code

    def is_cpu(self):
        """Always true: tensors travel through host memory."""
        return True

    def as_numpy(self):
        """The elements as a writable array. BF16, which NumPy lacks, goes through `to_dlpack`."""
        if self._array is None:
            if self._code == BF16:
                raise TritonModelException("tensor `%s` is BF16, which NumPy lacks; use `to_dlpack`" % self._name)
            self._array = self._raw_array()
        return self._array

    def _raw_array(self):
        data = self._data
        if self._code == BYTES:
            array = deserialize_strings(data.array() if isinstance(data, Block) else data)
        else:
            dtype = np.dtype(np.uint16) if self._code == BF16 else DTYPES[self._code]
            if data.__class__ is bytes:
                array = np.frombuffer(bytearray(data), dtype)
            else:
                array = (data if data.__class__ is np.ndarray else data.array()).view(dtype)
        return array.reshape(self._shape)

    def to_dlpack(self):
        """A DLPack capsule of the elements, without a copy. Not for BYTES."""
        return self.__dlpack__()

    def __dlpack__(self, *, stream=None, **_):
        if self._code == BYTES:
            raise TritonModelException("tensor `%s` is BYTES, which DLPack cannot hold" % self._name)
        if self._code == BF16:
            return _with_code(self._raw_array().__dlpack__(), _DL_BFLOAT)
        return self.as_numpy().__dlpack__()

    def __dlpack_device__(self):
        return (_CPU, 0)

    @staticmethod
    def from_dlpack(name, tensor):
        """A tensor from a DLPack capsule or an object that offers one, such as PyTorch's; copied if on a GPU."""
        if hasattr(tensor, "__dlpack__"):
            tensor = _on_host(name, tensor)
            if tensor.__dlpack_device__()[0] not in (_CPU, _CUDA_HOST):
                raise TritonModelException("tensor `%s` is not in host memory; move it there first" % name)
            capsule = tensor.__dlpack__()
        else:
            capsule = tensor
        is_bf16 = _code_of_capsule(name, capsule) == _DL_BFLOAT
        if is_bf16:
            _with_code(capsule, _DL_UINT)
        # NumPy marks it read-only, but nobody writes to an output.
        made = Tensor(name, np.from_dlpack(_Capsule(capsule)))
        if is_bf16:
            made._data, made._array, made._code = np.ascontiguousarray(made._array), None, BF16
        return made

    def _wire(self, place=None):
        """What travels: (name, type, shape, and bytes, block or the size of what was written to `place`)."""
        data = self._data
        if data is None or self._array is not None:
            data = serialize_strings(self._array) if self._code == BYTES else self._contiguous()
        elif isinstance(data, (Block, ClientBlock)):
            data = data.array()
        size = len(data) if data.__class__ is bytes else data.nbytes
        if place is not None and size and place.write(data):
            data = size
        elif size > INLINE_BYTES:
            data = runtime.outputs.put(data)
        return self._name, self._code, self._shape, data

    def _contiguous(self):
        array, dtype = self._array, DTYPES[self._code]
        if array.dtype is not dtype and array.dtype != dtype:
            array = array.astype(dtype)
        return array if array.flags.c_contiguous else np.ascontiguousarray(array)

    def __repr__(self):
        return "Tensor(name=%r, shape=%s)" % (self._name, list(self._shape))


class _Capsule:
    """An object around a capsule, as NumPy wants it."""

    def __init__(self, capsule):
        self._capsule = capsule

    def __dlpack__(self, **_):
        return self._capsule

    def __dlpack_device__(self):
        return (_CPU, 0)


def _on_host(name, tensor):
    if tensor.__dlpack_device__()[0] in (_CPU, _CUDA_HOST):
        return tensor.detach() if getattr(tensor, "requires_grad", False) else tensor
    for method in ("cpu", "get"):  # PyTorch, CuPy
        if hasattr(tensor, method):
            tensor = getattr(tensor, method)()
            # CuPy's arrays become NumPy's, which offer DLPack too.
            return tensor.detach() if hasattr(tensor, "detach") else tensor
    return tensor


def _pointer(capsule):
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return get(capsule, b"dltensor")


def _code_of_capsule(name, capsule):
    try:
        return ctypes.c_uint8.from_address(_pointer(capsule) + _CODE_OFFSET).value
    except (ValueError, TypeError, ctypes.ArgumentError):
        raise TritonModelException(
            "tensor `%s`: expected an unused DLPack capsule, found %s" % (name, type(capsule).__name__)
        ) from None


def _with_code(capsule, code):
    ctypes.c_uint8.from_address(_pointer(capsule) + _CODE_OFFSET).value = code
    return capsule
