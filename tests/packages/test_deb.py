"""The Debian package: what lintian says, and its life in a minimal Debian."""

import re
import subprocess
from dataclasses import replace

import pytest

from conftest import ROOT, package

CONF = "etc/trireme/trireme.conf"
# Files of dpkg and of adduser, which remain after a purge.
REMAINS = re.compile(r"var/(lib/dpkg|log/dpkg\.log|log/alternatives|cache/(ldconfig|debconf))|etc/(passwd|group|shadow|gshadow|subuid|subgid)-?$|etc/\.pwd\.lock$|run/adduser$|var/lib/trireme(/own)?$")


def deb(folder):
    (found,) = folder.glob("*.deb")
    return found


@pytest.fixture(scope="module")
def newer(tmp_path_factory):
    """A later revision of the package."""
    out = tmp_path_factory.mktemp("newer")
    package(out, "--revision=2", "deb")
    return deb(out)


def field(path, name):
    return subprocess.run(["dpkg-deb", "--field", path, name], capture_output=True, text=True, check=True).stdout.strip()


def test_lintian_has_no_remarks(packages):
    command = ["lintian", "--allow-root", "--fail-on=error,warning", "--display-level=>=warning", deb(packages[0])]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_the_package_depends_on_the_libraries_of_its_programs(packages):
    depends = field(deb(packages[0]), "Depends")
    assert re.search(r"\blibc6 \(>= 2\.\d+\)", depends) and "libgcc-s1" in depends and "adduser" in depends
    assert "openmpi-bin" in field(deb(packages[0]), "Recommends")


def test_the_unit_names_files_of_the_package(packages):
    listing = subprocess.run(["dpkg-deb", "--contents", deb(packages[0])], capture_output=True, text=True, check=True).stdout
    files = {line.split()[-1].lstrip(".") for line in listing.splitlines()}
    unit = subprocess.run(f"dpkg-deb --fsys-tarfile {deb(packages[0])} | tar -xO ./lib/systemd/system/trireme.service ./{CONF}", shell=True, capture_output=True, text=True, check=True).stdout
    assert "/opt/" not in unit
    for path in re.findall(r"(?:ExecStart=|EnvironmentFile=|file:|--model_repo=)(/[^\s\"]+)", unit):
        assert path in files or path + "/" in files, path


def test_install_serve_upgrade_remove_and_purge(packages, newer, debian_root):
    root, before = debian_root, debian_root.files()
    install(root, deb(packages[0]))
    serves(root)
    upgrade_keeps_settings(root, newer)
    own = root.path / "var/lib/trireme/own"
    own.write_text("a model of the administrator")
    root.run("dpkg", "--remove", "trireme")
    assert not (root.path / "usr/bin/launch").exists() and (root.path / CONF).is_file(), "removal keeps settings"
    cache = root.path / "var/lib/trireme/huggingface/hub"
    cache.mkdir(parents=True)
    root.run("dpkg", "--purge", "trireme")
    left = {path for path in root.files() - before if not REMAINS.match(path)}
    assert not left and own.is_file(), left


def install(root, path):
    target = root.path / "root" / path.name
    target.write_bytes(path.read_bytes())
    root.run("dpkg", "--install", f"/root/{path.name}")
    target.unlink()


def serves(root):
    """Starts what the unit starts, as its user and with its settings; systemd is not in a minimal Debian."""
    root.run("runuser", "-u", "trireme", "--", "test", "-w", "/var/lib/trireme")
    uid, gid = (root.run("id", flag, "trireme").strip() for flag in ("-u", "-g"))
    script = f"""
        set -a && . /{CONF} && set +a
        export XDG_RUNTIME_DIR=/tmp/run TRIREME_CACHE_DIR=/var/cache/trireme && mkdir -m 700 /tmp/run && cd /
        launch $TRIREME_FLAGS --device=cpu --detach
        trireme client 'Once upon a time'
        launch status && launch stop
    """
    text = replace(root, user=f"{uid}:{gid}").run("sh", "-ec", script)
    assert "serving" in text.lower() and len(text) > 200, text


def upgrade_keeps_settings(root, newer):
    conf = root.path / CONF
    changed = conf.read_text().replace("--world_size=1", "--world_size=2")
    conf.write_text(changed)
    install(root, newer)
    assert root.run("dpkg-query", "--show", "--showformat=${Version} ${Status}", "trireme").endswith("-2 install ok installed")
    assert conf.read_text() == changed, "an upgrade keeps the administrator's settings"


def test_the_scripts_of_the_package_are_plain_shell():
    for name in ["postinst", "prerm", "postrm"]:
        assert subprocess.run(["dash", "-n", ROOT / "packaging/deb" / name]).returncode == 0
