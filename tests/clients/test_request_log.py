"""The request log: one line per request with its times. Tables at start-up list backends, models and options."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import tritonclient.grpc as grpcclient

import metrics_page
from triton_requests import ENDLESS, STORY, stream, text_inputs
from conftest import BINARIES, ROOT
from serving import Rank

# Without an end token the model generates until the limit.
TIMES = ["total_ms", "queue_ms", "prefill_ms", "decode_ms", "stream_ms"]


@contextmanager
def shipped(folder, *flags, repository="model_repository"):
    """A rank that serves the shipped repository, or a changed one."""
    log = folder / "rank.log"
    command = [BINARIES / "trireme", "rank", f"--model-repository={repository}", f"--log-file={log}", "--device=cpu"]
    command += ["--http-address=127.0.0.1", "--grpc-address=127.0.0.1", "--http-port=0", "--grpc-port=0", "--metrics-port=0"]
    command += [f"--backend-config=python,shm-region-prefix-name=log{folder.name[-12:]}_", *flags]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        yield Rank(process, log)
    finally:
        process.terminate()
        process.wait(timeout=60)


def send_two_requests(client):
    """Sends the same prompt twice, with request ids; the second request reuses KV blocks of the first."""
    for request_id in ("first", "second"):
        pieces, error = stream(client, text_inputs(STORY * 6, 8, True, **ENDLESS), request_id=request_id)
        assert pieces and error is None


def check(line: dict, request_id: str):
    assert (line["id"], line["model"], line["outcome"]) == (request_id, "ensemble", "ok")
    assert line["output_tokens"] == 8 and line["prompt_tokens"] > 16 and line["preempted"] == 0
    assert (line["cached_tokens"] >= 16) == (request_id == "second")
    assert line["prefill_ms"] > 0 and line["decode_ms"] > 0
    parts = sum(line[name] for name in TIMES[1:])
    assert parts == pytest.approx(line["total_ms"], abs=0.01), "the parts add up to the total"


def test_plain_lines(tmp_path):
    with shipped(tmp_path) as one:
        with grpcclient.InferenceServerClient(one.grpc) as client:
            send_two_requests(client)
        for request_id in ("first", "second"):
            text = one.await_log(rf'\] "request (id={request_id} .*)"').group(1)
            fields = dict(pair.split("=", 1) for pair in text.split(" "))
            numbers = {name: float(value) if re.fullmatch(r"[0-9.]+", value) else value for name, value in fields.items()}
            check(numbers, request_id)


def test_lines_of_json(tmp_path):
    with shipped(tmp_path, "--log-format=JSON") as one:
        with grpcclient.InferenceServerClient(one.grpc) as client:
            send_two_requests(client)
        one.await_log('"id":"second"')
        lines = [json.loads(line) for line in one.log.read_text().splitlines()]
        requests = [line for line in lines if line["message"] == "request"]
        assert [line["id"] for line in requests] == ["first", "second"]
        for line in requests:
            check(line, line["id"])


def test_a_cancelled_request_is_logged_too(tmp_path):
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


def lines_of(one, count: int) -> list[dict]:
    """Waits for `count` lines of requests and returns them."""
    one.await_log(rf'(?s)(?:"message":"request".*){{{count}}}')
    lines = [json.loads(line) for line in one.log.read_text().splitlines()]
    return [line for line in lines if line["message"] == "request"]


def test_preemptions_are_logged_and_restarts_do_not_count_as_such(tmp_path):
    repository = tmp_path / "models"
    shutil.copytree(ROOT / "model_repository", repository)
    # Twelve blocks of 16: four requests of 90 tokens each do not fit at once.
    limits = {"max_tokens_in_paged_kv_cache": "192", "batch_scheduler_policy": "max_utilization", "enable_kv_cache_reuse": "false"}
    with open(repository / "tensorrt_llm/config.pbtxt", "a") as config:
        for key, value in limits.items():
            config.write(f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n')
    with shipped(tmp_path, "--log-format=JSON", repository=repository) as one:
        def ask_for(index: int):
            with grpcclient.InferenceServerClient(one.grpc) as client:
                return stream(client, text_inputs(STORY, 84, True, **ENDLESS), request_id=str(index))

        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(ask_for, range(4)))
        assert all(error is None for _, error in answers) and len({"".join(pieces) for pieces, _ in answers}) == 1
        found = metrics_page.families(metrics_page.page(one.metrics))
        preempted = found["trireme_llm_preemptions_total"].value()
        assert preempted > 0
        lines = lines_of(one, 4)
        assert sum(line["preempted"] for line in lines) == preempted

        # A worker dies in the middle: the stream continues, and no preemption is logged.
        worker = int(found["trireme_llm_worker_ready"].samples[0][1]["pid"])
        with grpcclient.InferenceServerClient(one.grpc) as client:
            texts = []

            def kill_once(result, error):
                texts.append((result, error))
                if len(texts) == 3:
                    os.kill(worker, signal.SIGKILL)

            client.start_stream(kill_once)
            client.async_stream_infer("ensemble", text_inputs(STORY, 84, True, **ENDLESS), request_id="lost")
            one.await_log('"id":"lost"')
            client.stop_stream()
        line = lines_of(one, 5)[4]
        assert (line["id"], line["outcome"], line["output_tokens"], line["preempted"]) == ("lost", "ok", 84, 0)
        found = metrics_page.families(metrics_page.page(one.metrics))
        assert found["trireme_llm_recoveries_total"].value() == found["trireme_llm_worker_restarts_total"].value() == 1


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
    ("arguments", "message"),
    [
        (["--model-repository=model_repository", "--no-such-option=1"], "unrecognized option '--no-such-option'"),
        (["--model-repository=model_repository", "--http-port=many"], "invalid value 'many'"),
        (["--model-repository=model_repository", "--load-model=ensemble"], "requires setting '--model-control-mode=explicit'"),
        (["--model-repository=model_repository", "--backend-config=python"], "expected `NAME,KEY=VALUE`"),
        ([], "--model-repository"),
    ],
)
def test_a_wrong_command_line_is_named_and_returns_exit_code_1(arguments, message):
    run = subprocess.run([BINARIES / "trireme", "rank", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 1, run.stderr
    assert message in run.stderr and "`trireme rank --help` lists the options\n" in run.stderr and run.stdout == ""


def test_a_missing_repository_and_a_port_in_use_end_with_exit_code_1(tmp_path):
    command = [BINARIES / "trireme", "rank", "--model-repository=/nowhere", "--device=cpu"]
    command.append("--backend-config=python,shm-region-prefix-name=lognowhere_")
    nowhere = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (nowhere.returncode, "/nowhere" in nowhere.stderr) == (1, True), nowhere.stderr
    with shipped(tmp_path) as one:
        port = one.http.rsplit(":", 1)[1]
        command = [BINARIES / "trireme", "rank", "--model-repository=model_repository", "--device=cpu", "--http-address=127.0.0.1"]
        command += [f"--http-port={port}", "--grpc-port=0", "--metrics-port=0", "--backend-config=python,shm-region-prefix-name=logtaken_"]
        taken = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert (taken.returncode, port in taken.stderr) == (1, True), taken.stderr
        one.process.send_signal(signal.SIGINT)
        assert one.process.wait(timeout=60) == 0
