"""Health checks while many requests wait and many connections are idle. See `scripts/bench_health`."""

import argparse
import http.client
import os
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import tritonclient.grpc as grpcclient

import metrics_page
from conftest import BINARIES, ROOT, World
from ports import free_ports
from triton_requests import text_inputs

# Requests that share a stream, and connections that share a client address: an address has some 28 000 ports.
PER_STREAM, PER_ADDRESS = 1000, 10_000
PROMPT = "Once upon a time there was a little dog."


@dataclass
class Figures:
    """What was seen under load."""

    # Seconds that checks took, and the names of those that were not answered or were negative.
    times: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    num_idle: int = 0
    # Requests that waited at the begin and at the end of the checks, and those that ended with an answer.
    waiting: tuple[int, int] = (0, 0)
    num_answered: int = 0
    errors: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        shares = statistics.quantiles(self.times, n=100, method="inclusive")
        times = f"p50 {shares[49] * 1000:.1f} ms, p99 {shares[98] * 1000:.1f} ms, at most {max(self.times) * 1000:.1f} ms"
        waiting = f"{self.waiting[0]} requests waiting at the begin and {self.waiting[1]} at the end"
        ended = f"requests answered: {self.num_answered}, failed: {len(self.errors)}"
        failed = "".join(f"\n{name} failed {count} times" for name, count in Counter(self.failed + self.errors).items())
        checks = f"{len(self.times)} checks, {len(self.failed)} failed; {times}"
        return f"{self.num_idle} idle connections, {waiting}: {checks}\n{ended}{failed}"


class Streams:
    """Requests over gRPC streams, all sent at once."""

    def __init__(self, world: World, count: int, max_tokens: int):
        self.figures_lock, self.num_answered, self.errors = threading.Lock(), 0, []
        self.ended, self.count = threading.Event(), count
        inputs = text_inputs(PROMPT, max_tokens, False)
        self.clients = [grpcclient.InferenceServerClient(world.grpc) for _ in range(-(-count // PER_STREAM))]
        for index, client in enumerate(self.clients):
            client.start_stream(self.received)
            for _ in range(min(PER_STREAM, count - index * PER_STREAM)):
                client.async_stream_infer("ensemble", inputs)

    def received(self, result, error) -> None:
        with self.figures_lock:
            if error is not None:
                self.errors.append(str(error))
            else:
                self.num_answered += 1
            if self.num_answered + len(self.errors) >= self.count:
                self.ended.set()

    def close(self) -> None:
        for client in self.clients:
            client.stop_stream(cancel_requests=True)
            client.close()


def idle_connections(world: World, count: int) -> list[socket.socket]:
    """Connections to the HTTP port that have had one answer each."""
    opened = []
    for index in range(count):
        connection = socket.create_connection(("127.0.0.1", world.http_port), timeout=30, source_address=(f"127.0.0.{2 + index // PER_ADDRESS}", 0))
        connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 200"), f"connection {index} is not served"
        opened.append(connection)
    return opened


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def check(world: World, path: str) -> bool:
    """Asks over a new connection, as probes do."""
    connection = http.client.HTTPConnection("127.0.0.1", world.http_port, timeout=10)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def num_waiting(world: World) -> int:
    page = metrics_page.families(metrics_page.page(f"localhost:{world.metrics_port}"))
    return int(page["trireme_llm_requests_waiting"].value() + page["trireme_llm_requests_queued"].value())


def measure(world: World, connections: int, requests: int, max_tokens: int, seconds: float) -> Figures:
    """Checks health for `seconds` under load, and waits for the answers."""
    figures = Figures()
    idle = idle_connections(world, connections)
    streams = Streams(world, requests, max_tokens)
    try:
        deadline = time.monotonic() + 60
        while num_waiting(world) < requests / 2 and not streams.ended.is_set() and time.monotonic() < deadline:
            time.sleep(0.05)
        begun, waiting = time.monotonic(), num_waiting(world)
        while time.monotonic() < begun + seconds:
            for path in ("/health", "/v2/health/ready", "/v2/models/ensemble/ready"):
                asked = time.monotonic()
                if not check(world, path):
                    figures.failed.append(path)
                figures.times.append(time.monotonic() - asked)
            time.sleep(0.02)
        figures.waiting = (waiting, num_waiting(world))
        figures.num_idle = sum(map(is_open, idle))
        streams.ended.wait(600)
        figures.num_answered, figures.errors = streams.num_answered, list(streams.errors)
    finally:
        streams.close()
        for connection in idle:
            connection.close()
    return figures


def repository(folder: Path) -> Path:
    """The shipped models, whose queue takes any number of requests."""
    models = Path(shutil.copytree(ROOT / "model_repository", folder / "models"))
    config = models / "tensorrt_llm/config.pbtxt"
    config.write_text(config.read_text().replace("max_queue_size: 1024", "max_queue_size: 0"))
    return models


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench_health", description=__doc__)
    parser.add_argument("--connections", type=int, default=17_000, help="idle connections; fewer if descriptors do not suffice")
    parser.add_argument("--requests", type=int, default=10_000, help="requests that are sent at once")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each answer")
    parser.add_argument("--seconds", type=float, default=10, help="for which health is checked")
    parser.add_argument("--keep-connections", action="store_true", help="with the relay")
    asked = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    # A port takes three eighths of the descriptors, and evicts idle connections when four fifths of these are taken.
    connections = min(asked.connections, most * 3 // 10 - 50)
    if connections < asked.connections:
        needed = (asked.connections + 50) * 10 // 3 + 1
        print(f"{most} descriptors are allowed (ulimit -n): {connections} connections instead of {asked.connections}, which need {needed}")
    with tempfile.TemporaryDirectory() as folder:
        world = World(*free_ports(3))
        ports = [f"--http_port={world.http_port}", f"--grpc_port={world.grpc_port}", f"--metrics_port={world.metrics_port}"]
        relay = ["--keep-connections"] if asked.keep_connections else []
        command = [BINARIES / "launch", "--world_size=2", f"--model_repo={repository(Path(folder))}", "--device=cpu", "--oversubscribe", "--detach"]
        subprocess.run([*command, *ports, *relay, "--", "--threads=1", f"--max-connections={(connections + 50) * 5 // 4}"], cwd=ROOT, check=True)
        try:
            figures = measure(world, connections, asked.requests, asked.tokens, asked.seconds)
        finally:
            subprocess.run([BINARIES / "launch", "stop", f"--http_port={world.http_port}"], check=True)
    print(figures)
    is_good = not figures.failed and not figures.errors and figures.num_idle == connections and figures.num_answered == asked.requests
    return 0 if is_good else 1


if __name__ == "__main__":
    os.environ.setdefault("OMPI_ALLOW_RUN_AS_ROOT", "1")
    os.environ.setdefault("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    sys.exit(main())
