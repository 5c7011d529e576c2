"""Emulates a slow link between two network interfaces: forwards every frame after a delay.

usage: slow_link.py MILLISECONDS INTERFACE INTERFACE
"""

import selectors
import socket
import sys
import time
from collections import deque

SOL_PACKET, PACKET_VNET_HDR, PACKET_OUTGOING, ETH_P_ALL = 263, 15, 4, 3
# The largest frame, with segmentation left to the device, and the size of the virtio header that describes it.
LARGEST = 70_000


def end_of(interface: str) -> socket.socket:
    """A raw socket on an interface. Offloaded checksums and segmentation are passed on in a virtio header."""
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    end.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
    end.bind((interface, ETH_P_ALL))
    end.setblocking(False)
    return end


def main():
    delay = float(sys.argv[1]) / 1000
    left, right = map(end_of, sys.argv[2:4])
    under_way = deque()  # (when it arrives, where, frame), in the order of arrival
    selector = selectors.DefaultSelector()
    selector.register(left, selectors.EVENT_READ, right)
    selector.register(right, selectors.EVENT_READ, left)
    print("joined", flush=True)
    while True:
        wait = max(0, under_way[0][0] - time.monotonic()) if under_way else None
        for key, _ in selector.select(wait):
            try:
                frame, address = key.fileobj.recvfrom(LARGEST)
            except OSError:
                continue  # The interface is down.
            if address[2] != PACKET_OUTGOING:
                under_way.append((time.monotonic() + delay, key.data, frame))
        while under_way and under_way[0][0] <= time.monotonic():
            _, end, frame = under_way.popleft()
            try:
                end.send(frame)
            except OSError:
                pass  # The frame is lost, as on a real link.


main()
