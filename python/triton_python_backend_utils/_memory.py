"""Blocks of shared memory for tensors that are too large for a message.

A region is cut into blocks, each behind a header of 64 bytes whose first byte says whether it is in use. Who fills a
block sets that byte; who has finished reading clears it. So nothing needs to be sent to give a block back.
"""

import ctypes
import mmap
import os
import threading

import numpy as np

from ._errors import TritonModelException
from ._runtime import runtime

HEADER = 64


class Region:
    """A mapped region."""

    def __init__(self, path, start, size):
        descriptor = os.open(path, os.O_RDWR)
        try:
            mapped = mmap.mmap(descriptor, start + size)
        finally:
            os.close(descriptor)
        self.size = size
        self.bytes = np.frombuffer(mapped, dtype=np.uint8)[start:]
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapped, start))


class Block:
    """A received block; it goes back to its region when no array refers to it any more."""

    __slots__ = ("__array_interface__", "_flags", "_at")

    def __init__(self, region, offset, size):
        self.__array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (region.address + offset, False),
            "version": 3,
        }
        self._flags, self._at = region.bytes, offset - HEADER

    def __del__(self):
        self._flags[self._at] = 0

    def array(self):
        """Its bytes."""
        return np.asarray(self)


class ClientFile:
    """An object of shared memory that belongs to a client."""

    def __init__(self, path):
        self._descriptor, self._why = None, None
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            self._why = str(error)

    def descriptor(self, region):
        """Its file descriptor. TritonModelException if it could not be opened."""
        if self._descriptor is None:
            raise TritonModelException("cannot open shared memory region '%s': %s" % (region, self._why))
        return self._descriptor

    def __del__(self):
        if self._descriptor is not None:
            os.close(self._descriptor)


class ClientBlock:
    """A tensor's place in shared memory of a client: an input is read there, an output written there."""

    __slots__ = ("_file", "_at", "nbytes", "_region")

    def __init__(self, wire):
        number, self._at, self.nbytes, self._region = wire
        self._file = runtime.files[number]

    def array(self):
        """Its bytes, mapped: what the model writes into them is its own and not the client's."""
        descriptor = self._file.descriptor(self._region)
        before = self._at % mmap.ALLOCATIONGRANULARITY
        try:
            mapped = mmap.mmap(
                descriptor, before + self.nbytes, access=mmap.ACCESS_COPY, offset=self._at - before
            )
        except (ValueError, OSError) as error:
            raise TritonModelException(
                "shared memory region '%s' cannot be used any more: %s" % (self._region, error)
            ) from None
        return np.frombuffer(mapped, np.uint8, self.nbytes, before)

    def write(self, data):
        """Writes an output there. False when there is no room for it, or no memory any more."""
        flat = flat_bytes(data)
        if self._file._descriptor is None or flat.size > self.nbytes:
            return False
        try:
            # A file that is too short would grow.
            if os.fstat(self._file._descriptor).st_size < self._at + flat.size:
                return False
            done = 0
            while done < flat.size:
                done += os.pwrite(self._file._descriptor, flat[done:], self._at + done)
        except OSError:
            return False
        return True


def flat_bytes(data):
    """The bytes of a bytes object or contiguous array as a flat array."""
    return data.reshape(-1).view(np.uint8) if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)


class Arena:
    """Regions that this process fills. `grow(size)` makes one of at least so many bytes: its number and itself."""

    def __init__(self, grow):
        self._grow = grow
        self._regions = []
        self._lock = threading.Lock()

    def put(self, data):
        """Copies the bytes of a contiguous array into a free block; returns (region, offset, size)."""
        flat = flat_bytes(data)
        needed = HEADER + -(-flat.size // HEADER) * HEADER
        with self._lock:
            number, region, at = self._find(needed)
        region.bytes[at + HEADER:at + HEADER + flat.size] = flat
        return number, at + HEADER, flat.size

    def _find(self, needed):
        for number, region, blocks in self._regions:
            at = claim(region.bytes, region.size, blocks, needed)
            if at is not None:
                return number, region, at
        number, region = self._grow(needed)
        self._regions.append((number, region, []))
        return number, region, claim(region.bytes, region.size, self._regions[-1][2], needed)


def claim(flags, size, blocks, needed):
    """Takes `needed` bytes: the offset, or None. `blocks` are those in use: [start, end), by start."""
    blocks[:] = [block for block in blocks if flags[block[0]]]
    start = 0
    for index, (taken, end) in enumerate(blocks):
        if taken - start >= needed:
            blocks.insert(index, (start, start + needed))
            break
        start = end
    else:
        if size - start < needed:
            return None
        blocks.append((start, start + needed))
    flags[start] = 1
    return start
