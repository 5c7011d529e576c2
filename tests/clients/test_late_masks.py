"""A grammar whose masks are slow to compute costs the other requests nothing: its row sits out the steps for which it is not ready."""

import http.client
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import metrics_page

# Every text has very many parses, so a mask takes milliseconds, and more with each token.
AMBIGUOUS = "start: e\ne: e e e | e e | /[a-z]/ | \" \""
PLAIN = {"prompt": "hot cold", "max_tokens": 120, "ignore_eos": True, "temperature": 1, "seed": 5}
SLOW = {"prompt": "x", "guided_grammar": AMBIGUOUS, "ignore_eos": True, "temperature": 1, "seed": 7}


def post(world, body):
    connection = http.client.HTTPConnection(world.http, timeout=300)
    try:
        connection.request("POST", "/v1/completions", json.dumps({"model": "ensemble", **body}))
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def text(answer):
    return answer["choices"][0]["text"]


def counters(world):
    """Tokens generated, and masks that were late."""
    found = metrics_page.families(metrics_page.page(f"localhost:{world.metrics_port}"))
    return [found[f"trireme_llm_{name}_total"].value() for name in ("output_tokens", "late_masks")]


def plain_texts(world, stop):
    """The texts of plain requests, one after the other."""
    texts = [text(post(world, PLAIN))]
    while not stop.is_set():
        texts.append(text(post(world, PLAIN)))
    return texts


def beside_plain_requests(world, body):
    """The answer to a request beside plain ones, their texts, and how many tokens and late masks there were meanwhile."""
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        plain = pool.submit(plain_texts, world, stop)
        before = counters(world)
        answer = post(world, body)
        tokens, late = (after - count for after, count in zip(counters(world), before))
        stop.set()
    return answer, plain.result(), tokens, late


def test_plain_rows_have_a_token_in_each_step_while_a_slow_mask_is_computed(world):
    plain, slow = text(post(world, PLAIN)), post(world, {**SLOW, "max_tokens": 24})
    assert slow["choices"][0]["finish_reason"] == "length", slow
    answer, texts, tokens, late = beside_plain_requests(world, {**SLOW, "max_tokens": 24})
    # A plain row that waited for the masks would have about as many tokens as the constrained one.
    assert late > 0 and tokens - 24 > 36, (tokens, late)
    assert set(texts) == {plain}, "plain rows have the same tokens as alone"
    assert text(answer) == text(slow), "the constrained row, too, although it sat out some steps"


def test_a_grammar_that_explodes_ends_its_own_request_with_the_reason(world):
    plain = text(post(world, PLAIN))
    answer, texts, _, _ = beside_plain_requests(world, {**SLOW, "max_tokens": 1500})
    assert "takes too long to compute: make it simpler" in answer["error"]["message"], answer
    assert set(texts) == {plain}
