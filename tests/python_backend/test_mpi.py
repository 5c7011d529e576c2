"""A model with a process on every rank. The processes communicate through mpi4py, like TensorRT-LLM's `gpt` model."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from conftest import BINARIES, HERE, REAL, Server, free_ports

pytest.importorskip("mpi4py", reason="skipped: no mpi4py")
pytestmark = pytest.mark.skipif(bool(REAL) or not shutil.which("mpirun"), reason="skipped: no mpirun")

PROMPT = [1, 2, 3]


@pytest.fixture
def world(tmp_path):
    """A function that starts worlds of a given size; they are stopped after the test."""
    servers = []

    def start(num_ranks: int) -> Server:
        ports = free_ports(3)
        prefix = f"pytest{ports[0]}_"
        command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
        for rank in range(num_ranks):
            command += [":"] if rank else []
            command += [
                "-n", "1", str(BINARIES / "trireme"), "rank", f"--model-repository={HERE / 'models_mpi'}",
                f"--http-port={ports[0]}", f"--grpc-port={ports[1]}", f"--metrics-port={ports[2]}", "--device=cpu",
                f"--backend-config=python,shm-region-prefix-name={prefix}{rank}_",
                f"--backend-config=python,interpreter={sys.executable}",
            ]
        log = tmp_path / f"world{num_ranks}.log"
        with open(log, "w") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        server = Server(process, *ports, prefix, log)
        servers.append(server)
        wait_for(server.is_ready, server)
        return server

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.process.terminate()
            server.process.wait(60)


def wait_for(condition, server, timeout=60):
    deadline = time.monotonic() + timeout
    while not (found := condition()):
        if server.process.poll() is not None or time.monotonic() > deadline:
            pytest.fail("it did not come to pass; the log:\n" + server.log.read_text()[-4000:])
        time.sleep(0.05)
    return found


def generate(server, count=6):
    """Generated tokens, and (rank, size, pid, columns of the weights) of each rank."""
    with httpclient.InferenceServerClient(f"localhost:{server.http_port}", network_timeout=60) as client:
        inputs = []
        for name, values in (("input_ids", [PROMPT]), ("request_output_len", [[count]])):
            array = np.array(values, np.int32)
            inputs.append(httpclient.InferInput(name, array.shape, "INT32"))
            inputs[-1].set_data_from_numpy(array)
        result = client.infer("tensorrt_llm", inputs)
        return result.as_numpy("output_ids")[0].tolist(), result.as_numpy("ranks")[0].tolist()


def rank_0(server):
    """The process of rank 0, a child of mpirun."""
    children = Path(f"/proc/{server.process.pid}/task").glob("*/children")
    pids = [int(pid) for task in children for pid in task.read_text().split()]
    return next(pid for pid in pids if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"trireme: rank 0"))


def ranks_that_answer(server, expected):
    """The ranks in a response; None while the model's processes restart."""
    try:
        tokens, ranks = generate(server)
    except InferenceServerException as error:
        assert "another one is started" in str(error)
        return None
    assert tokens == expected
    return ranks


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_every_rank_has_a_part_and_the_result_is_that_of_one_rank(world):
    alone, [[_, size, _, columns]] = generate(world(1))
    assert (size, columns, len(alone)) == (1, 64, len(PROMPT) + 6)

    server = world(2)
    tokens, ranks = generate(server)
    assert tokens == alone
    assert [(rank, size, columns) for rank, size, _, columns in ranks] == [(0, 2, 32), (1, 2, 32)]

    # The death of a process on another rank ends the model's other processes, and all restart.
    os.kill(ranks[1][2], signal.SIGKILL)
    wait_for(lambda: not is_alive(ranks[0][2]), server)
    again = wait_for(lambda: ranks_that_answer(server, alone), server)
    assert {pid for _, _, pid, _ in again}.isdisjoint(pid for _, _, pid, _ in ranks)

    # The signal goes to rank 0, because mpirun would kill the ranks after a second.
    os.kill(rank_0(server), signal.SIGTERM)
    assert server.process.wait(60) == 0, server.log.read_text()[-4000:]
    deadline = time.monotonic() + 30
    while any(is_alive(pid) for _, _, pid, _ in again) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for _, _, pid, _ in again if is_alive(pid)]
    assert server.shared_memory() == []
