"""A client that disconnects in the middle of a stream uses no more resources of the server."""

import http.client
import json
import time

import tritonclient.grpc as grpcclient

from triton_requests import ANSWER, ENDLESS, QUESTION, STORY, stream, text_inputs

# Without an end token the model generates until the limit, long enough to disconnect meanwhile.


def running_sequences(world) -> float:
    """Number of requests that run in the language model, from the metrics page."""
    connection = http.client.HTTPConnection("localhost", world.metrics_port, timeout=10)
    connection.request("GET", "/metrics")
    page = connection.getresponse().read().decode()
    connection.close()
    lines = [line for line in page.splitlines() if line.startswith("nv_trt_llm_request_metrics") and 'request_type="active"' in line]
    assert lines, "the metrics page has no nv_trt_llm_request_metrics"
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def wait_until(condition, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_a_request_is_cancelled_when_its_grpc_client_disconnects(world, grpc):
    leaving = grpcclient.InferenceServerClient(world.grpc)
    answers = []
    leaving.start_stream(lambda result, error: answers.append(error))
    leaving.async_stream_infer("ensemble", text_inputs(STORY, 1900, True, **ENDLESS))
    assert wait_until(lambda: len(answers) > 3, 30) and running_sequences(world) == 1
    leaving.stop_stream(cancel_requests=True)
    leaving.close()
    assert wait_until(lambda: running_sequences(world) == 0, 2)
    assert "".join(stream(grpc, text_inputs(QUESTION, 32, True))[0]) == ANSWER


def test_a_request_is_cancelled_when_its_http_client_disconnects(world, grpc):
    connection = http.client.HTTPConnection("localhost", world.http_port, timeout=30)
    body = json.dumps({"text_input": STORY, "max_tokens": 1900, "stream": True, "end_id": -1})
    connection.request("POST", "/v2/models/ensemble/generate_stream", body)
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ")
    connection.sock.close()
    response.close()
    assert wait_until(lambda: running_sequences(world) == 0, 2)
    assert "".join(stream(grpc, text_inputs(QUESTION, 32, True))[0]) == ANSWER
