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
    for body in (chat | {"logprobs": True, "max_tokens": 4, "stream_options": {"include_usage": True}}, demanded):
        _, answer = post(world, "/v1/chat/completions", body | {"stream": True})
        events = [line[6:] for line in answer.splitlines() if line.startswith("data: ")]
        assert events.pop() == "[DONE]" and events
        for event in events:
            check("ChatChunk", json.loads(event))
    _, answer = post(world, "/v1/completions", {"model": "ensemble", "prompt": ["a", "b"], "max_tokens": 3, "logprobs": 2, "echo": True})
    check("Completion", json.loads(answer))
    _, answer = post(world, "/v1/completions", {"model": "nobody", "prompt": "a"})
    check("Error", json.loads(answer))


def test_small_endpoints_are_as_described(world):
    for path, body in [
        ("/tokenize", {"model": "ensemble", "prompt": "hot", "return_token_strs": True}),
        ("/detokenize", {"model": "ensemble", "tokens": [5, 6]}),
        ("/v1/messages/count_tokens", {"model": "ensemble", "messages": USER}),
    ]:
        status, answer = post(world, path, body)
        assert status == 200, answer
        schema = SPEC["paths"][path]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
        Draft202012Validator(schema).validate(json.loads(answer))
    with urllib.request.urlopen(f"http://{world.http}/v1/models", timeout=10) as answer:
        for model in json.load(answer)["data"]:
            check("Model", model)
