"""Requests to the shipped models through an unmodified tritonclient."""

import http.client
import json
import queue

import numpy as np
import tritonclient.grpc as grpcclient

QUESTION, ANSWER = "Q: What is the opposite of hot?\nA:", " The opposite of hot is cold."
STORY = "Once upon a time"


def tensor(name: str, values, dtype) -> grpcclient.InferInput:
    array = np.array([values], dtype=dtype)
    kinds = {np.object_: "BYTES", np.int32: "INT32", np.float32: "FP32", np.bool_: "BOOL", np.uint64: "UINT64"}
    made = grpcclient.InferInput(name, list(array.shape), kinds[dtype])
    made.set_data_from_numpy(array)
    return made


# Inputs of a request that only its number of tokens ends.
ENDLESS = {"end_id": ([-1], np.int32)}


def text_inputs(prompt: str | bytes, max_tokens: int, stream: bool, **more) -> list[grpcclient.InferInput]:
    """Inputs of the ensemble. `more`: name=(values, dtype)."""
    prompt = prompt.encode() if isinstance(prompt, str) else prompt
    inputs = [tensor("text_input", [prompt], np.object_), tensor("max_tokens", [max_tokens], np.int32), tensor("stream", [stream], np.bool_)]
    return inputs + [tensor(name, values, dtype) for name, (values, dtype) in more.items()]


def stream(client, inputs, model: str = "ensemble", timeout: float = 60, **options) -> tuple[list[str], Exception | None]:
    """Streams a request. Returns its pieces of text, and the error if it ended with one."""
    answers: queue.Queue = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    pieces = []
    try:
        client.async_stream_infer(model, inputs, enable_empty_final_response=True, **options)
        while True:
            result, error = answers.get(timeout=timeout)
            if error is not None:
                return pieces, error
            output = result.as_numpy("text_output")
            if output is not None:
                pieces.append(output.reshape(-1)[0].decode("utf-8"))
            if result.get_response().parameters["triton_final_response"].bool_param:
                return pieces, None
    finally:
        client.stop_stream()


def post(address: str, path: str, body) -> tuple[int, str, str]:
    """Status, content type and body of an HTTP POST; `body` is sent as JSON unless it is bytes."""
    connection = http.client.HTTPConnection(address, timeout=60)
    try:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.getheader("Content-Type", ""), response.read().decode()
    finally:
        connection.close()
