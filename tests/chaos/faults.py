"""Faults: signals, memory limits, full file systems, corrupted plans, and clock changes."""

import ctypes
import mmap
import os
import resource
import signal
import threading
import time
from pathlib import Path

SHM = Path("/dev/shm")
MNT_DETACH = 2


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def segv(pid: int) -> None:
    """Sends SIGSEGV repeatedly, like a real fault: Rust's handler reacts to the first by restoring the default action."""
    for _ in range(3):
        try:
            os.kill(pid, signal.SIGSEGV)
        except ProcessLookupError:
            return
        time.sleep(0.005)


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def proceed(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        pass


def limit_memory(pid: int) -> None:
    """Makes every further memory allocation from the system fail."""
    resource.prlimit(pid, resource.RLIMIT_AS, (1 << 20, 1 << 20))


ON_PROCESSES = {"SIGKILL": kill, "SIGSTOP": stop, "SIGSEGV": segv, "memory": limit_memory}


def fill(folder: Path) -> Path:
    """Fills the file system of `folder` with a file."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            pass
        try:
            while True:
                file.write(bytes(1))
        except OSError:
            pass
    return filler


class SmallFileSystem:
    """A file system of `size`, mounted at `folder` in this program's mount namespace."""

    def __init__(self, folder: Path, size: str):
        self.folder = folder
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(b"none", str(folder).encode(), b"tmpfs", 0, f"size={size}".encode()) != 0:
            raise OSError(ctypes.get_errno(), f"cannot mount on {folder}")

    def close(self) -> None:
        ctypes.CDLL(None).umount2(str(self.folder).encode(), MNT_DETACH)


class PlanCorruptor(threading.Thread):
    """Flips bits in the step plans on their way to one worker, until `done` is set."""

    def __init__(self, ring: Path):
        super().__init__(daemon=True)
        self.ring, self.done = ring, threading.Event()
        self.start()

    def run(self) -> None:
        header = 4096
        with self.ring.open("r+b") as file, mmap.mmap(file.fileno(), 0) as bytes_:
            while not self.done.is_set():
                for at in range(header, min(len(bytes_), 64 << 10), 97):
                    bytes_[at] ^= 0x40
                time.sleep(0.0005)


def newest_ring(world, kind: str) -> Path:
    """The newest ring of worker 0 for `kind` (`plan` or `output`)."""
    owner = world.find("rank 0")
    rings = [path for path in SHM.iterdir() if f"_{owner}_" in f"_{path.name}" and path.name.endswith(f"_0_{kind}")]
    return max(rings, key=lambda path: path.stat().st_mtime_ns)


def faketime() -> Path | None:
    """The path of libfaketime, which changes the clock of a program."""
    return next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)


class Clock:
    """The wall clock of a world that runs under libfaketime, which reads the offset from a file."""

    def __init__(self, file: Path):
        self.file = file
        self.jump("+0")

    def jump(self, offset: str) -> None:
        fresh = self.file.with_suffix(".new")
        fresh.write_text(offset + "\n")
        fresh.rename(self.file)

    def variables(self) -> dict[str, str]:
        return {
            "LD_PRELOAD": str(faketime()),
            "FAKETIME_TIMESTAMP_FILE": str(self.file),
            "FAKETIME_CACHE_DURATION": "0",
            # Setting the wall clock does not change the monotonic clock.
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",
        }
