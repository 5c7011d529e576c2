"""Tool calls that `max_tokens` cuts, through OpenAI's own Python client: the arguments are what the model wrote so far, nothing is added.

A client notices a cut call because its arguments are not valid JSON. Arguments that a server completes would be executed.
"""

import pytest
from openai import OpenAI

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 10}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": PARAMETERS}}
NAMED = {"type": "function", "function": {"name": "weather"}}
WHOLE = 900


def call(world, choice, max_tokens, stream):
    """The finish reason, the text, and the arguments of all calls."""
    client = OpenAI(base_url=f"http://{world.http}/v1", api_key="none", max_retries=0)
    messages = [{"role": "user", "content": "What is the opposite of hot?"}]
    fields = dict(model="ensemble", messages=messages, tools=[TOOL], tool_choice=choice, temperature=0, max_tokens=max_tokens)
    if not stream:
        (found,) = client.chat.completions.create(**fields).choices
        return found.finish_reason, found.message.content or "", [one.function.arguments for one in found.message.tool_calls or []]
    reason, text, arguments = None, "", {}
    for chunk in client.chat.completions.create(stream=True, **fields):
        (found,) = chunk.choices
        reason, text = found.finish_reason or reason, text + (found.delta.content or "")
        for part in found.delta.tool_calls or []:
            arguments[part.index] = arguments.get(part.index, "") + (part.function.arguments or "")
    return reason, text, list(arguments.values())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_cut_arguments_are_the_beginning_of_the_whole_ones(world, choice, stream):
    reason, _, whole = call(world, choice, WHOLE, stream)
    assert reason != "length" and whole
    for max_tokens in (10, 20, 30, 40, 50, 60, 80):
        reason, _, cut = call(world, choice, max_tokens, stream)
        if reason == "length" and cut:
            assert cut[:-1] == whole[: len(cut) - 1], (max_tokens, cut)
            assert whole[len(cut) - 1].startswith(cut[-1]), (max_tokens, cut[-1])


@pytest.mark.parametrize("stream", [False, True])
def test_the_markup_of_a_cut_call_is_not_text(world, stream):
    for max_tokens in (10, 15, 20, 25, 30):
        _, text, _ = call(world, "required", max_tokens, stream)
        assert not text.strip(), (max_tokens, text)
