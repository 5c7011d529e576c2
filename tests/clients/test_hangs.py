"""Every health check of a world turns false within 10 s of a hang of any of its processes and threads, and stays true under load."""

import ctypes
import http.client
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

import health_load
import metrics_page
from conftest import ROOT, World, launch
from ports import free_ports
from stopped_process import stop
from triton_requests import post

NOTICED_WITHIN = 10
MODEL = "tensorrt_llm"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Two ranks, whose workers have two threads each. One of its models is in Python."""
    models = tmp_path_factory.mktemp("hangs") / "models"
    shutil.copytree(ROOT / "model_repository", models)
    (models / "echo/1").mkdir(parents=True)
    (models / "echo/1/model.py").write_text("class TritonPythonModel:\n    def execute(self, requests):\n        return [None for _ in requests]\n")
    tensor = 'name: "{}" data_type: TYPE_FP32 dims: [ -1 ]'
    (models / "echo/config.pbtxt").write_text(f'backend: "python"\ninput [{{ {tensor.format("IN")} }}]\noutput [{{ {tensor.format("OUT")} }}]\n')
    ports = World(*free_ports(3))
    flags = [f"--http_port={ports.http_port}", f"--grpc_port={ports.grpc_port}", f"--metrics_port={ports.metrics_port}"]
    started = launch("--world_size=2", f"--model_repo={models}", "--device=cpu", "--oversubscribe", "--detach", *flags, "--",
                     "--threads=2", f"--backend-config=python,interpreter={sys.executable}")
    assert started.returncode == 0, started.stderr
    yield ports
    stopped = launch("stop", f"--http_port={ports.http_port}")
    assert stopped.returncode == 0, stopped.stderr


def health(world: World) -> dict[str, bool]:
    """What each health check says."""
    found = metrics_page.families(metrics_page.page(f"localhost:{world.metrics_port}"))
    with grpc.insecure_channel(world.grpc) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        answer = check(b"", timeout=10)
    return {
        "/health": is_ok(world, "/health"),
        "/v2/health/ready": is_ok(world, "/v2/health/ready"),
        "/v2/models/ensemble/ready": is_ok(world, "/v2/models/ensemble/ready"),
        "grpc": answer == b"\x08\x01",
        "trireme_server_ready": found["trireme_server_ready"].value() == 1,
        "trireme_llm_ready": found["trireme_llm_ready"].value() == 1,
    }


def is_ok(world: World, path: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{world.http}{path}", timeout=10) as response:
            return response.status == 200
    except urllib.error.HTTPError:
        return False


def await_health(world: World, wanted: bool, seconds: float, only: set[str] | None = None) -> None:
    """Waits until all health checks, or those of `only`, say `wanted`."""
    deadline = time.monotonic() + seconds
    while True:
        found = {name: is_good for name, is_good in health(world).items() if not only or name in only}
        if all(is_good == wanted for is_good in found.values()):
            return
        assert time.monotonic() < deadline, f"after {seconds} s: {found}"
        time.sleep(0.1)


def processes(world: World, role: str) -> list[int]:
    """Pids by rank."""
    status = json.loads(launch("status", f"--http_port={world.http_port}", "--json").stdout)
    (one,) = status
    found = [process for process in one["processes"] if process["role"] == role]
    return [process["pid"] for process in sorted(found, key=lambda process: process["rank"])]


def generate(world: World, max_tokens: int = 8):
    return post(world.http, "/v2/models/ensemble/generate", {"text_input": "Once upon a time", "max_tokens": max_tokens})


def begin(world: World, max_tokens: int) -> Callable[[], None]:
    """Begins a request. The result waits for its end, and checks that it was answered."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(generate(world, max_tokens)))
    thread.start()

    def finish():
        thread.join(timeout=60)
        assert answers and answers[0][0] == 200, answers

    return finish


@contextmanager
def stopped(pid: int):
    stop(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def frozen(pid: int, thread_name: str):
    """Stops one thread of a process, as a lock would that nobody releases. The other threads go on."""
    seize, interrupt, detach, all_threads = 0x4206, 0x4207, 17, 0x40000000
    threads = Path(f"/proc/{pid}/task").iterdir()
    (thread,) = [int(one.name) for one in threads if (one / "comm").read_text().startswith(thread_name)]
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
    if ptrace(seize, thread, None, None) != 0:
        pytest.skip(f"this machine does not allow to trace a process: {os.strerror(ctypes.get_errno())}")
    try:
        assert ptrace(interrupt, thread, None, None) == 0
        os.waitpid(thread, all_threads)
        yield
    finally:
        ptrace(detach, thread, None, None)


def test_a_stopped_worker_is_noticed_when_idle_and_when_busy(world):
    await_health(world, True, 60)
    worker = processes(world, "worker")[1]
    with stopped(worker):
        await_health(world, False, NOTICED_WITHIN)
    await_health(world, True, NOTICED_WITHIN)
    finish = begin(world, 400)
    time.sleep(0.05)
    with stopped(worker):
        await_health(world, False, NOTICED_WITHIN)
    finish()
    await_health(world, True, NOTICED_WITHIN)


def test_a_stopped_rank_is_noticed(world):
    await_health(world, True, 60)
    with stopped(processes(world, "rank")[1]):
        await_health(world, False, NOTICED_WITHIN)
    await_health(world, True, NOTICED_WITHIN)


def test_a_step_thread_that_hangs_is_noticed_without_any_request(world):
    await_health(world, True, 60)
    with frozen(processes(world, "rank")[0], "steps-"):
        await_health(world, False, NOTICED_WITHIN)
    await_health(world, True, NOTICED_WITHIN)


def test_a_collective_that_hangs_is_noticed(world):
    await_health(world, True, 60)
    # A thread of one worker does not finish its part of an op, so the other worker waits in a collective.
    with frozen(processes(world, "worker")[1], "cpu1"):
        finish = begin(world, 8)
        await_health(world, False, NOTICED_WITHIN)
    finish()
    await_health(world, True, NOTICED_WITHIN)


def test_a_stopped_process_of_a_python_model_is_noticed(world):
    await_health(world, True, 60)
    children = Path(f"/proc/{processes(world, 'rank')[0]}/task").glob("*/children")
    pids = [int(pid) for file in children for pid in file.read_text().split()]
    (stub,) = [pid for pid in pids if b"stub.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    with stopped(stub):
        # The other models go on.
        await_health(world, False, NOTICED_WITHIN, only={"/v2/health/ready", "grpc", "trireme_server_ready"})
        assert is_ok(world, "/health")
    await_health(world, True, NOTICED_WITHIN)


def test_health_stays_true_under_load(world):
    await_health(world, True, 60)
    idle = [socket.create_connection(("localhost", port)) for port in (world.http_port, world.grpc_port) * 100]
    is_over, failures, answers = threading.Event(), [], []
    prompt = "Once upon a time there was a little dog. " * 40

    def ask():
        connection = http.client.HTTPConnection("localhost", world.http_port, timeout=120)
        while not is_over.is_set():
            body = json.dumps({"text_input": prompt, "max_tokens": 24})
            connection.request("POST", "/v2/models/ensemble/generate", body)
            response = connection.getresponse()
            response.read()
            answers.append(response.status)

    clients = [threading.Thread(target=ask) for _ in range(24)]
    for client in clients:
        client.start()
    end = time.monotonic() + 8
    while time.monotonic() < end:
        found = health(world)
        failures += [name for name, is_good in found.items() if not is_good]
        time.sleep(0.2)
    is_over.set()
    for client in clients:
        client.join(timeout=120)
    for connection in idle:
        connection.close()
    assert not failures and set(answers) == {200}, (failures, set(answers))


def test_health_is_answered_soon_while_requests_wait_and_connections_are_idle(world):
    """`scripts/bench_health` does the same with 17 000 connections and 10 000 requests."""
    await_health(world, True, 60)
    figures = health_load.measure(world, connections=800, requests=900, max_tokens=16, seconds=3)
    assert not figures.failed and not figures.errors, figures
    assert (figures.num_idle, figures.num_answered) == (800, 900)
    assert figures.waiting[0] > 300, figures
    assert max(figures.times) < 2, figures
