"""What a chat request says about its template reaches it: tools, documents, variables, the last message to continue."""

import json
import shutil
import urllib.error
import urllib.request

import pytest

from conftest import ROOT, free_ports, launch

TEMPLATE = """{{ tools | tojson }}|{{ documents | tojson }}|{{ enable_thinking | default('unset') }}|{% for message in messages %}{{ message.keys() | list }}{{ message.content }}
{% endfor %}{% if add_generation_prompt %}A:{% endif %}"""
TOOL = {"type": "function", "function": {"name": "z", "description": "d", "parameters": {"type": "object", "properties": {}}}}
USER = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def render(tmp_path_factory):
    """Gives the prompt of a chat request, or the words of the error."""
    models = tmp_path_factory.mktemp("templates") / "models"
    shutil.copytree(ROOT / "model_repository", models)
    (models / "tensorrt_llm/1/chat_template.jinja").write_text(TEMPLATE)
    named = models / "tensorrt_llm/1/additional_chat_templates"
    named.mkdir()
    (named / "short.jinja").write_text("short {{ messages | length }}")
    http, grpc, metrics = free_ports(3)
    flags = [f"--http_port={http}", f"--grpc_port={grpc}", f"--metrics_port={metrics}"]
    started = launch("--world_size=1", f"--model_repo={models}", "--device=cpu", "--detach", *flags)
    assert started.returncode == 0, started.stderr

    def answer(**fields):
        body = json.dumps({"model": "ensemble", "messages": [USER]} | fields).encode()
        url = f"http://localhost:{http}/v1/chat/completions/render"
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request) as response:
                return json.load(response)["data"][0]["prompt"]
        except urllib.error.HTTPError as error:
            assert error.code == 400
            return json.load(error)["error"]["message"]

    yield answer
    stopped = launch("stop", f"--http_port={http}")
    assert stopped.returncode == 0, stopped.stderr


def test_a_template_sees_every_field(render):
    assert render() == "null|null|unset|['role', 'content']Hi\nA:"
    assert render(tools=[TOOL]).startswith(json.dumps([TOOL]) + "|null|")
    assert render(documents=[{"title": "T", "text": "x"}]).startswith('null|[{"title": "T", "text": "x"}]|')
    assert render(chat_template_kwargs={"enable_thinking": False}).startswith("null|null|False|")
    assert render(add_generation_prompt=False).endswith("Hi\n")


def test_a_template_sees_tools_as_the_client_wrote_them(render):
    schema = {"properties": {"b": {"type": "string"}, "a": {"type": "integer"}}, "type": "object"}
    tool = {"function": {"strict": False, "parameters": schema, "x-hint": [1], "name": "z"}, "type": "function", "extra": None}
    assert render(tools=[tool]).startswith(json.dumps([tool]) + "|null|")
    bare = {"type": "function", "function": {"name": "z"}}
    assert render(tools=[bare]).startswith(json.dumps([bare]) + "|null|"), "nothing is added"


def test_the_last_message_is_continued(render):
    messages = [USER, {"role": "assistant", "content": "I am "}]
    assert render(messages=messages, continue_final_message=True).endswith("['role', 'content']I am ")


def test_templates_are_chosen_by_name(render):
    assert render(chat_template="short") == "short 1"
    assert "takes the names of the model's templates only (`default`, `short`)" in render(chat_template="{{ 1 }}")


def test_a_variable_cannot_replace_a_field(render):
    assert "`chat_template_kwargs` has `messages`; use the field of that name" in render(chat_template_kwargs={"messages": []})
