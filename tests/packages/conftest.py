"""Packages that `scripts/package` builds from the programs under test, and roots in which they run."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from roots import Root

ROOT = Path(__file__).resolve().parents[2]
BINARIES = Path(os.environ.get("TRIREME_BINARIES", ROOT / "target/debug"))
# A minimal Debian, made once.
DEBIAN = "bookworm"
CACHE = ROOT / ".cache/debootstrap"


def package(out: Path, *words: str) -> str:
    """Runs `scripts/package` and returns what it prints."""
    command = [ROOT / "scripts/package", f"--binaries={BINARIES}", f"--out={out}", "--level=1", *words]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1767225600"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def packages(tmp_path_factory):
    """The folder with all packages, and what was printed on them."""
    out = tmp_path_factory.mktemp("packages")
    return out, package(out, "all")


@pytest.fixture(scope="session")
def debian():
    """An archive of the minimal Debian."""
    needs_root()
    archive = CACHE / f"{DEBIAN}.tar"
    if not archive.is_file():
        CACHE.mkdir(parents=True, exist_ok=True)
        folder = CACHE / f"{DEBIAN}.{os.getpid()}"
        try:
            made = subprocess.run(["debootstrap", "--variant=minbase", DEBIAN, folder], capture_output=True, text=True)
            assert made.returncode == 0, made.stdout[-2000:]
            shutil.rmtree(folder / "var/cache/apt")
            subprocess.run(["tar", "--create", f"--file={archive}.new", f"--directory={folder}", "."], check=True)
            os.replace(f"{archive}.new", archive)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return archive


@pytest.fixture
def debian_root(debian, tmp_path):
    root = tmp_path / "debian"
    root.mkdir()
    subprocess.run(["tar", "--extract", f"--file={debian}", f"--directory={root}"], check=True)
    (root / "etc/hosts").write_text("127.0.0.1 localhost\n")
    yield Root(root)
    shutil.rmtree(root)


def needs_root():
    works = subprocess.run(["unshare", "--mount", "--net", "--pid", "--fork", "true"], capture_output=True).returncode == 0
    if os.getuid() != 0 or not works:
        pytest.skip("namespaces need root")
