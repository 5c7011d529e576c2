"""Clients for Node.js: OpenAI's, Anthropic's and the AI SDK; the cases are in `node/`. Skipped where Node.js is not installed."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from conftest import ROOT

FOLDER = Path(__file__).parent / "node"
PROGRAMS = ("openai.mjs", "other_sdks.mjs")
CASES = {program: re.findall(r"^  async (\w+)\(\) \{$", (FOLDER / program).read_text(), re.MULTILINE) for program in PROGRAMS}

pytestmark = pytest.mark.skipif(not (shutil.which("node") and shutil.which("npm")), reason="`node` and `npm` are not installed")


@pytest.fixture(scope="module")
def home():
    """A folder with the programs beside the packages of `node/package-lock.json`."""
    home = ROOT / ".cache/node_clients"
    home.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "package-lock.json", *PROGRAMS):
        shutil.copy(FOLDER / name, home)
    installed = subprocess.run(["npm", "ci", "--no-audit", "--no-fund"], cwd=home, capture_output=True, text=True, timeout=200)
    assert installed.returncode == 0, installed.stderr
    return home


@pytest.mark.parametrize(("program", "case"), [(program, case) for program, cases in CASES.items() for case in cases])
def test_node(world, home, program, case):
    ended = subprocess.run(["node", program, world.http, case], cwd=home, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("program", PROGRAMS)
def test_all_cases_are_run(home, program):
    listed = subprocess.run(["node", program, "localhost:1"], cwd=home, capture_output=True, text=True, timeout=100)
    assert listed.stdout.split() == CASES[program] and len(CASES[program]) > 5
