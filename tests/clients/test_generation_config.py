"""Sampling defaults of a checkpoint's generation_config.json: what the log says, and that requests without a value have them."""

import json
import shutil
from contextlib import contextmanager

from openai import OpenAI

from conftest import ROOT
from serving import rank_of

PROMPT = "hot cold"


@contextmanager
def served(folder, settings, *flags):
    """Serves the demo's model with a generation_config.json."""
    models, checkpoint = folder / "models", ROOT / "model_repository/tensorrt_llm/1"
    shutil.copytree(ROOT / "model_repository", models, symlinks=True, ignore=lambda path, _: ["1"] if path.endswith("tensorrt_llm") else [])
    (models / "tensorrt_llm/1").mkdir()
    for file in checkpoint.iterdir():
        if file.name != "generation_config.json":
            (models / "tensorrt_llm/1" / file.name).symlink_to(file.resolve())
    (models / "tensorrt_llm/1/generation_config.json").write_text(json.dumps(settings))
    with rank_of(models, folder, *flags, prefix="defaults") as served_rank:
        yield served_rank


def text(server, **fields):
    client = OpenAI(base_url=f"http://{server.http}/v1", api_key="none", max_retries=0)
    extra = {"ignore_eos": True, **fields.pop("extra_body", {})}
    return client.completions.create(model="ensemble", prompt=PROMPT, max_tokens=24, seed=3, extra_body=extra, **fields).choices[0].text


# With one token to choose from, every draw is the greedy one.
SETTINGS = {"temperature": 1.5, "top_k": 1, "min_p": 0.25, "repetition_penalty": 1.0, "eos_token_id": 2}


def test_the_log_lists_the_defaults_and_requests_without_values_have_them(tmp_path):
    with served(tmp_path, SETTINGS) as server:
        line = server.await_log(r"sampling defaults of generation_config.json for /v1, unless --generation-config=none: ([^\n\"]*)")
        assert line.group(1).startswith("temperature 1.5, top_k 1, min_p 0.25, repetition_penalty 1")
        greedy = text(server, temperature=0)
        assert text(server) == greedy
        assert text(server, temperature=1.5, extra_body={"top_k": 0, "min_p": 0}) != greedy, "a value of the request counts"


def test_a_file_without_settings_is_named_and_a_flag_leaves_the_file_out(tmp_path):
    for name in ("none", "off"):
        (tmp_path / name).mkdir()
    with served(tmp_path / "none", {"eos_token_id": 2}) as server:
        server.await_log("generation_config.json has no sampling defaults: OpenAI's apply")
        plain = text(server)
    with served(tmp_path / "off", SETTINGS, "--generation-config=none") as server:
        assert text(server) == plain != text(server, temperature=0)
