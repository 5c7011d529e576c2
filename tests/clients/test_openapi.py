"""docs/openapi.yaml is valid, and describes what the server takes and answers."""

import json
import urllib.error
import urllib.request

import openapi_spec_validator
import pytest
import yaml
from jsonschema import Draft202012Validator

from conftest import ROOT

SPEC = yaml.safe_load((ROOT / "docs/openapi.yaml").read_text())
USER = [{"role": "user", "content": "What is the opposite of hot?"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}}

# A value for each field of a request; fields that depend on another one come with it.
SAMPLES = {
    "model": "ensemble", "stream": False, "stream_options": {"include_usage": True}, "n": 1, "temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1,
    "seed": 3, "presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_penalty": 1.1, "min_tokens": 1, "stop": ["x"],
    "include_stop_str_in_output": True, "stop_token_ids": [5], "ignore_eos": True, "logit_bias": {"5": 1}, "allowed_token_ids": [5, 6], "bad_words": ["x"],
    "prompt_logprobs": 0, "skip_special_tokens": False, "spaces_between_special_tokens": True, "add_special_tokens": False, "truncate_prompt_tokens": 8,
    "return_token_ids": True, "use_beam_search": True, "length_penalty": 1.0, "early_stopping": False, "priority": 1, "cache_salt": "s",
    "response_format": {"type": "text"}, "structured_outputs": {"regex": "a+"}, "guided_json": {"type": "integer"}, "guided_json_object": True,
    "guided_regex": "a+", "guided_choice": ["a"], "guided_grammar": 'start: "a"', "guided_decoding_backend": "auto", "json_schema": {"type": "integer"},
    "regex": "a+", "ebnf": 'start: "a"', "user": "u", "metadata": {}, "store": False, "service_tier": "auto", "safety_identifier": "u", "prompt_cache_key": "k",
    "prompt_cache_retention": "24h", "prompt_cache_options": {}, "cache_control": {"type": "ephemeral"},
    "prompt": "x", "max_tokens": 2, "echo": True, "suffix": "", "best_of": 1, "messages": USER, "max_completion_tokens": 2, "top_logprobs": 1, "tools": [TOOL],
    "tool_choice": "auto", "parallel_tool_calls": True, "include_reasoning": True, "reasoning_effort": "low", "modalities": ["text"], "chat_template": "default",
    "chat_template_kwargs": {}, "documents": [], "add_generation_prompt": True, "continue_final_message": False, "input": "x", "instructions": "x",
    "max_output_tokens": 2, "text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"}, "include": [], "system": "x", "thinking": {"type": "disabled"},
    "output_config": {"effort": "low"}, "stop_sequences": ["x"],
}
WITH = {
    "stream_options": {"stream": True}, "use_beam_search": {"n": 2}, "length_penalty": {"use_beam_search": True, "n": 2},
    "early_stopping": {"use_beam_search": True, "n": 2}, "top_logprobs": {"logprobs": True}, "tool_choice": {"tools": [TOOL]},
}
# They are refused by the demo model, which has no reasoning, or have forms of their own.
OTHERS = {"thinking_token_budget", "structural_tag"}


def resolve(schema):
    """The properties of a request's schema."""
    found = dict(schema.get("properties", {}))
    for part in schema.get("allOf", []):
        found |= SPEC["components"]["schemas"][part["$ref"].rsplit("/", 1)[1]]["properties"]
    return found


def post(world, path, body):
    """The status and the body."""
    request = urllib.request.Request(f"http://{world.http}{path}", json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def check(name, answer):
    """Fails unless the answer follows the schema of this name."""
    schema = {"$ref": f"#/components/schemas/{name}", "components": SPEC["components"]}
    errors = [error.message for error in Draft202012Validator(schema).iter_errors(answer)]
    assert not errors, (errors, answer)


def test_the_file_is_valid():
    openapi_spec_validator.validate(SPEC)


@pytest.mark.parametrize(
    "path, name, answer, fields",
    [
        ("/v1/chat/completions", "ChatRequest", "Chat", {"messages": USER, "max_tokens": 4}),
        ("/v1/completions", "CompletionRequest", "Completion", {"prompt": "x", "max_tokens": 4}),
        ("/v1/messages", "MessageRequest", "AnthropicMessage", {"messages": USER, "max_tokens": 4}),
        ("/v1/responses", "ResponsesRequest", "Response", {"input": "x", "max_output_tokens": 4}),
    ],
)
def test_each_field_of_a_request_is_taken_and_no_other(world, path, name, answer, fields):
    base = {"model": "ensemble", **fields}
    for field in sorted(resolve(SPEC["components"]["schemas"][name]).keys() - OTHERS):
        value = SAMPLES.get(field, {"ChatRequest": True, "CompletionRequest": 1}.get(name)) if field != "tools" or name not in ("MessageRequest", "ResponsesRequest") else None
        if field == "tools" and value is None:
            value = [{"type": "function", "name": "f", "input_schema": {"type": "object"}, "parameters": {"type": "object"}}]
            value = [{key: part for key, part in value[0].items() if key != ("parameters" if name == "MessageRequest" else "input_schema")}]
            if name == "MessageRequest":
                value[0].pop("type")
        if field == "tool_choice" and name in ("MessageRequest", "ResponsesRequest"):
            continue
        extra = WITH.get(field, {}) if name != "ResponsesRequest" else {}
        status, body = post(world, path, base | extra | {field: value})
        assert status == 200, (field, body)
        if not (base | extra | {field: value}).get("stream"):
            check(answer, json.loads(body))
    status, body = post(world, path, base | {"temprature": 1})
    assert status == 400
    check("AnthropicError" if name == "MessageRequest" else "Error", json.loads(body))


def test_answers_with_tools_logprobs_and_chunks_are_as_described(world):
    chat = {"model": "ensemble", "messages": USER, "max_tokens": 200, "temperature": 0}
    demanded = chat | {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    for body in (chat | {"logprobs": True, "top_logprobs": 2, "max_tokens": 4}, demanded, chat | {"n": 2, "max_tokens": 3, "prompt_logprobs": 1}):
        status, answer = post(world, "/v1/chat/completions", body)
        assert status == 200
        check("Chat", json.loads(answer))
    for body in (chat | {"logprobs": True, "return_token_ids": True, "max_tokens": 4, "stream_options": {"include_usage": True}}, demanded):
        _, answer = post(world, "/v1/chat/completions", body | {"stream": True})
        events = [line[6:] for line in answer.splitlines() if line.startswith("data: ")]
        assert events.pop() == "[DONE]" and events
        for event in events:
            check("ChatChunk", json.loads(event))
    _, answer = post(world, "/v1/completions", {"model": "ensemble", "prompt": ["a", "b"], "max_tokens": 3, "logprobs": 2, "echo": True})
    check("Completion", json.loads(answer))
    _, answer = post(world, "/v1/completions", {"model": "nobody", "prompt": "a"})
    check("Error", json.loads(answer))


def answer_schema(path, method):
    """The schema of the answer with status 200."""
    answer = SPEC["paths"][path][method]["responses"]["200"]
    if "$ref" in answer:
        answer = SPEC["components"]["responses"][answer["$ref"].rsplit("/", 1)[1]]
    return {**answer["content"]["application/json"]["schema"], "components": SPEC["components"]}


def get(world, path):
    """The status and the body."""
    with urllib.request.urlopen(f"http://{world.http}{path}", timeout=10) as answer:
        return answer.status, answer.read().decode()


@pytest.mark.parametrize(
    "path, body",
    [
        ("/tokenize", {"model": "ensemble", "prompt": "hot", "return_token_strs": True, "add_special_tokens": False}),
        ("/tokenize", {"messages": USER, "tools": [TOOL], "chat_template_kwargs": {}, "documents": [], "add_generation_prompt": False}),
        ("/tokenize", {"messages": [*USER, {"role": "assistant", "content": "It"}], "chat_template": "default", "continue_final_message": True,
                       "add_generation_prompt": False, "reasoning_effort": "low"}),
        ("/detokenize", {"model": "ensemble", "tokens": [5, 6]}),
        ("/v1/messages/count_tokens", {"model": "ensemble", "messages": USER}),
        ("/v1/completions/render", {"model": "ensemble", "prompt": ["hot", "cold"]}),
        ("/v1/completions/render", {"model": "ensemble", "prompt": [5, 6]}),
        ("/v1/chat/completions/render", {"model": "ensemble", "messages": USER, "tools": [TOOL]}),
    ],
)
def test_endpoints_without_generation_are_as_described(world, path, body):
    request = SPEC["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    Draft202012Validator({**request, "components": SPEC["components"]}).validate(body)
    status, answer = post(world, path, body)
    assert status == 200, answer
    Draft202012Validator(answer_schema(path, "post")).validate(json.loads(answer))
    status, answer = post(world, path, body | {"temprature": 1})
    assert status == 400 and "temprature" in answer


def test_the_errors_of_the_page_are_those_of_the_server(world):
    page = (ROOT / "docs/openai.md").read_text()
    for path, body in [("/v1/chat/completions", {"messages": USER, "temperature": 3}), ("/v1/messages", {"messages": USER})]:
        status, answer = post(world, path, {"model": "ensemble", **body})
        assert status == 400
        documented = [json.loads(line) for line in page.splitlines() if line.startswith('{"') and '"error"' in line]
        error = json.loads(answer)
        assert (error.pop("request_id", None) is not None) == (path == "/v1/messages"), "the page leaves out the id"
        assert error in documented


def test_questions_about_the_server_are_answered_as_described(world):
    for path, asked in [("/v1/models", "/v1/models"), ("/v1/models/{name}", "/v1/models/ensemble"), ("/tokenizer_info", "/tokenizer_info"), ("/version", "/version")]:
        status, answer = get(world, asked)
        assert status == 200
        Draft202012Validator(answer_schema(path, "get")).validate(json.loads(answer))
    assert [get(world, path) for path in ("/health", "/ping")] == [(200, ""), (200, "")]
    with pytest.raises(urllib.error.HTTPError) as error:
        get(world, "/v1/models/nobody")
    check("Error", json.load(error.value))
    known = {path.replace("{name}", "ensemble") for path in SPEC["paths"]}
    with pytest.raises(urllib.error.HTTPError) as error:
        get(world, "/v1/unknown")
    # The server lists its paths where it does not know one.
    listed = json.load(error.value)["error"]["message"].split("there are ", 1)[1].rstrip(".").replace(" and ", ", ").split(", ")
    assert known == {*listed, "/v1/models/ensemble"}


@pytest.mark.parametrize("path, name, body", [
    ("/v1/messages", "AnthropicEvent", {"messages": USER, "max_tokens": 300}),
    ("/v1/responses", "ResponseEvent", {"input": "x", "max_output_tokens": 300}),
])
def test_events_of_messages_and_responses_are_as_described(world, path, name, body):
    tool = {"name": "f", "input_schema": TOOL["function"]["parameters"]} if name == "AnthropicEvent" else {"type": "function", **TOOL["function"]}
    demanded = {"tools": [tool], "tool_choice": {"type": "any"} if name == "AnthropicEvent" else "required"}
    kinds = set()
    for extra in ({}, demanded, {"max_tokens" if name == "AnthropicEvent" else "max_output_tokens": 2}):
        status, answer = post(world, path, {"model": "ensemble", "temperature": 0, "stream": True, **body, **extra})
        assert status == 200, answer
        lines = answer.splitlines()
        names = [line[7:] for line in lines if line.startswith("event: ")]
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
        assert names == [event["type"] for event in events] and len(events) > 4
        for event in events:
            check(name, event)
        kinds |= {*names}
    wanted = {"message_start", "content_block_delta", "message_stop"} if name == "AnthropicEvent" else {
        "response.completed", "response.incomplete", "response.output_text.done", "response.function_call_arguments.delta", "response.content_part.added"}
    assert wanted <= kinds
