"""Starts single ranks with given flags and models that need no checkpoint."""

import re
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

from conftest import BINARIES

IDENTITY = """
backend: "identity"
max_batch_size: 0
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""


class Rank:
    """A rank's process and its addresses."""

    def __init__(self, process: subprocess.Popen, log: Path, scheme: str = "http"):
        self.process, self.log = process, log
        self.grpc = f"localhost:{self.port('GRPCInferenceService')}"
        self.http = f"localhost:{self.port('HTTPService')}"
        self.metrics = f"localhost:{self.port('Metrics Service')}"

    def port(self, service: str, seconds: float = 60) -> int:
        return int(self.await_log(rf"Started {service} at .*:(\d+)", seconds).group(1))

    def await_log(self, pattern: str, seconds: float = 60) -> re.Match:
        deadline = time.monotonic() + seconds
        while True:
            text = self.log.read_text() if self.log.exists() else ""
            if found := re.search(pattern, text):
                return found
            assert self.process.poll() is None, f"the rank ended with {self.process.returncode}: {text}"
            assert time.monotonic() < deadline, f"`{pattern}` is not in the log after {seconds} s: {text}"
            time.sleep(0.05)


def repository(folder: Path, **models: str) -> Path:
    """Creates a repository of models, given as name=config.pbtxt, each with an empty version 1."""
    for name, config in models.items():
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(config)
    return folder


@contextmanager
def rank(folder: Path, *flags: str, prefix: str = "clients", **models: str):
    """Serves `models`, by default one called `identity`, until the block ends."""
    models_folder = repository(folder / "models", **(models or {"identity": IDENTITY}))
    with rank_of(models_folder, folder, *flags, prefix=prefix) as served:
        yield served


@contextmanager
def rank_of(models_folder: Path, folder: Path, *flags: str, prefix: str):
    """Serves a repository until the block ends, with its log in `folder`."""
    log = folder / "rank.log"
    command = [BINARIES / "trireme", "rank", f"--model-repository={models_folder}", f"--log-file={log}", "--device=cpu"]
    command += ["--http-address=127.0.0.1", "--grpc-address=127.0.0.1", "--http-port=0", "--grpc-port=0", "--metrics-port=0"]
    command += [f"--backend-config=python,shm-region-prefix-name={prefix}{folder.name[-12:]}_", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        yield Rank(process, log)
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
