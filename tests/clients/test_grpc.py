"""gRPC through an unmodified tritonclient."""

import json
from concurrent.futures import ThreadPoolExecutor

import grpc as grpc_module
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from triton_requests import ANSWER, QUESTION, STORY, post, stream, tensor, text_inputs


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


def test_plain_infer_on_a_decoupled_text_model_answers_with_the_whole_text(world, grpc):
    inputs = text_inputs(QUESTION, 32, False)
    for inputs in (inputs, [tensor for tensor in inputs if tensor.name() != "stream"]):
        assert grpc.infer("ensemble", inputs).as_numpy("text_output").tolist() == [ANSWER.encode()]
    body = {"inputs": [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [QUESTION]}, {"name": "max_tokens", "shape": [1], "datatype": "INT32", "data": [32]}]}
    status, _, answer = post(world.http, "/v2/models/ensemble/infer", body)
    outputs = {output["name"]: output["data"] for output in json.loads(answer)["outputs"]}
    assert status == 200 and outputs["text_output"] == [ANSWER]


def test_plain_infer_with_a_stream_on_a_decoupled_model_is_refused(grpc):
    with pytest.raises(InferenceServerException, match="decoupled"):
        grpc.infer("ensemble", text_inputs(QUESTION, 8, True))


def test_several_answers_to_plain_infer_are_an_error(grpc):
    with pytest.raises(InferenceServerException, match="more than once"):
        grpc.infer("ensemble", text_inputs(QUESTION, 4, False, num_return_sequences=([2], np.int32), temperature=([1.0], np.float32), top_p=([1.0], np.float32)))


def test_the_seed_has_the_names_of_two_releases(grpc):
    def sample(name):
        options = {"temperature": ([1.5], np.float32), "top_k": ([50], np.int32), name: ([5], np.uint64)}
        return "".join(stream(grpc, text_inputs(STORY, 24, True, **options))[0])

    assert sample("random_seed") == sample("seed")


def test_reflection_lists_the_services_in_both_of_its_versions(world):
    for version in ("v1", "v1alpha"):
        assert reflected(world.grpc, version) >= {"inference.GRPCInferenceService", "grpc.health.v1.Health"}, version


def reflected(address: str, version: str) -> set[str]:
    """The services that reflection lists. The messages are small enough to be written by hand: `list_services` is field 7, a service's name field 1."""

    def fields(data: bytes) -> list[tuple[int, bytes]]:
        found = []
        while data:
            number, kind, data = data[0] >> 3, data[0] & 7, data[1:]
            assert kind == 2, "only fields of bytes are expected"
            length, at = 0, 0
            while True:
                length |= (data[at] & 127) << (7 * at)
                at += 1
                if data[at - 1] < 128:
                    break
            found.append((number, data[at : at + length]))
            data = data[at + length :]
        return found

    with grpc_module.insecure_channel(address) as channel:
        call = channel.stream_stream(f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo")
        (answer,) = call(iter([b"\x3a\x01*"]), timeout=30)
    services = next(value for number, value in fields(answer) if number == 6)
    return {value.decode() for _, service in fields(services) for number, value in fields(service) if number == 1}
