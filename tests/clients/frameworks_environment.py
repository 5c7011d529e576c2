"""Runs test cases of frameworks in a Python environment of their own.

LiteLLM and Instructor do not yet allow the newest `openai`, which the other tests use, and KServe and LlamaIndex have versions of their own of
what others need. Their cases are files of pytest in `frameworks/`, run
by that environment's Python; each case is reported as one test here.
"""

import ast
import fcntl
import functools
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from conftest import ROOT

FOLDER = Path(__file__).parent / "frameworks"
HOME = ROOT / ".cache/venv_frameworks"


@functools.cache
def python() -> Path:
    """The environment's Python, with the packages of `frameworks/requirements.txt`."""
    found = HOME / "bin/python"
    HOME.parent.mkdir(exist_ok=True)
    # Two processes of pytest may come here at the same time.
    with open(HOME.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not found.exists():
            subprocess.run([sys.executable, "-m", "venv", HOME], check=True, timeout=120)
        command = [found, "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check", "-r", FOLDER / "requirements.txt"]
        subprocess.run(command, check=True, timeout=600)
    return found


def cases(file: str) -> list[str]:
    """The names of a file's test functions."""
    module = ast.parse((FOLDER / file).read_text())
    return [node.name for node in module.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]


def run(file: str, world, report: Path) -> dict[str, list[str]]:
    """Runs a file's cases against the server of `world`. Returns the failures of each function, one for each failed set of parameters."""
    command = [python(), "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--confcutdir={FOLDER}", f"--rootdir={FOLDER}", f"--junit-xml={report}", "--tb=short"]
    # Flags for the outer pytest name plugins that this one lacks.
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    ended = subprocess.run([*command, FOLDER / file], env=environment | {"TRIREME_HTTP": world.http, "TRIREME_GRPC": world.grpc}, capture_output=True, text=True, timeout=300)
    assert report.exists(), ended.stdout + ended.stderr
    found: dict[str, list[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        failures = found.setdefault(case.get("name", "").partition("[")[0], [])
        failures += [f"{case.get('name')}: {part.get('message')}\n{first_lines(part.text)}" for tag in ("failure", "error") for part in case.iter(tag)]
    assert set(cases(file)) <= set(found), ended.stdout + ended.stderr
    return found


def first_lines(text: str | None, count: int = 6) -> str:
    """The lines of a failure that point into the case itself; the rest are those of the framework."""
    return "\n".join((text or "").splitlines()[:count])
