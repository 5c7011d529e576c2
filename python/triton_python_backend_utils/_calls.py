"""Responses of other models, to requests that a model sends."""

import asyncio
import threading

from . import _channel
from ._errors import TritonError
from ._response import InferenceResponse
from ._runtime import channel


class ResponseIterator:
    """The responses of another model, each as it comes. `cancel` ends the request."""

    def __init__(self, request, decoupled):
        self._channel = channel()
        self._waiter = _channel.Waiter()
        self._ended = False
        wire = request._wire_for_call(decoupled)
        self._call = self._channel.open_call(self._waiter.put)
        self._channel.send(_channel.CALL, self._call, "infer", wire)

    def __iter__(self):
        return self

    def __aiter__(self):
        return _AsyncIteration(self)

    def __next__(self):
        if self._ended:
            raise StopIteration
        self._channel.wait(self._waiter)
        response, is_final = _response_of(self._waiter.items.popleft())
        if is_final:
            self._end()
        else:
            self._channel.send(_channel.CALL, 0, "taken", (self._call,))
        return response

    def cancel(self):
        """Ends the request; no more responses come."""
        if not self._ended:
            self._end()
            self._channel.send(_channel.DROP, self._call)

    def _end(self):
        self._ended = True
        self._channel.close_call(self._call)

    def _only(self):
        try:
            return next(self)
        finally:
            self.cancel()

    def __del__(self):
        try:
            self.cancel()
        except Exception:  # The server is gone, or this never started.
            pass


class _AsyncIteration:
    """A ResponseIterator for `async for`: a thread waits, so that the event loop need not."""

    def __init__(self, stream):
        self._stream = stream

    def __aiter__(self):
        return self

    async def __anext__(self):
        if self._stream._ended:
            raise StopAsyncIteration
        return await asyncio.get_running_loop().run_in_executor(None, self._stream.__next__)


class AwaitedResponse:
    """The one response of another model, for `await`."""

    def __init__(self, request):
        self._channel = channel()
        self._loop = asyncio.get_running_loop()
        self._reply = self._loop.create_future()
        wire = request._wire_for_call(False)
        self._call = self._channel.open_call(self._put)
        _listeners.add(self._loop, self._channel)
        self._channel.send(_channel.CALL, self._call, "infer", wire)

    def _put(self, reply):
        self._loop.call_soon_threadsafe(lambda: self._reply.done() or self._reply.set_result(reply))

    async def _only(self):
        is_final = False
        try:
            response, is_final = _response_of(await self._reply)
            return response
        finally:
            self._channel.close_call(self._call)
            _listeners.remove(self._loop, self._channel)
            if not is_final:
                self._channel.send(_channel.DROP, self._call)


class _Listeners:
    """Event loops that read the channel, because one of their coroutines waits for an answer."""

    def __init__(self):
        self._counts = {}
        self._lock = threading.Lock()

    def add(self, loop, connection):
        with self._lock:
            self._counts[loop] = self._counts.get(loop, 0) + 1
            if self._counts[loop] == 1:
                loop.add_reader(connection.fileno(), self._read, loop, connection)

    def _read(self, loop, connection):
        try:
            connection.poll()
        except _channel.Closed:
            loop.remove_reader(connection.fileno())

    def remove(self, loop, connection):
        with self._lock:
            self._counts[loop] -= 1
            if not self._counts[loop]:
                del self._counts[loop]
                loop.remove_reader(connection.fileno())


_listeners = _Listeners()


def _response_of(reply):
    """(response, is it the last) of a reply to `infer`."""
    if reply[2] is not None:
        return InferenceResponse(error=TritonError(reply[2][1], reply[2][0])), True
    return InferenceResponse._received(reply[3]), reply[3][3]
