"""Ports for servers that tests start."""

import random
import socket

# Below the ports that the system gives to connections, which could take one before the server does.
FIRST, BEHIND = 10_000, 32_000


def free_ports(count: int) -> list[int]:
    """Consecutive ports of this machine on which nothing listens."""
    choice = random.SystemRandom()  # Tests that run at the same time choose others.
    while True:
        first = choice.randrange(FIRST, BEHIND - count)
        ports = list(range(first, first + count))
        if all(map(is_free, ports)):
            return ports


def is_free(port: int) -> bool:
    with socket.socket() as listener:
        try:
            listener.bind(("", port))
        except OSError:
            return False
    return True
