"""Requests of published clients and benchmarks, to repositories of the layouts that they were written for."""

import json
import queue
import subprocess
import urllib.request
from contextlib import contextmanager

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from triton_requests import ANSWER, QUESTION
from conftest import BINARIES, ROOT, World, free_ports, launch

CHECKPOINT = ROOT / "model_repository/tensorrt_llm/1"
END_TOKEN = 2


@contextmanager
def served(folder, *layouts: str, fill: str = "", checkpoint=CHECKPOINT, change=lambda: None):
    """Launches a world of one rank that serves repositories made by `trireme init`, after calling `change`."""
    for layout in layouts:
        command = [BINARIES / "trireme", "init", checkpoint, f"--layout={layout}", f"--output={folder}", f"--fill={fill}"]
        made = subprocess.run(command, capture_output=True, text=True)
        assert made.returncode == 0, made.stderr
    change()
    ports = World(*free_ports(3))
    flags = [f"--http_port={ports.http_port}", f"--grpc_port={ports.grpc_port}", f"--metrics_port={ports.metrics_port}"]
    started = launch("--world_size=1", f"--model_repo={folder}", "--device=cpu", "--detach", *flags)
    assert started.returncode == 0, started.stderr
    try:
        yield ports
    finally:
        launch("stop", f"--http_port={ports.http_port}")


@pytest.fixture(scope="module")
def in_flight(tmp_path_factory):
    fill = "decoupled_mode:False,exclude_input_in_output:False"
    with served(tmp_path_factory.mktemp("in_flight") / "models", "tensorrt-llm", fill=fill) as world:
        yield world


@pytest.fixture(scope="module")
def fixed(tmp_path_factory):
    with served(tmp_path_factory.mktemp("fixed") / "models", "gpt", fill="triton_max_batch_size:8") as world:
        yield world


@pytest.fixture(scope="module")
def sessions(tmp_path_factory):
    with served(tmp_path_factory.mktemp("sessions") / "models", "turbomind", fill="model_name:base") as world:
        yield world


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    with served(tmp_path_factory.mktemp("texts") / "models", "lmdeploy", "sglang", "llama-python") as world:
        yield world


def completion(world, **fields) -> dict:
    """The response of OpenAI's completions endpoint."""
    request = urllib.request.Request(f"http://{world.http}/v1/completions", json.dumps(fields).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.loads(reply.read())


@pytest.mark.parametrize("model", ["lmdeploy_model", "sglang_model", "llama-python"])
def test_text_models_accept_openais_settings_that_they_do_not_declare(texts, model):
    asked = {"model": model, "prompt": "Once", "max_tokens": 12, "n": 4, "seed": 7, "temperature": 1.5, "logprobs": 1}
    choices = completion(texts, **asked)["choices"]
    drawn = [choice["text"] for choice in choices]
    assert len(set(drawn)) > 1, "each choice is sampled separately"
    assert drawn == [choice["text"] for choice in completion(texts, **asked)["choices"]], "a seed reproduces the choices"
    for choice in choices:
        values = choice["logprobs"]["token_logprobs"]
        assert len(values) >= 1 and all(value <= 0 for value in values), choice
    likeliest = completion(texts, **{**asked, "n": 1, "temperature": 0})["choices"][0]
    other = completion(texts, **{**asked, "n": 1, "temperature": 0, "presence_penalty": 2.0, "frequency_penalty": 2.0, "max_tokens": 64})
    plain = completion(texts, **{**asked, "n": 1, "temperature": 0, "max_tokens": 64})
    assert plain["choices"][0]["text"].startswith(likeliest["text"])
    assert other["choices"][0]["text"] != plain["choices"][0]["text"], "penalties change a long text"


@pytest.mark.parametrize("model", ["lmdeploy_model", "sglang_model", "llama-python"])
def test_trireme_client_works_with_text_models_of_every_layout(texts, model):
    command = [BINARIES / "trireme", "client", "-u", texts.grpc, "-m", model, "-n", "32", "--quiet", QUESTION]
    asked = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert asked.returncode == 0 and asked.stdout.strip() == ANSWER.strip(), asked
    drawn = {subprocess.run([*command, "-t", "5", "--seed", str(seed)], capture_output=True, text=True).stdout for seed in range(3)}
    assert len(drawn) > 1, drawn


def connected(world, protocol: str):
    return httpclient.InferenceServerClient(world.http) if protocol == "http" else grpcclient.InferenceServerClient(world.grpc)


def inputs(protocol: str = "grpc", **arrays):
    """Input tensors from name=array, with the data types of the arrays."""
    module = httpclient if protocol == "http" else grpcclient
    made = []
    for name, array in arrays.items():
        tensor = module.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        made.append(tensor)
    return made


def one(value, dtype):
    return np.array([[value]], dtype=dtype)


def streamed(world, model: str, tensors, **options) -> list:
    """All responses of a streamed request. Like published clients, it closes the stream as soon as the request is sent."""
    answers: queue.Queue = queue.Queue()
    with grpcclient.InferenceServerClient(world.grpc) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer(model, tensors, **options)
        client.stop_stream()
    results = [answers.get() for _ in range(answers.qsize())]
    assert results and all(error is None for _, error in results), results
    return [result for result, _ in results]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_core_benchmark_of_in_flight_batching_sends_random_ids(in_flight, protocol):
    ids = np.random.default_rng(7).integers(0, np.iinfo(np.int32).max, (1, 16), dtype=np.int32)
    arrays = {"input_ids": ids, "input_lengths": one(16, np.int32), "request_output_len": one(8, np.int32), "pad_id": one(0, np.int32), "end_id": one(-1, np.int32)}
    with connected(in_flight, protocol) as client:
        result = client.infer("tensorrt_llm", inputs(protocol, **arrays), request_id="3")
        again = client.infer("tensorrt_llm", inputs(protocol, **arrays))
    assert result.as_numpy("output_ids").shape == (1, 1, 24)
    assert (result.as_numpy("output_ids") == again.as_numpy("output_ids")).all()
    response = result.get_response()
    # The tool reads lengths from the first output, and matches responses by their ids.
    first = response["outputs"][0]["shape"] if protocol == "http" else list(response.outputs[0].shape)
    assert first == [1, 1, 24] and (response["id"] if protocol == "http" else response.id) == "3"


def test_ids_of_the_wrong_type_are_refused_as_triton_does(in_flight):
    with connected(in_flight, "grpc") as client:
        arrays = {"input_ids": np.array([[5, 6]], np.int32), "input_lengths": one(2, np.int32), "request_output_len": one(4, np.uint32)}
        with pytest.raises(InferenceServerException, match="UINT32.*INT32"):
            client.infer("tensorrt_llm", inputs(**arrays))
        negative = arrays | {"input_ids": np.array([[5, -6]], np.int32), "request_output_len": one(4, np.int32)}
        with pytest.raises(InferenceServerException, match="holds token -6"):
            client.infer("tensorrt_llm", inputs(**negative))


def test_an_ensemble_in_the_client_returns_the_same_as_the_server_s(in_flight):
    """The functionality test of `end_to_end_test.py`."""
    with connected(in_flight, "grpc") as client:
        empty = np.array([[b""]], dtype=object)
        text = np.array([[QUESTION.encode()]], dtype=object)
        prompt = client.infer("preprocessing", inputs(QUERY=text, BAD_WORDS_DICT=empty, STOP_WORDS_DICT=empty, REQUEST_OUTPUT_LEN=one(16, np.int32)))
        assert prompt.as_numpy("OUT_END_ID").tolist() == [[END_TOKEN]]
        handed = {"input_ids": "INPUT_ID", "input_lengths": "REQUEST_INPUT_LEN", "request_output_len": "REQUEST_OUTPUT_LEN", "end_id": "OUT_END_ID", "pad_id": "OUT_PAD_ID"}
        tokens = client.infer("tensorrt_llm", inputs(**{name: prompt.as_numpy(output) for name, output in handed.items()}))
        by_hand = client.infer("postprocessing", inputs(TOKENS_BATCH=tokens.as_numpy("output_ids").astype(np.int32), SEQUENCE_LENGTH=tokens.as_numpy("sequence_length")))
        ensemble = client.infer("ensemble", inputs(text_input=text, max_tokens=one(16, np.int32), bad_words=empty, stop_words=empty, stream=one(False, bool)))
    assert by_hand.as_numpy("OUTPUT")[0] == ensemble.as_numpy("text_output")[0]
    assert ensemble.as_numpy("text_output")[0].decode() == QUESTION + ANSWER


def test_trireme_s_client_and_benchmark_accept_a_model_without_streaming(in_flight):
    def run(*words):
        done = subprocess.run([BINARIES / "trireme", *words], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert run("client", QUESTION, "--url", in_flight.grpc, "--quiet") == QUESTION + ANSWER + "\n"
    lengths = ["--input-mean=8", "--input-stdev=1", "--output-mean=6", "--output-stdev=1"]
    report = run("bench", "core", "--url", in_flight.grpc, "--num-requests=4", "token-norm-dist", *lengths)
    assert "Total requests" in report and "failed" not in report


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_benchmark_of_fixed_batches_gets_all_rows_of_a_batch(fixed, protocol):
    """`identity_test.py` and `benchmark_core_model.py` of `tools/gpt`, which use ids of GPT-2's vocabulary for any model."""
    batch, start, output = 4, 8, 6
    rows = {
        "input_lengths": (start, np.int32), "request_output_len": (output, np.int32), "pad_id": (0, np.int32), "end_id": (2, np.int32), "beam_width": (1, np.int32),
        "temperature": (1.0, np.float32), "runtime_top_k": (1, np.int32), "runtime_top_p": (0.0, np.float32), "len_penalty": (1.0, np.float32),
        "repetition_penalty": (1.0, np.float32), "min_length": (output, np.int32), "presence_penalty": (0.0, np.float32), "frequency_penalty": (0.0, np.float32),
        "random_seed": (0, np.uint64), "output_log_probs": (True, bool),
    }
    arrays = {name: np.full((batch, 1), value, dtype) for name, (value, dtype) in rows.items()}
    ids = np.random.default_rng(3).integers(0, 50255, (batch, start), dtype=np.int32)
    with connected(fixed, protocol) as client:
        result = client.infer("tensorrt_llm", inputs(protocol, input_ids=ids, **arrays))
    assert result.as_numpy("output_ids").shape == (batch, 1, start + output)
    assert result.as_numpy("log_probs").shape == (batch, output, 1)


def lmdeploy_inputs(max_tokens: int, stream: bool):
    """`client.py` of LMDeploy's Triton Python backend."""
    return inputs(
        prompt=np.array([QUESTION.encode()], dtype=object), max_tokens=np.array([max_tokens], np.int32), temperature=np.array([1.0], np.float64),
        top_p=np.array([1.0], np.float64), top_k=np.array([1], np.int32), ignore_eos=np.array([False]), stream=np.array([stream]),
        bad_words=np.array([b"User:", b"GPT:"], dtype=object),
    )


@pytest.mark.parametrize("model", ["lmdeploy_model", "sglang_model"])
@pytest.mark.parametrize("stream", [True, False])
def test_text_of_lmdeploy_and_sglang_with_and_without_streaming(texts, model, stream):
    results = streamed(texts, model, lmdeploy_inputs(32, stream), sequence_start=True, sequence_end=True)
    pieces = [result.as_numpy("response")[0].decode() for result in results]
    assert "".join(pieces) == ANSWER and (len(pieces) > 3) == stream


def test_a_streaming_client_of_tensorrt_llm_works_with_a_hugging_face_model(texts):
    """`end_to_end_grpc_client.py -S --model-name llama-python`."""
    arrays = {
        "text_input": np.array([[QUESTION.encode()]], dtype=object), "max_tokens": one(32, np.int32), "stream": one(True, bool), "beam_width": one(1, np.int32),
        "temperature": one(1.0, np.float32), "exclude_input_in_output": one(False, bool),
    }
    arrays |= {"top_k": one(1, np.int32)}
    results = streamed(texts, "llama-python", inputs(**arrays), request_id="")
    pieces = [result.as_numpy("text_output")[0].decode("utf-8") for result in results]
    assert "".join(pieces) == ANSWER and len(pieces) > 3


class Chat:
    """Sends the requests of LMDeploy's `Chatbot` in one session of TurboMind's models."""

    def __init__(self, world, session: int):
        self.world, self.session, self.length = world, session, 0
        with connected(world, "grpc") as client:
            config = client.get_model_config("turbomind", as_json=True)["config"]
        self.name = config["parameters"]["model_name"]["string_value"]

    def encode(self, text: str):
        with connected(self.world, "grpc") as client:
            result = client.infer("preprocessing", inputs(QUERY=np.array([[text.encode()]], dtype=object)))
        return result.as_numpy("INPUT_ID"), result.as_numpy("REQUEST_INPUT_LEN")

    def decode(self, ids) -> str:
        arrays = {"TOKENS_BATCH": np.array([[ids]], np.uint32), "sequence_length": one(0, np.uint32), "skip_special_tokens": one(1, np.int32)}
        with connected(self.world, "grpc") as client:
            return client.infer("postprocessing", inputs(**arrays)).as_numpy("OUTPUT")[0].decode()

    def turn(self, ids, lengths, max_tokens: int, start: bool = False, end: bool = False, **more) -> list[int]:
        arrays = {
            "input_ids": ids, "input_lengths": lengths, "request_output_len": np.full(lengths.shape, max_tokens).astype(np.uint32),
            "runtime_top_p": one(1.0, np.float32), "temperature": one(0.8, np.float32), "repetition_penalty": one(1.0, np.float32), "step": one(self.length, np.int32),
            "runtime_top_k": one(1, np.uint32), "session_len": one(2048, np.uint32), "START": one(int(start), np.int32), "END": one(int(end), np.int32),
            "CORRID": one(self.session, np.uint64), "STOP": one(0, np.int32),
        }
        flags = {"sequence_id": self.session, "sequence_start": start, "sequence_end": end}
        result = streamed(self.world, "turbomind", inputs(**arrays, **more), **flags)[-1]
        told = int(result.as_numpy("sequence_length").squeeze())
        new = result.as_numpy("output_ids").reshape(-1)[self.length + int(lengths.squeeze()) : told]
        self.length = told
        return new.tolist()


def test_a_chat_of_turbomind_continues_its_session_and_ends_it(sessions):
    chat = Chat(sessions, 5)
    assert chat.name == "base"
    ids, lengths = chat.encode(QUESTION)
    assert chat.encode("<EOS>")[0].tolist() == [[END_TOKEN]] and chat.encode("<BOS>")[0].tolist() == [[int(ids[0, 0])]]
    first = chat.turn(ids, lengths, 32, start=True)
    assert chat.decode(first) == ANSWER
    history = chat.length
    again, length = chat.encode("\n" + QUESTION)
    assert chat.turn(again[:, 1:], length - 1, 4) and chat.length > history + 4
    # The last request ends the session, with no text and no tokens requested.
    chat.encode("")
    chat.turn(one(1, np.uint32), one(1, np.uint32), 0, end=True)


def test_the_serving_benchmark_of_turbomind_gets_as_many_tokens_as_it_requests(sessions):
    """`profile_serving.py` bans the end token, whose id it learns from the server."""
    chat = Chat(sessions, 0)
    end = int(chat.encode("<EOS>")[0][0][0])
    ids, lengths = chat.encode(QUESTION)
    new = chat.turn(ids, lengths, 48, start=True, end=True, bad_words_list=np.array([[[end], [1]]], np.int32))
    assert len(new) == 48 and end not in new
