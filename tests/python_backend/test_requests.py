"""What a model sees of a request, and what its response carries."""

import json

import ml_dtypes
import numpy as np
import tritonclient.grpc as grpcclient
from asking import ask, text


def test_types_and_shapes_survive_both_ways(grpc):
    values = {
        "FP32": np.linspace(-1, 1, 2000, dtype=np.float32),
        "FP16": np.array([1.5, -0.25], np.float16),
        "BOOL": np.array([[True, False, True]]),
        "UINT64": np.array([0, 2**64 - 1], np.uint64),
        "TEXT": np.array([b"", "süß".encode(), b"\x00\xff" * 3000], dtype=object),
    }
    answer = ask(grpc, "echo", values)
    for name, value in values.items():
        assert answer.as_numpy(name).tolist() == value.tolist(), name
        assert answer.as_numpy(name).shape == value.shape


def test_bf16_travels_through_dlpack(grpc):
    value = np.array([1.0, -2.0, 0.5], ml_dtypes.bfloat16)
    answer = ask(grpc, "echo", {"BF16": value})
    assert answer.as_numpy("BF16").astype(np.float32).tolist() == [1.0, -2.0, 0.5]


def test_empty_tensors_survive(grpc):
    answer = ask(grpc, "echo", {"FP16": np.zeros(0, np.float16), "TEXT": np.zeros(0, dtype=object)})
    assert answer.as_numpy("FP16").shape == (0,) and answer.as_numpy("TEXT").shape == (0,)


def test_a_model_knows_the_request(grpc):
    outputs = [grpcclient.InferRequestedOutput("REQUEST"), grpcclient.InferRequestedOutput("TEXT")]
    answer = ask(
        grpc, "echo", {"TEXT": text("x")}, request_id="ä1", sequence_id=2**62, sequence_start=True, sequence_end=True,
        priority=2, timeout=5_000_000, outputs=outputs, parameters={"flag": True, "number": -7, "word": "w"},
    )
    known = json.loads(answer.as_numpy("REQUEST")[0])
    assert known == {
        "id": "ä1",
        "correlation_id": 2**62,
        "flags": 3,
        "priority": 2,
        "timeout": 5_000_000,
        "parameters": {"flag": True, "number": -7, "word": "w"},
        "outputs": ["REQUEST", "TEXT"],
        "cancelled": False,
    }
    parameters = answer.get_response().parameters
    assert parameters["kept"].bool_param is True and parameters["n"].int64_param == 3
