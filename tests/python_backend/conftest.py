"""A server of the models in this folder. With TRITONSERVER set, the same tests run on that tritonserver."""

import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "support"))

from ports import free_ports  # noqa: E402 (needs the path above)

BINARIES = Path(os.environ.get("TRIREME_BINARIES", HERE.parents[1] / "target/debug"))
REAL = os.environ.get("TRITONSERVER")


@dataclass
class Server:
    """A running server."""

    process: subprocess.Popen
    http_port: int
    grpc_port: int
    metrics_port: int
    prefix: str
    log: Path

    def metrics(self) -> str:
        with urllib.request.urlopen(f"http://localhost:{self.metrics_port}/metrics", timeout=5) as reply:
            return reply.read().decode()

    def is_ready(self, path: str = "v2/health/ready") -> bool:
        try:
            with urllib.request.urlopen(f"http://localhost:{self.http_port}/{path}", timeout=5) as reply:
                return reply.status == 200
        except OSError:
            return False

    def model_pids(self, title: str) -> list[int]:
        """Pids of this server's model instances with the process title `title`."""
        children = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        pids = [int(pid) for task in children for pid in task.read_text().split()]
        return [pid for pid in pids if title.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]

    def shared_memory(self) -> list[str]:
        return [name for name in os.listdir("/dev/shm") if name.startswith(self.prefix)]


def start(repository: Path, directory: Path, *flags: str, is_ready: bool = True, wrapper: list[str] = []) -> Server:
    """Starts a server of `repository`, and waits until it is ready or, with is_ready=False, until it is live."""
    http, grpc, metrics = free_ports(3)
    prefix = f"pytest{http}_"
    command = [REAL] if REAL else [str(BINARIES / "trireme"), "rank"]
    command += [
        f"--model-repository={repository}", f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}",
        f"--backend-config=python,shm-region-prefix-name={prefix}", *flags,
    ]
    if not REAL:
        command += [f"--backend-config=python,interpreter={sys.executable}", "--device=cpu"]
    log = directory / f"server{http}.log"
    with open(log, "w") as output:
        process = subprocess.Popen([*wrapper, *command], stdout=output, stderr=subprocess.STDOUT)
    server = Server(process, http, grpc, metrics, prefix, log)
    deadline = time.monotonic() + 60
    while not server.is_ready("v2/health/ready" if is_ready else "v2/health/live"):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail("the server did not become ready:\n" + log.read_text()[-4000:])
        time.sleep(0.05)
    return server


def stop(server: Server, timeout: float = 30) -> int:
    server.process.send_signal(signal.SIGTERM)
    return server.process.wait(timeout)


def repository_of(directory: Path, *models: str) -> Path:
    root = directory / "models"
    for model in models:
        shutil.copytree(HERE / "models" / model, root / model)
    return root


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    directory = tmp_path_factory.mktemp("server")
    models = sorted(path.name for path in (HERE / "models").iterdir())
    server = start(repository_of(directory, *models), directory)
    yield server
    assert stop(server) == 0, server.log.read_text()[-4000:]
    if not REAL:
        assert server.shared_memory() == []


@pytest.fixture
def http(server):
    with httpclient.InferenceServerClient(f"localhost:{server.http_port}") as client:
        yield client


@pytest.fixture
def grpc(server):
    with grpcclient.InferenceServerClient(f"localhost:{server.grpc_port}") as client:
        yield client
