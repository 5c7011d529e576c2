"""The tarball, the list of crates and the checksums."""

import hashlib
import json
import re
import subprocess
import sys
import tarfile
import textwrap

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from conftest import BINARIES, ROOT, package


def only(folder, pattern):
    (found,) = folder.glob(pattern)
    return found


@pytest.fixture(scope="module")
def unpacked(packages, tmp_path_factory):
    target = tmp_path_factory.mktemp("tarball")
    with tarfile.open(only(packages[0], "*-linux.tar.gz")) as archive:
        archive.extractall(target, filter="tar")
    return only(target, "trireme-*")


def test_programs_run_where_the_tarball_is_unpacked(unpacked):
    script = """
        launch --model_repo=share/trireme/model_repository --device=cpu --dry-run
        trireme --version && launch --version
        trireme lint share/trireme/model_repository
    """
    done = subprocess.run(["bash", "-ec", script], cwd=unpacked, env={"PATH": f"{unpacked}/bin:/usr/bin:/bin"}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{unpacked}/bin/trireme rank" in done.stdout


def test_the_tarball_has_texts_unit_completions_and_man_pages(unpacked):
    share = unpacked / "share"
    for name in ["README.md", "LICENSE", "NOTICE", "THIRD_PARTY_LICENSES", "docs/operations.md"]:
        assert (share / "doc/trireme" / name).stat().st_size > 100, name
    for name in ["trireme.service", "trireme.conf", "monitoring/trireme.rules.yml", "slurm/trireme.sub"]:
        assert (share / "trireme" / name).is_file(), name
    for program in ["trireme", "launch"]:
        bash = share / "bash-completion/completions" / program
        assert subprocess.run(["bash", "-n", bash]).returncode == 0
        assert f"#compdef {program}" in (share / f"zsh/site-functions/_{program}").read_text()
        assert (share / f"fish/vendor_completions.d/{program}.fish").stat().st_size > 1000
    assert ".TH" in (share / "man/man1/launch-restart.1").read_text()


def test_bash_completes_sub_commands_and_flags(unpacked):
    script = """
        source "$1" && COMP_WORDS=($2 "$3") COMP_CWORD=1
        $(complete -p $2 | sed 's/.*-F \\([^ ]*\\).*/\\1/') $2 "$3" $2
        printf '%s\\n' "${COMPREPLY[@]}"
    """
    folder = unpacked / "share/bash-completion/completions"
    for program, typed, wanted in [("trireme", "se", "serve"), ("launch", "--world", "--world-size")]:
        done = subprocess.run(["bash", "-c", script, "complete", folder / program, program, typed], capture_output=True, text=True)
        assert wanted in done.stdout.split(), done


def test_the_same_programs_give_the_same_bytes(packages, tmp_path):
    package(tmp_path, "tarball", "chart", "sbom")
    for path in tmp_path.iterdir():
        if path.name != "SHA256SUMS":
            assert path.read_bytes() == (packages[0] / path.name).read_bytes(), path.name


def test_the_report_names_size_and_glibc(packages):
    size, glibc = re.search(r"linux\.tar\.gz: ([\d.]+) MB, needs glibc ([\d.]+)", packages[1]).groups()
    assert float(size) < 60
    newest = max((int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", (BINARIES / "trireme").read_bytes())))
    assert glibc == f"2.{newest}"


def test_a_tarball_above_the_limit_is_refused(tmp_path):
    script = """
        import pathlib, sys
        sys.path.insert(0, "packaging/build")
        import release, tarball
        tarball.MAX_BYTES = 1000
        binaries, out = map(pathlib.Path, sys.argv[1:])
        tarball.build(release.Release(binaries, out), out)
    """
    command = [sys.executable, "-B", "-c", textwrap.dedent(script), BINARIES, tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "at most 0 are allowed" in done.stderr, done


def test_checksums_hold_for_every_file(packages):
    folder, _ = packages
    lines = dict(reversed(line.split("  ")) for line in (folder / "SHA256SUMS").read_text().splitlines())
    assert set(lines) == {path.name for path in folder.iterdir()} - {"SHA256SUMS"} and len(lines) == 5
    for name, wanted in lines.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == wanted, name


def test_the_list_of_crates_is_cyclonedx_and_complete(packages):
    text = only(packages[0], "*.cdx.json").read_text()
    errors = JsonStrictValidator(SchemaVersion.V1_5).validate_str(text)
    assert errors is None, errors
    found = {entry["name"]: entry for entry in json.loads(text)["components"]}
    assert {"tokio", "h2", "mpi", "ring"} <= set(found) and "criterion" not in found
    assert re.fullmatch(r"[0-9a-f]{64}", found["tokio"]["hashes"][0]["content"])
