#!/usr/bin/env python3
"""Changes every field of each golden checkpoint's config.json and records what transformers computes then.

    make_config_goldens.py [CASE ...]      (needs torch and transformers)

It writes tests/goldens/config_changes.json. With names of cases only their entries are made; the others stay as they are.

Numbers and flags get another value; every field, also lists, texts and objects, is removed and set to null. Each entry has the case,
the field (a path with dots), its new value, which is missing if the field was removed, and the first logits after a fixed prompt in
fp32; null if transformers cannot load or run the changed checkpoint. `cargo test -p models --test config_changes` requires of every entry that the
checkpoint is refused, or computed as transformers does.
"""
import json
import pathlib
import sys

if {"-h", "--help"} & set(sys.argv[1:]):  # Before imports that may be missing.
    sys.exit(print(__doc__))

import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

GOLDENS = pathlib.Path(__file__).resolve().parents[2] / "tests" / "goldens"
# Longer than the windows of the checkpoints.
PROMPT = [5, 17, 3, 99, 42, 7, 120, 61, 30, 8, 77, 23, 150, 64, 11, 91, 38, 172, 6, 55, 140, 29, 83, 12, 101, 47, 68, 133, 19, 74]
NUM_LOGITS = 6
# Sizes of weights: any change makes a checkpoint whose tensors do not fit.
SIZES = {"vocab_size", "hidden_size", "n_embd", "num_hidden_layers", "n_layer"}
# Fields by which transformers finds the class of the model, whole models, whose defaults are large, and a token whose default is not
# in these vocabularies.
KEPT = {"model_type", "text_config", "vision_config", "audio_config", "pad_token_id"}
# Fields that only change weights of the parts that see images.
OF_IMAGES = {"multimodal_projector_bias", "projection_hidden_size", "spatial_merge_size", "projector_hidden_size", "downsample_factor"}
REMOVED = object()


def fields(config, prefix=""):
    """Paths and values of all fields."""
    for key, value in config.items():
        yield f"{prefix}{key}", value
        if isinstance(value, dict) and key not in ("vision_config", "audio_config"):
            yield from fields(value, f"{prefix}{key}.")


def changes(config):
    """Paths of fields and their new values."""
    for path, value in fields(config):
        if path in OF_IMAGES:
            continue
        if isinstance(value, (bool, int, float)) and path not in SIZES:
            yield path, changed(value)
        if path.rpartition(".")[2] not in KEPT:
            yield path, REMOVED
            yield path, None


def changed(value):
    if isinstance(value, bool):
        return not value
    return value * 2 + 1 if isinstance(value, int) else round(value * 1.5 + 0.25, 6)


def with_field(config, path, value):
    config = json.loads(json.dumps(config))
    *outer, last = path.split(".")
    place = config
    for key in outer:
        place = place[key]
    place[last] = value
    if value is REMOVED:
        del place[last]
    return config


def decoded(value):
    """Infinity has a form of its own in config.json."""
    if isinstance(value, list):
        return [decoded(of) for of in value]
    return float(value["__float__"]) if isinstance(value, dict) and "__float__" in value else value


def model_class(folder):
    """That of the unchanged checkpoint if it sees images, or if transformers finds none for it; others have one that transformers finds."""
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    return getattr(transformers, name) if "Conditional" in name or name == "Mistral4ForCausalLM" else AutoModelForCausalLM


@torch.no_grad()
def logits(folder, config):
    try:
        loaded = AutoConfig.for_model(config["model_type"], **{k: decoded(v) for k, v in config.items() if k != "model_type"})
        loaded._attn_implementation = "eager"
        model, report = model_class(folder).from_pretrained(folder, config=loaded, dtype=torch.float32, output_loading_info=True,
                                                            attn_implementation="eager")
        if report["missing_keys"] or report["mismatched_keys"]:
            return None
        found = model.eval()(torch.tensor([PROMPT])).logits[0, -1, :NUM_LOGITS]
    except Exception:
        return None
    return [round(x, 4) for x in found.tolist()] if torch.isfinite(found).all() else None


def main():
    out = GOLDENS / "config_changes.json"
    only = sys.argv[1:]
    old = json.loads(out.read_text()) if only else []
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    lines = []
    for folder in sorted(GOLDENS.iterdir()):
        if not (folder / "model.safetensors").exists() or folder.name.startswith(("internlm", "baichuan", "phi4_mm")):
            continue
        if only and folder.name not in only:
            lines += [json.dumps(entry) for entry in old if entry["case"] == folder.name]
            continue
        config = json.loads((folder / "config.json").read_text())
        if "quantization_config" in config:  # They have fields of their own, and transformers needs other packages for most.
            continue
        for path, value in changes(config):
            entry = {"case": folder.name, "field": path} | ({} if value is REMOVED else {"value": value})
            lines.append(json.dumps(entry | {"logits": logits(folder, with_field(config, path, value))}))
        print(folder.name, len(lines), file=sys.stderr)
    out.write_text("[\n" + ",\n".join(lines) + "\n]\n")


main()
