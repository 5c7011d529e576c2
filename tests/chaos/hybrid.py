"""A repository whose language model has recurrent layers: the model of a golden, with random embeddings for the demo model's tokenizer."""

import json
import shutil
import struct
from pathlib import Path

import numpy as np

from world import ROOT

GOLDEN = ROOT / "tests/goldens/qwen3_5"
MAX_POSITIONS = 2048


def make_repository(folder: Path) -> Path:
    """Writes the repository into a new folder. Returns its path."""
    shutil.copytree(ROOT / "model_repository", folder)
    checkpoint = folder / "tensorrt_llm" / "1"
    vocab_size = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    config = json.loads((GOLDEN / "config.json").read_text())
    config |= {"vocab_size": vocab_size, "max_position_embeddings": MAX_POSITIONS}
    (checkpoint / "config.json").write_text(json.dumps(config))
    tensors = read(GOLDEN / "model.safetensors")
    rng = np.random.default_rng(1)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        table = tensors[name]
        tensors[name] = (rng.standard_normal((vocab_size, table.shape[1])) * table.std(dtype=np.float32)).astype(table.dtype)
    write(checkpoint / "model.safetensors", tensors)
    return folder


def read(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file in float16."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    body = 8 + length
    tensors = {}
    for name, entry in json.loads(data[8:body]).items():
        if name == "__metadata__":
            continue
        assert entry["dtype"] == "F16", f"{name} of {path} is {entry['dtype']}"
        begin, end = entry["data_offsets"]
        tensors[name] = np.frombuffer(data[body + begin : body + end], np.float16).reshape(entry["shape"])
    return tensors


def write(path: Path, tensors: dict[str, np.ndarray]) -> None:
    header, at = {}, 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F16", "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    path.write_bytes(struct.pack("<Q", len(head)) + head + b"".join(tensor.tobytes() for tensor in tensors.values()))
