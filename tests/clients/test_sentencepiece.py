"""Serves a checkpoint whose tokenizer is a SentencePiece model that is trained here."""

import io
import json
import shutil

import numpy as np
import pytest
import sentencepiece
import tritonclient.grpc as grpcclient

from triton_requests import stream, tensor, text_inputs
from conftest import ROOT
from test_layouts import CHECKPOINT, served

SAMPLES = json.loads((ROOT / "tests/goldens/tokenizers/samples.json").read_text())
# Texts that contain the spelling of a special token. transformers and this server recognize the token; SentencePiece does not.
PLAIN = [text for text in SAMPLES if text and not any(token in text for token in ("<s>", "</s>", "<unk>", "<pad>"))]
# As many pieces as the model has token ids, since it may generate any id.
VOCAB_SIZE = 3072


def trained(**options) -> tuple[bytes, sentencepiece.SentencePieceProcessor]:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SAMPLES), model_writer=model, vocab_size=VOCAB_SIZE, num_threads=1, minloglevel=2, hard_vocab_limit=False, **options
    )
    return model.getvalue(), sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


@pytest.fixture(scope="module")
def pieces():
    return trained(model_type="bpe", byte_fallback=True)


@pytest.fixture(scope="module")
def t5_pieces():
    return trained(model_type="unigram", pad_id=0, eos_id=1, unk_id=2, bos_id=-1)


@pytest.fixture(scope="module")
def client(tmp_path_factory, pieces, t5_pieces):
    folder = tmp_path_factory.mktemp("sentencepiece")
    checkpoint, t5 = folder / "checkpoint", folder / "t5"
    checkpoint.mkdir()
    t5.mkdir()
    for file in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(CHECKPOINT / file, checkpoint / file)
    (checkpoint / "tokenizer.model").write_bytes(pieces[0])
    (t5 / "spiece.model").write_bytes(t5_pieces[0])
    models = folder / "models"

    def add_t5():
        shutil.copytree(models / "preprocessing", models / "preprocessing_t5")
        config = models / "preprocessing_t5/config.pbtxt"
        text = config.read_text().replace('"preprocessing"', '"preprocessing_t5"').replace(str(checkpoint), str(t5))
        config.write_text(text + 'parameters { key: "tokenizer_type" value: { string_value: "t5" } }\n')

    with served(models, "tensorrt-llm", checkpoint=checkpoint, change=add_t5) as world, grpcclient.InferenceServerClient(world.grpc) as client:
        yield client


def encoded(client, text: str, model: str = "preprocessing") -> list[int]:
    request = [tensor("QUERY", [text.encode()], np.object_), tensor("REQUEST_OUTPUT_LEN", [1], np.int32)]
    return client.infer(model, request).as_numpy("INPUT_ID")[0].tolist()


def test_prompts_have_the_ids_of_sentencepiece(client, pieces):
    for text in PLAIN:
        assert encoded(client, text) == [pieces[1].bos_id()] + pieces[1].encode(text), text


def test_tokenizer_type_t5_ends_prompts_by_its_own_rules(client, t5_pieces):
    for text in PLAIN[:60]:
        assert encoded(client, text, "preprocessing_t5") == t5_pieces[1].encode(text) + [t5_pieces[1].eos_id()], text


def test_streamed_text_equals_sentencepieces_decoding(client, pieces):
    for prompt in ("The ship left the harbour", "Das Schiff", "船は"):
        answers = []
        client.start_stream(lambda result, error: answers.append((result, error)))
        ids = encoded(client, prompt)
        inputs = [tensor("input_ids", ids, np.int32), tensor("input_lengths", [len(ids)], np.int32), tensor("request_output_len", [48], np.int32)]
        client.async_stream_infer("tensorrt_llm", inputs)
        client.stop_stream()
        (result, error), = answers
        assert error is None
        tokens = result.as_numpy("output_ids").reshape(-1)[: int(result.as_numpy("sequence_length").squeeze())].tolist()
        text, error = stream(client, text_inputs(prompt, 48, True))
        assert error is None and len(text) > 3
        assert "".join(text) == pieces[1].decode([token for token in tokens if token != pieces[1].eos_id()])
