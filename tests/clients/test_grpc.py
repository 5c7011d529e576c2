"""gRPC through an unmodified tritonclient."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from triton_requests import ANSWER, QUESTION, STORY, stream, tensor, text_inputs


def test_server_and_models_are_live_and_ready(grpc):
    assert grpc.is_server_live() and grpc.is_server_ready()
    for model in ("ensemble", "preprocessing", "tensorrt_llm", "postprocessing"):
        assert grpc.is_model_ready(model) and grpc.is_model_ready(model, "1")
    assert not grpc.is_model_ready("nobody")


def test_metadata_and_configuration_describe_the_models(grpc):
    assert "model_configuration" in grpc.get_server_metadata().extensions
    metadata = grpc.get_model_metadata("ensemble")
    assert list(metadata.versions) == ["1"]
    inputs = {entry.name: (entry.datatype, list(entry.shape)) for entry in metadata.inputs}
    assert inputs["text_input"] == ("BYTES", [-1, 1]) and inputs["max_tokens"] == ("INT32", [-1, 1])
    config = grpc.get_model_config("tensorrt_llm").config
    assert config.backend == "tensorrtllm" and config.model_transaction_policy.decoupled


def test_infer_tokenizes_and_detokenizes_without_loss(grpc):
    prompt = "A café by the sea, 3 rows of oars."
    request = [tensor("QUERY", [prompt.encode()], np.object_), tensor("REQUEST_OUTPUT_LEN", [1], np.int32)]
    ids = grpc.infer("preprocessing", request).as_numpy("INPUT_ID")
    assert ids.dtype == np.int32 and ids.shape[0] == 1 and ids.shape[1] > 5

    tokens = tensor("TOKENS_BATCH", ids.tolist(), np.int32)
    lengths = tensor("SEQUENCE_LENGTH", [ids.shape[1]], np.int32)
    text = grpc.infer("postprocessing", [tokens, lengths]).as_numpy("OUTPUT")
    assert text.reshape(-1)[0].decode() == prompt


def test_streamed_pieces_join_to_the_whole_text(grpc):
    pieces, error = stream(grpc, text_inputs(QUESTION, 32, True))
    assert error is None
    assert len(pieces) > 3 and "".join(pieces) == ANSWER


def test_without_streaming_one_response_has_the_same_text(grpc):
    pieces, error = stream(grpc, text_inputs(QUESTION, 32, False))
    assert error is None and [piece for piece in pieces if piece] == [ANSWER]


def test_tokens_in_and_out_of_the_language_model(world, grpc):
    request = [tensor("QUERY", [QUESTION.encode()], np.object_), tensor("REQUEST_OUTPUT_LEN", [1], np.int32)]
    ids = grpc.infer("preprocessing", request).as_numpy("INPUT_ID")
    inputs = [tensor("input_ids", ids[0].tolist(), np.int32), tensor("input_lengths", [ids.shape[1]], np.int32), tensor("request_output_len", [5], np.int32)]
    results = []
    with grpcclient.InferenceServerClient(world.grpc) as client:
        client.start_stream(lambda result, error: results.append((result, error)))
        client.async_stream_infer("tensorrt_llm", inputs)
        client.stop_stream()
    [(result, error)] = results
    assert error is None
    assert result.as_numpy("output_ids").shape == (1, 1, 5) and result.as_numpy("sequence_length").tolist() == [[5]]


def test_a_stop_word_ends_the_answer_and_is_not_in_it(grpc):
    pieces, error = stream(grpc, text_inputs(QUESTION, 32, True, stop_words=([b" hot"], np.object_)))
    assert error is None and "".join(pieces) == " The opposite of"


def test_sampling_with_a_seed_repeats_itself_and_differs_between_seeds(grpc):
    def sample(seed):
        options = {"temperature": ([1.5], np.float32), "top_k": ([50], np.int32), "seed": ([seed], np.uint64)}
        return "".join(stream(grpc, text_inputs(STORY, 24, True, **options))[0])

    assert sample(7) == sample(7)
    assert len({sample(seed) for seed in range(4)}) > 1


def test_one_request_alone_or_among_thirty_two_gets_the_same_text(world, grpc):
    alone = "".join(stream(grpc, text_inputs(STORY, 40, True))[0])

    def ask(_):
        with grpcclient.InferenceServerClient(world.grpc) as client:
            return "".join(stream(client, text_inputs(STORY, 40, True))[0])

    with ThreadPoolExecutor(32) as pool:
        assert set(pool.map(ask, range(32))) == {alone}


def test_plain_infer_on_a_decoupled_model_is_refused(grpc):
    with pytest.raises(InferenceServerException, match="decoupled"):
        grpc.infer("ensemble", text_inputs(QUESTION, 8, False))
