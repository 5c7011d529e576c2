"""Models that fail, hang or are killed: clients get one clear error, readiness is correct, and the model recovers soon."""

import os
import queue
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from infer import infer, tensors, text
from conftest import REAL, repository_of, start, stop

pytestmark = pytest.mark.skipif(bool(REAL), reason="the real server does not come back")


def wait_for(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.02)


def serves(grpc):
    try:
        return infer(grpc, "trouble", {"HOW": text("well")}).as_numpy("OUT").tolist() == [b"well"]
    except Exception:
        return False


def test_an_exception_reaches_the_client_and_the_log(grpc, server):
    with pytest.raises(Exception, match="ValueError: asked to raise(.|\n)*model.py.*answer"):
        infer(grpc, "trouble", {"HOW": text("raise")})
    assert "Traceback (most recent call last)" in server.log.read_text()
    assert serves(grpc)


def test_a_wrong_answer_is_explained(grpc):
    with pytest.raises(Exception, match="returned a list with str; expected InferenceResponse"):
        infer(grpc, "trouble", {"HOW": text("nothing")})


def test_a_dropped_response_sender_is_an_error_not_a_wait(grpc):
    with pytest.raises(Exception, match="dropped the response sender without a final response"):
        infer(grpc, "trouble", {"HOW": text("drop")}, client_timeout=5)


@pytest.mark.parametrize("how, words", [("kill", "SIGKILL"), ("exit", "exit code 3"), ("garbage", "broke the protocol")])
def test_a_process_that_ends_is_replaced(grpc, server, how, words):
    wait_for(lambda: serves(grpc))
    with pytest.raises(Exception, match=f"the Python process of 'trouble_0_0' ended .*{words}.*another one is started"):
        infer(grpc, "trouble", {"HOW": text(how)}, client_timeout=30)
    wait_for(lambda: serves(grpc))
    assert server.is_ready()


def test_a_process_killed_while_idle_shows_in_readiness_and_is_replaced(grpc, server):
    wait_for(lambda: serves(grpc))
    pids = server.model_pids("trouble_0_0")
    os.kill(pids[0], signal.SIGKILL)
    wait_for(lambda: not server.is_ready("v2/models/trouble/ready"), seconds=1)
    wait_for(lambda: server.is_ready("v2/models/trouble/ready"))
    assert serves(grpc)


def test_a_lost_request_is_tried_again_where_the_model_allows_it(grpc, tmp_path):
    assert infer(grpc, "flaky", {"MARK": text(str(tmp_path / "mark"))}).as_numpy("PID")[0] > 0


def test_a_hung_execute_is_ended_and_others_are_served(grpc, server):
    wait_for(lambda: serves(grpc))
    heard = queue.Queue()
    grpc.async_infer("trouble", tensors(HOW=text("hang")), callback=lambda result, error: heard.put(error or result))
    left = np.ones((1, 2), np.float32)
    assert infer(grpc, "add_sub", {"INPUT0": left, "INPUT1": left}).as_numpy("SUM").tolist() == [[2, 2]]
    assert "`execute` took longer than 2 s" in str(heard.get(timeout=10))
    wait_for(lambda: serves(grpc))


def test_a_client_that_disconnects_cancels_its_request(grpc, server):
    before = server.metrics()
    heard = queue.Queue()
    grpc.start_stream(lambda result, error: heard.put(error or result))
    grpc.async_stream_infer("repeat", tensors(IN=np.arange(10_000, dtype=np.int32), DELAY_MS=np.array([5], np.int32)))
    heard.get(timeout=10)
    grpc.stop_stream(cancel_requests=True)
    wait_for(lambda: clients_left(server.metrics()) > clients_left(before), seconds=5)


def clients_left(text):
    found = [line for line in text.splitlines() if line.startswith("repeat_clients_left{")]
    return float(found[0].split()[-1])


def test_an_import_error_names_file_and_line(tmp_path):
    repository = repository_of(tmp_path, "add_sub", "trouble")
    model = repository / "trouble/1/model.py"
    model.write_text("import os\nimport no_such_module\n")
    server = start(repository, tmp_path, "--exit-on-error=false", is_ready=False)
    wait_for(lambda: "failed to load" in server.log.read_text())
    # A log entry is one line.
    assert rf"ModuleNotFoundError: No module named 'no_such_module'\n\nAt:\n  {model}(2): <module>" in server.log.read_text()
    wait_for(lambda: server.is_ready("v2/models/add_sub/ready"))
    assert stop(server) == 0


def test_a_model_gets_no_secrets_and_prints_through_the_log(tmp_path, monkeypatch):
    for name in ["SOME_TOKEN", "KEPT_TOKEN", "TRIREME_API_KEYS"]:
        monkeypatch.setenv(name, "s3cret")
    repository = repository_of(tmp_path, "add_sub", "trouble")
    code = """
import os, sys
print("has", sorted(name for name in os.environ if os.environ[name] == "s3cret"))
print("score", open("/proc/self/oom_score_adj").read().strip())
print("one\\nE1121 two\\x1b[2J", file=sys.stderr)
import no_such_module
"""
    (repository / "trouble/1/model.py").write_text(code)
    score = min(int(Path("/proc/self/oom_score_adj").read_text()) + 500, 1000)
    flags = ["--exit-on-error=false", "--backend-config=python,pass-environment=KEPT_TOKEN"]
    server = start(repository, tmp_path, *flags, is_ready=False)
    for expected in ["has ['KEPT_TOKEN']", f"score {score}", "one", r"E1121 two\u{1b}[2J"]:
        wait_for(lambda: f'trouble_0_0: {expected}"\n' in server.log.read_text())
    assert "\x1b" not in server.log.read_text()
    assert stop(server) == 0


def test_a_killed_server_leaves_no_processes_and_files(tmp_path):
    server = start(repository_of(tmp_path, "add_sub"), tmp_path)
    with grpcclient.InferenceServerClient(f"localhost:{server.grpc_port}") as client:
        large = np.ones((1, 1 << 20), np.float32)
        infer(client, "add_sub", {"INPUT0": large, "INPUT1": large})
    pids = server.model_pids("add_sub_0_0") or server.model_pids("add_sub_0")
    assert pids
    server.process.kill()
    server.process.wait()
    wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), seconds=5)
    assert server.shared_memory() == []


def test_a_stop_waits_for_requests_but_not_for_a_model_that_hangs(tmp_path):
    server = start(repository_of(tmp_path, "trouble"), tmp_path, "--exit-timeout-secs=60")
    pids = server.model_pids("trouble_0_0")
    assert pids
    with grpcclient.InferenceServerClient(f"localhost:{server.grpc_port}") as client:
        heard = queue.Queue()
        client.async_infer("trouble", tensors(HOW=text("sleep")), callback=lambda result, error: heard.put(error or result))
        time.sleep(0.2)
        started = time.monotonic()
        assert stop(server, timeout=100) == 0
        assert time.monotonic() - started < 50, "the exit timeout ran out, as if the model hung"
        assert heard.get(timeout=5).as_numpy("OUT").tolist() == [b"sleep"]
    assert [pid for pid in pids if os.path.exists(f"/proc/{pid}")] == []
    assert server.shared_memory() == []
