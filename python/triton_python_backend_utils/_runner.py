"""The life of a model process: load, execute until the server ends it, finalize."""

import ctypes
import importlib
import importlib.util
import json
import marshal
import os
import signal
import socket
import sys
import threading
import traceback

import numpy

from . import _channel
from ._errors import TritonError, TritonModelException, describe
from ._inference import (
    TRITONSERVER_REQUEST_RELEASE_RESCHEDULE,
    InferenceRequest,
    note_cancelled,
)
from ._memory import Arena, ClientFile, Region
from ._model_config import ModelConfig
from ._response import InferenceResponse
from ._runtime import runtime
from ._services import Logger


def main():
    """Runs one model. Standard input is the socket to the server, unless the model runs on every rank."""
    path, load = os.environ.pop("TRIREME_PYTHON_SOCKET", None), os.environ.pop("TRIREME_PYTHON_LOAD", None)
    if path is not None:
        _end_with_launcher()
    if path is not None and _mpi_rank():
        _follow(bytes.fromhex(load))
        return
    connection = _inherited() if path is None else _connected(path)
    channel = runtime.channel = _channel.Channel(connection)
    runtime.outputs = Arena(lambda size: _new_region(channel, size))
    channel.on_cancel = note_cancelled
    channel.on_map = lambda *region: _map(channel, *region)
    channel.on_file = _open_or_close
    # The server says when to end. Programs that the model starts get the usual handling back.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    try:
        channel.send(_channel.STARTED)
        model = _load(channel)
        if model is not None:
            _serve(channel, model)
    except _channel.Closed:
        # Nobody to answer; threads of the model must not keep this process.
        os._exit(1)


def _inherited():
    connection = socket.socket(fileno=os.dup(0))
    connection.set_inheritable(False)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    return connection


def _connected(path):
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    return connection


def _mpi_rank():
    """The rank from the launcher's environment: Open MPI's, or Slurm's."""
    return int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("SLURM_PROCID") or 0)


def _end_with_launcher():
    """Has the kernel end this process with its parent, which is a launcher of MPI programs."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def _follow(load):
    """Runs the model on a rank other than the first: its requests come over MPI, and no server talks to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    arguments = marshal.loads(load)[1]
    try:
        model = _made(arguments)
    except BaseException as error:
        name, rank = arguments["args"]["model_instance_name"], _mpi_rank()
        words = "on rank %d of '%s': %s" % (rank, name, describe(error))
        traceback.print_exc()
        sys.stderr.flush()
        # One write, so that lines of other ranks do not get into it.
        os.write(2, b"trireme-python-failed %s\n" % words.encode().hex().encode())
        os._exit(1)
    ending = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ending.set())
    ending.wait()
    if hasattr(model, "finalize"):
        model.finalize()
    os._exit(0)


def _new_region(channel, size):
    number, path, start, size = channel.call("region", size)
    region = Region(path, start, size)
    channel.send(_channel.MAPPED, False, number)
    return number, region


def _map(channel, number, path, start, size):
    runtime.regions[number] = Region(path, start, size)
    channel.send(_channel.MAPPED, True, number)


def _open_or_close(number, path):
    """A client's shared memory was first used, or was unregistered (`path` is None)."""
    if path is None:
        runtime.files.pop(number, None)
    else:
        runtime.files[number] = ClientFile(path)


def _load(channel):
    """The loaded model; None when it failed, which was reported to the server, or when that was all."""
    channel.wait(channel.work)
    arguments = channel.work.items.popleft()[1]
    try:
        if arguments["complete"] is not None:
            channel.send(_channel.LOADED, None, _complete(_module_of(arguments), arguments["complete"]), False)
            return None
        model = _made(arguments)
    except _channel.Closed:
        raise
    except BaseException as error:
        channel.send(_channel.LOADED, (TritonError.INTERNAL, describe(error), traceback.format_exc()), None, False)
        return None
    has_probe = callable(getattr(model, "is_ready", None))
    if has_probe:
        threading.Thread(target=_answer_probes, args=(channel, model), name="is_ready", daemon=True).start()
    channel.send(_channel.LOADED, None, None, has_probe)
    return model


def _answer_probes(channel, model):
    """Calls the model's `is_ready` each time the server asks, beside `execute`."""
    try:
        while True:
            channel.wait(channel.probes)
            channel.probes.items.popleft()
            channel.send(_channel.PROBED, _is_ready(channel, model))
    except _channel.Closed:
        pass


def _is_ready(channel, model):
    try:
        answer = model.is_ready()
        if hasattr(answer, "__await__"):
            import asyncio

            answer = asyncio.run(_awaited(answer))
        if not isinstance(answer, (bool, numpy.bool_)):
            raise TypeError("`is_ready` returned %s; expected bool" % type(answer).__name__)
        return bool(answer)
    except Exception:
        channel.send(_channel.LOG, Logger.ERROR, "is_ready", traceback.format_exc())
        return False


async def _awaited(answer):
    return await answer


def _module_of(arguments):
    runtime.is_decoupled = arguments["is_decoupled"]
    runtime.log_verbose = arguments["log_verbose"]
    _name_process()
    return _import(arguments["model_dir"], arguments["version_dir"], arguments["file"])


def _made(arguments):
    """The model, initialized."""
    module = _module_of(arguments)
    model = _class_of(module)()
    if hasattr(model, "initialize"):
        model.initialize(dict(arguments["args"]))
    if not callable(getattr(model, "execute", None)):
        raise AttributeError("TritonPythonModel of %s has no method `execute`" % module.__file__)
    return model


def _name_process():
    try:
        with open("/proc/self/comm", "w") as name:
            name.write("trireme-python")
    except OSError:
        pass  # Only helps `ps`.


def _import(model_dir, version_dir, file):
    """The module of a model. Its own directory, and the one above, are on the path."""
    sys.path[1:1] = [version_dir, model_dir]
    path = os.path.join(version_dir, file)
    if not os.path.isfile(path):
        raise FileNotFoundError("model file %s does not exist" % path)
    if file.endswith(".py"):
        # As a part of its version's folder, so that `from . import …` finds its neighbours.
        return importlib.import_module("%s.%s" % (os.path.basename(version_dir), file[:-3].replace("/", ".")))
    loader = importlib.machinery.SourceFileLoader("model", path)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("model", loader))
    loader.exec_module(module)
    return module


def _class_of(module):
    made = getattr(module, "TritonPythonModel", None)
    if made is None:
        raise AttributeError("%s has no class `TritonPythonModel`" % module.__file__)
    return made


def _complete(module, config):
    """The configuration as the model completes it, as JSON; None if it does not."""
    complete = getattr(_class_of(module), "auto_complete_config", None)
    if complete is None:
        return None
    made = complete(ModelConfig(json.loads(config)))
    if not isinstance(made, ModelConfig):
        raise TypeError("auto_complete_config returned %s; expected its ModelConfig" % type(made).__name__)
    return json.dumps(made.as_dict())


def _serve(channel, model):
    work = channel.work
    while True:
        if not work.items:
            channel.wait(work)
        message = work.items.popleft()
        if message[0] != _channel.EXECUTE:
            break
        _execute(channel, model, message[1], message[2])
    try:
        if hasattr(model, "finalize"):
            model.finalize()
        _loop.stop()
    except Exception:
        channel.send(_channel.LOG, Logger.ERROR, "finalize", traceback.format_exc())
    # From here on the server may end it: with processes on other ranks, MPI would wait for them at exit.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    channel.send(_channel.FINALIZED)


def _execute(channel, model, batch, received):
    requests = []
    try:
        for wire in received:
            requests.append(InferenceRequest._received(wire))
        answer = model.execute(requests)
        # Cheaper than asking `inspect` about each list.
        if answer.__class__ is not list and hasattr(answer, "__await__"):
            if runtime.is_decoupled:
                _loop.start(answer, lambda error: _give_up(channel, requests, error))
                answer = None
            else:
                answer = _loop.finish(answer)
        responses = _responses(requests, answer)
    except _channel.Closed:
        raise
    except BaseException as error:
        words = describe(error)
        for request in requests:
            # The server answers them all.
            request._sender._closed = True
        channel.send(_channel.DONE, batch, None, (TritonError.INTERNAL, words, traceback.format_exc()))
        return
    channel.send(_channel.DONE, batch, responses, None)


def _responses(requests, answer):
    """What travels for each request: a response, None where a sender answers, or True to reschedule."""
    if answer is None:
        return tuple([_without_response(request) for request in requests])
    if runtime.is_decoupled:
        raise TritonModelException(
            "a decoupled model returned %s from `execute`; it must return None and answer through "
            "`get_response_sender()`" % type(answer).__name__
        )
    if not isinstance(answer, (list, tuple)):
        raise TritonModelException(
            "`execute` returned %s; expected a list with one InferenceResponse for each request"
            % type(answer).__name__
        )
    if len(answer) != len(requests):
        raise TritonModelException(
            "`execute` returned %d responses for %d requests; it must return one for each"
            % (len(answer), len(requests))
        )
    wires = []
    for request, response in zip(requests, answer):
        if response is None:
            wires.append(_without_response(request))
        elif not isinstance(response, InferenceResponse):
            raise TritonModelException(
                "`execute` returned a list with %s; expected InferenceResponse" % type(response).__name__
            )
        elif request._sender._closed:
            raise TritonModelException("`execute` returned a response that its response sender has sent already")
        else:
            request._sender._closed = True
            wires.append(response._wire(request._sender._places))
    return tuple(wires)


def _without_response(request):
    if request._release == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE:
        request._sender._closed = True
        return True
    if not request._sender_taken and not runtime.is_decoupled:
        raise TritonModelException("`execute` gave no response to a request whose response sender it did not take")
    return None


def _give_up(channel, requests, error):
    """An `async def execute` of a decoupled model failed: what has not been answered gets the error."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    channel.send(_channel.LOG, Logger.ERROR, "execute", text)
    for request in requests:
        if not request._sender._closed:
            request._sender._closed = True
            channel.send(_channel.RESPONSE, request._number, ((TritonError.INTERNAL, describe(error)), (), {}), 1)


class _Loop:
    """The event loop of an `async def execute`, in a thread of its own."""

    def __init__(self):
        self._loop = None
        self._thread = None

    def _started(self):
        import asyncio

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="execute", daemon=True)
            self._thread.start()
        return asyncio, self._loop

    def finish(self, coroutine):
        """Runs it to its end, and returns what it returns."""
        asyncio, loop = self._started()
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

    def start(self, coroutine, failed):
        """Runs it beside others; `failed` gets its exception."""
        asyncio, loop = self._started()
        future = asyncio.run_coroutine_threadsafe(coroutine, loop)
        future.add_done_callback(lambda future: future.exception() and failed(future.exception()))

    def stop(self):
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=5)


_loop = _Loop()
