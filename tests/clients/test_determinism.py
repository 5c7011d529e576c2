"""A request gives the same tokens whatever runs beside it and however it is computed: a small form of scripts/bench_determinism."""

import argparse
import importlib.machinery
import importlib.util
import subprocess
import sys

import pytest
from conftest import BINARIES, ROOT
from ports import free_ports

SCRIPT = ROOT / "scripts/bench_determinism"
SMALL = ["--prompts=6", "--tokens=16", "--max-len=150", "--chunk=24"]


GOLDENS = ROOT / "tests/goldens"


def run(model, flags, axes):
    port = free_ports(3)[0]  # It takes the next two as well.
    command = [sys.executable, SCRIPT, f"--model={model}", f"--bin={BINARIES}", f"--port={port}", *SMALL, *flags, *axes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("0 rows differ\n") and "of 12 rows differ" in done.stdout, done.stdout
    return done.stdout


@pytest.mark.parametrize(
    ("flags", "axes"),
    [
        (["--world-size=2", "--launch-args=--oversubscribe"], []),
        (["--world-size=2", "--launch-args=--oversubscribe --kv-cache-dtype=fp8"], ["among", "warm", "chunked", "drafts", "death"]),
        (["--launch-args=--kv-cache-dtype=int8"], ["among", "warm", "chunked"]),
        (["--launch-args=--weight-only-precision=int8"], ["among", "warm", "chunked"]),
        (["--launch-args=--weight-only-precision=int4"], ["among", "warm", "chunked"]),
    ],
    ids=["bf16 of two workers, all axes", "cache in fp8", "cache in int8", "int8", "int4"],
)
def test_tokens_depend_on_the_request_alone(flags, axes):
    run(ROOT / "model_repository/tensorrt_llm/1", flags, axes)


@pytest.mark.parametrize(
    ("golden", "guesses"),
    [
        ("mtp_qwen3_5", ["mtp_num_tokens=3"]),
        ("mtp_deepseek_v3", ["mtp_num_tokens=3"]),
        ("eagle3", ["eagle3_num_tokens=3", f"eagle3_path={GOLDENS / 'eagle3/specforge'}"]),
        ("olmo2", ["draft_model_num_tokens=3", f"draft_model_path={GOLDENS / 'olmo2'}"]),
    ],
    ids=["MTP head", "MTP head, experts", "EAGLE-3 head", "draft model"],
)
def test_tokens_do_not_depend_on_drafts_that_devices_guess(golden, guesses):
    flags = ["--tokens=40", "--rows=16", "--kv-tokens=8192", *(f"--guesses={parameter}" for parameter in guesses)]
    assert "guesses, at once" in run(GOLDENS / golden, flags, ["among", "guesses", "death"])


def test_a_differing_row_is_counted_and_shown_with_its_first_differing_position(capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    loader = importlib.machinery.SourceFileLoader("bench_determinism", str(SCRIPT))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("bench_determinism", loader))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader.exec_module(module)
    requests = module.Requests(argparse.Namespace(prompts=1, max_len=20, seed=0, show=3), vocab=100)
    assert module.compare("warm", requests, [[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 5, 7]]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "warm                         1 of 2 rows differ",
        "    prompt 0 (20 tokens, sampled): token 2 is 7, expected 6",
    ]
