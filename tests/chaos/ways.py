"""The ways in which clients send requests: each yields the pieces of an answer as they arrive."""

import http.client
import json
import queue
from collections.abc import Iterator

import numpy as np
import tritonclient.grpc as grpcclient

from world import PYTHON_MODEL

TIMEOUT = 60.0
MODEL = "ensemble"
# An array of 80 numbers keeps the grammar in force for the whole answer.
NUMBERS = {
    "type": "object",
    "properties": {"numbers": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 80, "maxItems": 80}},
    "required": ["numbers"],
    "additionalProperties": False,
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "numbers", "schema": NUMBERS}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds numbers.", "parameters": NUMBERS}}


class Refused(Exception):
    """An error that the server has sent."""


def events(world, path: str, body: dict) -> Iterator[dict]:
    """The events of a stream over HTTP. A stream that is cut off raises `http.client.IncompleteRead`."""
    connection = http.client.HTTPConnection("127.0.0.1", world.http_port, timeout=TIMEOUT)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise Refused(f"{response.status}: {response.read().decode(errors='replace')}")
    unread = b""
    # Reads bytes: iterating over lines would hide a truncated stream.
    while more := response.read1(1 << 16):
        *lines, unread = (unread + more).split(b"\n")
        for line in lines:
            if line.startswith(b"data: ") and line != b"data: [DONE]":
                event = json.loads(line[6:])
                if "error" in event:
                    raise Refused(str(event["error"]))
                yield event


def generate_stream(world, prompt: str, num_tokens: int) -> Iterator[str]:
    body = {"text_input": prompt, "max_tokens": num_tokens, "stream": True, "end_id": -1}
    for event in events(world, f"/v2/models/{MODEL}/generate_stream", body):
        yield event["text_output"]


def completions(world, prompt: str, num_tokens: int) -> Iterator[str]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": num_tokens, "stream": True, "temperature": 0, "ignore_eos": True}
    for event in events(world, "/v1/completions", body):
        yield event["choices"][0]["text"]


def deltas(world, prompt: str, num_tokens: int, **fields) -> Iterator[dict]:
    messages = [{"role": "user", "content": prompt}]
    body = {"model": MODEL, "messages": messages, "max_tokens": num_tokens, "stream": True, **fields}
    for event in events(world, "/v1/chat/completions", body):
        yield event["choices"][0]["delta"]


def chat(world, prompt: str, num_tokens: int) -> Iterator[str]:
    """A drawn answer: it repeats because its seed is given."""
    for delta in deltas(world, prompt, num_tokens, temperature=0.8, seed=7, ignore_eos=True):
        yield delta.get("content") or ""


def constrained_chat(world, prompt: str, num_tokens: int) -> Iterator[str]:
    for delta in deltas(world, prompt, num_tokens, temperature=0, response_format=SCHEMA):
        yield delta.get("content") or ""


def tool_calls(world, prompt: str, num_tokens: int) -> Iterator[str]:
    for delta in deltas(world, prompt, num_tokens, temperature=0, tools=[TOOL], tool_choice="required"):
        for call in delta.get("tool_calls") or []:
            yield (call["function"].get("name") or "") + (call["function"].get("arguments") or "")


def messages(world, prompt: str, num_tokens: int) -> Iterator[str]:
    """Anthropic's protocol."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "max_tokens": num_tokens, "stream": True, "temperature": 0}
    for event in events(world, "/v1/messages", body):
        if event["type"] == "content_block_delta":
            yield event["delta"]["text"]


def stream_infer(world, prompt: str, num_tokens: int) -> Iterator[str]:
    answers: queue.Queue = queue.Queue()
    with grpcclient.InferenceServerClient(f"127.0.0.1:{world.grpc_port}") as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer(MODEL, inputs(prompt, num_tokens), enable_empty_final_response=True)
        while True:
            result, error = answers.get(timeout=TIMEOUT)
            if error is not None:
                raise Refused(str(error))
            response = result.get_response()
            text = result.as_numpy("text_output")
            if text is not None:
                yield text.reshape(-1)[0].decode()
            if response.parameters["triton_final_response"].bool_param:
                return


def inputs(prompt: str, num_tokens: int) -> list[grpcclient.InferInput]:
    """The input tensors of a request over gRPC."""
    values = {
        "text_input": np.array([[prompt.encode()]], dtype=object),
        "max_tokens": np.array([[num_tokens]], dtype=np.int32),
        "end_id": np.array([[-1]], dtype=np.int32),
        "stream": np.array([[True]], dtype=bool),
    }
    datatypes = {"text_input": "BYTES", "max_tokens": "INT32", "end_id": "INT32", "stream": "BOOL"}
    tensors = []
    for name, value in values.items():
        tensor = grpcclient.InferInput(name, list(value.shape), datatypes[name])
        tensor.set_data_from_numpy(value)
        tensors.append(tensor)
    return tensors


WAYS = {
    "generate": generate_stream,
    "grpc": stream_infer,
    "completions": completions,
    "chat": chat,
    "messages": messages,
    "json": constrained_chat,
    "tools": tool_calls,
}


def python_model(world, prompt: str, num_tokens: int) -> Iterator[str]:
    """A number that a Python model answers, once."""
    tensor = {"name": "INPUT", "datatype": "INT32", "shape": [1], "data": [num_tokens]}
    connection = http.client.HTTPConnection("127.0.0.1", world.http_port, timeout=TIMEOUT)
    connection.request("POST", f"/v2/models/{PYTHON_MODEL}/infer", json.dumps({"inputs": [tensor]}))
    response = connection.getresponse()
    body = json.loads(response.read())
    if response.status != 200:
        raise Refused(f"{response.status}: {body['error']}")
    yield str(body["outputs"][0]["data"][0])


# Ways that only some worlds have.
OTHER_WAYS = {PYTHON_MODEL: python_model}
