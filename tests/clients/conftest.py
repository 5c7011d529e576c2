"""A world of two ranks on the CPU, started by `launch`, for tests with third-party clients."""

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests/support"))

from ports import free_ports  # noqa: E402 (needs the path above)

# They run in environments of their own.
collect_ignore = ["frameworks", "node"]

BINARIES = Path(os.environ.get("TRIREME_BINARIES", ROOT / "target/debug"))


@pytest.fixture
def short_folder():
    """A folder with a short path, for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@dataclass
class World:
    """The ports of a launched world."""

    http_port: int
    grpc_port: int
    metrics_port: int

    @property
    def http(self) -> str:
        return f"localhost:{self.http_port}"

    @property
    def grpc(self) -> str:
        return f"localhost:{self.grpc_port}"


def launch(*arguments: str, timeout: float = 120) -> subprocess.CompletedProcess:
    return subprocess.run([BINARIES / "launch", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout)


@pytest.fixture(scope="session")
def world():
    ports = World(*free_ports(3))
    flags = [f"--http_port={ports.http_port}", f"--grpc_port={ports.grpc_port}", f"--metrics_port={ports.metrics_port}"]
    started = launch("--world_size=2", "--model_repo=model_repository", "--device=cpu", "--oversubscribe", "--detach", *flags)
    assert started.returncode == 0, started.stderr
    yield ports
    stopped = launch("stop", f"--http_port={ports.http_port}")
    assert stopped.returncode == 0, stopped.stderr


@pytest.fixture
def grpc(world):
    with grpcclient.InferenceServerClient(world.grpc) as client:
        yield client


@pytest.fixture
def http(world):
    with httpclient.InferenceServerClient(world.http) as client:
        yield client


@pytest.fixture(scope="session")
def certificates(tmp_path_factory):
    """A root certificate, and a server's and a client's certificate signed by it."""
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=60)

    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    openssl("req", "-x509", *key, "-keyout", "root.key", "-out", "root.pem", "-subj", "/CN=root", "-days", "2")
    for name in ("server", "client"):
        (folder / f"{name}.ext").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
        openssl("req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signed = ["-CA", "root.pem", "-CAkey", "root.key", "-CAcreateserial", "-days", "2", "-extfile", f"{name}.ext"]
        openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signed)
    return folder
