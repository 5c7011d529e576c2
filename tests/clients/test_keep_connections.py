"""`launch --keep-connections`: rank 0 is killed while requests run, and their clients see a pause."""

import functools
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
from contextlib import contextmanager

import openai
import pytest
import tritonclient.grpc as grpcclient

import metrics_page
from conftest import World, launch
from ports import free_ports
from stopped_process import stop
from triton_requests import ENDLESS, text_inputs

PROMPT = "Once upon a time"
# Enough that a stream still runs when a test that saw its first token kills a process, also on a fast machine.
TOKENS = 800


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


@contextmanager
def kept_world(*rank_flags: str, launch_flags: tuple[str, ...] = ("--keep_connections=60",)):
    """A world of two ranks. Its ports are closed at the end."""
    ports = World(*free_ports(3))
    flags = [f"--http_port={ports.http_port}", f"--grpc_port={ports.grpc_port}", f"--metrics_port={ports.metrics_port}"]
    words = ["--world_size=2", "--model_repo=model_repository", "--device=cpu", "--oversubscribe", *launch_flags, "--detach"]
    started = launch(*words, *flags, *(["--", *rank_flags] if rank_flags else []))
    assert started.returncode == 0, started.stderr
    yield Kept(ports)
    stopped = launch("stop", f"--http_port={ports.http_port}")
    assert stopped.returncode == 0, stopped.stderr
    with pytest.raises(ConnectionError):
        http.client.HTTPConnection("localhost", ports.http_port, timeout=5).connect()


@pytest.fixture(scope="module")
def kept():
    with kept_world() as world:
        yield world


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
    "generate_stream": ("/v2/models/ensemble/generate_stream", {"text_input": PROMPT, "max_tokens": TOKENS, "stream": True, "end_id": -1}),
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
    body = json.dumps({"text_input": PROMPT, "max_tokens": max_tokens, "end_id": -1}).encode()
    request = urllib.request.Request(f"http://{world.http}/v2/models/ensemble/generate", body)
    with urllib.request.urlopen(request, timeout=60) as response:
        return response.status, json.loads(response.read())["text_output"]


def grpc_stream(world: World, prompts: list[str], begun: threading.Event, **options) -> dict[str, str]:
    """The texts of requests that run at once over one stream, by their prompts. `begun` is set when each has a response."""
    answers: queue.Queue = queue.Queue()
    texts: dict[str, str] = {}
    with grpcclient.InferenceServerClient(world.grpc, **options) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for prompt in prompts:
            client.async_stream_infer("ensemble", text_inputs(prompt, TOKENS, True, **ENDLESS), request_id=prompt, enable_empty_final_response=True)
        unfinished = set(prompts)
        while unfinished:
            result, error = answers.get(timeout=60)
            assert error is None, str(error)
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
        unary = threads.submit(client.infer, "ensemble", text_inputs(PROMPT, TOKENS, False, **ENDLESS))
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
    stop(rank_0)
    with ThreadPoolExecutor() as threads:
        url = f"http://{kept.ports.http}/v2/repository/models/ensemble/load"
        load = threads.submit(urllib.request.urlopen, urllib.request.Request(url, b"{}"), timeout=60)
        time.sleep(2)  # Until the relay has sent it, also on a busy machine.
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


def kill_relay(kept: Kept) -> None:
    relay = kept.processes()["relay"][0]
    os.kill(relay, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while kept.processes().get("relay", [relay])[0] == relay:
        assert time.monotonic() < deadline, "no other relay is started"
        time.sleep(0.02)
    kept.await_ready(10)


def complete(world: World, body: dict, **headers) -> tuple[int, dict, dict]:
    """Status, headers and answer of a completion."""
    all_headers = {"content-type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(f"http://{world.http}/v1/completions", json.dumps(body).encode(), all_headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, dict(response.headers), json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), json.load(error)


UNARY = {"model": "ensemble", "prompt": PROMPT, "max_tokens": 40, "temperature": 1.0, "ignore_eos": True}
REPLAYED = "idempotent-replayed"


def num_answered(world: World) -> float:
    """How many requests were answered."""
    page = metrics_page.families(metrics_page.page(f"localhost:{world.metrics_port}"))
    return page["nv_inference_request_success"].value(model="ensemble")


def test_a_request_with_an_idempotency_key_is_computed_once(kept):
    kept.await_ready()
    before = num_answered(kept.ports)
    long = UNARY | {"max_tokens": 200}
    with ThreadPoolExecutor() as threads:
        both = [threads.submit(complete, kept.ports, long, idempotency_key="both") for _ in range(2)]
        (status, _, first), (_, _, second) = [one.result(timeout=60) for one in both]
    assert status == 200 and first == second
    assert num_answered(kept.ports) == before + 1
    status, headers, third = complete(kept.ports, long, idempotency_key="both")
    assert (status, headers.get(REPLAYED), third) == (200, "true", first)
    # The next relay has the answer, too.
    kill_relay(kept)
    status, headers, fourth = complete(kept.ports, long, idempotency_key="both")
    assert (status, headers.get(REPLAYED), fourth) == (200, "true", first)
    assert num_answered(kept.ports) == before + 1


def test_nobody_gets_the_answer_of_another_client(kept):
    kept.await_ready()
    _, _, mine = complete(kept.ports, UNARY, idempotency_key="mine", authorization="Bearer a")
    for other in ({}, {"authorization": "Bearer b"}, {"authorization": "Bearer a", "x_api_key": "a"}):
        status, headers, theirs = complete(kept.ports, UNARY, idempotency_key="mine", **other)
        assert status == 200 and REPLAYED not in headers and theirs["id"] != mine["id"], other
    status, _, refused = complete(kept.ports, UNARY | {"max_tokens": 41}, idempotency_key="mine", authorization="Bearer a")
    assert status == 422 and "another request had this Idempotency-Key" in refused["error"]["message"]
    status, _, refused = complete(kept.ports, UNARY, idempotency_key="k" * 256)
    assert status == 400 and "Idempotency-Key has 256 bytes" in refused["error"]["message"]
    # An error is not kept.
    wrong = UNARY | {"model": "none"}
    assert [complete(kept.ports, wrong, idempotency_key="wrong")[0] for _ in range(2)] == [404, 404]
    assert REPLAYED not in complete(kept.ports, wrong, idempotency_key="wrong")[1]


def test_a_client_of_openai_does_not_notice_that_the_relay_was_killed(kept):
    """It sends a request again by itself when its connection breaks."""
    kept.await_ready()
    base = f"http://{kept.ports.http}/v1"
    with ThreadPoolExecutor() as threads, openai.OpenAI(base_url=base, api_key="-", max_retries=5, timeout=60) as client:
        ask = functools.partial(client.completions.create, model="ensemble", prompt=PROMPT, max_tokens=400, temperature=1.0,
                                extra_headers={"Idempotency-Key": "of openai"}, extra_body={"ignore_eos": True})
        # Without the worker of rank 1 it cannot be answered before the relay is killed.
        rank_1 = kept.processes()["rank"][1]
        stop(rank_1)
        try:
            answer = threads.submit(ask)
            time.sleep(0.3)
            kill_relay(kept)
        finally:
            os.kill(rank_1, signal.SIGCONT)
        first = answer.result(timeout=60)
    assert first.choices[0].text and first.usage.completion_tokens == 400
    # The parser of the client leaves out the ids of events.
    with openai.OpenAI(base_url=base, api_key="-", timeout=60) as client:
        events = client.chat.completions.create(**{key: value for key, value in CHAT.items() if key != "ignore_eos"},
                                                extra_headers={"Idempotency-Key": "a stream"})
        assert "".join(event.choices[0].delta.content or "" for event in events)


class Interrupted:
    """A stream whose connection its client may close. Has the events that came so far."""

    def __init__(self, world: World, path: str, body: dict, headers: dict):
        self.connection = http.client.HTTPConnection("localhost", world.http_port, timeout=60)
        self.connection.request("POST", path, json.dumps(body), {"content-type": "application/json", **headers})
        self.response = self.connection.getresponse()
        self.last_id, self.events = "", []

    def read(self, most: int | None = None) -> None:
        """Reads `most` further events; by default until the end."""
        lines, wanted = [], None if most is None else len(self.events) + most
        while wanted is None or len(self.events) < wanted:
            try:
                line = self.response.readline()
            except (OSError, http.client.HTTPException):
                break
            if not line:
                break
            if line.strip():
                lines.append(line.decode().strip())
                continue
            self.last_id = next((one[4:] for one in lines if one.startswith("id: ")), self.last_id)
            self.events.append("\n".join(one for one in lines if not one.startswith("id: ")))
            lines = []


@pytest.mark.parametrize("name", ["seeded", "unseeded", "choices", "generate_stream", "messages"])
def test_a_stream_goes_on_after_its_last_event_at_the_next_relay(kept, name):
    kept.await_ready()
    path, body = STREAMS[name]
    stream = Interrupted(kept.ports, path, body, {"idempotency-key": name})
    stream.read(10)
    kill_relay(kept)
    events, last = list(stream.events), stream.last_id
    assert len(events) == 10 and last
    rest = Interrupted(kept.ports, path, body, {"last-event-id": last})
    rest.read()
    # The whole answer, which the same key gets from its beginning.
    whole = Interrupted(kept.ports, path, body, {"idempotency-key": name})
    whole.read()
    # Choices may come in another order.
    in_order = sorted if name == "choices" else list
    assert in_order(without_counts(events + rest.events)) == in_order(without_counts(whole.events))
    assert text_of([line for event in whole.events for line in event.splitlines()])
    # A client may go on more than once.
    nothing = Interrupted(kept.ports, path, body, {"last-event-id": whole.last_id})
    nothing.read()
    assert nothing.response.status == 200 and nothing.events == []
    other = Interrupted(kept.ports, path, body | {"max_tokens": TOKENS, **OTHER_PROMPT[path]}, {"last-event-id": last})
    other.read()
    assert "events before the one of Last-Event-ID differ" in "".join(other.events)


def without_counts(events: list[str]) -> list[str]:
    """Events without what depends on the prefix cache."""
    return [re.sub(r'"(cached_tokens|cache_\w+_tokens|input_tokens)": ?\d+', "", event) for event in events]


OTHER_PROMPT = {
    "/v1/completions": {"prompt": "The little dog"},
    "/v2/models/ensemble/generate_stream": {"text_input": "The little dog"},
    "/v1/messages": {"messages": [{"role": "user", "content": "The little dog"}]},
}


def test_ids_of_events_are_refused_by_name_and_sent_only_if_asked_for(kept):
    kept.await_ready()
    path, body = STREAMS["completion"]
    plain = Stream(kept.ports, path, body).answer()
    assert not [line for line in plain if line.startswith("id:")]
    for wrong in ("5", "1-2-3-x", "1" * 2000):
        status, _, refused = complete(kept.ports, body, last_event_id=wrong)
        assert status == 400 and "Last-Event-ID" in refused["error"]["message"], wrong


def test_streams_survive_a_rolling_restart_and_a_plain_one(kept):
    """Also a gRPC stream that is never without a request."""
    kept.await_ready()
    is_over = threading.Event()
    with ThreadPoolExecutor() as threads:
        requests = threads.submit(one_after_the_other, kept.ports, is_over)
        try:
            for words in (["--rolling"], []):
                before = kept.processes()["rank"][0]
                stream = Stream(kept.ports, *STREAMS["completion"])
                restarted = launch("restart", f"--http_port={kept.ports.http_port}", *words)
                assert restarted.returncode == 0, restarted.stderr
                assert text_of(stream.answer())
                assert kept.processes()["rank"][0] != before
                assert generate(kept.ports, 4)[0] == 200
        finally:
            is_over.set()
        texts = requests.result(timeout=60)
    assert len(texts) > 2 and len(set(texts)) == 1 and texts[0], texts


def one_after_the_other(world: World, is_over: threading.Event) -> list[str]:
    """Sends requests over one gRPC stream, each when the last one is answered, until `is_over`. Returns their texts."""
    answers: queue.Queue = queue.Queue()
    texts = []
    with grpcclient.InferenceServerClient(world.grpc) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        while not is_over.is_set():
            client.async_stream_infer("ensemble", text_inputs(PROMPT, 8, False), request_id=str(len(texts)))
            result, error = answers.get(timeout=60)
            assert error is None, str(error)
            texts.append(result.as_numpy("text_output").reshape(-1)[0].decode())
        client.stop_stream()
    return texts


def test_it_is_refused_where_rank_0_is_elsewhere():
    with tempfile.TemporaryDirectory() as folder:
        refused = launch(f"--model_repo={folder}", "--keep_connections", "--hosts=a:1,b:1", "--world_size=2", "--dry_run")
    assert refused.returncode == 1 and "--keep-connections needs rank 0 on this machine" in refused.stderr, refused.stderr
