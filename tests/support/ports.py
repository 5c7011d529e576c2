"""Ports for servers that tests start."""

import socket


def free_ports(count: int) -> list[int]:
    """Ports of this machine on which nothing listens, all different."""
    sockets = [socket.socket() for _ in range(count)]
    for listener in sockets:
        listener.bind(("127.0.0.1", 0))
    ports = [listener.getsockname()[1] for listener in sockets]
    for listener in sockets:
        listener.close()
    return ports
