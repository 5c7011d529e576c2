"""Each bad request gets one clear error, and the server continues to serve."""

import numpy as np
import pytest

from triton_requests import ANSWER, QUESTION, post, stream, text_inputs


@pytest.fixture(autouse=True)
def still_serves(grpc):
    yield
    pieces, error = stream(grpc, text_inputs(QUESTION, 32, True))
    assert error is None and "".join(pieces) == ANSWER


def refused(grpc, inputs, *words: str, model: str = "ensemble") -> None:
    pieces, error = stream(grpc, inputs, model)
    assert pieces == [] and error is not None
    for word in words:
        assert word in str(error)


def test_an_unknown_model(grpc):
    refused(grpc, text_inputs(QUESTION, 8, True), "nobody", model="nobody")


def test_an_unknown_version(grpc):
    pieces, error = stream(grpc, text_inputs(QUESTION, 8, True), model_version="9")
    assert pieces == [] and "version 9" in str(error)


def test_a_negative_number_of_tokens(grpc):
    refused(grpc, text_inputs(QUESTION, -3, True), "-3")


def test_no_tokens_at_all(grpc):
    refused(grpc, text_inputs(QUESTION, 0, True), "0")


def test_a_prompt_longer_than_the_context(grpc):
    refused(grpc, text_inputs("row " * 5000, 8, True), "5002 tokens", "at most 2047")


def test_a_prompt_that_is_not_utf8(grpc):
    refused(grpc, text_inputs(b"\xff\xfe\xfa", 8, True), "UTF-8")


def test_an_input_that_the_model_does_not_have(grpc):
    refused(grpc, text_inputs(QUESTION, 8, True, nonsense=([1], np.int32)), "nonsense")


def test_an_input_of_the_wrong_type(grpc):
    refused(grpc, text_inputs(QUESTION, 8, True, temperature=([1], np.int32)), "temperature")


def test_a_value_out_of_range(grpc):
    refused(grpc, text_inputs(QUESTION, 8, True, top_p=([7.0], np.float32)), "top_p", "7")


def test_an_empty_prompt(grpc):
    refused(grpc, text_inputs("", 8, True), "empty")


def test_a_body_that_is_no_json(world):
    status, _, body = post(world.http, "/v2/models/ensemble/generate", b"{\"text_input\": ")
    # Triton's own status and message.
    assert status == 500 and "failed to parse the request JSON buffer" in body


def test_a_body_without_the_required_input(world):
    status, _, body = post(world.http, "/v2/models/ensemble/generate", {"text_input": QUESTION})
    assert status == 400 and "max_tokens" in body
