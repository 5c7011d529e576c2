"""Reasoning is separated from the answer, counted and limited, over OpenAI's and Anthropic's protocols."""

import json
import re
import shutil

import anthropic
import openai
import pytest

import metrics_page
from conftest import ROOT, free_ports, launch

# As Qwen 3's template, in short: the prompt opens the reasoning unless it is turned off.
TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% else %}<think>
{% endif %}{% endif %}{# <tool_call> #}"""
QUESTION = [{"role": "user", "content": "What is the opposite of hot?"}]


@pytest.fixture(scope="module")
def ports(tmp_path_factory):
    """The ports of HTTP and of the metrics of a server whose model reasons."""
    models = tmp_path_factory.mktemp("reasoning") / "models"
    shutil.copytree(ROOT / "model_repository", models)
    (models / "tensorrt_llm/1/chat_template.jinja").write_text(TEMPLATE)
    config = models / "tensorrt_llm/config.pbtxt"
    config.write_text(config.read_text().replace('"hermes"', '"qwen3"'))
    http, grpc, metrics = free_ports(3)
    flags = [f"--http_port={http}", f"--grpc_port={grpc}", f"--metrics_port={metrics}"]
    started = launch("--world_size=1", f"--model_repo={models}", "--device=cpu", "--detach", *flags)
    assert started.returncode == 0, started.stderr
    yield http, metrics
    stopped = launch("stop", f"--http_port={http}")
    assert stopped.returncode == 0, stopped.stderr


@pytest.fixture(scope="module")
def url(ports):
    return f"http://localhost:{ports[0]}"


@pytest.fixture
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def chat(client, max_tokens=60, temperature=0, extra=None, **fields):
    return client.chat.completions.create(
        model="ensemble", messages=QUESTION, max_tokens=max_tokens, temperature=temperature, extra_body=extra or {}, **fields)


def test_text_before_the_end_of_the_reasoning_is_no_content(client):
    answer = chat(client, max_tokens=6)
    message = answer.choices[0].message
    assert not message.content and message.reasoning_content and message.reasoning == message.reasoning_content
    assert answer.usage.completion_tokens_details.reasoning_tokens == answer.usage.completion_tokens


def test_reasoning_ends_behind_its_budget_and_the_answer_follows(client):
    budget = {"thinking_token_budget": 5}
    answer = chat(client, extra=budget)
    message = answer.choices[0].message
    assert message.reasoning and "</think>" not in message.reasoning + (message.content or "")
    reasoning, content = "", ""
    for chunk in chat(client, extra=budget, stream=True):
        delta = chunk.choices[0].delta
        reasoning += getattr(delta, "reasoning_content", None) or ""
        content += delta.content or ""
    assert (reasoning, content) == (message.reasoning, message.content or "")
    hidden = chat(client, extra=budget | {"include_reasoning": False}).choices[0].message
    assert hidden.content == message.content and not getattr(hidden, "reasoning", None)


def test_reasoning_and_cached_prompts_are_counted(client, ports):
    def counted() -> tuple[float, float]:
        families = metrics_page.families(metrics_page.page(f"localhost:{ports[1]}"))
        return tuple(families[f"trireme_llm_{name}_tokens_total"].value() for name in ("reasoning", "cached_prompt"))

    before = counted()
    usages = [chat(client, max_tokens=6, extra={"ignore_eos": True}).usage for _ in range(2)]
    reasoning = sum(usage.completion_tokens_details.reasoning_tokens for usage in usages)
    cached = sum(usage.prompt_tokens_details.cached_tokens for usage in usages)
    assert 0 < reasoning <= 12
    assert tuple(after - earlier for after, earlier in zip(counted(), before)) == (reasoning, cached)


def test_a_constraint_begins_behind_the_reasoning(client):
    answer = chat(client, max_tokens=90, extra={"thinking_token_budget": 8, "guided_regex": "[a-z]{3}[0-9]{3}"}).choices[0]
    assert answer.message.reasoning and re.fullmatch("[a-z]{3}[0-9]{3}", answer.message.content)
    assert answer.finish_reason == "stop"
    off = {"chat_template_kwargs": {"enable_thinking": False}, "guided_regex": "[a-z]{3}[0-9]{3}"}
    answer = chat(client, extra=off).choices[0]
    assert re.fullmatch("[a-z]{3}[0-9]{3}", answer.message.content) and not getattr(answer.message, "reasoning", None)


def test_a_tool_call_follows_the_reasoning(client):
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": schema}}]
    answer = chat(client, max_tokens=200, extra={"thinking_token_budget": 8}, tools=tools, tool_choice="required", parallel_tool_calls=False)
    (call,) = answer.choices[0].message.tool_calls
    assert answer.choices[0].message.reasoning and json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")


def test_effort_none_turns_reasoning_off(client):
    assert not getattr(chat(client, reasoning_effort="none").choices[0].message, "reasoning", None)


def test_anthropics_client_gets_a_thinking_block(url):
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    answer = client.messages.create(model="ensemble", max_tokens=8, messages=QUESTION, thinking={"type": "enabled", "budget_tokens": 1024})
    assert answer.content[0].type == "thinking" and answer.content[0].thinking
    plain = client.messages.create(model="ensemble", max_tokens=8, messages=QUESTION)
    assert [block.type for block in plain.content] == ["text"]
    hidden = client.messages.create(model="ensemble", max_tokens=8, messages=QUESTION, thinking={"type": "adaptive", "display": "omitted"})
    # The reasoning counts, although it is left out.
    assert [block.type for block in hidden.content] == ["text"] and hidden.usage.output_tokens > 0
