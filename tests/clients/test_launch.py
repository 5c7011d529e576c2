"""The launcher with real ranks: worlds of one user side by side, flags of ranks without `--`, empty repositories."""

import json
import math
import os
import re
import shutil
import subprocess
import urllib.request
from pathlib import Path

import pytest

from conftest import BINARIES, ROOT, launch
from ports import free_ports
from serving import IDENTITY, repository


def ports() -> tuple[list[int], list[str]]:
    """Free ports, and the flags that use them."""
    found = free_ports(3)
    return found, [f"--{name}_port={port}" for name, port in zip(("http", "grpc", "metrics"), found)]


def run(*words, environment: dict[str, str] | None = None, program: Path = BINARIES / "launch") -> subprocess.CompletedProcess:
    return subprocess.run([program, *words], cwd=ROOT, capture_output=True, text=True, timeout=120, env=os.environ | (environment or {}))


def test_two_worlds_of_one_user_with_different_run_directories_serve_at_once(short_folder):
    started = []
    try:
        for name in ("a", "b"):
            (short_folder / name).mkdir(mode=0o700)
            environment = {"XDG_RUNTIME_DIR": str(short_folder / name)}
            (http, *_), flags = ports()
            world = run("--world_size=2", "--model_repo=model_repository", "--device=cpu", "--oversubscribe", "--detach", *flags, environment=environment)
            assert world.returncode == 0, world.stderr
            started.append((http, environment))
        for http, _ in started * 2:
            body = json.dumps({"model": "ensemble", "prompt": "Once upon a time", "max_tokens": 4}).encode()
            request = urllib.request.Request(f"http://localhost:{http}/v1/completions", body, {"content-type": "application/json"})
            assert json.loads(urllib.request.urlopen(request, timeout=60).read())["choices"][0]["text"]
        for http, _ in started:
            assert [name for name in os.listdir("/dev/shm") if name.startswith(f"prefix{http}_0_")]
    finally:
        for http, environment in started:
            stopped = run("stop", f"--http_port={http}", environment=environment)
            assert stopped.returncode == 0, stopped.stderr
    assert not [name for name in os.listdir("/dev/shm") for http, _ in started if name.startswith(f"prefix{http}_")]


def test_flags_of_ranks_need_no_dashes(tmp_path):
    models = repository(tmp_path / "models", identity=IDENTITY)
    (http, *_), flags = ports()
    started = launch(f"--model_repo={models}", "--allow_client_shm", "true", "--id=named", "--device=cpu", "--detach", *flags)
    assert started.returncode == 0, started.stderr
    try:
        assert json.loads(urllib.request.urlopen(f"http://localhost:{http}/v2", timeout=60).read())["name"] == "named"
        register = urllib.request.Request(f"http://localhost:{http}/v2/systemsharedmemory/region/r/register", b'{"key": "/no_such", "offset": 0, "byte_size": 8}')
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(register, timeout=60)
        assert b"--allow-client-shm" not in refused.value.read(), "clients' shared memory is off"
    finally:
        assert launch("stop", f"--http_port={http}").returncode == 0
    unknown = launch("--dry_run", "--no-such-flag=1", "--id=named")
    assert unknown.returncode == 2 and "--no-such-flag" in unknown.stderr, unknown.stderr


def test_flags_are_those_of_the_server_program_that_is_given(tmp_path):
    alone = shutil.copy(BINARIES / "launch", tmp_path / "launch")
    known = run("--dry_run", f"--trireme={BINARIES}/trireme", "--enable-sleep-mode", program=alone)
    assert known.returncode == 0 and re.search(r" rank .*--enable-sleep-mode\n", known.stdout), known.stdout + known.stderr
    unknown = run("--dry_run", f"--trireme={tmp_path}/none", "--enable-sleep-mode", program=alone)
    assert unknown.returncode == 2 and "--enable-sleep-mode" in unknown.stderr, unknown.stderr


def test_an_empty_repository_is_refused_unless_models_are_loaded_later(tmp_path):
    (tmp_path / "empty/.git").mkdir(parents=True)
    _, flags = ports()
    refused = launch(f"--model_repo={tmp_path}/empty", "--device=cpu", "--detach", *flags)
    assert refused.returncode == 1 and f"{tmp_path}/empty holds no model" in refused.stderr, refused.stderr
    (http, *_), flags = ports()
    started = launch(f"--model_repo={tmp_path}/empty", "--device=cpu", "--detach", "--model-control-mode=explicit", *flags)
    try:
        assert started.returncode == 0, started.stderr
    finally:
        launch("stop", f"--http_port={http}")


def checkpoint(folder: Path, without: str) -> Path:
    """A repository of one text model around the demo's checkpoint, of which files are missing since then."""
    checkpoint = folder / "checkpoint"
    shutil.copytree(ROOT / "model_repository/tensorrt_llm/1", checkpoint)
    made = run("init", str(checkpoint), "--layout=llama-python", f"--output={folder / 'models'}", program=BINARIES / "trireme")
    assert made.returncode == 0, made.stderr
    for file in checkpoint.glob(without):
        file.unlink()
    return folder / "models"


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("without", "flags", "cause", "cure"),
    [
        ("tokenizer*", [], "no model of its repository has a tokenizer", "set parameter `tokenizer_dir`"),
        ("*.safetensors", [], "no `model.safetensors`", "copy the checkpoint's weights there"),
        ("-", ["--device=cuda"], "device `cuda` is not usable", "install the driver"),
        ("-", ["--", "--no-such-flag=1"], "unrecognized option '--no-such-flag'", "`trireme rank --help`"),
        ("-", ["--", "--record=/proc/none"], "cannot make the directory /proc/none", "name another directory with --record"),
    ],
)
def test_the_cause_of_a_failed_start_and_its_cure_come_first(tmp_path, short_folder, world_size, without, flags, cause, cure):
    if "--device=cuda" in flags and shutil.which("nvidia-smi"):
        pytest.skip("this machine has GPUs")
    words = [f"--model_repo={checkpoint(tmp_path, without)}", f"--world_size={world_size}", "--oversubscribe", "--detach", *ports()[1]]
    words += [] if "--device=cuda" in flags else ["--device=cpu"]
    started = run(*words, *flags, environment={"XDG_RUNTIME_DIR": str(short_folder)})
    first = started.stderr.split("launch: the world died")[0]
    assert started.returncode == 1 and cause in first.splitlines()[0] and cure in first, started.stderr
    assert "mpirun" not in started.stderr and len(started.stderr.splitlines()) < 12, started.stderr


@pytest.mark.parametrize("world_size", [1, 2])
def test_weights_that_do_not_fit_are_refused_before_they_are_read(tmp_path, short_folder, world_size):
    models = checkpoint(tmp_path, "*.safetensors")
    large_weights(tmp_path / "checkpoint")
    words = [f"--model_repo={models}", f"--world_size={world_size}", "--oversubscribe", "--detach", "--device=cpu", *ports()[1]]
    started = run(*words, "--weight_only_precision=int4", environment={"XDG_RUNTIME_DIR": str(short_folder)})
    first = started.stderr.splitlines()[0]
    assert started.returncode == 1 and re.search(r"its weights need [0-9.]+ GiB of memory, and [0-9.]+ GiB are free: (start|use) ", first), started.stderr
    assert "`launch --plan`" in first, started.stderr


def large_weights(folder: Path) -> None:
    """Makes a checkpoint of 2 TB in bf16, or 0.5 TB in 4 bits. The head of its file is whole, and the rest a hole."""
    hidden, inner, heads, kv_heads, layers = 32768, 114688, 256, 8, 80
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 128}
    config |= {"num_hidden_layers": layers, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    keys = kv_heads * 128
    of_layer = {"self_attn.q_proj": [hidden, hidden], "self_attn.k_proj": [keys, hidden], "self_attn.v_proj": [keys, hidden]}
    of_layer |= {"self_attn.o_proj": [hidden, hidden], "mlp.gate_proj": [inner, hidden], "mlp.up_proj": [inner, hidden]}
    of_layer |= {"mlp.down_proj": [hidden, inner], "input_layernorm": [hidden], "post_attention_layernorm": [hidden]}
    shapes = {"model.embed_tokens.weight": [config["vocab_size"], hidden], "model.norm.weight": [hidden]}
    shapes |= {f"model.layers.{layer}.{name}.weight": shape for layer in range(layers) for name, shape in of_layer.items()}
    head, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        head[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(head).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def test_a_repository_that_is_a_checkpoint_is_explained_by_lint():
    found = run("lint", "model_repository/tensorrt_llm/1", program=BINARIES / "trireme")
    assert found.returncode == 1 and "`trireme serve model_repository/tensorrt_llm/1`" in found.stdout, found.stdout


@pytest.mark.skipif(os.getuid() != 0, reason="mounts need root")
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_small_shared_memory_is_named_before_anything_starts(short_folder, world_size):
    words = [BINARIES / "launch", f"--world_size={world_size}", "--device=cpu", "--detach", *ports()[1]]
    script = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"'
    command = ["unshare", "--mount", "sh", "-ec", script, "launch", *words]
    started = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, env=os.environ | {"XDG_RUNTIME_DIR": str(short_folder)})
    assert started.returncode == 1 and "/dev/shm has 1 MiB free" in started.stderr and "--shm-size" in started.stderr, started.stderr


def test_models_sleep_wake_and_swap_by_commands(tmp_path):
    models = tmp_path / "models"
    shutil.copytree(ROOT / "model_repository", models)
    shutil.copytree(models / "tensorrt_llm", models / "second")
    config = models / "second/config.pbtxt"
    config.write_text(config.read_text().replace('name: "tensorrt_llm"', 'name: "second"'))
    keys = tmp_path / "keys"
    keys.write_text("# the team's key\nsecret\n")
    (http, *_), flags = ports()
    words = [f"--model_repo={models}", "--device=cpu", "--enable-sleep-mode", "--detach", *flags]
    words += ["--", f"--http-restricted-api=model-repository:admin-key=@{keys}"]
    started = run(*words)
    assert started.returncode == 0, started.stderr

    def act(*words: str, key: bool = True) -> subprocess.CompletedProcess:
        return run(*words, f"--http_port={http}", *([f"--key=admin-key=@{keys}"] if key else []))

    def sleeps(model: str) -> bool:
        request = urllib.request.Request(f"http://localhost:{http}/is_sleeping?model={model}", headers={"admin-key": "secret"})
        return json.loads(urllib.request.urlopen(request, timeout=60).read())["is_sleeping"]

    try:
        refused = act("sleep", key=False)
        assert refused.returncode == 1 and "admin-key" in refused.stderr, refused
        asleep = act("sleep", "second")
        assert asleep.returncode == 0 and asleep.stdout.startswith("`second` sleeps after "), asleep
        assert (sleeps("second"), sleeps("tensorrt_llm")) == (True, False)
        swapped = act("swap", "tensorrt_llm", "second", "--level=2")
        assert swapped.returncode == 0 and swapped.stdout.startswith("`tensorrt_llm` sleeps and `second` is awake after "), swapped
        assert (sleeps("second"), sleeps("tensorrt_llm")) == (False, True)
        # The checkpoint of the second is gone, so that it cannot take the place of the first.
        for words in (["swap", "second", "tensorrt_llm"], ["sleep", "second", "--level=2"]):
            assert act(*words).returncode == 0
        (models / "second/1/model.safetensors").rename(models / "second/1/away")
        failed = act("swap", "tensorrt_llm", "second")
        assert failed.returncode == 1 and "`second` does not wake" in failed.stderr, failed
        assert "`tensorrt_llm` is awake again" in failed.stderr
        assert (sleeps("second"), sleeps("tensorrt_llm")) == (True, False)
        (models / "second/1/away").rename(models / "second/1/model.safetensors")
        unknown = act("swap", "second", "none")
        assert unknown.returncode == 1 and "none" in unknown.stderr, unknown
        awake = act("wake")
        assert awake.returncode == 0 and awake.stdout.startswith("all language models are awake after "), awake
        early = act("swap", "second", "tensorrt_llm")
        assert early.returncode == 1 and "`tensorrt_llm` does not sleep" in early.stderr, early
    finally:
        stopped = run("stop", f"--http_port={http}")
        assert stopped.returncode == 0, stopped.stderr
