"""Clients get UNAVAILABLE or 503 with `retry-after` from a full queue, and after the server has died."""

import http.client
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from triton_requests import tensor
from conftest import BINARIES, ROOT, free_ports
from serving import IDENTITY, rank_of, repository

ONE_AT_A_TIME = {"max_batch_size: 64": "max_batch_size: 1", "max_queue_size: 1024": "max_queue_size: 1", "decoupled: true": "decoupled: false"}


def infer(stub, name: str, inputs, timeout: float = 60):
    """Sends a unary inference request."""
    request = service_pb2.ModelInferRequest(model_name=name)
    for made in inputs:
        request.inputs.append(made._get_tensor())
        request.raw_input_contents.append(made._get_content())
    return stub.ModelInfer(request, timeout=timeout)


@pytest.fixture
def narrow(tmp_path):
    """Serves only the language model, with one running and one waiting request at most."""
    folder = tmp_path / "models/tensorrt_llm"
    folder.mkdir(parents=True)
    config = (ROOT / "model_repository/tensorrt_llm/config.pbtxt").read_text()
    for before, after in ONE_AT_A_TIME.items():
        assert before in config
        config = config.replace(before, after)
    (folder / "config.pbtxt").write_text(config)
    (folder / "1").symlink_to(ROOT / "model_repository/tensorrt_llm/1")
    with rank_of(folder.parent, tmp_path, prefix="narrow") as served:
        yield served


def test_a_full_queue_is_unavailable_with_a_retry_after_trailer(narrow):
    values = {"input_ids": [5, 6, 7], "input_lengths": [3], "request_output_len": [300], "end_id": [-1]}
    inputs = [tensor(name, value, np.int32) for name, value in values.items()]
    refusals, answered = [], []

    def call():
        with grpc.insecure_channel(narrow.grpc) as channel:
            try:
                answered.append(infer(service_pb2_grpc.GRPCInferenceServiceStub(channel), "tensorrt_llm", inputs))
            except grpc.RpcError as error:
                refusals.append(error)

    threads = [threading.Thread(target=call) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answered and refusals
    for error in refusals:
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert ("retry-after", "1") in tuple(error.trailing_metadata()), error


@pytest.fixture
def launched(tmp_path, short_folder):
    """A launcher with its own run directory, and the ports of its world."""
    ports = free_ports(3)
    models = repository(tmp_path / "models", identity=IDENTITY)
    command = [BINARIES / "launch", f"--model_repo={models}", "--device=cpu", f"--http_port={ports[0]}", f"--grpc_port={ports[1]}", f"--metrics_port={ports[2]}"]
    # Other worlds of this machine may use the launcher's default names of shared memory.
    command += ["--", f"--backend-config=python,shm-region-prefix-name=refusal{os.getpid()}_"]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(short_folder), "TMPDIR": str(tmp_path)}
    log = (tmp_path / "launch.log").open("w")
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    yield process, ports, tmp_path / "launch.log"
    process.terminate()
    process.wait(timeout=60)


def await_served(log, times: int):
    deadline = time.monotonic() + 60
    while log.read_text().count("launch: serving after") < times:
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    return [int(child) for child in open(f"/proc/{pid}/task/{pid}/children").read().split()]


def kill(pid: int):
    """Kills a process and waits until it has ended."""
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while runs(pid):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except OSError:
        return False


def http_answer(port: int) -> tuple[int, str | None, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("POST", "/v2/models/identity/infer", b'{"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1], "data": [1]}]}')
        response = connection.getresponse()
        return response.status, response.getheader("Retry-After"), response.read().decode()
    finally:
        connection.close()


def grpc_answer(port: int):
    # A separate connection: channels to the same address share one, which may belong to the server that died.
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        try:
            return infer(service_pb2_grpc.GRPCInferenceServiceStub(channel), "identity", [tensor("INPUT0", 1.0, np.float32)])
        except grpc.RpcError as error:
            return error


def test_clients_get_the_cause_after_rank_0_died_until_the_next_one_serves(launched):
    process, (http_port, grpc_port, _), log = launched
    await_served(log, 1)
    assert http_answer(http_port)[0] == 200
    # One channel for the whole test, like that of a real client.
    with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        infer(stub, "identity", [tensor("INPUT0", 1.0, np.float32)])
        for times in (2, 3):
            kill(children(process.pid)[0])
            # Every connection is accepted: first by the launcher, then by the next world.
            refused = [http_answer(http_port)]
            grpc_refused = [grpc_answer(grpc_port)]
            while (answer := http_answer(http_port))[0] != 200:
                refused.append(answer)
                grpc_refused.append(grpc_answer(grpc_port))
            for status, retry_after, body in refused:
                assert (status, retry_after) == (503, "1"), body
                assert "the server died (signal 9 (SIGKILL" in body and "is started again" in body
            errors = [error for error in grpc_refused if isinstance(error, grpc.RpcError)]
            assert errors
            for error in errors:
                assert error.code() == grpc.StatusCode.UNAVAILABLE
                assert "the server died (signal 9 (SIGKILL" in error.details(), error
                assert ("retry-after", "1") in tuple(error.trailing_metadata())
            await_served(log, times)
            assert infer(stub, "identity", [tensor("INPUT0", 1.0, np.float32)]).model_name == "identity"


def test_a_server_that_ends_for_good_leaves_no_open_port(launched):
    process, (http_port, grpc_port, _), log = launched
    await_served(log, 1)
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=60)
    for port in (http_port, grpc_port):
        with pytest.raises(OSError):
            http_answer(port)
