"""TLS ends at the relay of `launch --keep-connections`: its clients see a pause when rank 0 is killed, as those without TLS."""

import os
import signal
import ssl
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException

import openai
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from test_keep_connections import PROMPT, TOKENS, grpc_stream, kept_world
from triton_requests import text_inputs


@pytest.fixture(scope="module")
def kept(certificates):
    flags = []
    for port in ("http", "grpc"):
        flags += [f"--{port}-use-ssl-mutual=true", f"--{port}-root-cert={certificates}/root.pem"]
        flags += [f"--{port}-server-cert={certificates}/server.pem", f"--{port}-server-key={certificates}/server.key"]
    with kept_world(*flags, "--metrics-use-ssl=true") as world:
        yield world


@pytest.fixture(scope="module")
def trust(certificates):
    """The root certificate, and one of a client."""
    context = ssl.create_default_context(cafile=certificates / "root.pem")
    context.load_cert_chain(certificates / "client.pem", certificates / "client.key")
    return context


@pytest.fixture(scope="module")
def grpc_options(certificates):
    return {
        "ssl": True,
        "root_certificates": str(certificates / "root.pem"),
        "private_key": str(certificates / "client.key"),
        "certificate_chain": str(certificates / "client.pem"),
    }


def await_ready(kept, trust, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(f"https://{kept.ports.http}/v2/health/ready", context=trust, timeout=10):
                return
        except urllib.error.URLError:
            assert time.monotonic() < deadline, f"not ready after {seconds} s"
            time.sleep(0.05)


def test_all_ports_serve_over_tls_only(kept, trust, grpc_options):
    await_ready(kept, trust)
    metrics = f"https://localhost:{kept.ports.metrics_port}/metrics"
    assert b"trireme_server_ready 1" in urllib.request.urlopen(metrics, context=trust, timeout=60).read()
    with httpclient.InferenceServerClient(kept.ports.http, ssl=True, ssl_context_factory=lambda: trust) as client:
        assert client.is_server_ready() and client.is_model_ready("ensemble")
    with grpcclient.InferenceServerClient(kept.ports.grpc, **grpc_options) as client:
        assert client.is_server_ready()
        answer = client.infer("ensemble", text_inputs(PROMPT, 4, False))
        assert answer.as_numpy("text_output").reshape(-1)[0]
    for port in (kept.ports.http_port, kept.ports.metrics_port):
        with pytest.raises((OSError, HTTPException)):
            urllib.request.urlopen(f"http://localhost:{port}/metrics", timeout=60)
    without = {"ssl": True, "root_certificates": grpc_options["root_certificates"]}
    with grpcclient.InferenceServerClient(kept.ports.grpc, **without) as client, pytest.raises(InferenceServerException):
        client.is_server_live(client_timeout=5)


def test_streams_over_tls_go_on_when_rank_0_is_killed(kept, trust, grpc_options):
    await_ready(kept, trust)
    prompts = [PROMPT, "The little dog"]
    undisturbed = grpc_stream(kept.ports, prompts, threading.Event(), **grpc_options)
    rank_0, begun = kept.processes()["rank"][0], threading.Event()
    base = f"https://{kept.ports.http}/v1"
    http_client = openai.DefaultHttpxClient(verify=trust)
    with ThreadPoolExecutor() as threads, openai.OpenAI(base_url=base, api_key="-", http_client=http_client, max_retries=0) as client:
        stream = threads.submit(grpc_stream, kept.ports, prompts, begun, **grpc_options)
        body = {"model": "ensemble", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "extra_body": {"ignore_eos": True}}
        events = client.completions.create(stream=True, **body)
        pieces = [next(events).choices[0].text]
        assert begun.wait(timeout=30) and not stream.done(), "the stream had ended"
        os.kill(rank_0, signal.SIGKILL)
        pieces += [event.choices[0].text for event in events]
        assert stream.result(timeout=60) == undisturbed
        assert "".join(pieces) == client.completions.create(**body).choices[0].text
    await_ready(kept, trust)
    assert kept.processes()["rank"][0] != rank_0
