"""HTTP through an unmodified tritonclient, and the generate endpoints as curl uses them."""

import json

import numpy as np
import tritonclient.http as httpclient

from triton_requests import ANSWER, QUESTION, post


def test_server_and_models_are_live_and_ready(http):
    assert http.is_server_live() and http.is_server_ready()
    assert http.is_model_ready("ensemble") and not http.is_model_ready("nobody")


def test_metadata_and_configuration_describe_the_models(http):
    assert http.get_server_metadata()["extensions"]
    metadata = http.get_model_metadata("postprocessing")
    assert metadata["outputs"] == [{"name": "OUTPUT", "datatype": "BYTES", "shape": [-1, -1]}]
    config = http.get_model_config("ensemble")
    assert [step["model_name"] for step in config["ensemble_scheduling"]["step"]] == ["preprocessing", "tensorrt_llm", "postprocessing"]


def test_infer_takes_json_and_binary_tensors_alike(http):
    answers = []
    for binary in (True, False):
        query = httpclient.InferInput("QUERY", [1, 1], "BYTES")
        query.set_data_from_numpy(np.array([["three rows of oars"]], dtype=np.object_), binary_data=binary)
        length = httpclient.InferInput("REQUEST_OUTPUT_LEN", [1, 1], "INT32")
        length.set_data_from_numpy(np.array([[4]], dtype=np.int32), binary_data=binary)
        wanted = [httpclient.InferRequestedOutput("INPUT_ID", binary_data=binary)]
        answers.append(http.infer("preprocessing", [query, length], outputs=wanted).as_numpy("INPUT_ID").tolist())
    assert answers[0] == answers[1] and len(answers[0][0]) > 3


def test_generate_returns_one_response(world):
    status, content_type, body = post(world.http, "/v2/models/ensemble/generate", {"text_input": QUESTION, "max_tokens": 32})
    assert status == 200 and content_type.startswith("application/json")
    assert json.loads(body)["text_output"] == ANSWER and json.loads(body)["model_name"] == "ensemble"


def test_events_of_generate_stream_join_to_the_whole_text(world):
    status, content_type, body = post(world.http, "/v2/models/ensemble/generate_stream", {"text_input": QUESTION, "max_tokens": 32, "stream": True})
    assert status == 200 and content_type.startswith("text/event-stream")
    events = [json.loads(line.removeprefix("data: ")) for line in body.splitlines() if line.startswith("data: ")]
    assert len(events) > 3 and "".join(event["text_output"] for event in events) == ANSWER
