"""Clients that send requests continuously while one world takes over from another."""

import http.client
import json
import queue
import socket
import threading
import time

import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

import ways


class LoadClient(threading.Thread):
    """Sends requests repeatedly through one protocol, and counts outcomes."""

    def __init__(self, world, prompt: str, expected: str, way: str):
        super().__init__(daemon=True)
        self.world, self.prompt, self.expected, self.way = world, prompt, expected, way
        self.done = threading.Event()
        self.answered, self.wrong, self.longest = 0, [], 0.0
        self.start()

    def run(self) -> None:
        ask = {"http": self.over_fresh_http, "kept http": self.over_kept_http, "grpc": self.over_grpc}[self.way]
        ask()

    def until_done(self, ask) -> None:
        while not self.done.is_set():
            begun = time.monotonic()
            try:
                text = ask()
                if not text or not self.expected.startswith(text):
                    self.wrong.append(f"{self.way}: got {text[:80]!r}")
                self.answered += 1
            except (OSError, http.client.HTTPException, InferenceServerException, queue.Empty, ValueError, KeyError) as error:
                self.wrong.append(f"{self.way}: {type(error).__name__}: {error}")
                time.sleep(0.05)
            self.longest = max(self.longest, time.monotonic() - begun)

    def body(self) -> str:
        return json.dumps({"text_input": self.prompt, "max_tokens": 8, "end_id": -1, "stream": False})

    def ask_http(self, connection: http.client.HTTPConnection) -> str:
        connection.request("POST", f"/v2/models/{ways.MODEL}/generate", self.body(), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        words = answer.read()
        if answer.status != 200:
            raise ValueError(f"{answer.status}: {words[:200]!r}")
        return json.loads(words)["text_output"]

    def over_fresh_http(self) -> None:
        def ask() -> str:
            connection = http.client.HTTPConnection("127.0.0.1", self.world.http_port, timeout=ways.TIMEOUT)
            try:
                return self.ask_http(connection)
            finally:
                connection.close()

        self.until_done(ask)

    def over_kept_http(self) -> None:
        """Uses one connection for many requests; reopens it only after `Connection: close`."""
        connection = http.client.HTTPConnection("127.0.0.1", self.world.http_port, timeout=ways.TIMEOUT)
        self.until_done(lambda: self.ask_http(connection))

    def over_grpc(self) -> None:
        with grpcclient.InferenceServerClient(f"127.0.0.1:{self.world.grpc_port}") as client:
            self.until_done(lambda: ask_grpc(client, self.prompt))


def ask_grpc(client, prompt: str) -> str:
    """Sends one short request on its own stream, over a persistent connection."""
    answers: queue.Queue = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    try:
        client.async_stream_infer(ways.MODEL, ways.inputs(prompt, 8), enable_empty_final_response=True)
        text = ""
        while True:
            result, error = answers.get(timeout=ways.TIMEOUT)
            if error is not None:
                raise error
            piece = result.as_numpy("text_output")
            text += piece.reshape(-1)[0].decode() if piece is not None else ""
            if result.get_response().parameters["triton_final_response"].bool_param:
                return text
    finally:
        client.stop_stream()


class ConnectionProbe(threading.Thread):
    """Opens connections to every port continuously, and counts refused ones."""

    def __init__(self, ports: list[int]):
        super().__init__(daemon=True)
        self.ports, self.done, self.opened, self.refused = ports, threading.Event(), 0, 0
        self.start()

    def run(self) -> None:
        while not self.done.is_set():
            for port in self.ports:
                try:
                    socket.create_connection(("127.0.0.1", port), timeout=5).close()
                    self.opened += 1
                except OSError:
                    self.refused += 1
            time.sleep(0.002)
