"""The examples in the documentation of Triton's Python backend, with the responses of Triton."""

import queue
import re

import numpy as np
import pytest
from infer import infer, stream, tensors
from conftest import REAL


@pytest.mark.parametrize("width", [1, 4, 1000, 300_000])
def test_add_sub(grpc, width):
    left = np.arange(width, dtype=np.float32)[np.newaxis]
    right = np.full((1, width), 0.25, dtype=np.float32)
    answer = infer(grpc, "add_sub", {"INPUT0": left, "INPUT1": right})
    np.testing.assert_array_equal(answer.as_numpy("SUM"), left + right)
    np.testing.assert_array_equal(answer.as_numpy("DIFFERENCE"), left - right)


def test_a_model_calls_another_one(grpc):
    left, right = np.ones((2, 5), np.float32), np.full((2, 5), 3, np.float32)
    answer = infer(grpc, "bls", {"INPUT0": left, "INPUT1": right})
    np.testing.assert_array_equal(answer.as_numpy("SUM"), left + right)
    np.testing.assert_array_equal(answer.as_numpy("DIFFERENCE"), left - right)


def test_a_model_gets_the_error_of_a_model_it_calls(grpc):
    inputs = {"INPUT0": np.ones((1, 5), np.float32), "INPUT1": np.ones((1, 5), np.float32)}
    with pytest.raises(Exception, match="TritonModelException: .*[Mm]odel:? 'no_such_model' is not"):
        infer(grpc, "bls", inputs, parameters={"model": "no_such_model"})


@pytest.mark.parametrize("async_for", [False, pytest.param(True, marks=pytest.mark.skipif(bool(REAL), reason="not there"))])
def test_awaited_requests_and_streams_of_other_models(grpc, async_for):
    inputs = {"INPUT": np.array([1, 2, 3], np.float32)}
    answer = infer(grpc, "bls_async", inputs, parameters={"async_for": async_for})
    np.testing.assert_array_equal(answer.as_numpy("SUMS"), [13, 26, 39])
    np.testing.assert_array_equal(answer.as_numpy("PIECES"), np.arange(40))


@pytest.mark.parametrize("count", [0, 1, 7, 500])
def test_a_model_adds_up_the_stream_of_another_one(grpc, count):
    answer = infer(grpc, "bls_square", {"IN": np.array([count], np.int32)})
    assert answer.as_numpy("SUM").tolist() == [count * count]


@pytest.mark.parametrize("count", [0, 1, 4, 300])
def test_square_sends_the_requested_number_of_responses(grpc, count):
    results = stream(grpc, "square", {"IN": np.array([count], np.int32)})
    assert [result.as_numpy("OUT").tolist() for result in results] == [[count]] * count


def test_repeat_sends_a_response_for_each_element(grpc):
    results = stream(grpc, "repeat", {"IN": np.arange(9, dtype=np.int32), "DELAY_MS": np.array([2], np.int32)})
    assert [result.as_numpy("OUT").item() for result in results] == list(range(9))


def test_a_model_completes_its_configuration(grpc):
    config = grpc.get_model_config("auto_complete", as_json=True)["config"]
    assert config["max_batch_size"] == 16 and "dynamic_batching" in config
    assert [tensor["name"] for tensor in config["input"] + config["output"]] == ["INPUT", "BATCHED"]
    answer = infer(grpc, "auto_complete", {"INPUT": np.zeros((3, 2), np.int64)})
    assert answer.as_numpy("BATCHED").tolist() == [[1]] * 3


def test_queued_requests_are_batched(grpc):
    heard = queue.Queue()
    for _ in range(64):
        inputs = tensors(INPUT=np.zeros((1, 2), np.int64))
        grpc.async_infer("auto_complete", inputs, callback=lambda result, error: heard.put(error or result))
    answers = [heard.get(timeout=20) for _ in range(64)]
    assert all(not isinstance(answer, Exception) for answer in answers)
    statistics = grpc.get_inference_statistics("auto_complete", as_json=True)["model_stats"][0]
    assert int(statistics["execution_count"]) < int(statistics["inference_count"])


def test_models_create_metrics(grpc, server):
    for value in (3.5, 0.25, 100.0):
        answer = infer(grpc, "custom_metrics", {"VALUE": np.array([value])})
    assert answer.as_numpy("VALUES").tolist()[1] == 100.0
    requests = answer.as_numpy("VALUES").tolist()[0]
    text = server.metrics()
    assert re.search(r"# TYPE test_requests_total counter", text)
    found = re.search(r"test_requests_total\{([^}]*)\} (\S+)", text)
    assert float(found[2]) == requests
    assert 'model="custom_metrics"' in found[1] and 'version="1"' in found[1]
    assert re.search(r"test_last_value(\{\})? 100", text)
    assert re.search(r'test_values_bucket\{model="custom_metrics",le="5(\.0)?"\} \d', text)
    if not REAL:
        assert "the value is now 100.0" in server.log.read_text()
