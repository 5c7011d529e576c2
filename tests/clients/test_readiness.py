"""Readiness of models that serve, of models that failed to load, and of models whose workers restart."""

import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request

import pytest

import metrics_page
from triton_requests import post
from conftest import BINARIES, ROOT
from serving import IDENTITY, Rank, rank

BROKEN = IDENTITY.replace('backend: "identity"', 'backend: "no_such_backend"')


def status(address: str, path: str) -> int:
    """The status of a path of Triton's protocol, or of any path that begins with a slash."""
    try:
        with urllib.request.urlopen(f"http://{address}{path if path.startswith('/') else '/v2/' + path}", timeout=30) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code


def await_status(address: str, path: str, wanted: int):
    deadline = time.monotonic() + 90
    while (found := status(address, path)) != wanted:
        assert time.monotonic() < deadline, f"{path} answers {found}"
        time.sleep(0.02)


def test_a_model_that_fails_to_load_does_not_make_others_unready(tmp_path):
    with rank(tmp_path, "--exit-on-error=false", prefix="ready", identity=IDENTITY, broken=BROKEN) as one:
        assert status(one.http, "models/identity/ready") == 200
        assert status(one.http, "models/broken/ready") == 400
        assert status(one.http, "health/live") == 200
        assert status(one.http, "health/ready") == 400, "strict readiness requires all models"
        assert "| broken   | 1       | UNAVAILABLE: " in one.log.read_text()


def test_without_strict_readiness_a_failed_model_is_ignored(tmp_path):
    with rank(tmp_path, "--exit-on-error=false", "--strict-readiness=false", prefix="ready", identity=IDENTITY, broken=BROKEN) as one:
        assert [status(one.http, path) for path in ("health/ready", "models/identity/ready")] == [200, 200]


def test_a_later_load_failure_does_not_affect_other_models(tmp_path):
    flags = ["--model-control-mode=explicit", "--load-model=identity"]
    with rank(tmp_path, *flags, prefix="ready", identity=IDENTITY, broken=BROKEN) as one:
        assert post(one.http, "/v2/repository/models/broken/load", {})[0] == 400
        ready = [status(one.http, path) for path in ("health/ready", "models/identity/ready", "models/broken/ready")]
        assert ready == [200, 200, 400]


def test_health_needs_one_model_that_answers_and_not_those_that_failed_to_load(tmp_path):
    models = tmp_path / "models"
    shutil.copytree(ROOT / "model_repository", models)
    (models / "broken/1").mkdir(parents=True)
    (models / "broken/config.pbtxt").write_text(BROKEN)
    log = tmp_path / "rank.log"
    command = [BINARIES / "trireme", "rank", f"--model-repository={models}", f"--log-file={log}", "--device=cpu", "--exit-on-error=false"]
    command += ["--http-address=127.0.0.1", "--grpc-address=127.0.0.1", "--http-port=0", "--grpc-port=0", "--metrics-port=0"]
    command += [f"--backend-config=python,shm-region-prefix-name=health{tmp_path.name[-10:]}_"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        one = Rank(process, log)
        assert status(one.http, "health/ready") == 400, "strict readiness requires all models"
        assert status(one.http, "/health") == 200, "the ensemble can run a step"
    finally:
        process.terminate()
        process.wait(timeout=60)


@pytest.fixture
def restartable(tmp_path):
    """A copy of the shipped repository with an additional model that needs no worker."""
    models = tmp_path / "models"
    shutil.copytree(ROOT / "model_repository", models)
    (models / "identity/1").mkdir(parents=True)
    (models / "identity/config.pbtxt").write_text(IDENTITY)
    log = tmp_path / "rank.log"
    command = [BINARIES / "trireme", "rank", f"--model-repository={models}", f"--log-file={log}", "--device=cpu"]
    command += ["--http-address=127.0.0.1", "--grpc-address=127.0.0.1", "--http-port=0", "--grpc-port=0", "--metrics-port=0"]
    command += [f"--backend-config=python,shm-region-prefix-name=restart{tmp_path.name[-10:]}_"]
    command += ["--model-control-mode=explicit", "--load-model=*"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        yield Rank(process, log), models
    finally:
        process.terminate()
        process.wait(timeout=60)


def test_a_model_is_not_ready_while_its_workers_restart(restartable):
    one, models = restartable
    weights = models / "tensorrt_llm/1/model.safetensors"
    assert status(one.http, "health/ready") == 200
    found = metrics_page.families(metrics_page.page(one.metrics))
    assert found["trireme_llm_worker_ready"].value() == 1
    worker = int(found["trireme_llm_worker_ready"].samples[0][1]["pid"])

    # Without the weights the next worker cannot load, so the test controls how long the restart takes.
    hidden = weights.with_suffix(".hidden")
    weights.rename(hidden)
    os.kill(worker, signal.SIGKILL)
    await_status(one.http, "models/tensorrt_llm/ready", 400)
    assert status(one.http, "models/ensemble/ready") == 400, "a step of the ensemble cannot run"
    assert status(one.http, "health/ready") == 400
    assert [status(one.http, path) for path in ("/health", "/ping")] == [503, 503], "no model that answers text can run a step"
    assert [status(one.http, f"models/{name}/ready") for name in ("identity", "preprocessing")] == [200, 200]
    found = metrics_page.families(metrics_page.page(one.metrics))
    assert found["trireme_llm_ready"].value() == 0
    assert found["trireme_llm_worker_restarts_total"].value() >= 1

    # The model recovers automatically, or by a load request after the server has given up.
    hidden.rename(weights)
    deadline = time.monotonic() + 60
    while status(one.http, "models/tensorrt_llm/ready") != 200:
        post(one.http, "/v2/repository/models/tensorrt_llm/load", {})
        assert time.monotonic() < deadline
        time.sleep(0.2)
    await_status(one.http, "health/ready", 200)
    assert status(one.http, "/health") == 200
    code, _, body = post(one.http, "/v2/models/ensemble/generate", {"text_input": "Once", "max_tokens": 4})
    assert code == 200, body
