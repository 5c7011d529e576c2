"""Replays recorded requests to a Triton server and compares the responses.

The recordings are in a folder beside the project; without them the tests are skipped. Known differences are listed with their reasons in
differences.json. A test fails on a difference that is not listed, and on a listed one that no longer occurs.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests/support"))

from ports import free_ports  # noqa: E402 (needs the path above)

RECORDED = Path(os.environ.get("TRIREME_RECORDED", ROOT.parent / "shared/conformance"))
SERVER = Path(os.environ.get("TRIREME_BINARIES", ROOT / "target/debug")) / "examples/test_server"
DIFFERENCES = json.loads((Path(__file__).parent / "differences.json").read_text())
# Profiles: whether the repository contains the broken models, and which models are loaded (an empty list loads all).
PROFILES = {"none": (False, []), "explicit": (True, ["identity_fp32", "stream_text"]), "crash": (False, [])}

pytestmark = pytest.mark.skipif(not RECORDED.exists(), reason=f"no recorded answers in {RECORDED}")


def wait_until_it_listens(port: int, server: subprocess.Popen) -> None:
    for _ in range(300):
        assert server.poll() is None, f"the server ended with {server.returncode}"
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError("the server did not start within 30 s")


@pytest.mark.parametrize("profile", PROFILES)
def test_recorded_answers_come_back(profile, tmp_path):
    with_broken, loaded = PROFILES[profile]
    repository = tmp_path / "repository"
    shutil.copytree(RECORDED / "model_repo", repository)
    if with_broken:
        shutil.copytree(RECORDED / "model_repo_bad", repository, dirs_exist_ok=True)

    port = free_ports(3)[0]  # It takes the next two as well.
    # Messages contain the repository's path. A short path keeps them similar to the recorded ones.
    server = subprocess.Popen([SERVER, repository.name, str(port), *loaded], cwd=tmp_path)
    try:
        wait_until_it_listens(port, server)
        wait_until_it_listens(port + 1, server)
        report = tmp_path / "report.json"
        replay = [sys.executable, RECORDED / "replay.py", "check", "--profile", profile, "--json", report]
        subprocess.run([*replay, "--http", f"localhost:{port}", "--grpc", f"localhost:{port + 1}"], timeout=300)
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(timeout=30)

    rows = json.loads(report.read_text())
    assert rows, "nothing was replayed"
    different = {f"{row['kind']} {row['id']}": row["note"] for row in rows if row["verdict"] == "DIFF"}
    known = DIFFERENCES[profile]
    new = {case: note for case, note in different.items() if case not in known}
    assert not new, f"answers differ from those recorded: {json.dumps(new, indent=1)}"
    gone = sorted(set(known) - set(different))
    assert not gone, f"no longer different; remove them from differences.json: {gone}"
