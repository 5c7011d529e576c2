"""Anthropic's own Python client against /v1/messages."""

import json
import shutil
import urllib.error
import urllib.request

import anthropic
import pytest

from conftest import ROOT, free_ports, launch
from triton_requests import ANSWER, QUESTION

TEMPLATE = """{% for message in messages %}{{ 'Q: ' if message.role == 'user' else 'S: ' if message.role == 'system' else 'A: ' }}{{ message.content }}
{% endfor %}{% if add_generation_prompt %}A:{% endif %}"""
QUESTION_ALONE = QUESTION.removeprefix("Q: ").removesuffix("\nA:")


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """Anthropic's client of a world whose tokenizer has a chat template."""
    models = tmp_path_factory.mktemp("anthropic") / "models"
    shutil.copytree(ROOT / "model_repository", models)
    (models / "tensorrt_llm/1/chat_template.jinja").write_text(TEMPLATE)
    http, grpc, metrics = free_ports(3)
    flags = [f"--http_port={http}", f"--grpc_port={grpc}", f"--metrics_port={metrics}"]
    started = launch("--world_size=1", f"--model_repo={models}", "--device=cpu", "--detach", *flags)
    assert started.returncode == 0, started.stderr
    yield anthropic.Anthropic(base_url=f"http://localhost:{http}", api_key="none", max_retries=0)
    stopped = launch("stop", f"--http_port={http}")
    assert stopped.returncode == 0, stopped.stderr


def ask(client, **fields):
    fields = {"model": "ensemble", "max_tokens": 32, "messages": [{"role": "user", "content": QUESTION_ALONE}]} | fields
    extra = {"temperature": 0} | fields.pop("extra_body", {})
    return client.messages.create(**fields, extra_body=extra)


def test_a_message_has_the_models_text(client):
    message = ask(client)
    (block,) = message.content
    assert block.type == "text" and block.text == ANSWER
    assert message.role == "assistant" and message.stop_reason == "end_turn" and message.stop_sequence is None
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens > 3 and 0 < message.usage.output_tokens < 32
    assert ask(client, max_tokens=2).stop_reason == "max_tokens"


def test_a_stream_joins_to_the_same_message(client):
    fields = {"model": "ensemble", "max_tokens": 32, "extra_body": {"temperature": 0}, "messages": [{"role": "user", "content": [{"type": "text", "text": QUESTION_ALONE}]}]}
    with client.messages.stream(**fields) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == ANSWER == message.content[0].text
    assert message.stop_reason == "end_turn" and message.usage.output_tokens > 3


def test_stop_sequences_are_reported(client):
    stop = ANSWER.strip()[1:3]
    message = ask(client, stop_sequences=[stop, "never"])
    assert message.stop_reason == "stop_sequence" and message.stop_sequence == stop
    assert message.content[0].text == ANSWER[: ANSWER.index(stop)]


def test_a_last_message_of_the_assistant_is_continued(client):
    prefill = ANSWER[:4].rstrip()
    messages = [{"role": "user", "content": QUESTION_ALONE}, {"role": "assistant", "content": prefill}]
    counted = client.messages.count_tokens(model="ensemble", messages=messages)
    assert counted.input_tokens > client.messages.count_tokens(model="ensemble", messages=messages[:1]).input_tokens - 2


def test_tokens_are_counted_as_they_are_charged(client):
    messages = [{"role": "user", "content": QUESTION_ALONE}]
    counted = client.messages.count_tokens(model="ensemble", system="Be brief.", messages=messages).input_tokens
    usage = ask(client, system="Be brief.", messages=messages).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


def test_errors_have_anthropics_form(client):
    with pytest.raises(anthropic.NotFoundError) as missing:
        ask(client, model="nobody")
    assert missing.value.body["type"] == "error" and missing.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="block of type `image`") as refused:
        source = {"type": "url", "url": "http://localhost/x.png"}
        ask(client, messages=[{"role": "user", "content": [{"type": "image", "source": source}]}])
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    assert missing.value.request_id.startswith("req-") and missing.value.body["request_id"] == missing.value.request_id
    with pytest.raises(anthropic.BadRequestError, match="`temprature` is not known"):
        ask(client, extra_body={"temprature": 1})
    for body in (b"{", b"[]", b'{"model": "ensemble"}'):
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(f"{str(client.base_url).rstrip('/')}/v1/messages", data=body, timeout=30)
        assert error.value.code == 400 and json.load(error.value)["type"] == "error"


def test_a_message_has_the_id_of_its_request(client):
    assert ask(client)._request_id.startswith("req-")
    assert ask(client, extra_headers={"x-request-id": "mine-7"})._request_id == "mine-7"


@pytest.mark.parametrize("field, value", [("n", 2), ("return_token_ids", True), ("stop", ["x"])])
def test_fields_without_a_place_in_a_message_are_refused(world, field, value):
    client = anthropic.Anthropic(base_url=f"http://{world.http}", api_key="none", max_retries=0)
    with pytest.raises(anthropic.BadRequestError, match=field):
        client.messages.create(model="ensemble", max_tokens=4, messages=[{"role": "user", "content": "Hi"}], stop_sequences=["y"], extra_body={field: value})
