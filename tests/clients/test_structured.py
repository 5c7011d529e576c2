"""Structured output and tool calls through OpenAI's and Anthropic's own Python clients."""

import json
import re

import anthropic
import openai
import pytest
from openai import OpenAI

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 10},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "unit", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": WEATHER, "strict": True}}
TIME = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}}
QUESTION = [{"role": "user", "content": "What is the opposite of hot?"}]


@pytest.fixture
def client(world):
    return OpenAI(base_url=f"http://{world.http}/v1", api_key="none", max_retries=0)


def chat(client, messages=QUESTION, max_tokens=400, temperature=0, **fields):
    return client.chat.completions.create(model="ensemble", messages=messages, max_tokens=max_tokens, temperature=temperature, **fields)


def check_weather(arguments):
    assert set(arguments) == {"city", "unit", "days"}
    assert isinstance(arguments["city"], str) and arguments["unit"] in ("celsius", "fahrenheit") and 1 <= arguments["days"] <= 9


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_response_format_gives_json_of_the_schema(client, temperature):
    form = {"type": "json_schema", "json_schema": {"name": "weather", "strict": True, "schema": WEATHER}}
    answer = chat(client, response_format=form, temperature=temperature, seed=1)
    assert answer.choices[0].finish_reason == "stop"
    check_weather(json.loads(answer.choices[0].message.content))
    stream = chat(client, response_format=form, temperature=temperature, seed=1, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == answer.choices[0].message.content


def test_each_choice_of_n_follows_the_constraint(client):
    answer = chat(client, n=4, temperature=2.0, extra_body={"structured_outputs": {"regex": "[a-z]{4,8}: [0-9]{3}"}})
    texts = [choice.message.content for choice in answer.choices]
    assert all(re.fullmatch("[a-z]{4,8}: [0-9]{3}", text) for text in texts)
    assert len(set(texts)) > 1


def test_other_servers_names_of_constraints_work(client):
    for extra, pattern in [
        ({"guided_choice": ["red", "green"]}, "red|green"),
        ({"guided_regex": "x[0-9]"}, "x[0-9]"),
        ({"regex": "y[0-9]"}, "y[0-9]"),
        ({"guided_grammar": 'start: "a" | "b"'}, "a|b"),
        ({"structured_outputs": {"choice": ["one", "two"]}}, "one|two"),
    ]:
        assert re.fullmatch(pattern, chat(client, extra_body=extra).choices[0].message.content), extra
        completion = client.completions.create(model="ensemble", prompt="x", max_tokens=30, extra_body=extra)
        assert re.fullmatch(pattern, completion.choices[0].text), extra
    assert json.loads(chat(client, extra_body={"guided_json": WEATHER}).choices[0].message.content)["days"] > 0


def test_a_structural_tag_frees_the_text_around_its_parts(client):
    tag = {"type": "tag", "begin": "<call>", "content": {"type": "json_schema", "json_schema": WEATHER}, "end": "</call>"}
    form = {"type": "structural_tag", "format": {"type": "sequence", "elements": [{"type": "const_string", "value": "Yes: "}, tag]}}
    for fields in ({"response_format": form}, {"extra_body": {"structured_outputs": {"structural_tag": json.dumps(form)}}}):
        answer = chat(client, **fields).choices[0]
        found = re.fullmatch("Yes: <call>(.*)</call>", answer.message.content, re.DOTALL)
        assert answer.finish_reason == "stop" and found, answer
        check_weather(json.loads(found.group(1)))
    with pytest.raises(openai.BadRequestError, match="`nothing` at `#/format` is not supported"):
        chat(client, response_format={"type": "structural_tag", "format": {"type": "nothing"}})


def test_json_object_gives_an_object_or_says_that_it_was_cut(client):
    answer = chat(client, response_format={"type": "json_object"}, max_tokens=200)
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)
    else:
        assert answer.choices[0].message.content.lstrip().startswith("{")


def test_only_allowed_tokens_are_generated(client):
    ids = client.completions.create(model="ensemble", prompt="hot cold", max_tokens=1, extra_body={"return_token_ids": True}).model_extra["prompt_token_ids"]
    answer = client.completions.create(
        model="ensemble", prompt="x", max_tokens=8, temperature=2.0, extra_body={"allowed_token_ids": ids, "return_token_ids": True})
    assert set(answer.choices[0].model_extra["token_ids"]) <= set(ids)


def test_what_cannot_be_followed_is_a_400_that_names_the_field(client):
    for fields, words in [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strin"}}}}, "strin"),
        ({"extra_body": {"guided_regex": "(a"}}, "regular expression"),
        ({"extra_body": {"guided_regex": "a", "guided_choice": ["b"]}}, "guided_"),
        ({"extra_body": {"cache_salt": ""}}, "cache_salt"),
    ]:
        with pytest.raises(openai.BadRequestError, match=words):
            chat(client, **fields)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
@pytest.mark.parametrize("temperature", [0, 1.5])
def test_a_demanded_tool_call_is_valid(client, choice, temperature):
    fields = dict(tools=[TOOL], tool_choice=choice, temperature=temperature, seed=4, parallel_tool_calls=False)
    answer = chat(client, **fields).choices[0]
    (call,) = answer.message.tool_calls
    assert call.type == "function" and call.function.name == "get_weather" and call.id
    check_weather(json.loads(call.function.arguments))
    assert answer.finish_reason == ("tool_calls" if choice == "required" else "stop")
    assert not answer.message.content

    name, arguments, reason = "", "", None
    for chunk in chat(client, stream=True, **fields):
        for delta in chunk.choices[0].delta.tool_calls or []:
            assert delta.index == 0
            name += delta.function.name or ""
            arguments += delta.function.arguments or ""
        reason = chunk.choices[0].finish_reason or reason
    assert (name, arguments, reason) == ("get_weather", call.function.arguments, answer.finish_reason)


def test_a_demanded_call_comes_before_the_form_of_a_text(client):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": {}}}}
    answer = chat(client, tools=[TOOL], tool_choice="required", response_format=form).choices[0]
    check_weather(json.loads(answer.message.tool_calls[0].function.arguments))


def test_a_conversation_goes_on_after_a_call(client):
    call = chat(client, tools=[TOOL, TIME], tool_choice="required").choices[0].message
    assert call.tool_calls
    history = [*QUESTION, call.model_dump(exclude_none=True)]
    history += [{"role": "tool", "tool_call_id": one.id, "content": '{"degrees": 4}'} for one in call.tool_calls]
    assert chat(client, messages=[*history, {"role": "user", "content": "Thanks."}], tools=[TOOL], max_tokens=8).choices


def test_tools_that_are_not_demanded_leave_the_text_free(client):
    free = chat(client, tools=[TOOL], tool_choice="none").choices[0]
    assert free.message.content == chat(client).choices[0].message.content and not free.message.tool_calls
    assert chat(client, tools=[TOOL], max_tokens=20).choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_anthropics_client_gets_a_tool_use(world):
    client = anthropic.Anthropic(base_url=f"http://{world.http}", api_key="none", max_retries=0)
    tools = [{"name": "get_weather", "input_schema": WEATHER}]
    fields = dict(model="ensemble", extra_body={"temperature": 0}, max_tokens=400, messages=QUESTION, tools=tools, tool_choice={"type": "tool", "name": "get_weather"})
    answer = client.messages.create(**fields)
    (block,) = [block for block in answer.content if block.type == "tool_use"]
    assert answer.stop_reason == "tool_use" and block.name == "get_weather"
    check_weather(block.input)
    with client.messages.stream(**fields) as stream:
        final = stream.get_final_message()
    assert [block.input for block in final.content if block.type == "tool_use"] == [block.input]


def test_a_response_has_a_function_call(client):
    tools = [{"type": "function", "name": "get_weather", "parameters": WEATHER, "strict": True}]
    answer = client.responses.create(model="ensemble", input="What is the opposite of hot?", tools=tools, tool_choice="required", max_output_tokens=400, temperature=0)
    calls = [item for item in answer.output if item.type == "function_call"]
    assert calls and calls[0].name == "get_weather"
    check_weather(json.loads(calls[0].arguments))
    form = {"format": {"type": "json_schema", "name": "weather", "schema": WEATHER}}
    check_weather(json.loads(client.responses.create(model="ensemble", input="x", text=form, max_output_tokens=400, temperature=0).output_text))
