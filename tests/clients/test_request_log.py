"""One line of the log a request says where its time went; before the first, tables say what serves."""

import json
import re
import signal
import subprocess
import time
from contextlib import contextmanager

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from asking import STORY, stream, text_inputs
from conftest import BINARIES, ROOT
from serving import Rank

# With no end token the model writes until the limit.
ENDLESS = {"end_id": ([-1], np.int32)}
TIMES = ["total_ms", "queue_ms", "prefill_ms", "decode_ms", "stream_ms"]


@contextmanager
def shipped(folder, *flags):
    """A rank that serves the shipped repository."""
    log = folder / "rank.log"
    command = [BINARIES / "trireme", "rank", "--model-repository=model_repository", f"--log-file={log}", "--device=cpu"]
    command += ["--http-address=127.0.0.1", "--grpc-address=127.0.0.1", "--http-port=0", "--grpc-port=0", "--metrics-port=0"]
    command += [f"--backend-config=python,shm-region-prefix-name=log{folder.name[-12:]}_", *flags]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        yield Rank(process, log)
    finally:
        process.terminate()
        process.wait(timeout=60)


def ask(client):
    """The same prompt twice, the second time with blocks of the first; the id is the client's own."""
    for request_id in ("first", "second"):
        pieces, error = stream(client, text_inputs(STORY * 6, 8, True, **ENDLESS), request_id=request_id)
        assert pieces and error is None


def check(line: dict, request_id: str):
    assert (line["id"], line["model"], line["outcome"]) == (request_id, "ensemble", "ok")
    assert line["output_tokens"] == 8 and line["prompt_tokens"] > 16 and line["preempted"] == 0
    assert (line["cached_tokens"] >= 16) == (request_id == "second")
    assert line["prefill_ms"] > 0 and line["decode_ms"] > 0
    parts = sum(line[name] for name in TIMES[1:])
    assert parts == pytest.approx(line["total_ms"], abs=0.01), "the parts are the whole"


def test_plain_lines(tmp_path):
    with shipped(tmp_path) as one:
        with grpcclient.InferenceServerClient(one.grpc) as client:
            ask(client)
        for request_id in ("first", "second"):
            text = one.await_log(rf'\] "request (id={request_id} .*)"').group(1)
            fields = dict(pair.split("=", 1) for pair in text.split(" "))
            numbers = {name: float(value) if re.fullmatch(r"[0-9.]+", value) else value for name, value in fields.items()}
            check(numbers, request_id)


def test_lines_of_json(tmp_path):
    with shipped(tmp_path, "--log-format=JSON") as one:
        with grpcclient.InferenceServerClient(one.grpc) as client:
            ask(client)
        one.await_log('"id":"second"')
        lines = [json.loads(line) for line in one.log.read_text().splitlines()]
        requests = [line for line in lines if line["message"] == "request"]
        assert [line["id"] for line in requests] == ["first", "second"]
        for line in requests:
            check(line, line["id"])


def test_a_client_that_leaves_has_a_line_too(tmp_path):
    with shipped(tmp_path, "--log-format=JSON") as one:
        with grpcclient.InferenceServerClient(one.grpc) as client:
            seen = []
            client.start_stream(lambda result, error: seen.append(result))
            client.async_stream_infer("ensemble", text_inputs(STORY, 400, True, **ENDLESS), request_id="left")
            deadline = time.monotonic() + 60
            while len(seen) < 3:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            client.stop_stream(cancel_requests=True)
        one.await_log('"id":"left"')
        line = next(json.loads(line) for line in one.log.read_text().splitlines() if '"id":"left"' in line)
        assert line["outcome"] == "cancelled"
        assert 3 <= line["output_tokens"] < 400 and line["decode_ms"] > 0


def test_tables_come_before_the_lines_that_scripts_wait_for(tmp_path):
    with shipped(tmp_path, "--exit-timeout-secs=7", "--backend-config=tensorrtllm,x=1") as one:
        text = one.log.read_text()
    tables = re.findall(r"(?m)^I\S+ \S+ \d+ \S+\] \n((?:[+|].*\n)+)\n", text)
    heads = [[cell.strip() for cell in table.splitlines()[1].strip("|").split("|")] for table in tables]
    assert heads == [["Repository Agent", "Path"], ["Backend", "Path", "Config"], ["Model", "Version", "Status"], ["Option", "Value"]]
    rows = [[[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[3:-1]] for table in tables]
    assert [row[0] for row in rows[1]] == ["detokenize", "tensorrtllm", "tokenize"]
    assert json.loads(rows[1][1][2]) == {"cmdline": {"auto-complete-config": "true", "x": "1"}}
    assert rows[2] == [[name, "1", "READY"] for name in ("ensemble", "postprocessing", "preprocessing", "tensorrt_llm")]
    options = dict(rows[3])
    assert (options["model_control_mode"], options["exit_timeout"], options["strict_readiness"]) == ("MODE_NONE", "7", "1")
    assert text.index("| Option") < text.index("Started GRPCInferenceService at ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model-repository=model_repository", "--no-such-option=1"], "unrecognized option '--no-such-option'"),
        (["--model-repository=model_repository", "--http-port=many"], "invalid value 'many'"),
        ([], "--model-repository"),
    ],
)
def test_a_wrong_command_line_is_answered_with_the_usage_and_exit_code_1(arguments, words):
    run = subprocess.run([BINARIES / "trireme", "rank", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 1, run.stderr
    assert words in run.stderr.split("Usage: ")[0] and "Usage: trireme rank [options]\n" in run.stderr and run.stdout == ""


def test_a_repository_that_is_not_there_and_a_port_that_is_taken_end_with_exit_code_1(tmp_path):
    nowhere = subprocess.run(
        [BINARIES / "trireme", "rank", "--model-repository=/nowhere", "--device=cpu"], capture_output=True, text=True, timeout=60
    )
    assert (nowhere.returncode, "/nowhere" in nowhere.stderr) == (1, True), nowhere.stderr
    with shipped(tmp_path) as one:
        port = one.http.rsplit(":", 1)[1]
        command = [BINARIES / "trireme", "rank", "--model-repository=model_repository", "--device=cpu", "--http-address=127.0.0.1"]
        command += [f"--http-port={port}", "--grpc-port=0", "--metrics-port=0", "--backend-config=python,shm-region-prefix-name=logtaken_"]
        taken = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert (taken.returncode, port in taken.stderr) == (1, True), taken.stderr
        one.process.send_signal(signal.SIGINT)
        assert one.process.wait(timeout=60) == 0
