"""LangChain's ChatOpenAI and OpenAI, from the package `langchain-openai`."""

import json

import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI
from openai import LengthFinishReasonError
from pydantic import BaseModel, ConfigDict, Field

from triton_requests import ANSWER, QUESTION

QUESTION_ALONE = QUESTION.removeprefix("Q: ").removesuffix("\nA:")


class Weather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")
    city: str = Field(max_length=10)
    days: int = Field(ge=1, le=9)


@pytest.fixture
def chat(world):
    def make(max_tokens=400, **fields):
        return ChatOpenAI(model="ensemble", base_url=f"http://{world.http}/v1", api_key="none", temperature=0, max_tokens=max_tokens, max_retries=0, **fields)

    return make


def test_an_answer_its_stream_and_a_batch_are_the_same(chat):
    model = chat()
    answer = model.invoke(QUESTION_ALONE)
    assert answer.content == ANSWER and answer.response_metadata["finish_reason"] == "stop"
    chunks = list(model.stream([SystemMessage("Be brief."), HumanMessage(QUESTION_ALONE)], stream_usage=True))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert len(chunks) > 3 and whole.content == model.invoke([("system", "Be brief."), ("human", QUESTION_ALONE)]).content
    assert whole.usage_metadata["output_tokens"] > 3
    assert [one.content for one in model.batch([QUESTION_ALONE] * 3)] == [ANSWER] * 3


@pytest.mark.parametrize("choice", ["required", "Weather"])
def test_a_bound_tool_is_called_and_the_conversation_goes_on(chat, choice):
    model = chat().bind_tools([Weather], tool_choice=choice, strict=True)
    answer = model.invoke(QUESTION_ALONE)
    assert answer.tool_calls and not answer.invalid_tool_calls
    for call in answer.tool_calls:
        assert call["name"] == "Weather" and call["id"] and Weather.model_validate(call["args"])
    results = [ToolMessage('{"degrees": 4}', tool_call_id=call["id"]) for call in answer.tool_calls]
    after = chat(max_tokens=8).bind_tools([Weather]).invoke([HumanMessage(QUESTION_ALONE), answer, *results, HumanMessage("Thanks.")])
    assert after.response_metadata["finish_reason"]


def test_a_streamed_tool_call_is_joined(chat):
    chunks = list(chat().bind_tools([Weather], tool_choice="Weather", strict=True).stream(QUESTION_ALONE))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    (call,) = whole.tool_calls
    assert call["name"] == "Weather" and Weather.model_validate(call["args"])


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_is_an_object_of_the_model(chat, method):
    assert isinstance(chat().with_structured_output(Weather, method=method, strict=True).invoke(QUESTION_ALONE), Weather)
    raw = chat().with_structured_output(Weather, method=method, strict=True, include_raw=True).invoke(QUESTION_ALONE)
    assert isinstance(raw["parsed"], Weather) and raw["parsing_error"] is None


def test_a_stream_of_structured_output_ends_with_the_object(chat):
    assert isinstance(list(chat().with_structured_output(Weather).stream(QUESTION_ALONE))[-1], Weather)


def test_log_probabilities_belong_to_the_text(chat):
    answer = chat().bind(logprobs=True, top_logprobs=2).invoke(QUESTION_ALONE)
    entries = answer.response_metadata["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == ANSWER
    assert all(entry["logprob"] <= 0 and len(entry["top_logprobs"]) >= 2 for entry in entries)


def test_the_responses_api_gives_the_same_answer(chat):
    model = chat(use_responses_api=True)
    assert model.invoke(QUESTION_ALONE).text == ANSWER
    assert "".join(chunk.text for chunk in model.stream(QUESTION_ALONE)) == ANSWER
    (call,) = model.bind_tools([Weather], tool_choice="Weather", strict=True).invoke(QUESTION_ALONE).tool_calls
    assert Weather.model_validate(call["args"])
    assert isinstance(model.with_structured_output(Weather).invoke(QUESTION_ALONE), Weather)


def test_a_completion_and_its_stream_are_the_same(world):
    model = OpenAI(model="ensemble", base_url=f"http://{world.http}/v1", api_key="none", temperature=0, max_tokens=32, max_retries=0)
    assert model.invoke(QUESTION) == ANSWER == "".join(model.stream(QUESTION))
    assert model.generate([QUESTION, QUESTION]).llm_output["token_usage"]["completion_tokens"] > 6


def test_a_prompt_that_is_too_long_is_a_context_overflow(chat):
    """LangChain's agents shorten the conversation on this error and end on any other one."""
    with pytest.raises(ContextOverflowError):
        chat(max_tokens=8).invoke("word " * 4000)


def test_json_mode_gives_json_or_says_that_it_was_cut(chat):
    model = chat(max_tokens=60).bind(response_format={"type": "json_object"})
    try:
        assert isinstance(json.loads(model.invoke(QUESTION_ALONE).content), dict)
    except LengthFinishReasonError as cut:
        assert cut.completion.choices[0].message.content.lstrip().startswith("{")
