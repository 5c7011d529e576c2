"""Messages between this process and the server, over a Unix socket.

A message is its length (4 bytes, little-endian) and a marshalled tuple that begins with its kind. There is no reader
thread: whichever thread waits for something reads the socket and hands out what it finds, so that the usual case, one
thread that waits for requests, costs one system call and no switch between threads.
"""

import marshal
import socket
import struct
import threading
from collections import deque

# From the server.
LOAD, EXECUTE, REPLY, CANCEL, FINALIZE, MAP, OPEN_FILE, CLOSE_FILE, PROBE = range(9)
# To the server.
LOADED, DONE, RESPONSE, CALL, LOG, METRIC, MAPPED, DROP, FINALIZED, STARTED, PROBED = range(11)

# Version 2 of the format holds no references, and every Python 3 reads it.
FORMAT = 2
_length = struct.Struct("<I")
_READ_BYTES = 1 << 18


class Closed(Exception):
    """The server is gone."""


class Waiter:
    """Something a thread waits for: `items`, put there by whichever thread reads the socket."""

    __slots__ = ("items", "_wake")

    def __init__(self):
        self.items = deque()
        self._wake = threading.Event()

    def put(self, item):
        self.items.append(item)
        self._wake.set()


class Channel:
    """The socket, and the messages read from it."""

    def __init__(self, sock):
        self._socket = sock
        self._buffer = b""
        self._reading = threading.Lock()
        # Reentrant: a finalizer that sends may run at any point of this class.
        self._writing = threading.RLock()
        self._waiters = []
        self._calls = {}
        self._next_call = 0
        self._calls_lock = threading.Lock()
        self._closed = None
        self.work = Waiter()
        self.probes = Waiter()
        self.on_cancel = lambda number: None
        self.on_map = lambda number, path, start, size: None
        self.on_file = lambda number, path: None

    def send(self, *message):
        """Sends one message."""
        payload = marshal.dumps(message, FORMAT)
        with self._writing:
            try:
                self._socket.sendall(_length.pack(len(payload)) + payload)
            except OSError as error:
                raise Closed("the server is gone") from error

    def wait(self, waiter):
        """Returns when `waiter` has an item, reading the socket itself if no other thread does."""
        if waiter.items:
            return
        self._waiters.append(waiter)
        try:
            while not waiter.items:
                if self._closed is not None:
                    raise Closed("the server is gone")
                if not self._reading.acquire(blocking=False):
                    waiter._wake.wait()
                    waiter._wake.clear()
                    continue
                try:
                    while not waiter.items:
                        self._read()
                finally:
                    self._reading.release()
        finally:
            self._waiters.remove(waiter)
            # Somebody else must read now.
            for other in self._waiters[:1]:
                other._wake.set()

    def poll(self):
        """Hands out what has arrived, without waiting. Any thread may call it at any time."""
        if not self._reading.acquire(blocking=False):
            return
        try:
            self._read(socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass
        finally:
            self._reading.release()
            for waiter in self._waiters[:1]:
                waiter._wake.set()

    def fileno(self):
        return self._socket.fileno()

    def call(self, method, *arguments):
        """Asks the server, and returns its answer. TritonModelException with the server's words if it refuses."""
        waiter = Waiter()
        number = self.open_call(waiter.put)
        try:
            self.send(CALL, number, method, arguments)
            self.wait(waiter)
        finally:
            self.close_call(number)
        return value_of(waiter.items.popleft())

    def open_call(self, handler):
        """A number for a question; `handler` gets each answer, in whatever thread reads it."""
        with self._calls_lock:
            self._next_call += 1
            self._calls[self._next_call] = handler
            return self._next_call

    def close_call(self, number):
        self._calls.pop(number, None)

    def _read(self, flags=0):
        data = self._socket.recv(_READ_BYTES, flags)
        if not data:
            self._closed = True
            for waiter in self._waiters:
                waiter._wake.set()
            raise Closed("the server is gone")
        if self._buffer:
            data = self._buffer + data
        at, end = 0, len(data)
        while end - at >= 4:
            size = _length.unpack_from(data, at)[0]
            if end - at - 4 < size:
                data = self._read_rest(data[at:], size + 4 - (end - at))
                at, end = 0, len(data)
            self._hand_out(marshal.loads(memoryview(data)[at + 4:at + 4 + size]))
            at += 4 + size
        self._buffer = data[at:]

    def _read_rest(self, begun, missing):
        parts = [begun]
        while missing:
            part = self._socket.recv(min(missing, 1 << 20))
            if not part:
                self._closed = True
                raise Closed("the server is gone")
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def _hand_out(self, message):
        kind = message[0]
        if kind == EXECUTE or kind == LOAD or kind == FINALIZE:
            self.work.put(message)
        elif kind == REPLY:
            handler = self._calls.get(message[1])
            if handler is not None:
                handler(message)
        elif kind == CANCEL:
            self.on_cancel(message[1])
        elif kind == MAP:
            self.on_map(*message[1:])
        elif kind == OPEN_FILE:
            self.on_file(message[1], message[2])
        elif kind == PROBE:
            self.probes.put(message)
        elif kind == CLOSE_FILE:
            self.on_file(message[1], None)


def value_of(reply):
    """The value of (REPLY, call, error or None, value), or the exception it stands for."""
    from ._errors import TritonModelException

    if reply[2] is not None:
        raise TritonModelException(reply[2][1])
    return reply[3]
