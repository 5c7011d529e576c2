"""Models that hang, die or are unloaded in each phase of their life; limits of tensors and memory."""

import os
import queue
import re
import shutil
import signal
import subprocess
import threading
import time

import cycles
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from infer import infer, tensors, text
from conftest import REAL, repository_of, start, stop
from test_failures import wait_for

pytestmark = pytest.mark.skipif(bool(REAL), reason="the real server does not survive it")
FEW = np.arange(8, dtype=np.uint8)


def explicit(directory, stay_in=None, *flags, **options):
    """A server in explicit mode without loaded models, with `phases` in its repository."""
    repository = repository_of(directory, "phases")
    if stay_in:
        with open(repository / "phases/config.pbtxt", "a") as config:
            config.write('parameters { key: "stay_in" value: { string_value: "%s" } }\n' % stay_in)
    return start(repository, directory, "--model-control-mode=explicit", "--exit-timeout-secs=2", *flags, **options)


def client_of(server):
    return grpcclient.InferenceServerClient(f"localhost:{server.grpc_port}")


def beside(work):
    """Runs `work` in a thread. Returns a queue that gets its exception or None."""
    heard = queue.Queue()

    def run():
        try:
            work()
            heard.put(None)
        except Exception as error:
            heard.put(error)

    threading.Thread(target=run, daemon=True).start()
    return heard


def is_in(server, phase):
    return f"in {phase}" in server.log.read_text()


def ends_in_time(server, seconds=15):
    """Stops the server; the exit timeout is 2 s even if models hang."""
    pids = server.model_pids("phases_0_0")
    begun = time.monotonic()
    stop(server, timeout=30)
    assert time.monotonic() - begun < seconds
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    assert server.shared_memory() == []


@pytest.mark.parametrize("phase", ["initialize", "execute", "finalize"])
def test_a_stop_ends_a_model_that_hangs(tmp_path, phase):
    server = explicit(tmp_path, phase)
    with client_of(server) as client:
        loaded = beside(lambda: client.load_model("phases"))
        if phase == "initialize":
            wait_for(lambda: is_in(server, phase))
        else:
            assert loaded.get(timeout=20) is None
        if phase == "execute":
            mark = tmp_path / "mark"
            inputs = tensors(INPUT=FEW, MARK=text(str(mark)))
            client.async_infer("phases", inputs, callback=lambda result, error: None)
            wait_for(mark.exists)
        ends_in_time(server)


@pytest.mark.parametrize("phase", ["initialize", "finalize"])
def test_a_process_killed_in_a_phase_leaves_a_server_that_loads_again(tmp_path, phase):
    server = explicit(tmp_path, phase)
    with client_of(server) as client:
        if phase == "initialize":
            heard = beside(lambda: client.load_model("phases"))
        else:
            client.load_model("phases")
            heard = beside(lambda: client.unload_model("phases"))
        wait_for(lambda: is_in(server, phase))
        os.kill(server.model_pids("phases_0_0")[0], signal.SIGKILL)
        error = heard.get(timeout=20)
        assert (error is None) if phase == "finalize" else ("SIGKILL" in str(error)), error
        wait_for(lambda: not server.model_pids("phases_0_0"))
        config = tmp_path / "models/phases/config.pbtxt"
        config.write_text(config.read_text().replace(f'"{phase}"', '"nothing"'))
        client.load_model("phases")
        assert infer(client, "phases", {"INPUT": FEW}).as_numpy("OUTPUT").tolist() == FEW.tolist()
    ends_in_time(server)


def test_a_model_unloaded_while_busy_answers_first(tmp_path):
    server = explicit(tmp_path)
    mark, heard = tmp_path / "mark", queue.Queue()
    with client_of(server) as client:
        client.load_model("phases")
        inputs = tensors(INPUT=FEW, MARK=text(str(mark)))
        client.async_infer("phases", inputs, callback=lambda result, error: heard.put(error or result))
        wait_for(mark.exists)
        unloaded = beside(lambda: client.unload_model("phases"))
        wait_for(lambda: not server.is_ready("v2/models/phases/ready"))
        mark.unlink()
        assert heard.get(timeout=20).as_numpy("OUTPUT").tolist() == FEW.tolist()
        assert unloaded.get(timeout=20) is None
        wait_for(lambda: not server.model_pids("phases_0_0"))
    ends_in_time(server)


def test_a_tensor_of_100_mb_is_passed_both_ways(tmp_path):
    server = explicit(tmp_path)
    values = np.arange(100 << 20, dtype=np.uint32).astype(np.uint8)
    with client_of(server) as client:
        client.load_model("phases")
        assert (infer(client, "phases", {"INPUT": values}).as_numpy("OUTPUT") == values).all()
        client.unload_model("phases")
    ends_in_time(server)


def test_full_shared_memory_is_an_error_of_the_request(tmp_path):
    # A private /dev/shm of 8 MiB.
    own = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=8m shm /dev/shm && exec "$0" "$@"']
    if not shutil.which("unshare") or subprocess.run([*own, "true"], capture_output=True).returncode:
        pytest.skip("skipped: no mount namespaces")
    server = explicit(tmp_path, wrapper=own)
    with client_of(server) as client:
        client.load_model("phases")
        for _ in range(2):
            with pytest.raises(Exception, match="no shared memory for a tensor"):
                infer(client, "phases", {"INPUT": np.zeros(16 << 20, np.uint8)})
            values = np.arange(1 << 20, dtype=np.uint32).astype(np.uint8)
            assert (infer(client, "phases", {"INPUT": values}).as_numpy("OUTPUT") == values).all()
        assert server.is_ready("v2/models/phases/ready")
    assert stop(server) == 0


def test_a_model_that_dies_after_loading_is_restarted_with_growing_pauses(tmp_path):
    repository = repository_of(tmp_path, "phases")
    model = repository / "phases/1/model.py"
    dies = "import os, threading\nthreading.Timer(0.05, os._exit, [9]).start()\n"
    server = start(repository, tmp_path)
    model.write_text(dies + model.read_text())
    os.kill(server.model_pids("phases_0_0")[0], signal.SIGKILL)
    # The model has usually loaded by then, but not always.
    pauses = lambda: re.findall(r"(?:another one|next try) in (\S+?)[\s:]", server.log.read_text() + " ")  # noqa: E731
    wait_for(lambda: len(pauses()) >= 3, seconds=60)
    assert pauses()[:3] == ["100ms", "200ms", "400ms"]
    ends_in_time(server)


def test_the_folder_of_a_killed_server_is_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    server = explicit(tmp_path)
    folders = lambda: list(tmp_path.glob("trireme-python-*"))  # noqa: E731
    assert not folders(), "no Python model is loaded yet"
    with client_of(server) as client:
        client.load_model("phases")
    assert len(folders()) == 1
    server.process.kill()
    server.process.wait()
    wait_for(lambda: not folders())


def test_cycles_of_loading_and_unloading_leak_nothing(tmp_path):
    assert cycles.run(tmp_path, 12) == {}
