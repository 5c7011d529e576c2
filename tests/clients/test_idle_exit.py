"""`launch --idle-exit`: a world without requests ends, and the next request starts it and is answered."""

import http.client
import json
import os
import re
import signal
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from conftest import launch
from stopped_process import stop
from test_keep_connections import PROMPT, Kept, generate, kept_world
from triton_requests import stream, text_inputs

IDLE = 2


@pytest.fixture(scope="module")
def kept():
    with kept_world(launch_flags=(f"--idle_exit={IDLE}",)) as world:
        yield world


def status(kept: Kept) -> dict:
    (world,) = json.loads(launch("status", f"--http_port={kept.ports.http_port}", "--json").stdout)
    return world


def await_sleep(kept: Kept, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while status(kept)["state"] != "asleep":
        assert time.monotonic() < deadline, status(kept)
        time.sleep(0.1)


def memory_mib(pid: int) -> float:
    """Memory of a process, with its share of pages that others have as well."""
    return int(re.search(r"^Pss: +(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M).group(1)) / 1024


def test_only_launcher_and_relay_remain_and_probes_wake_nothing(kept):
    assert generate(kept.ports, 4)[0] == 200
    await_sleep(kept)
    processes = kept.processes()
    assert set(processes) == {"launcher", "relay"}, processes
    memory = {role: memory_mib(pids[0]) for role, pids in processes.items()}
    print(f"memory while asleep, MiB: {memory}")
    assert sum(memory.values()) < 100, memory
    end = time.monotonic() + IDLE + 2
    while time.monotonic() < end:
        for path in ("/health", "/v2/health/live", "/v2/health/ready", "/v2/models/ensemble/ready"):
            with urllib.request.urlopen(f"http://{kept.ports.http}{path}", timeout=10) as answer:
                assert (answer.status, answer.headers["trireme-state"], answer.read()) == (200, "asleep", b"asleep\n"), path
        page = urllib.request.urlopen(f"http://localhost:{kept.ports.metrics_port}/metrics", timeout=10).read().decode()
        assert "\ntrireme_server_asleep 1\n" in page
        with httpclient.InferenceServerClient(kept.ports.http) as client:
            assert client.is_server_ready() and client.is_model_ready("ensemble")
        with grpcclient.InferenceServerClient(kept.ports.grpc) as client:
            assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("ensemble")
        with grpc.insecure_channel(kept.ports.grpc) as channel:
            check = channel.unary_unary("/grpc.health.v1.Health/Check")
            answer, call = check.with_call(b"", timeout=10)
            assert answer == b"\x08\x01" and ("trireme-state", "asleep") in call.trailing_metadata()
        time.sleep(0.2)
    assert set(kept.processes()) == {"launcher", "relay"}


def test_a_request_starts_the_world_and_is_answered(kept):
    await_sleep(kept)
    begun = time.monotonic()
    status_code, text = generate(kept.ports, 4)
    assert status_code == 200 and text
    print(f"the first request took {time.monotonic() - begun:.2f} s")
    assert len(kept.processes()["rank"]) == 2
    await_sleep(kept)
    with grpcclient.InferenceServerClient(kept.ports.grpc) as client:
        pieces, error = stream(client, text_inputs(PROMPT, 4, True))
    assert error is None and "".join(pieces)


def test_many_clients_and_open_connections_wake_one_world(kept):
    await_sleep(kept)
    connection = http.client.HTTPConnection("localhost", kept.ports.http_port, timeout=60)
    connection.connect()
    restarts = status(kept)["num_restarts"]
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: generate(kept.ports, 4), range(8)))
    assert [code for code, _ in answers] == [200] * 8
    for _ in range(2):
        connection.request("POST", "/v2/models/ensemble/generate", json.dumps({"text_input": PROMPT, "max_tokens": 4}))
        answer = connection.getresponse()
        assert answer.status == 200 and json.loads(answer.read())["text_output"]
        await_sleep(kept)
    assert status(kept)["num_restarts"] == restarts + 2


def test_a_relay_that_is_killed_while_the_world_sleeps_is_replaced(kept):
    await_sleep(kept)
    relay = kept.processes()["relay"][0]
    os.kill(relay, signal.SIGKILL)
    kept.await_ready(10)
    assert set(kept.processes()) == {"launcher", "relay"}
    assert generate(kept.ports, 4)[0] == 200


def test_a_relay_that_is_stopped_is_replaced(kept):
    """`--liveness-timeout` is 15 s."""
    kept.await_ready()
    relay = kept.processes()["relay"][0]
    stop(relay)
    deadline = time.monotonic() + 30
    while kept.processes().get("relay", [relay])[0] == relay:
        assert time.monotonic() < deadline, "the relay is still there"
        time.sleep(0.2)
    kept.await_ready(10)
    assert generate(kept.ports, 4)[0] == 200


def test_a_restart_wakes_the_world(kept):
    await_sleep(kept)
    restarted = launch("restart", f"--http_port={kept.ports.http_port}")
    assert restarted.returncode == 0, restarted.stderr
    assert len(kept.processes()["rank"]) == 2
    # The fixture ends it while it sleeps.
    await_sleep(kept)
