"""OpenAI's Responses API through OpenAI's own Python client."""

import openai
import pytest
from openai.types.responses import Response

from test_openai import QUESTION, client  # noqa: F401  The fixture starts a world with a chat template.
from triton_requests import ANSWER

QUESTION_ALONE = QUESTION.removeprefix("Q: ").removesuffix("\nA:")


def respond(client, **fields):
    return client.responses.create(**{"model": "ensemble", "input": QUESTION_ALONE, "max_output_tokens": 32, "temperature": 0} | fields)


def test_a_response_has_the_models_text(client):  # noqa: F811
    response = respond(client)
    assert response.output_text == ANSWER and response.status == "completed"
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens > 4
    Response.model_validate(response.model_dump())  # The client takes answers unchecked; here no field may be missing.
    cut = respond(client, max_output_tokens=2)
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"


def test_a_stream_joins_to_the_same_response(client):  # noqa: F811
    fields = {"model": "ensemble", "input": [{"role": "user", "content": [{"type": "input_text", "text": QUESTION_ALONE}]}]}
    with client.responses.stream(**fields, max_output_tokens=32, temperature=0) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == ANSWER == final.output_text
    assert [event.sequence_number for event in events if hasattr(event, "sequence_number")] == list(range(len(events)))


def test_no_message_of_the_assistant_is_lost(client):  # noqa: F811
    texts = [{"role": "assistant", "content": text} for text in ("Cold is the opposite of hot.", "It is cold.")]
    question = [{"role": "user", "content": QUESTION_ALONE}]
    last, both = (respond(client, input=question + messages + question).usage.input_tokens for messages in (texts[1:], texts))
    assert both > last + 5


def test_a_stream_without_text_has_the_same_output(client):  # noqa: F811
    whole = respond(client, max_output_tokens=0)
    *_, last = respond(client, max_output_tokens=0, stream=True)
    assert [item.content[0].text for item in last.response.output] == [item.content[0].text for item in whole.output] == [""]


def test_log_probabilities_are_listed(client):  # noqa: F811
    response = respond(client, include=["message.output_text.logprobs"], top_logprobs=3)
    logprobs = response.output[0].content[0].logprobs
    assert "".join(token.token for token in logprobs) == ANSWER and all(len(token.top_logprobs) == 3 for token in logprobs)


def test_what_needs_storage_is_refused_by_name(client):  # noqa: F811
    for name, value in {"previous_response_id": "resp_1", "background": True, "conversation": "c"}.items():
        with pytest.raises(openai.BadRequestError, match=f"`{name}` is not supported"):
            respond(client, extra_body={name: value})
