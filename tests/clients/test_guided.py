"""Constrained answers over Triton's protocols: TensorRT-LLM's guide tensors."""

import json
import queue
import re
import urllib.error
import urllib.request

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "degrees": {"type": "integer"}, "sunny": {"type": "boolean"}},
    "required": ["city", "degrees", "sunny"],
    "additionalProperties": False,
}


def post(world, path, body):
    """The status and the body of the answer."""
    request = urllib.request.Request(f"http://{world.http}/v2/models/ensemble/{path}", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def generate(world, **fields):
    """The status, and the text or the error."""
    status, body = post(world, "generate", {"text_input": "What is the opposite of hot?", "max_tokens": 300, **fields})
    return status, json.loads(body)["text_output" if status == 200 else "error"]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 2.0, "top_p": 0.95, "seed": 3}])
def test_generate_follows_a_schema_a_pattern_and_a_grammar(world, sampling):
    def guided(kind, guide):
        status, text = generate(world, guided_decoding_guide_type=kind, guided_decoding_guide=guide, **sampling)
        assert status == 200, text
        return text

    weather = json.loads(guided("json_schema", json.dumps(SCHEMA)))
    assert isinstance(weather["city"], str) and isinstance(weather["sunny"], bool) and set(weather) == set(SCHEMA["properties"])
    assert re.fullmatch(r"[a-z]{3}-[0-9]{4}", guided("regex", "[a-z]{3}-[0-9]{4}"))
    grammar = 'start: "the " adjective " sky"\nadjective: "blue" | "grey"'
    assert guided("ebnf_grammar", grammar) in ("the blue sky", "the grey sky")


def test_generate_follows_a_structural_tag(world):
    tag = {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"}
    guide = json.dumps({"type": "structural_tag", "format": tag})
    status, text = generate(world, guided_decoding_guide_type="structural_tag", guided_decoding_guide=guide)
    assert status == 200 and text.startswith("<f>") and text.endswith("</f>"), text
    assert set(json.loads(text[3:-4])) == set(SCHEMA["properties"])


def test_a_stream_joins_to_the_constrained_text(world):
    body = {"text_input": "x", "max_tokens": 60, "stream": True,
            "guided_decoding_guide_type": "regex", "guided_decoding_guide": "(yes|no), [0-9]{12}"}
    status, answer = post(world, "generate_stream", body)
    assert status == 200
    events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: ")]
    assert re.fullmatch("(yes|no), [0-9]{12}", "".join(event["text_output"] for event in events))


def test_guides_work_over_grpc_beside_free_requests(world):
    """Twelve requests at once on one stream: the constrained ones follow their guide, the others answer as when alone."""

    def tensor(name, value, kind):
        array = np.array([[value]], dtype={"BYTES": object, "INT32": np.int32, "BOOL": bool}[kind])
        made = grpcclient.InferInput(name, [1, 1], kind)
        made.set_data_from_numpy(array)
        return made

    def texts(guides):
        """The text of each request, by its id."""
        answers, found = queue.Queue(), dict.fromkeys(map(str, range(len(guides))), "")
        with grpcclient.InferenceServerClient(world.grpc) as client:
            client.start_stream(lambda result, error: answers.put((result, error)))
            for number, guide in enumerate(guides):
                inputs = [tensor("text_input", "What is the opposite of hot?", "BYTES"), tensor("max_tokens", 24, "INT32"), tensor("stream", True, "BOOL")]
                if guide:
                    inputs += [tensor("guided_decoding_guide_type", "regex", "BYTES"), tensor("guided_decoding_guide", guide, "BYTES")]
                client.async_stream_infer("ensemble", inputs, request_id=str(number), enable_empty_final_response=True)
            num_open = len(guides)
            while num_open:
                result, error = answers.get(timeout=60)
                assert error is None, str(error)
                response = result.get_response()
                if response.parameters["triton_final_response"].bool_param:
                    num_open -= 1
                if (text := result.as_numpy("text_output")) is not None:
                    found[response.id] += text.item(0).decode()
            client.stop_stream()
        return found

    (alone,) = texts([None]).values()
    guides = [None if number % 3 == 0 else f"{number:02}[a-f]{{8}}" for number in range(12)]
    for number, text in texts(guides).items():
        guide = guides[int(number)]
        assert text == alone if guide is None else re.fullmatch(guide, text), (guide, text)


@pytest.mark.parametrize(
    "kind, guide, words",
    [
        ("json_schema", '{"type": "object"', "JSON schema"),
        ("json_schema", '{"type": "object", "dependentSchemas": {}}', "dependentSchemas"),
        ("regex", "(a", "regular expression"),
        ("xml", "a", "guided_decoding_guide_type"),
        ("regex", "", "guided_decoding_guide"),
        ("ebnf_grammar", 'root ::= missing', "`missing` is not defined"),
    ],
)
def test_a_guide_that_cannot_be_followed_is_refused_before_any_token(world, kind, guide, words):
    status, error = generate(world, guided_decoding_guide_type=kind, guided_decoding_guide=guide)
    assert status == 400 and words in error, error


def test_a_guide_with_beams_is_refused(world):
    status, error = generate(world, guided_decoding_guide_type="regex", guided_decoding_guide="a+", beam_width=2)
    assert status == 400 and "beam search" in error


def test_min_p_reaches_the_sampler(world):
    """With a `min_p` near 1 only the likeliest token is left, so a draw is greedy."""
    greedy = generate(world, max_tokens=16)
    drawn = generate(world, max_tokens=16, temperature=3.0, top_p=1.0, min_p=0.9999, seed=5)
    free = generate(world, max_tokens=16, temperature=3.0, top_p=1.0, seed=5)
    assert drawn == greedy != free


@pytest.mark.parametrize("stop", ["opposite", "posite", "is cold"])
def test_the_text_before_a_stop_word_is_complete(world, stop):
    """White space before the stop word belongs to the text, as over OpenAI's protocol."""
    _, whole = generate(world, max_tokens=30)
    assert stop in whole
    assert generate(world, max_tokens=30, stop_words=[stop]) == (200, whole[: whole.index(stop)])


@pytest.mark.parametrize("field, value", [("allowed_token_ids", [1]), ("top_logprobs", 3), ("tools", []), ("guided_regex", "a+"), ("logit_bias", {"1": 1}), ("n", 2), ("best_of", 3), ("functions", [])])
def test_generate_refuses_fields_of_openai_that_it_has_under_another_name_or_not_at_all(world, field, value):
    status, body = post(world, "generate", {"text_input": "hot", "max_tokens": 4, field: value})
    assert status == 400 and f"'{field}' changes the text" in json.dumps(body), body


@pytest.mark.parametrize("field, value", [("n", 1), ("best_of", 1), ("stream", False)])
def test_generate_takes_values_of_such_fields_that_change_nothing(world, field, value):
    plain = post(world, "generate", {"text_input": "hot", "max_tokens": 4})
    assert plain[0] == 200 and post(world, "generate", {"text_input": "hot", "max_tokens": 4, field: value}) == plain
