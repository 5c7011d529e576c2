"""Stops processes."""

import os
import signal
import time
from pathlib import Path


def stop(pid: int) -> None:
    """Stops a process, and returns when each of its threads has stopped. `SIGSTOP` alone returns before: a thread that waits for a core still runs."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 30
    while not all(state_of(stat) in "TtZX" for stat in Path(f"/proc/{pid}/task").glob("*/stat")):
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(0.002)


def state_of(stat: Path) -> str:
    """The letter of a thread's state, as proc(5) names it."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"
