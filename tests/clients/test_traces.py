"""Traces: an OpenTelemetry collector receives spans over HTTP, with Triton's names."""

import json
import threading
import time
import urllib.request
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from serving import IDENTITY, rank

ENSEMBLE = """
platform: "ensemble"
input [ { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] } ]
ensemble_scheduling { step [ { model_name: "identity" model_version: -1
  input_map { key: "INPUT0" value: "IN" } output_map { key: "OUTPUT0" value: "OUT" } } ] }
"""
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = {"traceparent": f"00-{TRACE}-{SPAN}-01"}


class Collector:
    """A server that records the requests posted to it."""

    def __init__(self):
        self.posts = posts = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                posts.append((self.path, self.headers["Content-Type"], ExportTraceServiceRequest.FromString(body)))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def spans(self) -> list:
        scopes = [scope for _, _, post in list(self.posts) for resource in post.resource_spans for scope in resource.scope_spans]
        return [span for scope in scopes for span in scope.spans]

    def await_spans(self, count: int, seconds: float = 60) -> dict:
        deadline = time.monotonic() + seconds
        while len(self.spans()) < count:
            assert time.monotonic() < deadline, f"{self.spans()}"
            time.sleep(0.02)
        return {span.name: span for span in self.spans()}


@pytest.fixture
def collector():
    collector = Collector()
    yield collector
    collector.server.shutdown()


@contextmanager
def traced(folder, url: str, *more: str):
    settings = ["mode=opentelemetry", f"opentelemetry,url={url}", "level=TIMESTAMPS", *more]
    with rank(folder, *[f"--trace-config={setting}" for setting in settings], identity=IDENTITY, ens=ENSEMBLE) as server:
        yield server


def infer(server, model: str, name: str, headers: dict[str, str] = {}):
    body = {"id": "r7", "inputs": [{"name": name, "datatype": "FP32", "shape": [2], "data": [1, 2]}]}
    request = urllib.request.Request(f"http://{server.http}/v2/models/{model}/infer", json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request, timeout=60))


def attributes(items) -> dict:
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in items}


def test_an_ensembles_spans_are_children_of_the_clients_span(tmp_path, collector):
    more = ["rate=1000000", "opentelemetry,bsp_schedule_delay=50", "opentelemetry,resource=service.version=3"]
    with traced(tmp_path, collector.url, *more) as server:
        infer(server, "ens", "IN")  # Not sampled at a rate of one in a million, and without a span of the client.
        infer(server, "ens", "IN", PARENT)
        collector.await_spans(4)
        settings = json.load(urllib.request.urlopen(f"http://{server.http}/v2/trace/setting", timeout=60))
    assert settings["trace_mode"] == "opentelemetry"
    path, content_type, post = collector.posts[0]
    assert (path, content_type) == ("/v1/traces", "application/x-protobuf")
    assert attributes(post.resource_spans[0].resource.attributes) == {"service.name": "triton-inference-server", "service.version": "3"}
    spans = {span.name: span for span in collector.spans()}
    assert {span.trace_id.hex() for span in collector.spans()} == {TRACE}
    assert len({span.span_id for span in collector.spans()}) == len(collector.spans())
    root, ensemble, model = spans["InferRequest"], spans["ens"], spans["identity"]
    assert root.parent_span_id.hex() == SPAN
    assert ensemble.parent_span_id == root.span_id and model.parent_span_id == ensemble.span_id
    parts = [span for span in collector.spans() if span.name == "compute"]
    assert model.span_id in {span.parent_span_id for span in parts}
    root_attributes, inner = attributes(ensemble.attributes), attributes(model.attributes)
    assert (root_attributes["triton.model_name"], root_attributes["triton.model_version"], root_attributes["triton.request_id"]) == ("ens", 1, "r7")
    assert root_attributes["triton.trace_parent_id"] == 0 and inner["triton.trace_parent_id"] == root_attributes["triton.trace_id"]
    assert [event.name for event in root.events] == ["HTTP_RECV_START", "HTTP_RECV_END", "HTTP_SEND_START", "HTTP_SEND_END"]
    assert [event.name for event in model.events][0] == "REQUEST_START" and [event.name for event in model.events][-1] == "REQUEST_END"
    for span in collector.spans():
        assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano <= root.end_time_unix_nano
        assert abs(span.start_time_unix_nano / 1e9 - time.time()) < 3600


def test_pending_spans_are_sent_at_the_end_and_grpc_has_spans_too(tmp_path, collector):
    more = ["rate=1", "opentelemetry,bsp_schedule_delay=3600000"]
    with traced(tmp_path, collector.url, *more) as server:
        with grpcclient.InferenceServerClient(server.grpc) as client:
            given = grpcclient.InferInput("INPUT0", [1], "FP32")
            given.set_data_from_numpy(np.array([1], dtype=np.float32))
            client.infer("identity", [given], headers=PARENT)
            client.infer("identity", [given])
        assert collector.spans() == []
    collector.await_spans(6)
    roots = [span for span in collector.spans() if span.name == "InferRequest"]
    assert [span.trace_id.hex() == TRACE for span in roots] == [True, False]
    assert [span.parent_span_id.hex() for span in roots] == [SPAN, ""]


def test_requests_are_answered_without_a_collector(tmp_path, collector):
    collector.server.shutdown()
    collector.server.server_close()
    more = ["rate=1", "opentelemetry,bsp_schedule_delay=1", "opentelemetry,bsp_max_queue_size=4", "opentelemetry,bsp_max_export_batch_size=2"]
    with traced(tmp_path, collector.url, *more) as server:
        for _ in range(20):
            assert infer(server, "identity", "INPUT0")["outputs"][0]["data"] == [1, 2]
        server.await_log("spans are lost: cannot post to http://127.0.0.1")
