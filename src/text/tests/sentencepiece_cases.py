#!/usr/bin/env python3
"""Writes SentencePiece models, and the ids and decoded texts of sentencepiece for random texts.

    sentencepiece_cases.py OUT_DIR SEED

Each folder of OUT_DIR holds tokenizer.model and cases.json, a list of [text, ids, decoded text]. The models are those of
tests/goldens/tokenizers, as they are and with one property changed at a time. Needs sentencepiece and protobuf.
"""
import json
import pathlib
import random
import sys

import sentencepiece
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "scripts/goldens"))

from make_tokenizer_goldens import ODDITIES, SENTENCES, mixtures  # noqa: E402 (its folder is known from here on)

# The fields of sentencepiece_model.proto that are changed here: name, number, type, default. Others are kept as they are.
# sentencepiece's own module for them needs a newer protobuf than the other clients allow.
SCHEMA = {
    "Piece": [("piece", 1, "STRING", ""), ("score", 2, "FLOAT", "0"), ("type", 3, "INT32", "1")],
    "TrainerSpec": [("treat_whitespace_as_suffix", 24, "BOOL", "false"), ("byte_fallback", 35, "BOOL", "false")],
    "NormalizerSpec": [("precompiled_charsmap", 2, "BYTES", ""), ("add_dummy_prefix", 3, "BOOL", "true"), ("remove_extra_whitespaces", 4, "BOOL", "true")],
    "ModelProto": [("pieces", 1, ".Piece", None), ("trainer_spec", 2, ".TrainerSpec", None), ("normalizer_spec", 3, ".NormalizerSpec", None)],
}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
MODELS = ["llama", "no_prefix", "unused", "bpe_nfkc", "t5", "unigram"]
# A checkpoint's special tokens are found before the model sees the text; sentencepiece alone does not know them.
SPECIAL = ["<s>", "</s>", "<unk>", "<pad>", "<extra_id_"]


def equal_scores(proto, rng):
    """Many pieces share a score, as in merged vocabularies."""
    for piece in proto.pieces:
        if piece.type == NORMAL and len(piece.piece) > 1:
            piece.score = float(-rng.randrange(3))


def other_types(proto, rng):
    """Some pieces become user-defined, unused or control pieces."""
    for piece in proto.pieces:
        if piece.type == NORMAL and rng.random() < 0.1:
            piece.type = rng.choice([USER_DEFINED, UNUSED, CONTROL])


def other_flags(proto, rng):
    spec = proto.normalizer_spec
    for name in ("add_dummy_prefix", "remove_extra_whitespaces"):
        setattr(spec, name, not getattr(spec, name))
    proto.trainer_spec.treat_whitespace_as_suffix = rng.random() < 0.5


def other_fallback(proto, rng):
    """Byte fallback is enabled where it was disabled, and disabled where it was enabled."""
    proto.trainer_spec.byte_fallback = not proto.trainer_spec.byte_fallback
    kept = [piece for piece in proto.pieces if piece.type != BYTE]
    del proto.pieces[:]
    proto.pieces.extend(kept)
    if proto.trainer_spec.byte_fallback:
        for byte in range(256):
            proto.pieces.add(piece=f"<0x{byte:02X}>", score=0.0, type=BYTE)


def other_normalizer(proto, rng):
    """Identity replaces nmt_nfkc, and nmt_nfkc replaces identity."""
    spec = proto.normalizer_spec
    spec.precompiled_charsmap = b"" if spec.precompiled_charsmap else parsed("t5").normalizer_spec.precompiled_charsmap


CHANGES = [None, equal_scores, other_types, other_flags, other_fallback, other_normalizer]


def model_class():
    file = descriptor_pb2.FileDescriptorProto(name="model.proto", syntax="proto2")
    for name, fields in SCHEMA.items():
        message = file.message_type.add(name=name)
        for field, number, kind, default in fields:
            added = message.field.add(name=field, number=number, label=3 if field == "pieces" else 1, default_value=default)
            if kind.startswith("."):
                added.type_name = kind
            else:
                added.type = descriptor_pb2.FieldDescriptorProto.Type.Value(f"TYPE_{kind}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("ModelProto"))


ModelProto = model_class()


def parsed(name):
    proto = ModelProto()
    proto.ParseFromString(next((ROOT / "tests/goldens/tokenizers" / name).glob("*.model")).read_bytes())
    return proto


def of_pieces(proto, rng, count):
    """Texts of the model's own pieces, which can be merged in many ways."""
    pieces = [piece.piece.replace("\u2581", " ") for piece in proto.pieces if piece.type in (NORMAL, USER_DEFINED, UNUSED)]
    return ["".join(rng.choices(pieces, k=rng.randrange(1, 30))) for _ in range(count)]


def texts(proto, rng):
    runs = [character * rng.randrange(1000, 3000) for character in ("a", " ", "\u2581", "\0", "é", "語", "\U0001f600")]
    # Surrogates are not characters.
    anything = ["".join(chr(rng.choice([rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)])) for _ in range(20)) for _ in range(40)]
    long = ["\n".join(mixtures(200, rng.random()))]
    found = SENTENCES + ODDITIES + runs + anything + long + mixtures(150, rng.random()) + of_pieces(proto, rng, 150)
    return [text for text in found if not any(token in text for token in SPECIAL)]


def main():
    out, rng = pathlib.Path(sys.argv[1]), random.Random(int(sys.argv[2]))
    for name in MODELS:
        for change in CHANGES:
            proto = parsed(name)
            if change:
                change(proto, rng)
            folder = out / (f"{name}-{change.__name__}" if change else name)
            folder.mkdir(parents=True)
            (folder / "tokenizer.model").write_bytes(proto.SerializeToString())
            model = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
            cases = []
            for text in texts(proto, rng):
                ids = model.encode(text)
                # A special token gives no text.
                cases.append([text, ids, model.decode([id for id in ids if not model.is_unknown(id)])])
            (folder / "cases.json").write_text(json.dumps(cases))


if __name__ == "__main__":
    main()
