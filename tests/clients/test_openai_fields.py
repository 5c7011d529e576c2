"""Every field of OpenAI's requests has its effect, through OpenAI's own Python client."""

import json
import math
import urllib.error
import urllib.request

import openai
import pytest

from conftest import ROOT, free_ports, launch
from triton_requests import ANSWER, QUESTION

PROMPT = "The captain"


@pytest.fixture(scope="module")
def client():
    """OpenAI's client of a world with the shipped repository."""
    http, grpc, metrics = free_ports(3)
    flags = [f"--http_port={http}", f"--grpc_port={grpc}", f"--metrics_port={metrics}"]
    started = launch("--world_size=2", f"--model_repo={ROOT / 'model_repository'}", "--device=cpu", "--detach", *flags)
    assert started.returncode == 0, started.stderr
    yield openai.OpenAI(base_url=f"http://localhost:{http}/v1", api_key="none", max_retries=0)
    stopped = launch("stop", f"--http_port={http}")
    assert stopped.returncode == 0, stopped.stderr


def complete(client, prompt=PROMPT, max_tokens=12, temperature=0, **fields):
    known = {"n", "seed", "stop", "logprobs", "echo", "logit_bias", "stream", "stream_options"}
    own = {name: value for name, value in fields.items() if name in known}
    extra = {name: value for name, value in fields.items() if name not in known}
    return client.completions.create(model="ensemble", prompt=prompt, max_tokens=max_tokens, temperature=temperature, extra_body=extra, **own)


def text(client, **fields):
    return complete(client, **fields).choices[0].text


def ids(client, prompt):
    """The token ids of a text, as the server encodes it."""
    return complete(client, prompt=prompt, max_tokens=1, return_token_ids=True).model_extra["prompt_token_ids"]


def triton(client, path, **fields):
    """An answer of Triton's generate endpoint of the same server."""
    url = str(client.base_url).replace("/v1/", f"/v2/models/{path}")
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(fields).encode()), timeout=60) as answer:
        return json.load(answer)


def test_token_ids_are_prompts(client):
    tokens = ids(client, PROMPT)
    assert len(tokens) > 1
    assert text(client, prompt=tokens) == text(client)
    several = complete(client, prompt=[tokens, ids(client, QUESTION)])
    assert [choice.text for choice in several.choices] == [text(client), text(client, prompt=QUESTION)]
    with pytest.raises(openai.BadRequestError, match="outside of the vocabulary"):
        complete(client, prompt=[1, 99_999_999])


def test_an_echo_with_log_probabilities_scores_the_prompt(client):
    """What evaluation harnesses ask for; the values are those of the logits that Triton's endpoint returns."""
    answer = complete(client, prompt=QUESTION, max_tokens=1, echo=True, logprobs=3).choices[0]
    found = answer.logprobs
    tokens = ids(client, QUESTION)
    assert answer.text.startswith(QUESTION) and "".join(found.tokens) == "<s>" + answer.text
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset) == len(tokens) + 1
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
    assert found.text_offset == [len("".join(found.tokens[:at])) for at in range(len(found.tokens))]
    logits = triton(client, "tensorrt_llm/generate", input_ids=tokens, input_lengths=len(tokens), request_output_len=1, return_context_logits=True)["context_logits"]
    width = len(logits) // len(tokens)
    for at in range(1, len(tokens)):
        row = logits[(at - 1) * width : at * width]
        largest = max(row)
        log_sum = largest + math.log(sum(math.exp(value - largest) for value in row))
        assert math.isclose(found.token_logprobs[at], row[tokens[at]] - log_sum, abs_tol=2e-4)
        best = sorted((value - log_sum for value in row), reverse=True)[:3]
        assert all(math.isclose(a, b, abs_tol=2e-4) for a, b in zip(sorted(found.top_logprobs[at].values(), reverse=True), best))
    only = complete(client, prompt=QUESTION, max_tokens=0, echo=True, logprobs=1).choices[0]
    assert only.text == QUESTION and only.finish_reason == "length" and len(only.logprobs.tokens) == len(tokens)


def test_each_choice_has_the_log_probabilities_of_the_echoed_prompt(client):
    fields = dict(prompt=[PROMPT, QUESTION], n=2, max_tokens=2, temperature=1, seed=3, echo=True, logprobs=1, return_token_ids=True)
    plain = [choice.model_extra["token_ids"] for choice in complete(client, **fields | {"echo": False}).choices]
    choices = complete(client, **fields).choices
    for choice, output in zip(choices, plain):
        assert choice.logprobs.token_logprobs.count(None) == 1 and choice.logprobs.top_logprobs.count(None) == 1
        assert choice.model_extra["token_ids"] == output, "the prompt's ids are in prompt_token_ids"
    assert choices[1].logprobs.tokens[:2] == choices[0].logprobs.tokens[:2] != choices[2].logprobs.tokens[:2]
    parts = [{"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []} for _ in choices]
    for chunk in complete(client, stream=True, **fields):
        for name, values in parts[chunk.choices[0].index].items():
            values.extend(getattr(chunk.choices[0].logprobs, name))
    assert parts == [{name: getattr(choice.logprobs, name) for name in parts[0]} for choice in choices]


def test_an_echo_and_prompt_log_probabilities_list_as_many_tokens_as_each_asks_for(client):
    for echoed, prompt in [(1, 3), (3, 1)]:
        both = complete(client, max_tokens=1, echo=True, logprobs=echoed, prompt_logprobs=prompt).choices[0]
        assert both.logprobs == complete(client, max_tokens=1, echo=True, logprobs=echoed).choices[0].logprobs
        alone = complete(client, max_tokens=1, prompt_logprobs=prompt).choices[0]
        assert both.model_extra["prompt_logprobs"] == alone.model_extra["prompt_logprobs"]


def test_prompt_log_probabilities_are_not_lost_where_the_text_begins_late(client):
    held = complete(client, prompt_logprobs=1, stop=[text(client, max_tokens=2) + "never"])
    assert len(held.choices[0].model_extra["prompt_logprobs"]) == len(ids(client, PROMPT))


def test_prompt_log_probabilities_have_vllms_form(client):
    choice = complete(client, prompt=PROMPT, max_tokens=1, prompt_logprobs=2).choices[0]
    found = choice.model_extra["prompt_logprobs"]
    tokens = ids(client, PROMPT)
    assert len(found) == len(tokens) and found[0] is None
    for token, entry in zip(tokens[1:], found[1:]):
        own = entry[str(token)]
        assert own["logprob"] <= 0 and own["rank"] >= 1 and {other["rank"] for other in entry.values()} >= {1, 2}


def test_each_token_has_one_entry_with_the_likeliest_tokens(client):
    choice = complete(client, prompt=QUESTION, max_tokens=6, logprobs=5).choices[0]
    assert "".join(choice.logprobs.tokens) == choice.text
    for token, logprob, top in zip(choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.logprobs.top_logprobs):
        assert top[token] == logprob == max(top.values()) and len(top) >= 5
    streamed = complete(client, prompt=QUESTION, max_tokens=6, logprobs=5, stream=True)
    pieces = [chunk.choices[0] for chunk in streamed]
    joined = [token for piece in pieces if piece.logprobs for token in piece.logprobs.tokens]
    assert joined == choice.logprobs.tokens
    offsets = [offset for piece in pieces if piece.logprobs for offset in piece.logprobs.text_offset]
    assert offsets == choice.logprobs.text_offset


def test_biased_and_forbidden_tokens(client):
    likely = ids(client, text(client, max_tokens=1))[-1]
    biased = complete(client, logit_bias={"7": 100}, max_tokens=4, ignore_eos=True, return_token_ids=True)
    assert biased.choices[0].model_extra["token_ids"] == [7] * 4
    first = complete(client, max_tokens=1, return_token_ids=True).choices[0].model_extra["token_ids"][0]
    without = complete(client, logit_bias={str(first): -100}, max_tokens=1, return_token_ids=True).choices[0].model_extra["token_ids"][0]
    assert without != first and likely >= 0
    word = text(client).split()[0]
    assert word not in text(client, bad_words=[word]).split()


def test_stop_tokens_and_stop_strings(client):
    tokens = complete(client, return_token_ids=True).choices[0].model_extra["token_ids"]
    stopped = complete(client, stop_token_ids=[tokens[3]], return_token_ids=True).choices[0]
    assert stopped.model_extra["token_ids"] == tokens[: tokens.index(tokens[3])] and stopped.finish_reason == "stop"
    whole = text(client, max_tokens=24, ignore_eos=True)
    stop = whole[7:11]
    cut = complete(client, max_tokens=24, stop=[stop, "never found"]).choices[0]
    assert cut.text == whole[: whole.index(stop)] and cut.model_extra["stop_reason"] == stop
    kept = complete(client, max_tokens=24, stop=stop, include_stop_str_in_output=True).choices[0]
    assert kept.text == whole[: whole.index(stop)] + stop
    for stream in (False, True):
        answer = complete(client, max_tokens=24, stop=stop, stream=stream)
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        assert "".join(choice.text for choice in choices) == whole[: whole.index(stop)]


def test_sampling_fields_have_their_effect(client):
    drawn = [text(client, temperature=1.5, seed=seed, max_tokens=16) for seed in range(4)]
    assert len(set(drawn)) > 1
    greedy = text(client, max_tokens=16)
    assert {text(client, temperature=1.5, seed=seed, max_tokens=16, min_p=0.999) for seed in range(4)} == {greedy}
    assert {text(client, temperature=1.5, seed=seed, max_tokens=16, top_k=1) for seed in range(4)} == {greedy}
    assert text(client, temperature=1.5, seed=0, max_tokens=16, top_k=-1) == drawn[0]
    assert complete(client, prompt=QUESTION, max_tokens=32, min_tokens=20).usage.completion_tokens >= 20
    assert complete(client, prompt=QUESTION, max_tokens=32).choices[0].text == ANSWER


def test_a_beam_search_has_tritons_beams(client):
    found = complete(client, max_tokens=8, n=3, use_beam_search=True, length_penalty=0.0, early_stopping=True)
    beams = triton(client, "ensemble/generate", text_input=PROMPT, max_tokens=8, beam_width=3, exclude_input_in_output=True, stream=False)
    assert [choice.text for choice in found.choices] == beams["text_output"]
    with pytest.raises(openai.BadRequestError, match="does not stream"):
        list(complete(client, n=3, use_beam_search=True, stream=True))


def test_prompts_can_be_cut_from_the_left(client):
    tokens = ids(client, QUESTION)
    cut = complete(client, prompt=QUESTION, truncate_prompt_tokens=3, return_token_ids=True)
    assert cut.model_extra["prompt_token_ids"] == tokens[-3:] and cut.usage.prompt_tokens == 3
    assert complete(client, prompt="word " * 3000, truncate_prompt_tokens=-1, max_tokens=2).usage.completion_tokens == 2


def test_usage_reports_cached_tokens_and_can_come_with_each_chunk(client):
    prompt = "A long enough prompt for the prefix cache, written twice. " * 8
    complete(client, prompt=prompt, max_tokens=2)
    usage = complete(client, prompt=prompt, max_tokens=2).usage
    assert 0 < usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(complete(client, max_tokens=5, ignore_eos=True, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 5 and chunks[-1].choices == []


def test_max_tokens_has_the_rest_of_the_context_as_its_default_in_a_chat(client):
    (model,) = client.models.list().data
    assert model.created > 0 and model.model_extra["max_model_len"] > 100
    messages = [{"role": "user", "content": "x"}]
    chat = client.chat.completions.create(model="ensemble", messages=messages, extra_body={"ignore_eos": True})
    assert chat.usage.total_tokens == model.model_extra["max_model_len"] and chat.choices[0].finish_reason == "length"


def test_fields_that_are_not_known_are_refused_by_name(client):
    for name, value in {"temprature": 1, "guided_regexp": "a", "functions": [{"name": "f"}], "lora_path": "x"}.items():
        with pytest.raises(openai.BadRequestError, match=f"`{name}` is not known") as refused:
            complete(client, **{name: value})
        assert refused.value.param == name
    assert text(client, user="somebody", metadata={"a": "b"}, store=False) == text(client)


def request(client, path, body=None, method=None, headers=None):
    """Status, headers and JSON (or text) of a request beside the client's own."""
    url = str(client.base_url).replace("/v1/", path)
    data = None if body is None else json.dumps(body).encode()
    sent = urllib.request.Request(url, data, headers or {}, method=method)
    try:
        with urllib.request.urlopen(sent, timeout=60) as answer:
            status, found, text = answer.status, answer.headers, answer.read().decode()
    except urllib.error.HTTPError as error:
        status, found, text = error.code, error.headers, error.read().decode()
    return status, found, json.loads(text) if text.startswith(("{", "[")) else text


def test_texts_and_tokens_are_converted_without_generation(client):
    tokens = ids(client, QUESTION)
    status, _, found = request(client, "/tokenize", {"model": "ensemble", "prompt": QUESTION, "return_token_strs": True})
    assert status == 200 and found["tokens"] == tokens and found["count"] == len(tokens) and found["max_model_len"] > 100
    assert "".join(found["token_strs"]) == "<s>" + QUESTION
    assert request(client, "/tokenize", {"prompt": QUESTION, "add_special_tokens": False})[2]["tokens"] == tokens[1:]
    assert request(client, "/detokenize", {"tokens": tokens[1:]})[2] == {"prompt": QUESTION}
    rendered = request(client, "/v1/completions/render", {"model": "ensemble", "prompt": [QUESTION, tokens]})[2]["data"]
    assert rendered == [{"prompt": QUESTION, "prompt_token_ids": tokens}, {"prompt": None, "prompt_token_ids": tokens}]
    chat = {"model": "ensemble", "messages": [{"role": "user", "content": "x"}]}
    (found,) = request(client, "/v1/chat/completions/render", chat)[2]["data"]
    assert request(client, "/tokenize", chat)[2]["tokens"] == found["prompt_token_ids"]
    for path, body, words in (("/detokenize", {"tokens": [1, 99_999_999]}, "outside of the vocabulary"), ("/tokenize", {}, "`messages`"), ("/detokenize", {}, "`tokens` is missing"), ("/tokenize", {"prompt": "a", "x": 1}, "`x` is not known")):
        status, _, error = request(client, path, body)
        assert status == 400 and words in error["error"]["message"]


def test_paths_that_gateways_ask_for(client):
    for path in ("/health", "/ping"):
        assert request(client, path)[0] == 200 and request(client, path, method="HEAD")[0] == 200
    assert request(client, "/version")[2]["version"]
    assert request(client, "/health", {})[0] == 405


def test_requests_have_ids(client):
    _, headers, _ = request(client, "/v1/models", headers={"x-request-id": "mine-7"})
    assert headers["x-request-id"] == "mine-7"
    first, second = (request(client, "/v1/models")[1]["x-request-id"] for _ in range(2))
    assert first.startswith("req-") and first != second
    assert request(client, "/v1/nothing")[1]["x-request-id"]


def test_messages_that_the_template_does_not_show_are_refused(client):
    with pytest.raises(openai.BadRequestError, match="check their roles"):
        client.chat.completions.create(model="ensemble", messages=[{"role": "wizard", "content": "Hi"}], max_tokens=2)
