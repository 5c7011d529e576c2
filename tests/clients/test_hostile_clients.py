"""Hostile, broken and slow clients: each gets an error or a timeout, memory stays bounded, and other clients are served.

`TRIREME_LONG=1` runs it with more of everything, and waits for the deadlines of slow clients.
"""

import gzip
import json
import os
import resource
import socket
import struct
import time
import zlib

import pytest

from triton_requests import post
from serving import rank

LONG = os.environ.get("TRIREME_LONG") == "1"
INFER = "/v2/models/identity/infer"
GOOD = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [2], "data": [1, 2]}]}
MIB = 1 << 20
LARGEST_BODY = 8 * MIB
# Compression of decompression bombs: gigabytes must fit into the largest accepted body.
GIGABYTES, LEVEL = (2048 * MIB, 6) if LONG else (256 * MIB, 1)


class Server:
    """A rank under attack."""

    def __init__(self, served):
        self.served, self.pid = served, served.process.pid
        self.http_port, self.grpc_port = (int(address.rsplit(":", 1)[1]) for address in (served.http, served.grpc))
        self.rest = self.memory()

    def memory(self) -> int:
        """Bytes of resident memory."""
        with open(f"/proc/{self.pid}/statm") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()

    def peak(self) -> int:
        with open(f"/proc/{self.pid}/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

    def still_serves(self, most: int) -> None:
        """Asserts that another client is served, and that memory has grown by `most` bytes at most."""
        status, _, body = post(self.served.http, INFER, GOOD)
        assert status == 200 and json.loads(body)["outputs"][0]["data"] == [1, 2]
        above = self.peak() - self.rest
        print(f"{above >> 20} MiB above the {self.rest >> 20} MiB at rest")
        assert above < most, f"{above} bytes more than before"

    def open(self, port: int | None = None, sent: bytes = b"") -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", port or self.http_port), timeout=30)
        connection.sendall(sent)
        return connection


@pytest.fixture
def server(tmp_path):
    with rank(tmp_path, f"--http-max-input-size={LARGEST_BODY}", prefix="sturdy") as served:
        server = Server(served)
        server.still_serves(64 * MIB)
        # Resets the peak.
        with open(f"/proc/{server.pid}/clear_refs", "w") as clear:
            clear.write("5")
        server.rest = server.memory()
        yield server


@pytest.fixture(scope="module", autouse=True)
def many_files():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(before[1], 65536), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def head(length: int, *lines: str, path: str = INFER) -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {length}", *lines, "", ""]).encode()


def status_of(connection: socket.socket) -> int | None:
    """The status of the next response; `None` if the server closed the connection."""
    try:
        line = connection.makefile("rb").readline()
    except ConnectionResetError:
        return None
    return int(line.split()[1]) if line else None


def status_for(server: Server, sent: bytes) -> int | None:
    with server.open(sent=sent) as connection:
        return status_of(connection)


def test_heads_that_never_end(server):
    slow = [server.open(sent=b"POST /v2 HTTP/1.1\r\nX-") for _ in range(4000 if LONG else 1000)]
    slow += [server.open(server.grpc_port, b"PRI * HT") for _ in range(4000 if LONG else 500)]
    server.still_serves(96 * MIB)
    if LONG:  # Silent connections are closed after half a minute.
        time.sleep(40)
        for connection in slow[::100]:
            assert status_of(connection) in (None, 408), "still open"
    for connection in slow:
        connection.close()


def test_bodies_that_never_end(server):
    body = json.dumps(GOOD).encode()
    slow = [server.open(sent=head(LARGEST_BODY) + body[:-1]) for _ in range(500)]
    server.still_serves(64 * MIB)
    for connection in slow:
        connection.close()


def test_a_half_closed_connection_is_answered_or_closed(server):
    """A half-closed connection counts as a disconnect and cancels the request, unless the response is complete before."""
    body = json.dumps(GOOD).encode()
    for _ in range(200):
        with server.open(sent=head(len(body)) + body) as connection:
            connection.shutdown(socket.SHUT_WR)
            assert status_of(connection) in (200, None)
    server.still_serves(64 * MIB)


def test_connections_that_are_reset(server):
    body = json.dumps(GOOD).encode()
    for turn in range(3000 if LONG else 600):
        port = server.grpc_port if turn % 3 == 2 else server.http_port
        connection = server.open(port, head(len(body)) + body[: turn % len(body)])
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    server.still_serves(64 * MIB)


@pytest.mark.parametrize("path", [INFER, "/v2/models/identity/generate", "/v2/repository/index", "/v2/trace/setting", "/v2/logging"])
def test_json_that_is_nested_100_000_deep(server, path):
    for text in ("[" * 100_000, '{"a":' * 100_000, '{"inputs":' + "[" * 100_000 + "]" * 100_000 + "}"):
        status, _, body = post(server.served.http, path, text.encode())
        assert 400 <= status < 500 and "nested deeper" in body, (status, body[:200])
    server.still_serves(64 * MIB)


@pytest.mark.parametrize("shape", [[10**9], [10**12], [2**62, 4], [2**63 - 1], [2**32, 2**32], [2**33, 2**33, 0, 2**33]])
def test_shapes_that_are_absurd(server, shape):
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": shape}
    status, _, body = post(server.served.http, INFER, {"inputs": [tensor | {"data": [1, 2, 3, 4]}]})
    assert 400 <= status < 500, (status, body[:200])
    text = json.dumps({"inputs": [tensor | {"parameters": {"binary_data_size": 8}}]}).encode()
    status = status_for(server, head(len(text) + 8, f"Inference-Header-Content-Length: {len(text)}") + text + bytes(8))
    assert status == 400
    server.still_serves(64 * MIB)


def test_http_bodies_that_unpack_to_gigabytes(server):
    zeros = bytes(MIB)
    for coding, packer in (("gzip", zlib.compressobj(LEVEL, zlib.DEFLATED, 31)), ("deflate", zlib.compressobj(LEVEL))):
        packed = b"".join(packer.compress(zeros) for _ in range(GIGABYTES // MIB)) + packer.flush()
        for _ in range(8 if LONG else 2):
            sent = head(len(packed), f"Content-Encoding: {coding}") + packed
            assert status_for(server, sent) == 400
    server.still_serves(64 * MIB)


def test_bodies_and_heads_that_are_too_large(server):
    assert status_for(server, head(10**12)) == 400
    assert status_for(server, head(2**63)) in (400, 413)
    assert status_for(server, b"POST /v2 HTTP/1.1\r\nHost: x\r\nX: " + b"y" * MIB) in (None, 400, 431)
    assert status_for(server, b"GET /" + b"x" * (1 * MIB)) in (None, 400, 414, 431)
    many = b"".join(b"X-%d: y\r\n" % number for number in range(20_000))
    assert status_for(server, b"GET /v2 HTTP/1.1\r\nHost: x\r\n" + many + b"\r\n") in (None, 400, 431)
    server.still_serves(64 * MIB)


# HTTP/2 frames over a socket, since no client library misbehaves in these ways.

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RESET, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
STREAM_INFER, UNARY_INFER = (f"/inference.GRPCInferenceService/{name}" for name in ("ModelStreamInfer", "ModelInfer"))


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def call(stream: int, path: str, *more: tuple[str, str]) -> bytes:
    """The headers of a gRPC call, without compression."""
    fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "x"), ("te", "trailers")]
    fields += [("content-type", "application/grpc"), *more]
    text = b"".join(b"\0" + bytes([len(key)]) + key.encode() + bytes([len(value)]) + value.encode() for key, value in fields)
    return frame(HEADERS, 4, stream, text)


def drain(connection: socket.socket, until: bytes, seconds: float = 30) -> bytes:
    """Reads from the server until it has sent `until`."""
    received, deadline = b"", time.monotonic() + seconds
    while until not in received and time.monotonic() < deadline:
        more = connection.recv(1 << 16)
        if not more:
            break
        received += more
    return received


class Call:
    """A gRPC call that respects the server's flow control and reads only the frames that this requires."""

    def __init__(self, server: Server, path: str, *headers: tuple[str, str], window: int = 65535):
        """`window` is the number of bytes that the server may send."""
        self.connection = server.open(server.grpc_port, PREFACE + frame(SETTINGS, 0, 0, struct.pack(">HI", 4, window)))
        self.received = self.connection.makefile("rb")
        self.credit = {0: 65535, 1: 65535}  # Bytes that may be sent, on the connection and on stream 1.
        self.is_over = self.has_data = False
        while self.step() != SETTINGS:
            pass
        self.connection.sendall(frame(SETTINGS, 1, 0) + call(1, path, *headers))

    def step(self) -> int:
        """Reads the next frame. Returns its type."""
        start = self.received.read(9)
        assert len(start) == 9, "the connection ended before the call"
        length, kind, flags, stream = int.from_bytes(start[:3], "big"), start[3], start[4], int.from_bytes(start[5:], "big")
        payload = self.received.read(length)
        if kind == SETTINGS and not flags & 1:
            settings = dict(struct.iter_unpack(">HI", payload))
            self.credit[1] += settings.get(4, 65535) - 65535
        if kind == WINDOW_UPDATE and stream in self.credit:
            self.credit[stream] += int.from_bytes(payload, "big")
        self.has_data |= kind == DATA and length > 0
        self.is_over |= stream == 1 and (kind == RESET or kind == HEADERS and bool(flags & 1))
        return kind

    def send(self, message: bytes, is_last: bool = False) -> None:
        """Sends a message as flow control permits; raises `TimeoutError` if the server grants nothing for a second."""
        self.connection.settimeout(1)
        for at in range(0, len(message), 16000):
            piece = message[at : at + 16000]
            while min(self.credit.values()) < len(piece) and not self.is_over:
                self.step()
            if self.is_over:
                raise ConnectionError("the server ended the call")
            self.connection.sendall(frame(DATA, int(is_last and at + 16000 >= len(message)), 1, piece))
            self.credit = {stream: credit - len(piece) for stream, credit in self.credit.items()}


def test_ten_thousand_idle_streams(server):
    connections = []
    for _ in range(5):
        connection = server.open(server.grpc_port, PREFACE + frame(SETTINGS, 0, 0))
        connection.sendall(b"".join(call(1 + 2 * number, STREAM_INFER) for number in range(2000)))
        connection.sendall(frame(PING, 0, 0, b"all here"))  # The reply to a ping follows the replies to all earlier frames.
        assert b"all here" in drain(connection, b"all here")
        connections.append(connection)
    server.still_serves(256 * MIB)
    for connection in connections:
        connection.close()


def field(number: int, value: bytes) -> bytes:
    """A length-delimited field of protobuf."""
    length, size = b"", len(value)
    while size > 0x7F:
        length, size = length + bytes([size & 0x7F | 0x80]), size >> 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + value


def infer_message(values: bytes) -> bytes:
    count = len(values) // 4
    varint = b""
    while count > 0x7F:
        varint, count = varint + bytes([count & 0x7F | 0x80]), count >> 7
    tensor = field(1, b"INPUT0") + field(2, b"FP32") + field(3, varint + bytes([count]))
    message = field(1, b"identity") + field(5, tensor) + field(7, values)
    return b"\0" + struct.pack(">I", len(message)) + message


def test_a_grpc_client_that_never_reads(server):
    """It allows the server to send nothing, and sends requests as long as flow control permits."""
    message = infer_message(bytes(MIB))
    calls = [Call(server, path, window=0) for path in (STREAM_INFER, UNARY_INFER) * (8 if LONG else 2)]
    for call_ in calls:
        try:
            for _ in range(200):  # A unary call takes one message; further ones are read and dropped.
                call_.send(message)
        except (TimeoutError, ConnectionError):
            pass  # Flow control has stopped it: this is the limit of a stream.
    server.still_serves(160 * MIB)
    for call_ in calls:
        call_.connection.close()


def test_an_http_client_that_never_reads(server):
    body = json.dumps({"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [100_000], "data": [0.5] * 100_000}]}).encode()
    assert len(body) < LARGEST_BODY
    request = head(len(body)) + body
    connections = [server.open() for _ in range(32 if LONG else 4)]
    for connection in connections:
        connection.settimeout(1)
        try:
            for _ in range(40 if LONG else 10):
                connection.sendall(request)
        except (TimeoutError, ConnectionError):
            pass
    server.still_serves(256 * MIB)
    for connection in connections:
        connection.close()


def test_a_grpc_message_that_unpacks_to_gigabytes(server):
    packed = gzip.compress(bytes(GIGABYTES), LEVEL)
    for _ in range(4 if LONG else 1):
        call_ = Call(server, UNARY_INFER, ("grpc-encoding", "gzip"))
        call_.send(b"\1" + struct.pack(">I", len(packed)) + packed, is_last=True)
        call_.connection.settimeout(60)
        while not call_.is_over:
            call_.step()
        assert not call_.has_data, "the server sent a response message"
    server.still_serves(64 * MIB)


def test_rst_after_rst(server):
    """Streams that are opened and reset at once, as in the rapid-reset attack."""
    with server.open(server.grpc_port, PREFACE + frame(SETTINGS, 0, 0)) as connection:
        try:
            for number in range(20_000 if LONG else 5_000):
                stream = 1 + 2 * number
                connection.sendall(call(stream, STREAM_INFER) + frame(RESET, 0, stream, struct.pack(">I", 8)))
        except ConnectionError:
            pass  # The server may have closed the connection.
    server.still_serves(128 * MIB)
