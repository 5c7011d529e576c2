"""Measures the round-trip time of one byte over TCP in milliseconds: the minimum of five.

usage: round_trip.py serve|ask ADDRESS
"""

import socket
import sys
import time

PORT, COUNT = 7, 5


def serve(address: str):
    with socket.create_server((address, PORT)) as listener:
        print("listening", flush=True)
        stream, _ = listener.accept()
        for _ in range(COUNT):
            stream.sendall(stream.recv(1))


def ask(address: str):
    def once() -> float:
        begun = time.monotonic()
        stream.sendall(b"?")
        stream.recv(1)
        return time.monotonic() - begun

    with socket.create_connection((address, PORT), timeout=20) as stream:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        print(int(min(once() for _ in range(COUNT)) * 1000))


{"serve": serve, "ask": ask}[sys.argv[1]](sys.argv[2])
