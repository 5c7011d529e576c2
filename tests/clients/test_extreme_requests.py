"""Extreme values for every number, list and string that a client can send, through every protocol, to a launched world.

The cases are generated. Each base request below contains every field of its protocol; those of gRPC come from the service's
descriptors. One at a time, every number is replaced by each of NUMBERS, every list by lists of each of LENGTHS, and every string by
each of STRINGS. The response must be a result or a short error within ANSWER_SECONDS. Meanwhile another client waits at most
OTHERS_WAIT_SECONDS, and rank 0 must not end or grow by more than MOST_GROWTH bytes.
"""

import copy
import json
import multiprocessing
import os
import shutil
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from tritonclient.grpc import service_pb2

from conftest import ROOT, World, launch
from ports import free_ports

ANSWER_SECONDS = 30.0
OTHERS_WAIT_SECONDS = 1.0
MIB = 1 << 20
MOST_GROWTH = 300 * MIB
LONGEST_ERROR = 16 << 10

NUMBERS = [-1, 0, 1, 2**31 - 1, 2**63 - 1, float("nan")]
LENGTHS = [0, 1, 100_000]
STRINGS = {"empty": b"", "16 MiB": b"ab " * (16 * MIB // 3), "control": bytes(range(1, 32)) + b"\x7f\xc2\x85", "not UTF-8": b"\xff\xfe\xc3("}

IDENTITY = """
backend: "identity"
input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ -1 ] }, { name: "INPUT1" data_type: TYPE_STRING dims: [ -1 ] optional: true } ]
output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ -1 ] }, { name: "OUTPUT1" data_type: TYPE_STRING dims: [ -1 ] } ]
"""


# The world under test.


@dataclass
class Launched(World):
    """A launched world, with the memory of its rank 0."""

    rank_0: int = 0

    def status(self, key: str) -> int:
        """A memory size of rank 0 from `/proc`, in bytes."""
        with open(f"/proc/{self.rank_0}/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith(key))


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("extreme")
    repository = folder / "models"
    shutil.copytree(ROOT / "model_repository", repository)
    (repository / "identity/1").mkdir(parents=True)
    (repository / "identity/config.pbtxt").write_text(IDENTITY)
    world = Launched(*free_ports(3))
    ports = [f"--http_port={world.http_port}", f"--grpc_port={world.grpc_port}", f"--metrics_port={world.metrics_port}"]
    flags = ["--model-control-mode=explicit", "--load-model=*", "--allow-client-shm=true"]
    started = launch("--world_size=2", f"--model_repo={repository}", "--device=cpu", "--oversubscribe", "--detach", *ports, "--", *flags)
    assert started.returncode == 0, started.stderr
    status = launch("status", "--json", f"--http_port={world.http_port}")
    world.rank_0 = rank_0_of(status.stdout)
    yield world
    stopped = launch("stop", f"--http_port={world.http_port}")
    assert stopped.returncode == 0, stopped.stderr


def rank_0_of(status: str) -> int:
    return next(process["pid"] for world in json.loads(status) for process in world["processes"] if process["role"] == "rank" and process["rank"] == 0)


def other_client(port: int, stop, longest) -> None:
    """Sends small inference requests repeatedly and stores the longest response time in `longest`. Runs in its own process, because the test keeps this one busy."""
    body = json.dumps({"inputs": [{"name": "INPUT0", "datatype": "INT32", "shape": [1], "data": [7]}]}).encode()
    head = f"POST /v2/models/identity/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    connection = None
    while not stop.is_set():
        asked = time.monotonic()
        try:
            connection = connection or socket.create_connection(("127.0.0.1", port), timeout=60)
            connection.sendall(head + body)
            answer = connection.recv(1 << 16)
            assert b"200 OK" in answer, answer
        except OSError:
            connection = None
            longest.value = float("inf")
            return
        longest.value = max(longest.value, time.monotonic() - asked)
        time.sleep(0.02)


class Watch:
    """Runs cases and checks the server after each: it answers, serves others, and does not use too much memory."""

    def __init__(self, world: Launched):
        self.world, self.problems, self.num_cases = world, [], 0
        processes = multiprocessing.get_context("spawn")
        self.stop, self.longest = processes.Event(), processes.Value("d", 0.0)
        self.other = processes.Process(target=other_client, args=(world.http_port, self.stop, self.longest), daemon=True)

    def __enter__(self):
        Path(f"/proc/{self.world.rank_0}/clear_refs").write_text("5")  # Resets the peak.
        self.memory_before = self.world.status("VmRSS")
        self.other.start()
        return self

    def case(self, name: str, send) -> None:
        """Runs one case. `send` returns an error message, or None if the response is acceptable."""
        self.num_cases += 1
        begun = time.monotonic()
        self.longest.value = 0.0
        try:
            problem = send()
        except Exception as error:  # A client library may raise anything for a broken response.
            problem = f"no answer: {type(error).__name__}: {error}"
        took = time.monotonic() - begun
        waited, grown = self.longest.value, self.world.status("VmHWM") - self.memory_before if os.path.exists(f"/proc/{self.world.rank_0}") else 0
        if not os.path.exists(f"/proc/{self.world.rank_0}"):
            pytest.fail(f"{name}: rank 0 has ended")
        if problem:
            self.problems.append(f"{name}: {problem[:300]}")
        if took > ANSWER_SECONDS:
            self.problems.append(f"{name}: answered after {took:.1f} s")
        if waited > OTHERS_WAIT_SECONDS:
            self.problems.append(f"{name}: another client waited {waited:.1f} s")
        if grown > MOST_GROWTH:
            self.problems.append(f"{name}: rank 0 grew by {grown >> 20} MiB")
            Path(f"/proc/{self.world.rank_0}/clear_refs").write_text("5")

    def __exit__(self, *failure):
        self.stop.set()
        self.other.join(timeout=60)
        if failure[0] is None:
            grown = self.world.status("VmHWM") - self.memory_before
            print(f"{self.num_cases} cases; rank 0 grew by at most {grown >> 20} MiB")
            assert not self.problems, f"{len(self.problems)} of {self.num_cases} cases:\n" + "\n".join(self.problems[:60])


@pytest.fixture
def watch(launched):
    with Watch(launched) as watch:
        yield watch


# HTTP: every node of a JSON document.

TENSOR = {
    "name": "INPUT0",
    "datatype": "INT32",
    "shape": [2],
    "data": [1, 2],
    "parameters": {"number": 1, "text": "a"},
}
REGION = {"shared_memory_region": "region", "shared_memory_offset": 0, "shared_memory_byte_size": 8}
INFER = {
    "id": "1",
    "parameters": {"sequence_id": 1, "sequence_start": False, "priority": 1, "timeout": 10_000_000, "number": 1, "text": "a", "binary_data_output": False},
    "inputs": [TENSOR],
    "outputs": [{"name": "OUTPUT0", "parameters": {"binary_data": False, "classification": 0}}],
}
IN_REGION = {
    "inputs": [{"name": "INPUT0", "datatype": "INT32", "shape": [2], "parameters": REGION}],
    "outputs": [{"name": "OUTPUT0", "parameters": REGION}],
}
CLASSES = {"inputs": [TENSOR], "outputs": [{"name": "OUTPUT0", "parameters": {"classification": 1}}]}
IN_TAIL = {"inputs": [{"name": "INPUT0", "datatype": "INT32", "shape": [2], "parameters": {"binary_data_size": 8}}]}
GENERATE = {
    "id": "1",
    "text_input": "a",
    "max_tokens": 2,
    "parameters": {"temperature": 1.0, "text": "a"},
    "stop_words": ["b"],
    "bad_words": ["c"],
    "embedding_bias_words": ["d"],
    "embedding_bias_weights": [0.5],
    "priority": 1,
    "timeout": 10_000_000,
    "sequence_id": 1,
    "unknown": "a",
}
SAMPLING = {
    "model": "ensemble",
    "max_tokens": 2,
    "n": 1,
    "seed": 1,
    "stop": ["b"],
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 5,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 1,
    "user": "a",
    "stream": False,
}
COMPLETION = SAMPLING | {"prompt": ["a"], "echo": False, "logprobs": 1, "best_of": 1}
CHAT = SAMPLING | {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}], "name": "a"}], "max_completion_tokens": 2, "logprobs": True, "top_logprobs": 0}
LOAD = {"parameters": {"config": json.dumps({"backend": "identity"}), "file:1/weights": "aGVsbG8="}}
TRACE = {"trace_level": ["TIMESTAMPS"], "trace_rate": "1000", "trace_count": "0", "log_frequency": "0"}
LEVELS = {"log_info": True, "log_warning": True, "log_error": True, "log_verbose_level": 0, "log_format": "default"}
LOGGING = LEVELS | {"log_file": ""}
MEMORY = {"key": "/nothing", "offset": 0, "byte_size": 8}
CUDA_MEMORY = {"raw_handle": {"b64": "a" * 88}, "device_id": 0, "byte_size": 8}


def inputs_of(model: str) -> dict:
    """Every optional number of a shipped model's configuration, as `generate` takes it."""
    text = (ROOT / "model_repository" / model / "config.pbtxt").read_text()
    numbers = ("TYPE_INT32", "TYPE_UINT64", "TYPE_FP32")
    found = {}
    for line in text.split("output [", 1)[0].splitlines():
        if "optional: true" in line and any(kind in line for kind in numbers) and "-1" not in line:
            found[line.split('"')[1]] = 1
    return found


DOCUMENTS = {
    "infer": ("/v2/models/identity/infer", INFER),
    "infer in a region": ("/v2/models/identity/infer", IN_REGION),
    "infer with classes": ("/v2/models/identity/infer", CLASSES),
    "infer with a tail": ("/v2/models/identity/infer", IN_TAIL),
    "generate": ("/v2/models/ensemble/generate", GENERATE),
    "generate stream": ("/v2/models/ensemble/generate_stream", {"text_input": "a", "max_tokens": 2, "stream": True, "stop_words": ["b"]}),
    "generate, optional inputs": ("/v2/models/ensemble/generate", {"text_input": "a", "max_tokens": 2} | inputs_of("ensemble")),
    "completions": ("/v1/completions", COMPLETION),
    "chat": ("/v1/chat/completions", CHAT),
    "index": ("/v2/repository/index", {"ready": True}),
    "load": ("/v2/repository/models/another/load", LOAD),
    "unload": ("/v2/repository/models/another/unload", {"parameters": {"unload_dependents": False}}),
    "trace": ("/v2/trace/setting", TRACE),
    "logging": ("/v2/logging", LOGGING),
    "register memory": ("/v2/systemsharedmemory/region/region/register", MEMORY),
    "register device memory": ("/v2/cudasharedmemory/region/region/register", CUDA_MEMORY),
}

HOLE = "the value under test"


def nodes(document, path=()):
    """Every path in a JSON document with its value."""
    yield path, document
    children = document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    for key, child in children:
        yield from nodes(child, (*path, key))


def with_value(document, path, value: bytes) -> bytes:
    """The document as JSON, with `value`, which is JSON already, inserted at `path`."""
    if not path:
        return value
    changed = copy.deepcopy(document)
    parent = changed
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = HOLE
    return json.dumps(changed).encode().replace(json.dumps(HOLE).encode(), value)


def text_json(text: bytes) -> bytes:
    """A JSON string of these bytes, which may be invalid UTF-8; control characters are escaped as JSON requires."""
    escaped = bytearray()
    for byte in text if len(text) < 1000 else b"":
        escaped += b"\\u%04x" % byte if byte < 32 else bytes([byte])
    return b'"' + (bytes(escaped) or text) + b'"'


def distinct(sample, index: int):
    """An element like `sample` that is different for each index."""
    if isinstance(sample, dict):
        return {key: distinct(value, index) if key in ("name", "text", "content") else value for key, value in sample.items()}
    if isinstance(sample, list):
        return [distinct(sample[0], index)] if sample else []
    return f"{sample}{index}" if isinstance(sample, str) else index


def replacements(value):
    """The replacements of a value, as name and JSON."""
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, (int, float)):
        yield from ((str(number), json.dumps(number).encode()) for number in NUMBERS)
    elif isinstance(value, str):
        yield from ((name, text_json(text)) for name, text in STRINGS.items())
        if value.isdigit():
            yield from ((f'"{number}"', json.dumps(str(number)).encode()) for number in NUMBERS)
    elif isinstance(value, list):
        for length in LENGTHS:
            yield f"{length} elements", json.dumps([distinct(value[0], index) for index in range(length)]).encode()
    elif isinstance(value, dict):
        for length in LENGTHS:
            yield f"{length} members", json.dumps(dict(value, **{f"m{index}": index for index in range(length)})).encode()


def post(port: int, path: bytes, body: bytes, headers: bytes = b"") -> tuple[int, bytes]:
    """Status and body of a response. Uses a socket, because client libraries refuse to send some of these requests."""
    head = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n%sContent-Length: %d\r\n\r\n" % (path, headers, len(body))
    with socket.create_connection(("127.0.0.1", port), timeout=2 * ANSWER_SECONDS) as connection:
        try:
            connection.sendall(head + body)
        except (BrokenPipeError, ConnectionResetError):
            pass  # The server has responded before it read the whole request.
        answer = bytearray()
        while more := connection.recv(1 << 16):
            answer += more
    head, _, body = bytes(answer).partition(b"\r\n\r\n")
    return int(head.split(b" ", 2)[1]), body


def http_problem(port: int, path: bytes, body: bytes, headers: bytes = b"") -> str | None:
    status, answer = post(port, path, body, headers)
    # Like Triton, this server answers 500 to some errors of the client, with the same messages; in OpenAI's protocol it does not.
    if status >= 500 and status not in (501, 503) and (path.startswith(b"/v1") or b'"error":"' not in answer):
        return f"status {status}: {answer[:200]!r}"
    if status >= 400 and len(answer) > LONGEST_ERROR:
        return f"an error of {len(answer)} bytes"
    # Requests that are not valid HTTP get a status without a body.
    if status >= 400 and not answer and status != 431 and b"Content-Length" not in headers:
        return f"status {status} without words"
    return None


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_value_of_a_json_request(launched, watch, name):
    path, document = DOCUMENTS[name]
    tail = bytes(8) if "tail" in name else b""
    for place, value in nodes(document):
        for what, replacement in replacements(value):
            body = with_value(document, place, replacement)
            headers = b"Inference-Header-Content-Length: %d\r\n" % len(body) if tail else b""
            where = ".".join(map(str, place)) or "the document"
            watch.case(f"{name}: {where} = {what}", lambda: http_problem(launched.http_port, path.encode(), body + tail, headers))
    if name == "logging":
        assert post(launched.http_port, path.encode(), json.dumps(LEVELS).encode())[0] == 200


PATHS = [
    b"/v2/models/%s/infer",
    b"/v2/models/identity/versions/%s/infer",
    b"/v2/models/%s/generate",
    b"/v2/models/%s/trace/setting",
    b"/v2/repository/models/%s/load",
    b"/v2/repository/models/%s/unload",
    b"/v2/systemsharedmemory/region/%s/register",
    b"/v2/systemsharedmemory/region/%s/unregister",
    b"/v2/cudasharedmemory/region/%s/register",
    b"/v1/models/%s",
]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.decode())
def test_every_name_in_a_path(launched, watch, path):
    body = json.dumps(INFER).encode()
    names = {"empty": b"", "8 KiB": b"a" * 8192, "MiB": b"a" * MIB, "control": b"%01%7f%0a", "dots": b"..", "slashes": b"..%2f..%2fetc", "not UTF-8": b"%ff%fe", "numbers": b"-1"}
    names |= {str(number): str(number).encode() for number in NUMBERS}
    for what, name in names.items():
        watch.case(f"{path.decode()}: {what}", lambda: http_problem(launched.http_port, path % name, body))


HEADERS = [b"Inference-Header-Content-Length", b"Content-Length", b"Accept-Encoding", b"Content-Encoding", b"traceparent", b"triton-request-id"]


@pytest.mark.parametrize("header", HEADERS, ids=lambda header: header.decode())
def test_every_number_in_a_header(launched, watch, header):
    values = [str(number).encode() for number in NUMBERS] + [b"", b"a" * 8192, b"gzip," * 1500]
    for value in values:
        sent = b"%s: %s\r\n" % (header, value)
        watch.case(f"{header.decode()}: {value[:30]}", lambda: http_problem(launched.http_port, b"/v2/models/identity/infer", json.dumps(INFER).encode(), sent))


# gRPC: every field of every request message of the service.

SERVICE = "inference.GRPCInferenceService"
WITHOUT_REQUEST = ("ServerLive", "ServerReady", "ServerMetadata")


def byte_messages():
    """The service's message types with strings declared as bytes, so that they can contain any bytes."""
    file = descriptor_pb2.FileDescriptorProto()
    service_pb2.DESCRIPTOR.CopyToProto(file)
    is_key = lambda message, field: message.options.map_entry and field.name == "key"

    def loosen(message):
        for field in message.field:
            if field.type == field.TYPE_STRING and not is_key(message, field):
                field.type = field.TYPE_BYTES
        for nested in message.nested_type:
            loosen(nested)

    for message in file.message_type:
        loosen(message)
    pool = descriptor_pool.DescriptorPool()
    for needed in service_pb2.DESCRIPTOR.dependencies:
        pool.AddSerializedFile(needed.serialized_pb)
    pool.Add(file)
    methods = pool.FindServiceByName(SERVICE).methods
    return {method.name: message_factory.GetMessageClass(method.input_type) for method in methods if method.name not in WITHOUT_REQUEST}


def base_message(method: str, kind):
    message = kind()
    if method in ("ModelInfer", "ModelStreamInfer"):
        message.model_name = b"identity" if method == "ModelInfer" else b"ensemble"
        message.id = b"1"
        message.parameters["number"].int64_param = 1
        inputs = [(b"INPUT0", b"INT32", [2])] if method == "ModelInfer" else [(b"text_input", b"BYTES", [1, 1]), (b"max_tokens", b"INT32", [1, 1])]
        for name, datatype, shape in inputs:
            tensor = message.inputs.add(name=name, datatype=datatype, shape=shape)
            if datatype == b"BYTES":
                tensor.contents.bytes_contents.append(b"a")
            else:
                tensor.contents.int_contents.extend([2] * shape[-1])
            tensor.parameters["text"].string_param = b"a"
        output = message.outputs.add(name=b"OUTPUT0" if method == "ModelInfer" else b"text_output")
        output.parameters["classification"].int64_param = 0
    elif "Load" in method or "Unload" in method:
        message.model_name = b"another"
    elif "name" in kind.DESCRIPTOR.fields_by_name and "SharedMemory" not in method:
        message.name = b"identity"
    return message


def is_map(field) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def set_distinct(field, container, length: int) -> None:
    """Sets the length of a repeated field. Elements with a name get different names."""
    if is_map(field):
        for index in range(length):
            container[f"m{index}"].SetInParent()
    elif field.message_type is not None:
        sample = copy.deepcopy(container[0]) if len(container) else None
        del container[:]
        for index in range(length):
            element = container.add()
            if sample is not None:
                element.CopyFrom(sample)
            if "name" in field.message_type.fields_by_name:
                element.name = b"m%d" % index
    else:
        del container[:]
        container.extend([b"m%d" % index if field.type == field.TYPE_BYTES else index % 2 for index in range(length)])


def fits(field, number) -> bool:
    try:
        setattr_probe = field.containing_type._concrete_class()
        if field.is_repeated:
            getattr(setattr_probe, field.name).append(number)
        else:
            setattr(setattr_probe, field.name, number)
        return True
    except (ValueError, TypeError):
        return False


def changes(message, path=""):
    """Yields the name of every change of one value. The change is applied to `message` until the next iteration."""
    for field in message.DESCRIPTOR.fields:
        where = f"{path}{field.name}"
        whole = type(message).FromString(message.SerializeToString())
        if field.is_repeated:
            for length in LENGTHS:
                set_distinct(field, getattr(message, field.name), length)
                yield f"{where} of {length}"
                message.CopyFrom(whole)
            container = getattr(message, field.name)
            if is_map(field):
                for what, text in STRINGS.items():
                    if what != "not UTF-8":
                        container[text.decode()].SetInParent()
                        yield f"{where}[{what}]"
                        message.CopyFrom(whole)
                key = next(iter(getattr(message, field.name)), "key")
                for name in changes(getattr(message, field.name)[key], f"{where}[{key}]."):
                    yield name
            elif field.message_type is not None:
                if not len(container):
                    container.add()
                yield from changes(getattr(message, field.name)[0], f"{where}[0].")
            message.CopyFrom(whole)
        elif field.message_type is not None:
            yield from changes(getattr(message, field.name), f"{where}.")
            message.CopyFrom(whole)
        elif field.type == field.TYPE_BYTES:
            for what, text in STRINGS.items():
                setattr(message, field.name, text)
                yield f"{where} = {what}"
                message.CopyFrom(whole)
        elif field.type != field.TYPE_BOOL:
            for number in NUMBERS:
                if fits(field, number):
                    setattr(message, field.name, number)
                    yield f"{where} = {number}"
                    message.CopyFrom(whole)


# Statuses that a request must never get, because they tell the client nothing.
BROKEN = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.DATA_LOSS)


def grpc_problem(channel, method: str, sent: bytes) -> str | None:
    make = channel.stream_stream if method == "ModelStreamInfer" else channel.unary_unary
    ask = make(f"/{SERVICE}/{method}", request_serializer=bytes, response_deserializer=bytes)
    try:
        if method == "ModelStreamInfer":
            for _ in ask(iter([sent]), timeout=2 * ANSWER_SECONDS):
                pass
        else:
            ask(sent, timeout=2 * ANSWER_SECONDS)
    except grpc.RpcError as error:
        if error.code() in BROKEN:
            return f"{error.code()}: {error.details()[:200]}"
        if len(error.details() or "") > LONGEST_ERROR:
            return f"an error of {len(error.details())} bytes"
    return None


@pytest.mark.parametrize("method", byte_messages())
def test_every_field_of_a_grpc_request(launched, watch, method):
    message = base_message(method, byte_messages()[method])
    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(launched.grpc, options) as channel:
        for name in changes(message):
            sent = message.SerializeToString()
            watch.case(f"{method}: {name}", lambda: grpc_problem(channel, method, sent))
    if method == "LogSettings":
        assert post(launched.http_port, b"/v2/logging", json.dumps(LEVELS).encode())[0] == 200


def test_requests_that_once_ended_the_service(launched, watch):
    """Before there were limits, each of these ended rank 0, filled its memory or blocked other clients."""
    ensemble = b"/v2/models/ensemble/generate"
    ask = lambda path, document: lambda: http_problem(launched.http_port, path, json.dumps(document).encode())
    for width in (65, 20_000_000, 2_000_000_000):
        for _ in range(7):
            watch.case(f"beams: {width}", ask(ensemble, {"text_input": "a", "max_tokens": 4, "beam_width": width}))
    watch.case("choices of a long prompt", ask(b"/v1/completions", {"model": "ensemble", "prompt": "ab " * 1_400_000, "n": 128, "max_tokens": 1}))
    watch.case("a long prompt", ask(ensemble, {"text_input": "ab " * (16 * MIB // 3), "max_tokens": 1}))
    for field in ("stop_words", "bad_words"):
        watch.case(f"many {field}", ask(ensemble, {"text_input": "a", "max_tokens": 1, field: [f"w{index}" for index in range(80_000)]}))
    outputs = [{"name": f"O{index}"} for index in range(160_000)]
    watch.case("many outputs", ask(b"/v2/models/identity/infer", {"inputs": [TENSOR], "outputs": outputs}))
    with grpc.insecure_channel(launched.grpc, [("grpc.max_send_message_length", -1)]) as channel:
        names = service_pb2.ModelInferRequest(model_name="identity", inputs=[{"name": f"i{index}"} for index in range(120_000)])
        watch.case("many inputs", lambda: grpc_problem(channel, "ModelInfer", names.SerializeToString()))
        empty = b"\x0a\x08identity" + b"\x2a\x00" * (16 * MIB // 2)
        watch.case("empty inputs", lambda: grpc_problem(channel, "ModelInfer", empty))
