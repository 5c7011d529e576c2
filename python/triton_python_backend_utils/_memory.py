"""Blocks of shared memory for tensors that are too large for a message.

A region is cut into blocks, each behind a header of 64 bytes whose first byte says whether it is in use. Who fills a
block sets that byte; who has finished reading clears it. So nothing needs to be sent to give a block back.
"""

import ctypes
import mmap
import os
import threading

import numpy as np

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


class Arena:
    """Regions that this process fills. `grow(size)` makes one of at least so many bytes: its number and itself."""

    def __init__(self, grow):
        self._grow = grow
        self._regions = []
        self._lock = threading.Lock()

    def put(self, data):
        """Copies the bytes of a contiguous array into a free block; returns (region, offset, size)."""
        flat = data.reshape(-1).view(np.uint8) if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
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
