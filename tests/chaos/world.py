"""A launched world for fault injection, and checks for its leftovers."""

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests/support"))

from ports import free_ports  # noqa: E402 (needs the path above)

BINARIES = Path(os.environ.get("TRIREME_BINARIES", ROOT / "target/release"))
WORLD_SIZE = 2
# The name of a Python model, and of its process.
PYTHON_MODEL = "slow_echo"
# Shorter than the defaults, so that a stopped process is detected soon.
LIVENESS, EXIT_TIMEOUT = "--liveness-timeout=6", 20
RANK_TIMEOUTS = ["--step-timeout=5", "--heartbeat-timeout=8"]
TIMEOUT = 60.0


def until(what: str, condition, timeout: float = TIMEOUT, look: float = 0.01):
    """Waits until `condition()` is true; returns its value."""
    end = time.monotonic() + timeout
    while True:
        if value := condition():
            return value
        if time.monotonic() > end:
            raise TimeoutError(f"not within {timeout:.0f} s: {what}")
        time.sleep(look)


def environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()[1])
    except OSError:
        return None


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] not in "ZX"
    except OSError:
        return False


class World:
    """A launcher and its processes, with their own run directory."""

    def __init__(self, scratch: Path, repository: Path, variables: dict[str, str] | None = None, exit_timeout: int = EXIT_TIMEOUT,
                 keeps_connections: bool = False, rank_flags: list[str] | None = None,
                 python: str | None = None):
        self.rank_flags = RANK_TIMEOUTS + (rank_flags or [])
        if python:
            self.rank_flags.append(f"--backend-config=python,interpreter={python}")
        self.scratch, self.repository, self.keeps_connections = scratch, repository, keeps_connections
        self.http_port, self.grpc_port, self.metrics_port = free_ports(3)
        self.variables, self.exit_timeout = variables or {}, exit_timeout
        self.mark = f"chaos-{os.getpid()}-{self.http_port}"
        self.launcher: subprocess.Popen | None = None
        self.log = scratch / "launch.log"

    def environment(self) -> dict[str, str]:
        folders = dict.fromkeys(("XDG_RUNTIME_DIR", "TMPDIR", "HOME"), str(self.scratch))
        return {**os.environ, **folders, **self.variables, "TRIREME_CHAOS": self.mark}

    def launch(self, *arguments: str) -> subprocess.CompletedProcess:
        """Runs an action of `launch`."""
        command = [BINARIES / "launch", *arguments]
        return subprocess.run(command, env=self.environment(), capture_output=True, text=True, timeout=2 * TIMEOUT)

    def start(self) -> None:
        """Starts the launcher without waiting."""
        ports = [f"--http_port={self.http_port}", f"--grpc_port={self.grpc_port}", f"--metrics_port={self.metrics_port}"]
        command = [BINARIES / "launch", f"--world_size={WORLD_SIZE}", "--device=cpu", "--oversubscribe", LIVENESS]
        command += ["--keep-connections=60"] if self.keeps_connections else []
        command += [f"--exit-timeout={self.exit_timeout}", f"--model_repo={self.repository}", *ports, "--", "--threads=1", *self.rank_flags]
        with self.log.open("ab") as log:
            self.launcher = subprocess.Popen(command, cwd=ROOT, env=self.environment(), stdout=log, stderr=log)

    def start_ready(self) -> None:
        self.start()
        self.await_ready()

    def await_ready(self) -> None:
        until("the world is ready", self.is_whole)

    def is_ready(self) -> bool:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=1)
            connection.request("GET", "/v2/health/ready")
            return connection.getresponse().status == 200
        except OSError:
            return False

    def is_whole(self) -> bool:
        """Whether it is ready and has all of its processes."""
        names = ["rank 0", "rank n", "worker 0", "worker n"] + ["relay"] * self.keeps_connections
        return self.is_ready() and all(self.find(name) for name in names)

    def processes(self) -> list[int]:
        """Every process of this world, the launcher included."""
        marked = f"TRIREME_CHAOS={self.mark}".encode()
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        return [pid for pid in pids if is_alive(pid) and marked in environment(pid).split(b"\0")]

    def find(self, name: str) -> int | None:
        """The pid of the Python model, `launch`, `relay`, `mpirun`, `rank 0`, `rank n`, `worker 0` or `worker n`."""
        if name == PYTHON_MODEL:
            return max((pid for pid in self.processes() if f"{PYTHON_MODEL}_0_0" in title(pid).split()), default=None)
        if name == "launch":
            return self.launcher.pid if self.launcher and self.launcher.poll() is None else None
        start = "mpirun " if name == "mpirun" else f"trireme: {name.replace('n', '1') if name.endswith(' n') else name}"
        if name.endswith(" n"):
            start = f"trireme: {name[:-2]} {WORLD_SIZE - 1}"
        found = [pid for pid in self.processes() if title(pid).startswith(start)]
        if name == "mpirun":
            # Its children have its title until they run their own program, and `launch` asks another mpirun for its version.
            found = [pid for pid in found if " rank " in title(pid) and parent(pid) not in found]
        return max(found) if found else None

    def terminate(self) -> int:
        """Sends SIGTERM to the launcher; returns its exit code."""
        assert self.launcher is not None
        if self.launcher.poll() is None:
            self.launcher.send_signal(signal.SIGTERM)
        return self.launcher.wait(TIMEOUT)

    def kill(self) -> None:
        """Kills the remaining processes of a failed world before the next case."""
        while pids := self.processes():
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            time.sleep(0.05)
        if self.launcher:
            self.launcher.wait(TIMEOUT)

    def leftovers(self) -> list[str]:
        """Processes, shared memory, sockets and session directories that have not been removed."""
        left = [f"process {pid} ({title(pid)})" for pid in self.processes()]
        left += [f"/dev/shm/{name}" for name in shared_memory()]
        left += [str(path) for path in self.scratch.rglob("*") if path.is_socket()]
        left += [str(path) for path in self.scratch.glob("ompi.*/pid.*")]
        left += [str(path) for path in self.scratch.glob("trireme/*.json")]
        for port in (self.http_port, self.grpc_port, self.metrics_port):
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(("0.0.0.0", port))
                except OSError:
                    left.append(f"a listener on port {port}")
        return left


BEFORE = set(os.listdir("/dev/shm"))


def shared_memory() -> list[str]:
    """Files in /dev/shm that were created since this program started."""
    return sorted(set(os.listdir("/dev/shm")) - BEFORE)
