"""Fields and endpoints that clients know from vLLM: `stop_reason`, and the tokenizer's settings."""

import json
import urllib.error
import urllib.request

import pytest
from openai import OpenAI

from conftest import ROOT

CHECKPOINT = ROOT / "model_repository/tensorrt_llm/1"
QUESTION = [{"role": "user", "content": "What is the opposite of hot?"}]


@pytest.fixture
def client(world):
    return OpenAI(base_url=f"http://{world.http}/v1", api_key="none", max_retries=0)


def completed(client, **extra):
    return client.completions.create(
        model="ensemble", prompt="The captain", max_tokens=12, temperature=0, stop=extra.pop("stop", None), extra_body={"return_token_ids": True, **extra}).choices[0]


def info(world, query=""):
    with urllib.request.urlopen(f"http://{world.http}/tokenizer_info{query}", timeout=10) as answer:
        return json.load(answer)


def test_stop_reason_is_the_id_or_the_text_that_ended_the_answer_and_null_otherwise(client):
    whole = completed(client, ignore_eos=True)
    ids = whole.model_extra["token_ids"]
    assert whole.finish_reason == "length" and whole.model_extra["stop_reason"] is None
    stop_id = ids[3]
    ended = completed(client, stop_token_ids=[stop_id])
    assert (ended.finish_reason, ended.model_extra["stop_reason"]) == ("stop", stop_id)
    stop = whole.text[4:7]
    ended = completed(client, stop=[stop], stop_token_ids=[3])
    assert (ended.finish_reason, ended.model_extra["stop_reason"]) == ("stop", stop)


def test_a_chats_stop_reason_is_null_at_the_models_own_end_also_when_it_is_named(client, world):
    fields = dict(model="ensemble", messages=QUESTION, max_tokens=100, temperature=0)
    end_id = json.loads((CHECKPOINT / "config.json").read_text())["eos_token_id"]
    for extra, expected in [({}, None), ({"stop_token_ids": [end_id]}, None), ({"stop_token_ids": [end_id], "ignore_eos": True}, end_id)]:
        choice = client.chat.completions.create(**fields, extra_body=extra).choices[0]
        assert (choice.finish_reason, choice.model_extra["stop_reason"]) == ("stop", expected), extra
        chunks = list(client.chat.completions.create(**fields, stream=True, extra_body=extra))
        assert chunks[-1].choices[0].model_extra["stop_reason"] == expected, extra
        assert all("stop_reason" not in chunk.choices[0].model_extra for chunk in chunks[:-1])


def test_a_stream_begins_with_the_ids_of_the_prompt(client):
    fields = dict(model="ensemble", max_tokens=4, temperature=0, n=2, extra_body={"return_token_ids": True})
    prompts = ["The captain", "Once upon a time"]
    whole = client.completions.create(prompt=prompts, **fields).choices
    found = [[], [], [], []]
    for chunk in client.completions.create(prompt=prompts, stream=True, **fields):
        found[chunk.choices[0].index].append(chunk.choices[0].model_extra.get("prompt_token_ids"))
    assert [ids[0] for ids in found] == [choice.model_extra["prompt_token_ids"] for choice in whole]
    assert not any(any(ids[1:]) for ids in found)
    whole = client.chat.completions.create(messages=QUESTION, **fields)
    first, *others = client.chat.completions.create(messages=QUESTION, stream=True, **fields)
    assert first.model_extra["prompt_token_ids"] == whole.model_extra["prompt_token_ids"]
    assert not any("prompt_token_ids" in chunk.model_extra for chunk in others)


def test_a_chat_has_the_log_probabilities_of_its_prompt_whatever_its_answer_begins_with(client):
    fields = dict(model="ensemble", max_tokens=8, temperature=0, extra_body={"prompt_logprobs": 1, "return_token_ids": True})
    for question in ["What is 7 plus 8?", "Hi"]:
        answer = client.chat.completions.create(messages=[{"role": "user", "content": question}], **fields).model_extra
        assert len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"])


def test_tokenizer_info_is_the_checkpoints_file(world):
    found = info(world)
    assert found == json.loads((CHECKPOINT / "tokenizer_config.json").read_text())
    assert info(world, "?model=ensemble") == found
    with pytest.raises(urllib.error.HTTPError) as error:
        info(world, "?model=nobody")
    assert error.value.code == 404 and json.load(error.value)["error"]["code"] == "model_not_found"
    # Without names of tokens, a client could not count them.
    assert isinstance(found["eos_token"], str) and "message" in found["chat_template"]
