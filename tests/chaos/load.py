"""Clients that stream text over HTTP and gRPC, and record the outcomes."""

import http.client
import json
import queue
import threading
import time
from dataclasses import dataclass, field

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

TIMEOUT = 60.0
MODEL = "ensemble"
NUM_TOKENS = 200
SHORT = ["Once upon a time", "The captain", "A little dog", "Q: What is 7 plus 8?\nA:"]
LONG = [" ".join([prompt] + ["and then they went to the big red house"] * 40) for prompt in SHORT]


@dataclass
class Outcome:
    """The outcome of one request."""

    prompt: str
    protocol: str
    pieces: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    error: str | None = None
    has_ended: bool = False

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def longest_pause(self) -> float:
        """The longest time between two pieces, in seconds."""
        return max((later - earlier for earlier, later in zip(self.times, self.times[1:])), default=0.0)


class Request(threading.Thread):
    """One request on its own connection."""

    def __init__(self, world, prompt: str, protocol: str, num_tokens: int = NUM_TOKENS):
        super().__init__(daemon=True)
        self.world, self.num_tokens = world, num_tokens
        self.outcome = Outcome(prompt, protocol)
        self.first_pieces = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            self.over_http() if self.outcome.protocol == "http" else self.over_grpc()
        except (OSError, http.client.HTTPException, InferenceServerException) as error:
            self.outcome.error = self.outcome.error or f"{type(error).__name__}: {error}"
        self.outcome.has_ended = True
        self.first_pieces.set()

    def add_piece(self, piece: str) -> None:
        self.outcome.pieces.append(piece)
        self.outcome.times.append(time.monotonic())
        if len(self.outcome.pieces) == 5:
            self.first_pieces.set()

    def over_http(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.world.http_port, timeout=TIMEOUT)
        body = {"text_input": self.outcome.prompt, "max_tokens": self.num_tokens, "stream": True, "end_id": -1}
        connection.request("POST", f"/v2/models/{MODEL}/generate_stream", json.dumps(body))
        response = connection.getresponse()
        if response.status != 200:
            self.outcome.error = f"{response.status}: {response.read().decode(errors='replace')}"
            return
        unread = b""
        # Reads bytes: iterating over lines would hide a truncated stream.
        while more := response.read1(1 << 16):
            *lines, unread = (unread + more).split(b"\n")
            for line in lines:
                if line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        self.outcome.error = event["error"]
                        return
                    self.add_piece(event["text_output"])

    def over_grpc(self) -> None:
        answers: queue.Queue = queue.Queue()
        with grpcclient.InferenceServerClient(f"127.0.0.1:{self.world.grpc_port}") as client:
            client.start_stream(lambda result, error: answers.put((result, error)))
            client.async_stream_infer(MODEL, inputs(self.outcome.prompt, self.num_tokens), enable_empty_final_response=True)
            while True:
                try:
                    result, error = answers.get(timeout=TIMEOUT)
                except queue.Empty:
                    return
                if error is not None:
                    self.outcome.error = str(error)
                    return
                response = result.get_response()
                text = result.as_numpy("text_output")
                if text is not None:
                    self.add_piece(text.reshape(-1)[0].decode())
                if response.parameters["triton_final_response"].bool_param:
                    return


def inputs(prompt: str, num_tokens: int) -> list[grpcclient.InferInput]:
    values = {
        "text_input": np.array([[prompt.encode()]], dtype=object),
        "max_tokens": np.array([[num_tokens]], dtype=np.int32),
        "end_id": np.array([[-1]], dtype=np.int32),
        "stream": np.array([[True]], dtype=bool),
    }
    datatypes = {"text_input": "BYTES", "max_tokens": "INT32", "end_id": "INT32", "stream": "BOOL"}
    asked = []
    for name, value in values.items():
        tensor = grpcclient.InferInput(name, list(value.shape), datatypes[name])
        tensor.set_data_from_numpy(value)
        asked.append(tensor)
    return asked


def send(world, prompts: list[str], num_tokens: int = NUM_TOKENS) -> list[Request]:
    """Sends one request per prompt, alternating between HTTP and gRPC."""
    return [Request(world, prompt, ("http", "grpc")[i % 2], num_tokens) for i, prompt in enumerate(prompts)]


def wait(requests: list[Request], timeout: float = TIMEOUT) -> list[Outcome]:
    end = time.monotonic() + timeout
    for request in requests:
        request.join(max(0.0, end - time.monotonic()))
    return [request.outcome for request in requests]
