"""`trireme lint` and `launch` report the errors of repositories of any layout with the same messages."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from conftest import BINARIES, ROOT, free_ports, launch

CHECKPOINT = ROOT / "model_repository/tensorrt_llm/1"
# Layouts whose models have different names share a repository.
LAYOUTS = ["tensorrt-llm", "gpt", "turbomind", "lmdeploy sglang llama-python"]
ENSEMBLES = ["tensorrt-llm", "gpt"]
UNSET = "template variables taken as unset: "


def made(folder: Path, layouts: str) -> Path:
    for layout in layouts.split():
        command = [BINARIES / "trireme", "init", CHECKPOINT, f"--layout={layout}", f"--output={folder}"]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
    return folder


def elsewhere(folder: Path, checkpoint: Path) -> None:
    """Sets the directory of checkpoint and tokenizer of each model to `checkpoint`."""
    for link in folder.rglob("weights"):
        link.unlink()
        link.symlink_to(checkpoint)
    for config in folder.rglob("config.pbtxt"):
        config.write_text(config.read_text().replace(str(CHECKPOINT), str(checkpoint)))


def without_tokenizer(folder: Path, layouts: str) -> list[str]:
    made(folder / "models", layouts)
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    for file in CHECKPOINT.iterdir():
        if not file.name.startswith("tokenizer"):
            (checkpoint / file.name).symlink_to(file)
    elsewhere(folder / "models", checkpoint)
    return ["tokenizer"]


def for_three_ranks(folder: Path, layouts: str) -> list[str]:
    made(folder / "models", layouts)
    return ["cannot be shared by 3 workers; world sizes that would do: 1, 2, 4"]


def of_two_versions(folder: Path, layouts: str) -> list[str]:
    """Combines ensembles with models of another release; for other layouts adds an empty second version."""
    models = made(folder / "models", layouts)
    if layouts in ENSEMBLES:
        other = ENSEMBLES[1 - ENSEMBLES.index(layouts)]
        shutil.copy(made(folder / "other", other) / "ensemble/config.pbtxt", models / "ensemble/config.pbtxt")
        return ["ensemble"]
    for model in models.iterdir():
        (model / "2").mkdir()
    elsewhere(models, folder / "nowhere")
    return ["nowhere" if layouts == "turbomind" else "no checkpoint"]


def around_an_engine(folder: Path, layouts: str) -> list[str]:
    made(folder / "models", layouts)
    engine = folder / "engine"
    engine.mkdir()
    (engine / "config.json").write_text('{"pretrained_config": {"architecture": "LlamaForCausalLM"}, "build_config": {}}')
    (engine / "rank0.engine").write_bytes(b"engine")
    elsewhere(folder / "models", engine)
    return ["holds a TensorRT engine, which only TensorRT-LLM can run"]


def unfilled(folder: Path, layouts: str) -> list[str]:
    for layout in layouts.replace("tensorrt-llm", "tensorrt_llm").split():
        shutil.copytree(ROOT / "src/lint/layouts" / layout, folder / "models", dirs_exist_ok=True)
    for model in (folder / "models").iterdir():
        (model / "1").mkdir()
    return ["no checkpoint", UNSET]


def linted(models: Path, world_size: int) -> tuple[dict[str, str], set[str]]:
    """From `trireme lint`: models with errors and their reasons, and the messages about unfilled variables."""
    command = [BINARIES / "trireme", "lint", models, f"--world-size={world_size}", "--json"]
    result = subprocess.run(command, capture_output=True, text=True)
    report = json.loads(result.stdout)
    assert (result.returncode == 0) == (report["wrong"] == 0), report
    findings = report["findings"]
    wrong = [found for found in findings if found["verdict"] == "wrong"]
    assert all(found["file"] and (models / found["model"]).is_dir() for found in wrong)
    unset = {found["why"] for found in findings if found["why"].startswith(UNSET)}
    return {found["model"]: found["why"] for found in wrong}, unset


def launched(models: Path, world_size: int) -> tuple[dict[str, str], set[str]]:
    """The same from the log of a world, which ends because of the errors."""
    http, grpc, metrics = free_ports(3)
    flags = [f"--http_port={http}", f"--grpc_port={grpc}", f"--metrics_port={metrics}", "--device=cpu", "--oversubscribe"]
    result = launch(f"--world_size={world_size}", f"--model_repo={models}", *flags)
    assert result.returncode == 1 and "creating server: " in result.stderr, result.stderr
    failed = dict(re.findall(r"\"failed to load '([^']+)': (.*)\"$", result.stderr, re.M))
    unset = re.findall(rf"\"({UNSET}.*) model=", result.stderr)
    return {model: json.loads(f'"{reason}"') for model, reason in failed.items()}, set(unset)


@pytest.mark.parametrize("wrong", [without_tokenizer, for_three_ranks, of_two_versions, around_an_engine, unfilled])
@pytest.mark.parametrize("layouts", LAYOUTS)
def test_lint_and_launch_report_the_same(tmp_path, layouts, wrong):
    expected = wrong(tmp_path, layouts)
    world_size = 3 if wrong is for_three_ranks else 1
    (lint, lint_unset), (log, log_unset) = linted(tmp_path / "models", world_size), launched(tmp_path / "models", world_size)
    assert lint == log and lint_unset == log_unset
    # An ensemble whose models do not fit is one error; otherwise each model has its own.
    assert len(lint) >= (1 if layouts in [*ENSEMBLES, "turbomind"] else len(layouts.split())), lint
    said = [*lint.values(), *lint_unset]
    for words in expected:
        assert any(words in text for text in said), said
