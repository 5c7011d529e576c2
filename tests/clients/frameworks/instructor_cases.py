"""Instructor: pydantic models from its modes of tools and of JSON schemas."""

from typing import Literal

import instructor
import pytest
from anthropic import Anthropic
from conftest import MESSAGES
from instructor.core import IncompleteOutputException
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field


class Weather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")
    city: str = Field(max_length=10)
    unit: Literal["celsius", "fahrenheit"]
    days: int = Field(ge=1, le=9)


class Forecast(BaseModel):
    model_config = ConfigDict(extra="forbid")
    hours: list[Weather] = Field(min_length=1, max_length=2)
    note: str | None = Field(max_length=8)


class Plain(BaseModel):
    """A model without `extra="forbid"`, as most programs write it: its schema does not say whether there can be other properties."""

    city: str = Field(max_length=10)
    days: int = Field(ge=1, le=9)


@pytest.fixture
def openai(server):
    return OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0)


def ask(client, model, max_tokens=1600, **fields):
    return client.create(model="ensemble", messages=MESSAGES, response_model=model, max_retries=0, max_tokens=max_tokens, **fields)


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA])
@pytest.mark.parametrize("model", [Weather, Forecast])
@pytest.mark.parametrize("temperature", [0, 1.5])
def test_an_object_of_the_model_comes_back(openai, mode, model, temperature):
    assert isinstance(ask(instructor.from_openai(openai, mode=mode), model, temperature=temperature, seed=3), model)


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA])
def test_an_object_of_a_plain_model_comes_back(openai, mode):
    assert ask(instructor.from_openai(openai, mode=mode), Plain, temperature=0).days > 0


def test_a_response_has_an_object_of_the_model(openai):
    """Instructor sends a format of the text too; a demanded call leaves no text for it."""
    client = instructor.from_openai(openai, mode=instructor.Mode.RESPONSES_TOOLS)
    fields = dict(model="ensemble", messages=MESSAGES, response_model=Weather, max_retries=0, max_output_tokens=400, temperature=0)
    assert isinstance(client.create(**fields), Weather)


def test_a_partial_object_grows_to_the_whole_one(openai):
    client = instructor.from_openai(openai, mode=instructor.Mode.JSON_SCHEMA)
    fields = dict(model="ensemble", messages=MESSAGES, response_model=Weather, max_retries=0, max_tokens=400, temperature=0)
    parts = list(client.create_partial(**fields))
    assert len(parts) > 3 and parts[-1].model_dump() == client.create(**fields).model_dump()


def test_the_usage_comes_with_the_object(openai):
    client = instructor.from_openai(openai, mode=instructor.Mode.JSON_SCHEMA)
    weather, answer = client.create_with_completion(model="ensemble", messages=MESSAGES, response_model=Weather, max_retries=0, max_tokens=400, temperature=0)
    assert weather.days > 0 and answer.usage.completion_tokens > 5


def test_anthropics_tools_give_an_object(server):
    client = instructor.from_anthropic(Anthropic(base_url=server, api_key="none", max_retries=0), mode=instructor.Mode.TOOLS)
    assert isinstance(ask(client, Weather), Weather)


def test_a_cut_object_is_an_incomplete_output(openai):
    with pytest.raises(IncompleteOutputException):
        ask(instructor.from_openai(openai, mode=instructor.Mode.JSON_SCHEMA), Weather, max_tokens=3, temperature=0)
