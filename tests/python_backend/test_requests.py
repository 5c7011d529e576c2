"""The request that a model receives, and the response that it returns."""

import json
import queue
import re
import sys
import tarfile

import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from infer import infer, stream, tensors, text
from conftest import REAL, repository_of, start, stop


def test_types_and_shapes_survive_both_ways(grpc):
    values = {
        "FP32": np.linspace(-1, 1, 2000, dtype=np.float32),
        "FP16": np.array([1.5, -0.25], np.float16),
        "BOOL": np.array([[True, False, True]]),
        "UINT64": np.array([0, 2**64 - 1], np.uint64),
        "TEXT": np.array([b"", "süß".encode(), b"\x00\xff" * 3000], dtype=object),
    }
    answer = infer(grpc, "echo", values)
    for name, value in values.items():
        assert answer.as_numpy(name).tolist() == value.tolist(), name
        assert answer.as_numpy(name).shape == value.shape


def test_bf16_is_passed_through_dlpack(grpc):
    value = np.array([1.0, -2.0, 0.5], ml_dtypes.bfloat16)
    answer = infer(grpc, "echo", {"BF16": value})
    assert answer.as_numpy("BF16").astype(np.float32).tolist() == [1.0, -2.0, 0.5]


def test_empty_tensors_survive(grpc):
    answer = infer(grpc, "echo", {"FP16": np.zeros(0, np.float16), "TEXT": np.zeros(0, dtype=object)})
    assert answer.as_numpy("FP16").shape == (0,) and answer.as_numpy("TEXT").shape == (0,)


def test_a_model_gets_the_properties_of_the_request(grpc):
    outputs = [grpcclient.InferRequestedOutput("REQUEST"), grpcclient.InferRequestedOutput("TEXT")]
    answer = infer(
        grpc, "echo", {"TEXT": text("x")}, request_id="ä1", sequence_id=2**62, sequence_start=True, sequence_end=True,
        priority=2, timeout=5_000_000, outputs=outputs, parameters={"flag": True, "number": -7, "word": "w"},
    )
    known = json.loads(answer.as_numpy("REQUEST")[0])
    assert known == {
        "id": "ä1",
        "correlation_id": 2**62,
        "flags": 3,
        "priority": None if REAL else 2,
        "timeout": 5_000_000,
        "parameters": {"flag": True, "number": -7, "word": "w"},
        "outputs": ["REQUEST", "TEXT"],
        "cancelled": False,
    }
    if not REAL:  # Like the priority, newer than the reference server.
        parameters = answer.get_response().parameters
        assert parameters["kept"].bool_param is True and parameters["n"].int64_param == 3


def test_a_model_can_reschedule_a_request(grpc):
    answer = infer(grpc, "again", {"TIMES": np.array([4], np.int32)}, request_id="r")
    assert answer.as_numpy("SEEN").tolist() == [5]


@pytest.mark.skipif(bool(REAL), reason="the real server gives Python models the initial state in every execution")
def test_a_rescheduled_request_keeps_its_sequence_state(grpc):
    # One sequence at a time, and three concurrent ones with separate states.
    for _ in range(2):
        told = stream(grpc, "again_state", {"STEP": np.array([[1]], np.int32), "LIMIT": np.array([[7]], np.int32)})
        assert [answer.as_numpy("SUM").item() for answer in told] == [2, 4, 6, 7]
    heard = queue.Queue()
    grpc.start_stream(lambda result, error: heard.put(error or result))
    for step in (1, 2, 3):
        inputs = tensors(STEP=np.array([[step]], np.int32), LIMIT=np.array([[12]], np.int32))
        grpc.async_stream_infer("again_state", inputs, request_id=str(step))
    sums = {"1": [], "2": [], "3": []}
    while any(told[-1:] != [12] for told in sums.values()):
        answer = heard.get(timeout=20)
        assert not isinstance(answer, Exception), answer
        sums[answer.get_response().id].append(answer.as_numpy("SUM").item())
    grpc.stop_stream()
    assert sums == {"1": [2, 4, 6, 8, 10, 12], "2": [2, 4, 6, 8, 10, 12], "3": [6, 12]}


def test_a_model_loads_and_unloads_others(tmp_path):
    repository = repository_of(tmp_path, "control", "add_sub")
    server = start(repository, tmp_path, "--model-control-mode=explicit", "--load-model=control")
    with grpcclient.InferenceServerClient(f"localhost:{server.grpc_port}") as client:
        assert infer(client, "control", {"NAME": text("add_sub")}).as_numpy("READY").tolist() == [False, True, False]
        with pytest.raises(Exception, match="failed to load 'no_such_model'"):
            infer(client, "control", {"NAME": text("no_such_model")})
    assert stop(server) == 0


@pytest.mark.parametrize("as_archive", [False, True])
def test_a_model_uses_its_own_python_environment(tmp_path, as_archive):
    repository = repository_of(tmp_path, "add_sub")
    environment = tmp_path / "environment"
    (environment / "bin").mkdir(parents=True)
    python = environment / "bin/python3"
    python.write_text(f'#!/bin/sh\necho started by "$0"\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    path = "$$TRITON_MODEL_DIRECTORY/../../environment"
    if as_archive:
        with tarfile.open(repository / "add_sub/environment.tar.gz", "w:gz") as archive:
            archive.add(environment / "bin", "bin")
        path = "$$TRITON_MODEL_DIRECTORY/environment.tar.gz"
    with open(repository / "add_sub/config.pbtxt", "a") as config:
        config.write('parameters { key: "EXECUTION_ENV_PATH" value: { string_value: "%s" } }\n' % path)
    server = start(repository, tmp_path)
    with grpcclient.InferenceServerClient(f"localhost:{server.grpc_port}") as client:
        ones = np.ones((1, 2), np.float32)
        assert infer(client, "add_sub", {"INPUT0": ones, "INPUT1": ones}).as_numpy("SUM").tolist() == [[2, 2]]
    assert re.search(r"started by \S*/environment\d*/bin/python3" , server.log.read_text())
    assert stop(server) == 0


@pytest.mark.skipif(bool(REAL), reason="newer than the real server at hand")
def test_a_model_reports_its_own_readiness(tmp_path):
    server = start(repository_of(tmp_path, "readiness"), tmp_path)
    path = tmp_path / "words"
    path.write_text("yes")
    ready = "v2/models/readiness/ready"
    with grpcclient.InferenceServerClient(f"localhost:{server.grpc_port}") as client:
        assert server.is_ready(ready)
        infer(client, "readiness", {"NAME": text(str(path))})
        for words, is_ready in (("no", False), ("yes", True), ("neither", False)):
            path.write_text(words)
            assert server.is_ready(ready) is is_ready and client.is_model_ready("readiness") is is_ready
        assert "`is_ready` returned str; expected bool" in server.log.read_text()

        # Readiness is queried during a long request.
        wait = tmp_path / "words.wait"
        wait.touch()
        path.write_text("yes")
        heard = queue.Queue()
        inputs = tensors(NAME=text(str(path)))
        client.async_infer("readiness", inputs, callback=lambda result, error: heard.put(error or result))
        assert server.is_ready(ready)
        path.write_text("no")
        assert not server.is_ready(ready)
        wait.unlink()
        assert not isinstance(heard.get(timeout=20), Exception)
        path.unlink()  # The check raises now.
        assert not server.is_ready(ready)
    assert stop(server) == 0


def test_requests_of_a_model_are_traced_as_its_own_requests(tmp_path):
    file = tmp_path / "trace.json"
    flags = [f"--trace-config=triton,file={file}", "--trace-config=rate=1", "--trace-config=level=TIMESTAMPS"]
    server = start(repository_of(tmp_path, "add_sub", "bls"), tmp_path, *flags)
    with grpcclient.InferenceServerClient(f"localhost:{server.grpc_port}") as client:
        ones = np.ones((1, 2), np.float32)
        infer(client, "bls", {"INPUT0": ones, "INPUT1": ones})
    assert stop(server) == 0
    traces = {trace["model_name"]: trace for trace in json.loads(file.read_text()) if "model_name" in trace}
    assert traces["add_sub"]["parent_id"] == traces["bls"]["id"]
    assert "parent_id" not in traces["bls"]


def test_the_environment_may_be_given_by_its_activation_script(tmp_path):
    repository = repository_of(tmp_path, "add_sub")
    scripts = tmp_path / "env/lib/site-packages/conda_pack/scripts/posix"
    for folder in (scripts, tmp_path / "env/bin"):
        folder.mkdir(parents=True)
    (scripts / "activate").touch()
    python = tmp_path / "env/bin/python3"
    python.write_text(f'#!/bin/sh\necho started by "$0"\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    with open(repository / "add_sub/config.pbtxt", "a") as config:
        config.write('parameters { key: "EXECUTION_ENV_PATH" value: { string_value: "%s" } }\n' % (scripts / "activate"))
    server = start(repository, tmp_path)
    assert f"started by {python}" in server.log.read_text()
    assert stop(server) == 0
