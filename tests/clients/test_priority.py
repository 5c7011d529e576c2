"""OpenAI's field `priority` decides which of the waiting requests is served first."""

import re
import shutil
import threading
import time
import urllib.request

import openai
import pytest

from conftest import ROOT
from serving import rank_of

WAITING = re.compile(r"^trireme_llm_requests_waiting\{.*\} (\d+)", re.M)


@pytest.fixture
def single(tmp_path):
    """Serves the demo model, with one running request at most."""
    models = tmp_path / "models"
    shutil.copytree(ROOT / "model_repository", models)
    config = models / "tensorrt_llm/config.pbtxt"
    config.write_text(config.read_text().replace("max_batch_size: 64", "max_batch_size: 1"))
    with rank_of(models, tmp_path, prefix="priority") as served:
        yield served


def await_waiting(served, count: int):
    """Waits until `count` sequences are in the queue."""
    deadline = time.monotonic() + 60
    while True:
        text = urllib.request.urlopen(f"http://{served.metrics}/metrics", timeout=10).read().decode()
        if (found := WAITING.search(text)) and int(found[1]) == count:
            return
        assert time.monotonic() < deadline, text
        time.sleep(0.01)


def test_a_waiting_request_with_a_lower_priority_value_overtakes(single):
    client = openai.OpenAI(base_url=f"http://{single.http}/v1", api_key="-", max_retries=0)
    begun = []

    def stream(priority: int):
        return client.completions.create(model="ensemble", prompt="Once", max_tokens=2000, stream=True, extra_body={"priority": priority, "ignore_eos": True})

    # The next request begins when the connection of this one is closed, so the order of threads on a busy machine does not matter.
    def await_first_token(priority: int):
        with stream(priority) as answer:
            next(iter(answer))
            begun.append(priority)

    # The one that runs keeps the others waiting until it is closed.
    with stream(0) as running:
        next(iter(running))
        threads = [threading.Thread(target=await_first_token, args=(priority,)) for priority in (5, 0, -5)]
        for waiting, thread in enumerate(threads, 1):
            thread.start()
            await_waiting(single, waiting)
    for thread in threads:
        thread.join()
    assert begun == [-5, 0, 5]
