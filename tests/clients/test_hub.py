"""The cache of `trireme pull` and that of Python's huggingface_hub are one: each reads what the other has downloaded."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import BINARIES, ROOT

NAME = "demo/tiny-stories"
CHECKPOINT = ROOT / "model_repository/tensorrt_llm/1"


class Site:
    """A hub with one model, and a cache."""

    def __init__(self, url: str, folder: Path):
        self.cache = folder / "cache"
        names = ("HF_", "HUGGING", "TRANSFORMERS_", "XDG_")
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith(names)}
        self.environment |= {"HF_ENDPOINT": url, "HF_HOME": str(folder), "HF_HUB_CACHE": str(self.cache), "HF_HUB_DISABLE_XET": "1"}

    def run(self, *command: str, offline: bool = False) -> subprocess.CompletedProcess:
        environment = self.environment | ({"HF_HUB_OFFLINE": "1"} if offline else {})
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)

    def pull(self, offline: bool = False) -> subprocess.CompletedProcess:
        return self.run(BINARIES / "trireme", "pull", NAME, offline=offline)

    def python(self, code: str, offline: bool = False) -> str:
        """What a new interpreter prints, because huggingface_hub reads the environment when it is imported."""
        code = f"from huggingface_hub import hf_hub_download, scan_cache_dir, snapshot_download\nimport json\n{code}"
        done = self.run(sys.executable, "-c", code, offline=offline)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def blobs(self) -> dict[str, tuple[int, int]]:
        """Inode and time of each blob, which change when it is downloaded again."""
        blobs = (self.cache / "models--demo--tiny-stories/blobs").iterdir()
        return {blob.name: (blob.stat().st_ino, blob.stat().st_mtime_ns) for blob in blobs}


@pytest.fixture
def site(tmp_path):
    server = subprocess.Popen(
        [BINARIES / "examples/hub_server", NAME, CHECKPOINT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield Site(server.stdout.readline().strip(), tmp_path)
    finally:
        server.stdin.close()
        server.wait(timeout=60)


def test_python_reads_what_trireme_has_pulled(site):
    pulled = site.pull()
    assert pulled.returncode == 0, pulled.stderr
    assert "downloading model.safetensors" in pulled.stderr
    folder = Path(pulled.stdout.strip())
    assert site.python(f"print(snapshot_download({NAME!r}))", offline=True) == str(folder)
    config = site.python(f"print(hf_hub_download({NAME!r}, 'config.json'))", offline=True)
    assert json.loads(Path(config).read_text()) == json.loads((CHECKPOINT / "config.json").read_text())
    code = """
info = scan_cache_dir()
repository, = info.repos
revision, = repository.revisions
print(json.dumps([repository.repo_id, sorted(revision.refs), len(revision.files), len(info.warnings)]))
"""
    assert json.loads(site.python(code)) == [NAME, ["main"], len(list(folder.iterdir())), 0]


def test_python_downloads_only_what_trireme_left_out(site):
    assert site.pull().returncode == 0
    before = site.blobs()
    site.python(f"snapshot_download({NAME!r})")
    after = site.blobs()
    assert before.items() <= after.items()


def test_trireme_reads_what_python_has_downloaded(site):
    folder = site.python(f"print(snapshot_download({NAME!r}))")
    before = site.blobs()
    for offline in (False, True):
        pulled = site.pull(offline=offline)
        assert (pulled.returncode, pulled.stdout.strip(), pulled.stderr) == (0, folder, "")
    assert site.blobs() == before
    listed = site.run(BINARIES / "trireme", "list").stdout
    assert NAME in listed and "main (11111111)" in listed and "incomplete" not in listed


def test_a_part_of_a_model_is_completed(site):
    site.python(f"hf_hub_download({NAME!r}, 'config.json')")
    pulled = site.pull(offline=True)
    assert pulled.returncode == 1 and "is not complete in" in pulled.stderr, pulled.stderr
    assert "incomplete" in site.run(BINARIES / "trireme", "list").stdout
    pulled = site.pull()
    assert pulled.returncode == 0, pulled.stderr
    assert "downloading config.json" not in pulled.stderr and "downloading model.safetensors" in pulled.stderr
