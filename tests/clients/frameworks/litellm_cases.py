"""LiteLLM with its providers `openai`, `hosted_vllm`, `text-completion-openai` and `anthropic`."""

import asyncio
import copy
import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # Otherwise the import fetches a list of prices.

import litellm  # noqa: E402 (reads the variable above)
import pytest  # noqa: E402

from conftest import ANSWER, MESSAGES, QUESTION, WEATHER, check_weather  # noqa: E402



def tools():
    """A tool; a new copy each time, because LiteLLM removes fields from the caller's objects."""
    return [{"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": copy.deepcopy(WEATHER)}}]


@pytest.fixture(params=["openai", "hosted_vllm", "anthropic"])
def complete(request, server):
    """`litellm.completion` of one provider."""
    base = server if request.param == "anthropic" else f"{server}/v1"

    def ask(messages=MESSAGES, max_tokens=400, temperature=0, **fields):
        return litellm.completion(
            model=f"{request.param}/ensemble", api_base=base, api_key="none", messages=messages, max_tokens=max_tokens, temperature=temperature,
            num_retries=0, **fields)

    ask.provider = request.param
    return ask


def test_an_answer_and_its_stream_are_the_same(complete):
    answer = complete()
    assert answer.choices[0].message.content == ANSWER and answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens > 3 and answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    chunks = list(complete(stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    built = litellm.stream_chunk_builder(chunks)
    assert built.choices[0].finish_reason == "stop" and built.usage.completion_tokens == answer.usage.completion_tokens
    assert complete(max_tokens=2).choices[0].finish_reason == "length"


def test_a_demanded_tool_call_is_valid_and_the_conversation_goes_on(complete):
    message = complete(tools=tools(), tool_choice="required").choices[0].message
    assert message.tool_calls
    for call in message.tool_calls:
        assert call.function.name == "get_weather" and call.id
        check_weather(json.loads(call.function.arguments))
    results = [{"role": "tool", "tool_call_id": call.id, "content": '{"degrees": 4}'} for call in message.tool_calls]
    after = complete(messages=[*MESSAGES, message.model_dump(), *results, {"role": "user", "content": "Thanks."}], tools=tools(), max_tokens=8)
    assert after.choices[0].finish_reason


def test_a_streamed_tool_call_is_valid(complete):
    choice = {"type": "function", "function": {"name": "get_weather"}}
    chunks = list(complete(tools=tools(), tool_choice=choice, stream=True))
    (call,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    check_weather(json.loads(call.function.arguments))


def test_a_schema_is_followed(complete):
    form = {"type": "json_schema", "json_schema": {"name": "weather", "strict": True, "schema": copy.deepcopy(WEATHER)}}
    check_weather(json.loads(complete(response_format=form).choices[0].message.content))


def test_errors_have_litellms_types(complete):
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        complete(temperature=-1)
    with pytest.raises(litellm.ContextWindowExceededError):
        complete(messages=[{"role": "user", "content": "word " * 4000}], max_tokens=8)


def test_log_probabilities_belong_to_the_text(complete):
    if complete.provider == "anthropic":
        with pytest.raises(litellm.UnsupportedParamsError):
            complete(logprobs=True)
        return
    choice = complete(logprobs=True, top_logprobs=3).choices[0]
    entries = choice.logprobs.content
    assert "".join(entry.token for entry in entries) == choice.message.content
    assert all(len(entry.top_logprobs) >= 3 and entry.logprob == entry.top_logprobs[0].logprob <= 0 for entry in entries)


def test_a_text_completion_scores_its_prompt(server):
    answer = litellm.text_completion(
        model="text-completion-openai/ensemble", api_base=f"{server}/v1", api_key="none", prompt=f"Q: {QUESTION}\nA:", max_tokens=16, temperature=0, echo=True, logprobs=2)
    (choice,) = answer.choices
    assert choice.text == f"Q: {QUESTION}\nA:{ANSWER}"
    assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) and choice.logprobs.token_logprobs[0] is None
    stream = litellm.text_completion(
        model="text-completion-openai/ensemble", api_base=f"{server}/v1", api_key="none", prompt=f"Q: {QUESTION}\nA:", max_tokens=16, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text or "" for chunk in stream) == ANSWER


def test_a_response_has_the_models_text(server):
    answer = litellm.responses(model="openai/ensemble", api_base=f"{server}/v1", api_key="none", input=QUESTION, max_output_tokens=32, temperature=0)
    assert answer.status == "completed" and [part.text for item in answer.output for part in item.content] == [ANSWER]
    events = list(litellm.responses(model="openai/ensemble", api_base=f"{server}/v1", api_key="none", input=QUESTION, max_output_tokens=32, temperature=0, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == ANSWER
    assert events[-1].type == "response.completed" and events[-1].response.usage.output_tokens > 3


def test_anthropics_messages_pass_through(server):
    answer = asyncio.run(litellm.anthropic.messages.acreate(
        model="anthropic/ensemble", api_base=server, api_key="none", messages=MESSAGES, max_tokens=32, temperature=0))
    assert [block["text"] for block in answer["content"]] == [ANSWER] and answer["stop_reason"] == "end_turn"


@pytest.mark.parametrize("path", ["generate", "infer"])
def test_tritons_endpoints_answer_with_the_whole_text(server, path):
    prompt = [{"role": "user", "content": f"Q: {QUESTION}\nA:"}]
    answer = litellm.completion(model="triton/ensemble", api_base=f"{server}/v2/models/ensemble/{path}", messages=prompt, max_tokens=64, num_retries=0)
    assert ANSWER in answer.choices[0].message.content


def test_tritons_generate_streams(server):
    prompt = [{"role": "user", "content": f"Q: {QUESTION}\nA:"}]
    chunks = litellm.completion(model="triton/ensemble", api_base=f"{server}/v2/models/ensemble/generate", messages=prompt, max_tokens=64, stream=True)
    assert ANSWER in "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
