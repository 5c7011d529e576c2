"""Packages that `scripts/package` builds from the programs under test, and roots in which they run."""

import hashlib
import os
import shutil
import subprocess
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from roots import Root

ROOT = Path(__file__).resolve().parents[2]
BINARIES = Path(os.environ.get("TRIREME_BINARIES", ROOT / "target/debug"))
CACHE = ROOT / ".cache/debootstrap"
UBUNTU = os.environ.get("UBUNTU_MIRROR", "http://archive.ubuntu.com/ubuntu")
KEYRING = "pool/main/u/ubuntu-keyring/ubuntu-keyring_2023.11.28.1_all.deb"
KEYRING_SHA256 = "36de43b15853ccae0028e9a767613770c704833f82586f28eb262f0311adb8a8"
# Suites, and further options of `debootstrap`.
SYSTEMS = {"debian": ("bookworm", list), "ubuntu": ("noble", lambda: ubuntu_keys())}


def package(out: Path, *words: str) -> str:
    """Runs `scripts/package` and returns what it prints."""
    # The limit of the tarball's size needs gzip's level 4. xz, of the Debian package, takes four times as long with 4 as with 1.
    level = "--level=1" if words[-1] == "deb" else "--level=4"
    command = [ROOT / "scripts/package", f"--binaries={BINARIES}", f"--out={out}", level, *words]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1767225600"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def packages(tmp_path_factory):
    """The folder with all packages, and what was printed on them."""
    out = tmp_path_factory.mktemp("packages")
    return out, package(out, "tarball", "oci", "chart", "sbom") + package(out, "deb")


def archive(system):
    """An archive of a minimal system, made once."""
    needs_root()
    suite, options = SYSTEMS[system]
    archive = CACHE / f"{suite}.tar"
    if not archive.is_file():
        CACHE.mkdir(parents=True, exist_ok=True)
        folder = CACHE / f"{suite}.{os.getpid()}"
        try:
            made = subprocess.run(["debootstrap", "--variant=minbase", *options(), suite, folder, *source(system)], capture_output=True, text=True)
            if made.returncode != 0 and system == "ubuntu":
                pytest.skip(f"no Ubuntu: {made.stdout[-200:]}{made.stderr[-200:]}")
            assert made.returncode == 0, made.stdout[-2000:]
            shutil.rmtree(folder / "var/cache/apt")
            subprocess.run(["tar", "--create", f"--file={archive}.new", f"--directory={folder}", "."], check=True)
            os.replace(f"{archive}.new", archive)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return archive


def source(system):
    """Mirror and script of `debootstrap`. Debian's has no script for new releases of Ubuntu, which are all alike."""
    return [UBUNTU, "gutsy"] if system == "ubuntu" else []


def ubuntu_keys():
    """The option with the keys of Ubuntu's archive, which Debian does not have. The package with them is known by its hash."""
    path = CACHE / "ubuntu-keyring"
    if not path.is_dir():
        try:
            package = urllib.request.urlopen(f"{UBUNTU}/{KEYRING}", timeout=60).read()
        except OSError as error:
            pytest.skip(f"no Ubuntu: {UBUNTU}: {error}")
        assert hashlib.sha256(package).hexdigest() == KEYRING_SHA256
        file = CACHE / "ubuntu-keyring.deb"
        file.write_bytes(package)
        subprocess.run(["dpkg-deb", "--extract", file, path], check=True)
    return ["--include=adduser", f"--keyring={path}/usr/share/keyrings/ubuntu-archive-keyring.gpg"]


@contextmanager
def unpacked(system, folder):
    """A new root folder with the system."""
    root = folder / system
    root.mkdir()
    subprocess.run(["tar", "--extract", f"--file={archive(system)}", f"--directory={root}"], check=True)
    (root / "etc/hosts").write_text("127.0.0.1 localhost\n")
    try:
        yield Root(root)
    finally:
        shutil.rmtree(root)


@pytest.fixture
def debian_root(tmp_path):
    with unpacked("debian", tmp_path) as root:
        yield root


def needs_root():
    works = subprocess.run(["unshare", "--mount", "--net", "--pid", "--fork", "true"], capture_output=True).returncode == 0
    if os.getuid() != 0 or not works:
        pytest.skip("namespaces need root")
