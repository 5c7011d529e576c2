"""`launch --keep-connections`: rank 0 is killed while requests run, and their clients see a pause."""

import http.client
import json
import os
import queue
import re
import signal
import tempfile
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
import tritonclient.grpc as grpcclient

from conftest import World, launch
from ports import free_ports
from triton_requests import text_inputs

PROMPT = "Once upon a time"
TOKENS = 120


class Kept:
    """A world whose launcher keeps the connections of clients."""

    def __init__(self, ports: World):
        self.ports = ports

    def processes(self) -> dict[str, list[int]]:
        (world,) = json.loads(launch("status", f"--http_port={self.ports.http_port}", "--json").stdout)
        found: dict[str, list[int]] = {}
        for process in world["processes"]:
            found.setdefault(process["role"], []).append(process["pid"])
        return found

    def await_ready(self, seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while not self.is_ready():
            assert time.monotonic() < deadline, f"not ready after {seconds} s"
            time.sleep(0.05)

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.ports.http}/v2/health/ready", timeout=10) as response:
                return response.status == 200
        except (urllib.error.URLError, ConnectionError):
            return False


@pytest.fixture(scope="module")
def kept():
    ports = World(*free_ports(3))
    flags = [f"--http_port={ports.http_port}", f"--grpc_port={ports.grpc_port}", f"--metrics_port={ports.metrics_port}"]
    words = ["--world_size=2", "--model_repo=model_repository", "--device=cpu", "--oversubscribe", "--keep_connections=60", "--detach"]
    started = launch(*words, *flags)
    assert started.returncode == 0, started.stderr
    yield Kept(ports)
    stopped = launch("stop", f"--http_port={ports.http_port}")
    assert stopped.returncode == 0, stopped.stderr
    with pytest.raises(ConnectionError):
        http.client.HTTPConnection("localhost", ports.http_port, timeout=5).connect()


class Stream:
    """A request whose answer is read in the background, over one connection."""

    def __init__(self, world: World, path: str, body: dict):
        self.connection = http.client.HTTPConnection("localhost", world.http_port, timeout=60)
        headers = {"content-type": "application/json", "anthropic-version": "2023-06-01"}
        self.connection.request("POST", path, json.dumps(body), headers)
        self.begun, self.lines = threading.Event(), queue.Queue()
        self.reader = threading.Thread(target=self.read)
        self.reader.start()

    def read(self) -> None:
        try:
            response = self.connection.getresponse()
            self.lines.put(f"status {response.status}")
            for line in filter(bytes.strip, response):
                self.lines.put(line.decode().strip())
                if b"text" in line or b"content" in line:
                    self.begun.set()
        except (ConnectionError, http.client.HTTPException) as error:
            self.lines.put(f"broken: {error!r}")
        self.begun.set()

    def answer(self) -> list[str]:
        """All lines, after the end."""
        self.reader.join(timeout=60)
        assert not self.reader.is_alive(), "the stream does not end"
        status, *found = [self.lines.get() for _ in range(self.lines.qsize())]
        assert status == "status 200", (status, found)
        return found


SAMPLED = {"temperature": 1.0, "top_p": 0.95}
CHAT = {"model": "ensemble", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": TOKENS, "stream": True, "ignore_eos": True, "temperature": 0}
COMPLETION = {"model": "ensemble", "prompt": PROMPT, "max_tokens": TOKENS, "stream": True, "ignore_eos": True}
WORDS = "([a-z]{2} ){20}"
STREAMS = {
    "chat": ("/v1/chat/completions", CHAT),
    "completion": ("/v1/completions", COMPLETION | {"temperature": 0}),
    "seeded": ("/v1/completions", COMPLETION | SAMPLED | {"seed": 7}),
    "unseeded": ("/v1/completions", COMPLETION | SAMPLED | {"stream_options": {"include_usage": True}}),
    "choices": ("/v1/completions", COMPLETION | SAMPLED | {"n": 2, "logprobs": 1}),
    "constrained": ("/v1/completions", COMPLETION | SAMPLED | {"ignore_eos": False, "guided_regex": WORDS}),
    "generate_stream": ("/v2/models/ensemble/generate_stream", {"text_input": PROMPT, "max_tokens": TOKENS, "stream": True}),
    "messages": (
        "/v1/messages",
        {"model": "ensemble", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": TOKENS, "stream": True, "temperature": 0},
    ),
}


# Requests without a seed, which another request does not repeat.
DRAWN = {"unseeded", "choices", "constrained"}


def text_of(lines: list[str]) -> str:
    """The text of a stream of any of the protocols."""
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert not [event for event in events if "error" in event], lines[-3:]
    pieces = []
    for event in events:
        for choice in event.get("choices", []):
            pieces.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
        pieces += [event.get("text_output", ""), event.get("delta", {}).get("text", "")]
    return "".join(pieces)


def test_streams_go_on_with_the_same_tokens_when_rank_0_is_killed(kept):
    kept.await_ready()
    undisturbed = {name: Stream(kept.ports, *request) for name, request in STREAMS.items() if name not in DRAWN}
    undisturbed = {name: stream.answer() for name, stream in undisturbed.items()}
    rank_0 = kept.processes()["rank"][0]
    streams = {name: Stream(kept.ports, *request) for name, request in STREAMS.items()}
    with ThreadPoolExecutor() as threads:
        unary = threads.submit(generate, kept.ports, TOKENS)
        for stream in streams.values():
            assert stream.begun.wait(timeout=30)
        is_running = [stream.reader.is_alive() for stream in streams.values()]
        os.kill(rank_0, signal.SIGKILL)
        assert any(is_running), "all streams had ended"
        answers = {name: stream.answer() for name, stream in streams.items()}
        assert unary.result(timeout=60) == generate(kept.ports, TOKENS)
    for name, lines in answers.items():
        # Each stream has one answer of one id, whole and without an error.
        ids = {json.loads(line[6:]).get("id") for line in lines if line.startswith("data: {")} - {None}
        assert len(ids) <= 1, (name, ids)
        assert text_of(lines), name
        if name not in DRAWN:
            assert text_of(lines) == text_of(undisturbed[name]), name
    assert re.fullmatch(WORDS, text_of(answers["constrained"]))
    assert answers["unseeded"][-1] == "data: [DONE]"


def generate(world: World, max_tokens: int) -> tuple[int, str]:
    body = json.dumps({"text_input": PROMPT, "max_tokens": max_tokens}).encode()
    request = urllib.request.Request(f"http://{world.http}/v2/models/ensemble/generate", body)
    with urllib.request.urlopen(request, timeout=60) as response:
        return response.status, json.loads(response.read())["text_output"]


def grpc_stream(world: World, prompts: list[str], begun: threading.Event) -> dict[str, str]:
    """The texts of requests that run at once over one stream, by their prompts. `begun` is set when each has a response."""
    answers: queue.Queue = queue.Queue()
    texts: dict[str, str] = {}
    with grpcclient.InferenceServerClient(world.grpc) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for prompt in prompts:
            client.async_stream_infer("ensemble", text_inputs(prompt, TOKENS, True), request_id=prompt, enable_empty_final_response=True)
        unfinished = set(prompts)
        while unfinished:
            result, error = answers.get(timeout=60)
            assert error is None, error
            response = result.get_response()
            output = result.as_numpy("text_output")
            texts[response.id] = texts.get(response.id, "") + ("" if output is None else output.reshape(-1)[0].decode())
            if response.parameters["triton_final_response"].bool_param:
                unfinished.remove(response.id)
            if texts.keys() == set(prompts):
                begun.set()
        client.stop_stream()
    return texts


def test_grpc_calls_go_on_with_the_same_tokens_when_rank_0_is_killed(kept):
    kept.await_ready()
    prompts = [PROMPT, "The little dog", "One day"]
    undisturbed = grpc_stream(kept.ports, prompts, threading.Event())
    rank_0, begun = kept.processes()["rank"][0], threading.Event()
    with ThreadPoolExecutor() as threads, grpcclient.InferenceServerClient(kept.ports.grpc) as client:
        stream = threads.submit(grpc_stream, kept.ports, prompts, begun)
        unary = threads.submit(client.infer, "ensemble", text_inputs(PROMPT, TOKENS, False))
        assert begun.wait(timeout=30)
        assert not stream.done(), "the stream had ended"
        os.kill(rank_0, signal.SIGKILL)
        assert stream.result(timeout=60) == undisturbed
        assert unary.result(timeout=60).as_numpy("text_output").reshape(-1)[0].decode() == undisturbed[PROMPT]
        # The same connection serves the next world.
        assert client.is_server_ready()


def test_health_is_false_and_requests_wait_while_rank_0_is_away(kept):
    kept.await_ready()
    os.kill(kept.processes()["rank"][0], signal.SIGKILL)
    deadline = time.monotonic() + 10
    while kept.is_ready():
        assert time.monotonic() < deadline
    status, text = generate(kept.ports, 4)
    assert status == 200 and text
    kept.await_ready()


def test_a_request_that_changes_the_server_is_not_sent_again(kept):
    kept.await_ready()
    rank_0 = kept.processes()["rank"][0]
    os.kill(rank_0, signal.SIGSTOP)
    with ThreadPoolExecutor() as threads:
        url = f"http://{kept.ports.http}/v2/repository/models/ensemble/load"
        load = threads.submit(urllib.request.urlopen, urllib.request.Request(url, b"{}"), timeout=60)
        time.sleep(0.5)
        os.kill(rank_0, signal.SIGKILL)
        with pytest.raises(urllib.error.HTTPError) as refused:
            load.result(timeout=60)
    assert refused.value.code == 503 and b"it may change the server" in refused.value.read()
    kept.await_ready()


def test_a_relay_that_is_killed_is_started_again(kept):
    kept.await_ready()
    relay = kept.processes()["relay"][0]
    stream = Stream(kept.ports, *STREAMS["completion"])
    assert stream.begun.wait(timeout=30)
    os.kill(relay, signal.SIGKILL)
    assert stream.answer()[-1] != "data: [DONE]"
    kept.await_ready(10)
    assert kept.processes()["relay"][0] != relay
    assert generate(kept.ports, 4)[0] == 200


def test_streams_survive_a_rolling_restart_and_a_plain_one(kept):
    kept.await_ready()
    for words in (["--rolling"], []):
        before = kept.processes()["rank"][0]
        stream = Stream(kept.ports, *STREAMS["completion"])
        restarted = launch("restart", f"--http_port={kept.ports.http_port}", *words)
        assert restarted.returncode == 0, restarted.stderr
        assert text_of(stream.answer())
        assert kept.processes()["rank"][0] != before
        assert generate(kept.ports, 4)[0] == 200


def test_it_is_refused_where_rank_0_is_elsewhere():
    with tempfile.TemporaryDirectory() as folder:
        refused = launch(f"--model_repo={folder}", "--keep_connections", "--hosts=a:1,b:1", "--world_size=2", "--dry_run")
    assert refused.returncode == 1 and "--keep-connections needs rank 0 on this machine" in refused.stderr, refused.stderr
