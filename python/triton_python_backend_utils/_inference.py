"""Requests: those that a model answers, and those that it sends to other models."""

import json

from . import _channel
from ._calls import AwaitedResponse, ResponseIterator
from ._errors import TritonError, TritonModelException
from ._memory import ClientBlock
from ._response import InferenceResponse, checked_parameters
from ._runtime import channel, runtime
from ._tensor import Tensor

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2

TRITONSERVER_MEMORY_CPU, TRITONSERVER_MEMORY_CPU_PINNED, TRITONSERVER_MEMORY_GPU = range(3)


class PreferredMemory:
    """Where a model would like the outputs of a request; they come in host memory all the same."""

    __slots__ = ("_kind", "_device")

    def __init__(self, preferred_memory_type=TRITONSERVER_MEMORY_CPU, preferred_device_id=0):
        self._kind, self._device = preferred_memory_type, preferred_device_id

    def memory_type(self):
        """One of TRITONSERVER_MEMORY_…"""
        return self._kind

    def device_id(self):
        """The device's number."""
        return self._device


class InferenceTrace:
    """Stands for the trace of a request, to be passed on to requests that it causes."""

    __slots__ = ("_number",)

    def __init__(self, number=None):
        self._number = number

    def get_context(self):
        """The OpenTelemetry context: always None, for traces go to files."""
        return None


class InferenceRequest:
    """A request: one that came to this model, or one for another model, sent with `exec` or `async_exec`."""

    __slots__ = (
        "_number", "_id", "_correlation", "_flags", "_priority", "_timeout", "_parameters", "_outputs", "_inputs",
        "_model", "_version", "_memory", "_trace", "_release", "_sender", "_sender_taken",
    )

    def __init__(
        self,
        model_name="",
        requested_output_names=(),
        inputs=(),
        request_id="",
        correlation_id=0,
        model_version=-1,
        flags=0,
        timeout=0,
        preferred_memory=None,
        trace=None,
        parameters=None,
        priority=0,
    ):
        for tensor in inputs:
            if not isinstance(tensor, Tensor):
                raise TritonModelException("`inputs` holds %s; expected Tensor" % type(tensor).__name__)
        self._number = None
        self._model, self._version = str(model_name), int(model_version)
        self._id, self._correlation, self._flags = str(request_id), correlation_id, int(flags)
        self._priority, self._timeout = int(priority), int(timeout)
        self._parameters = checked_parameters(parameters)
        self._outputs = tuple(requested_output_names)
        self._inputs = list(inputs)
        self._memory = preferred_memory or PreferredMemory()
        self._trace = trace
        self._sender = None
        self._sender_taken = False
        self._release = TRITONSERVER_REQUEST_RELEASE_ALL

    @classmethod
    def _received(cls, wire):
        request = cls.__new__(cls)
        (
            request._number, request._id, request._correlation, request._flags, request._priority, request._timeout,
            request._parameters, request._outputs, inputs, places,
        ) = wire
        request._inputs = [Tensor._received(tensor) for tensor in inputs]
        request._model, request._version, request._memory, request._trace = "", -1, None, None
        request._sender = ResponseSender(request._number)
        if places:
            request._sender._places = {name: ClientBlock(place) for name, place in places}
        request._sender_taken = False
        request._release = TRITONSERVER_REQUEST_RELEASE_ALL
        return request

    def inputs(self):
        """The input tensors."""
        return list(self._inputs)

    def request_id(self):
        """The client's id."""
        return self._id

    def correlation_id(self):
        """The sequence it belongs to: a number or a string."""
        return self._correlation

    def model_name(self):
        """The model it is for; empty for one that came to this model."""
        return self._model

    def requested_output_names(self):
        """Names of the requested outputs, as a set."""
        return set(self._outputs)

    def flags(self):
        """TRITONSERVER_REQUEST_FLAG_SEQUENCE_… bits."""
        return self._flags

    def set_flags(self, flags):
        """Sets the sequence bits."""
        self._flags = int(flags)

    def timeout(self):
        """Microseconds it may wait in a queue; 0 for the model's default."""
        return self._timeout

    def priority(self):
        """Its priority level; 0 for the model's default."""
        return self._priority

    def parameters(self):
        """The parameters as a JSON object."""
        return json.dumps(self._parameters)

    def preferred_memory(self):
        """Where the outputs are wanted."""
        return self._memory or PreferredMemory()

    def trace(self):
        """Its trace, to hand to requests it causes."""
        return self._trace or InferenceTrace(self._number)

    def set_release_flags(self, flags):
        """TRITONSERVER_REQUEST_RELEASE_RESCHEDULE sends the request to this model again once `execute` returns."""
        if flags not in (TRITONSERVER_REQUEST_RELEASE_ALL, TRITONSERVER_REQUEST_RELEASE_RESCHEDULE):
            raise TritonModelException("release flags %r are not one of TRITONSERVER_REQUEST_RELEASE_…" % (flags,))
        self._release = flags

    def get_response_sender(self):
        """Sends responses at any time, from any thread, also after `execute` has returned."""
        self._sender_taken = True
        return self._sender

    def is_cancelled(self):
        """Whether the client has left or cancelled."""
        return self._sender is not None and self._sender.is_cancelled()

    def exec(self, decoupled=False):
        """Has the other model answer: its response, or with `decoupled=True` an iterator over its responses."""
        stream = ResponseIterator(self, decoupled)
        return stream if decoupled else stream._only()

    async def async_exec(self, decoupled=False):
        """As `exec`, without blocking the event loop; the iterator may be read with `for` or `async for`."""
        return ResponseIterator(self, True) if decoupled else await AwaitedResponse(self)._only()

    def _wire_for_call(self, decoupled):
        if not self._model:
            raise TritonModelException("the request has no `model_name`")
        cause = None if self._trace is None else self._trace._number
        return (
            self._model, self._version, self._id, self._correlation, self._flags, self._priority, self._timeout,
            self._parameters, self._outputs, tuple([tensor._wire() for tensor in self._inputs]), decoupled,
        ), cause


_cancelled = set()


def note_cancelled(number):
    """The client of a request has left. Notes of requests that ended meanwhile are forgotten in time."""
    if len(_cancelled) >= 65536:
        _cancelled.clear()
    _cancelled.add(number)


class ResponseSender:
    """Sends the responses of one request."""

    __slots__ = ("_number", "_closed", "_places", "__weakref__")

    def __init__(self, number):
        self._number = number
        # Where the client wants outputs in its own shared memory, by name.
        self._places = None
        self._closed = False

    def send(self, response=None, flags=0):
        """Sends a response; with flags=TRITONSERVER_RESPONSE_COMPLETE_FINAL, none follows it."""
        if flags not in (0, TRITONSERVER_RESPONSE_COMPLETE_FINAL):
            raise TritonModelException("unable to send response: unknown flags %r" % (flags,))
        if response is None and not flags:
            raise TritonModelException("inference response must be provided when the response flags are 0")
        if response is not None and not isinstance(response, InferenceResponse):
            raise TritonModelException("expected InferenceResponse, found %s" % type(response).__name__)
        if self._closed:
            raise TritonModelException("Unable to send response. Response sender has been closed.")
        wire = None if response is None else response._wire(self._places)
        self._closed = bool(flags)
        channel().send(_channel.RESPONSE, self._number, wire, flags)
        if flags:
            _cancelled.discard(self._number)

    def __del__(self):
        # Nobody can answer any more; the client must not wait for ever.
        if not self._closed and runtime.channel is not None:
            words = "the model dropped the response sender without a final response"
            try:
                runtime.channel.send(_channel.RESPONSE, self._number, ((TritonError.INTERNAL, words), (), {}), 1)
            except Exception:  # The server is gone.
                pass

    def is_cancelled(self):
        """Whether the client has left or cancelled."""
        if self._number not in _cancelled and runtime.channel is not None:
            runtime.channel.poll()
        return self._number in _cancelled


def get_input_tensor_by_name(inference_request, name):
    """The input called `name`, or None."""
    for tensor in inference_request._inputs:
        if tensor._name == name:
            return tensor
    return None
