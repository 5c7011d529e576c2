"""Mode `poll`: the server loads and unloads models as the repository changes, like tritonserver."""

import json
import re
import shutil
import time
import urllib.error
import urllib.request

import pytest

from conftest import HERE, repository_of, start, stop


def index(server):
    """Name, version, state and reason of each line."""
    request = urllib.request.Request(f"http://localhost:{server.http_port}/v2/repository/index", method="POST")
    with urllib.request.urlopen(request, timeout=10) as reply:
        lines = json.loads(reply.read())
    return sorted(tuple(line.get(key, "") for key in ["name", "version", "state", "reason"]) for line in lines)


def metadata(server, model):
    try:
        with urllib.request.urlopen(f"http://localhost:{server.http_port}/v2/models/{model}", timeout=10) as reply:
            return reply.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.read().decode()


def await_(what, is_there):
    deadline = time.monotonic() + 60
    while not (found := is_there()):
        assert time.monotonic() < deadline, what
        time.sleep(0.1)
    return found


def await_index(server, *lines):
    await_(f"{lines} is the index", lambda: index(server) == sorted(lines))


def await_refusal(server, since):
    """Waits for the error of a poll in the log, after `since` characters."""
    return await_("a poll fails", lambda: re.search(r"(?i)fail.*poll|poll.*fail", server.log.read_text()[since:]))


@pytest.fixture
def polled(tmp_path):
    repository = repository_of(tmp_path, "add_sub")
    server = start(repository, tmp_path, "--model-control-mode=poll", "--repository-poll-secs=1")
    yield server, repository
    assert stop(server) == 0


def test_models_and_versions_are_loaded_and_unloaded_with_their_directories(polled):
    server, repository = polled
    config = repository / "add_sub/config.pbtxt"
    whole, ready = config.read_text(), ("add_sub", "1", "READY", "")
    await_index(server, ready)
    shutil.copytree(HERE / "models/echo", repository / "echo")
    await_index(server, ready, ("echo", "1", "READY", ""))

    shutil.copytree(repository / "add_sub/1", repository / "add_sub/2")
    config.write_text(whole + "\nversion_policy { all { } }\n")
    await_index(server, ready, ("add_sub", "2", "READY", ""), ("echo", "1", "READY", ""))
    shutil.rmtree(repository / "add_sub/1")
    gone = ("add_sub", "1", "UNAVAILABLE", "unloaded")
    await_index(server, gone, ("add_sub", "2", "READY", ""), ("echo", "1", "READY", ""))

    shutil.rmtree(repository / "echo")
    await_index(server, gone, ("add_sub", "2", "READY", ""))
    await_("echo has no version", lambda: "has no available versions" in metadata(server, "echo"))


def test_an_unreadable_model_does_not_affect_others(polled):
    server, repository = polled
    config, ready = repository / "add_sub/config.pbtxt", ("add_sub", "1", "READY", "")
    whole, since = config.read_text(), len(server.log.read_text())
    config.write_text(whole + "\nnonsense: 4\n")
    await_refusal(server, since)
    assert index(server) == [ready] and server.is_ready(), "the loaded model still serves"
    config.write_text(whole)

    (repository / "broken/1").mkdir(parents=True)
    since = len(server.log.read_text())
    (repository / "broken/config.pbtxt").write_text("nonsense")
    await_refusal(server, since)
    assert ready in index(server) and server.is_ready(), "a new model that fails to load does not affect readiness"
    shutil.rmtree(repository / "broken")
    await_index(server, ready)
