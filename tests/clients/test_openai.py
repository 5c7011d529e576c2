"""OpenAI's own Python client against /v1."""

import json
import shutil
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from triton_requests import ANSWER, QUESTION
from conftest import ROOT, free_ports, launch

TEMPLATE = """{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('no system turns') }}{% endif %}Q: {{ message.content }}
{% endfor %}{% if add_generation_prompt %}A:{% endif %}"""


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """OpenAI's client of a world whose tokenizer has a chat template."""
    models = tmp_path_factory.mktemp("openai") / "models"
    shutil.copytree(ROOT / "model_repository", models)
    (models / "tensorrt_llm/1/chat_template.jinja").write_text(TEMPLATE)
    http, grpc, metrics = free_ports(3)
    flags = [f"--http_port={http}", f"--grpc_port={grpc}", f"--metrics_port={metrics}"]
    started = launch("--world_size=1", f"--model_repo={models}", "--device=cpu", "--detach", *flags)
    assert started.returncode == 0, started.stderr
    yield openai.OpenAI(base_url=f"http://localhost:{http}/v1", api_key="none", max_retries=0)
    stopped = launch("stop", f"--http_port={http}")
    assert stopped.returncode == 0, stopped.stderr


def test_text_models_are_listed(client):
    assert [model.id for model in client.models.list().data] == ["ensemble"]
    assert client.models.retrieve("ensemble").id == "ensemble"


def test_a_completion_has_the_ensembles_text_and_usage(client):
    completion = client.completions.create(model="ensemble", prompt=QUESTION, max_tokens=32, temperature=0)
    (choice,) = completion.choices
    assert choice.text == ANSWER and choice.finish_reason == "stop" and choice.logprobs is None
    usage = completion.usage
    assert 0 < usage.completion_tokens < 32 and usage.prompt_tokens > 3
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_a_stream_joins_to_the_same_text_and_ends_with_usage(client):
    chunks = list(client.completions.create(model="ensemble", prompt=QUESTION, max_tokens=32, temperature=0, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == ANSWER
    assert len(chunks) > 3 and [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens > 3


def test_a_chat_uses_the_template(client):
    question = QUESTION.removeprefix("Q: ").removesuffix("\nA:")
    messages = [{"role": "user", "content": question}]
    chat = client.chat.completions.create(model="ensemble", messages=messages, max_tokens=32, temperature=0)
    assert chat.choices[0].message.content == ANSWER and chat.choices[0].message.role == "assistant"
    chunks = list(client.chat.completions.create(model="ensemble", messages=messages, max_tokens=32, temperature=0, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    with pytest.raises(openai.BadRequestError, match="no system turns"):
        client.chat.completions.create(model="ensemble", messages=[{"role": "system", "content": "x"}, *messages])


def test_stop_strings_are_removed_and_the_finish_reason_is_reported(client):
    whole = client.completions.create(model="ensemble", prompt="The captain", max_tokens=24, temperature=0, extra_body={"ignore_eos": True})
    text = whole.choices[0].text
    assert whole.choices[0].finish_reason == "length" and whole.usage.completion_tokens == 24
    stop = text[8:12]
    for stream in (False, True):
        answer = client.completions.create(model="ensemble", prompt="The captain", max_tokens=24, temperature=0, stop=[stop], stream=stream)
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        assert "".join(choice.text for choice in choices) == text[: text.index(stop)]
        assert choices[-1].finish_reason == "stop"


def test_several_choices_and_prompts_keep_their_order(client):
    drawn = client.completions.create(model="ensemble", prompt=["The captain", "Once"], n=2, max_tokens=8, temperature=1.0, seed=5)
    assert [choice.index for choice in drawn.choices] == [0, 1, 2, 3]
    again = client.completions.create(model="ensemble", prompt=["The captain", "Once"], n=2, max_tokens=8, temperature=1.0, seed=5)
    assert [choice.text for choice in drawn.choices] == [choice.text for choice in again.choices]
    assert drawn.choices[0].text != drawn.choices[1].text
    alone = client.completions.create(model="ensemble", prompt="Once", n=2, max_tokens=8, temperature=1.0, seed=5)
    assert [choice.text for choice in drawn.choices[2:]] == [choice.text for choice in alone.choices]
    unseeded = client.completions.create(model="ensemble", prompt=["Once"] * 4, max_tokens=16, temperature=1.5)
    assert len({choice.text for choice in unseeded.choices}) > 1, "each prompt is drawn by itself"


def test_log_probabilities_are_those_of_the_chosen_tokens(client):
    completion = client.completions.create(model="ensemble", prompt=QUESTION, max_tokens=8, temperature=0, logprobs=1)
    logprobs = completion.choices[0].logprobs
    assert "".join(logprobs.tokens) == completion.choices[0].text
    assert len(logprobs.token_logprobs) == len(logprobs.tokens) > 2 and all(value <= 0 for value in logprobs.token_logprobs)
    chat = client.chat.completions.create(model="ensemble", messages=[{"role": "user", "content": "Hello?"}], max_tokens=4, temperature=0, logprobs=True)
    assert chat.choices[0].logprobs.content[0].logprob <= 0


def test_the_bytes_of_logprobs_are_those_of_tokens_that_are_parts_of_a_character(client):
    emoji = {"structured_outputs": {"choice": ["🙂🌍"]}}
    messages = [{"role": "user", "content": "Hello?"}]
    chat = client.chat.completions.create(model="ensemble", messages=messages, max_tokens=16, logprobs=True, top_logprobs=2, extra_body=emoji)
    tokens = chat.choices[0].logprobs.content
    assert chat.choices[0].message.content == "🙂🌍" and len(tokens) > 2
    assert b"".join(bytes(token.bytes) for token in tokens).startswith("🙂🌍".encode())
    assert all(bytes(token.bytes) in [bytes(top.bytes) for top in token.top_logprobs] for token in tokens if token.logprob > -0.5)


def test_errors_have_openais_form(client):
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="nobody", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="temperature") as wrong:
        client.completions.create(model="ensemble", prompt="x", temperature=5)
    assert wrong.value.param == "temperature" and wrong.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.completions.create(model="ensemble", prompt="word " * 3000, max_tokens=4)
    for path, body, status in (("completions", b"{", 400), ("nothing", None, 404), ("models", b"{}", 405)):
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(f"{str(client.base_url).rstrip('/')}/{path}", data=body, timeout=30)
        assert error.value.code == status and json.load(error.value)["error"]["message"]


@pytest.mark.parametrize(
    "path, advice",
    [
        ("/v1/embeddings", "as a Python model"),
        ("/v1/score", "as a Python model"),
        ("/v1/rerank", "as a Python model"),
        ("/rerank", "as a Python model"),
        ("/v1/audio/speech", "as a Python model"),
        ("/v1/batches", "Nothing is stored"),
    ],
)
def test_an_endpoint_that_is_not_served_is_refused_with_what_to_do(world, path, advice):
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"http://{world.http}{path}", data=b"{}", timeout=30)
    error = json.load(refused.value)["error"]
    assert refused.value.code == 404 and error["message"].startswith(f"{path} is not served: ") and advice in error["message"]


def test_clients_that_disconnect_mid_stream_do_not_affect_the_server(client):
    with ThreadPoolExecutor(4) as threads:
        def leave(_):
            stream = client.completions.create(model="ensemble", prompt="The captain", max_tokens=400, temperature=0, stream=True, extra_body={"ignore_eos": True})
            next(iter(stream))
            stream.close()
        list(threads.map(leave, range(4)))
    assert client.completions.create(model="ensemble", prompt=QUESTION, max_tokens=32, temperature=0).choices[0].text == ANSWER
