#!/usr/bin/env python3
"""Records the prompts that transformers makes of conversations, for the chat templates in tests/goldens/chat_templates.

    make_chat_template_goldens.py [DIR]          default: tests/goldens/chat_templates beside this script's parent folder

DIR has templates (*.jinja). Written are cases.json, the conversations and the settings of their prompts; prompts.json, for each
template the prompt of each case, or an object with the error; and probes.json, small templates with their output or error.
The clock stands at 1987-06-15. Needs transformers, tokenizers and jinja2.

Three things happen to a conversation before a template reads it, here as in the server. Content in parts stays a list if the template
iterates over a message's content, else its texts are joined by line feeds. Arguments of tool calls are objects; a template that
fails on objects gets them as JSON text. Null content is left out; a template that fails on that gets null in messages with tool calls,
as transformers gave it until it left null out, too.

A case is left out where a template iterates over none, which fails in Python and is an empty loop in the server: templates named
`tool_use` do so without tools, and are not used without tools.
"""
import argparse
import copy
import datetime
import json
import pathlib

import jinja2
import jinja2.ext
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from chat_template_probes import CONTEXT, PROBES

ROOT = pathlib.Path(__file__).resolve().parents[2]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a town – today's, as \"text\" & <b>more</b>.",
        "parameters": {
            "type": "object",
            "properties": {
                "town": {"type": "string", "description": "Name of the town, e.g. Zürich or 東京"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
                "days": {"type": ["integer", "null"], "minimum": 1, "maximum": 16},
            },
            "required": ["town"],
            "additionalProperties": False,
        },
    },
}
SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Searches documents.\nReturns at most `limit` of them.",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string"},
                "filters": {
                    "type": "object",
                    "properties": {"year": {"type": "integer"}, "tags": {"type": "array", "items": {"type": "string"}}},
                    "required": ["year"],
                },
                "threshold": {"type": "number", "default": 0.5},
            },
            "required": ["query"],
        },
    },
}
EMPTY = {"type": "function", "function": {"name": "now", "description": "The time.", "parameters": {"type": "object", "properties": {}}}}
TOOLS = [WEATHER, SEARCH, EMPTY]
# Some templates fail on lists of types.
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": "The first."},
                "b": {"type": "number", "description": "The second."},
                "unit": {"type": "string", "description": "Their unit.", "enum": ["m", "km"]},
            },
            "required": ["a", "b"],
        },
    },
}


def system(text="You are a careful assistant."):
    return {"role": "system", "content": text}


def user(content="How are you?"):
    return {"role": "user", "content": content}


def assistant(content=None, **fields):
    return {"role": "assistant", "content": content, **fields}


def call(number, name, arguments):
    return {"id": f"call{number:05}", "type": "function", "function": {"name": name, "arguments": arguments}}


def tool(number, name, content):
    return {"role": "tool", "tool_call_id": f"call{number:05}", "name": name, "content": content}


ONE_CALL = [user("Weather in Zürich?"), assistant(tool_calls=[call(1, "get_weather", {"town": "Zürich", "days": 2})])]
RESULT = tool(1, "get_weather", '{"temperature": 21.5, "sky": "clear"}')
TWO_CALLS = [
    system(),
    user("Weather in Oslo, and papers on fjords?"),
    assistant(
        "I look both up.",
        tool_calls=[
            call(1, "search", {"query": "fjords & \"ice\"", "filters": {"year": 2020, "tags": ["geo", "<x>"]}, "threshold": 0.25}),
            call(2, "get_weather", {"unit": "celsius", "town": "Oslo", "days": None}),
        ],
    ),
    tool(1, "search", "[]"),
    tool(2, "get_weather", "12 °C\nrain"),
]
DOCUMENTS = [
    {"title": "Fjords", "text": "A fjord is a long, narrow inlet."},
    {"title": "Ice – 冰", "text": "Ice is frozen \"water\".", "source": "notes"},
]
PARTS = [{"type": "text", "text": "First part."}, {"type": "text", "text": " Second\npart. "}]
THOUGHT = "The user greets.\n\nA greeting is due."

CASES = {
    "user": {"messages": [user()]},
    "system": {"messages": [system(), user()]},
    "turns": {"messages": [system(), user("1+1?"), assistant("2"), user("And 2+2?")]},
    "turns_without_system": {"messages": [user("1+1?"), assistant("2"), user("And 2+2?"), assistant("4"), user("Thanks")]},
    "without_generation_prompt": {"messages": [user(), assistant("Fine.")], "add_generation_prompt": False},
    "spaces": {"messages": [system("  \n system \n"), user("  \n x \n "), assistant(" \n y  "), user("\tz\t")]},
    "unicode": {"messages": [user("«Größe» 👩‍👩‍👧 e\u0301 \u00a0 <b>&amp;'\"\\ {{ x }} {% if %} \r\n\u2028."), assistant("好"), user("नमस्ते")]},
    "empty_texts": {"messages": [system(""), user(""), assistant(""), user("")]},
    "tools": {"messages": [system(), user("Weather in Zürich?")], "tools": TOOLS},
    "tools_without_system": {"messages": [user("Weather in Zürich?")], "tools": TOOLS[:1]},
    "tool_call": {"messages": [*ONE_CALL, RESULT], "tools": TOOLS},
    "tool_call_answered": {"messages": [*ONE_CALL, RESULT, assistant("Clear, 21.5 °C."), user("Thanks")], "tools": TOOLS},
    "parallel_calls": {"messages": TWO_CALLS, "tools": TOOLS},
    "parallel_calls_answered": {"messages": [*TWO_CALLS, assistant("Rain."), user("Again")], "tools": TOOLS, "add_generation_prompt": True},
    "tool_call_without_tools": {"messages": [*ONE_CALL, RESULT]},
    "call_without_arguments": {"messages": [user("Time?"), assistant(tool_calls=[call(1, "now", {})]), tool(1, "now", "12:00")], "tools": TOOLS},
    "reasoning": {"messages": [user("Hi"), assistant("Hello!", reasoning_content=THOUGHT), user("Bye")]},
    "reasoning_last": {"messages": [user("Hi"), assistant("Hello!", reasoning_content=THOUGHT)], "add_generation_prompt": False},
    "reasoning_and_call": {
        "messages": [user("Weather?"), assistant("", reasoning_content="Look it up.", tool_calls=ONE_CALL[1]["tool_calls"]), RESULT],
        "tools": TOOLS,
    },
    "thought_in_text": {"messages": [user("Hi"), assistant(f"<think>\n{THOUGHT}\n</think>\n\nHello!"), user("Bye")]},
    "thinking": {"messages": [user()], "variables": {"enable_thinking": True, "thinking": True}},
    "no_thinking": {"messages": [system(), user()], "variables": {"enable_thinking": False, "thinking": False}},
    "effort": {"messages": [system(), user()], "variables": {"reasoning_effort": "high"}},
    "developer": {"messages": [{"role": "developer", "content": "Be terse."}, user()], "tools": TOOLS[:2]},
    "plain_tools": {"messages": [system(), user("2 + 3?")], "tools": [ADD]},
    "plain_tools_call": {
        "messages": [user("2 + 3?"), assistant("", tool_calls=[call(1, "add", {"a": 2, "b": 3})]), tool(1, "add", "5")],
        "tools": [ADD],
    },
    "documents": {"messages": [user("What is a fjord?")], "documents": DOCUMENTS},
    "parts": {"messages": [user(PARTS), assistant("Seen."), user(PARTS[:1])]},
    "continued": {"messages": [user(), assistant("I am")], "add_generation_prompt": False, "continue_final_message": True},
    "continued_space": {"messages": [user(), assistant("I am ")], "add_generation_prompt": False, "continue_final_message": True},
    "continued_reasoning": {
        "messages": [user(), assistant("Well,", reasoning_content="Short.")],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
}


class Clock(datetime.datetime):
    @classmethod
    def now(cls, zone=None):
        return cls(1987, 6, 15, tzinfo=zone)


def iterates_content(template):
    """Whether a template's syntax tree has a loop over a message's content."""
    tree = jinja2.Environment(extensions=[jinja2.ext.loopcontrols]).parse(without_generation(template))
    names = {"content"}

    def is_content(node):
        while isinstance(node, (jinja2.nodes.Filter, jinja2.nodes.CondExpr)):
            node = node.node if isinstance(node, jinja2.nodes.Filter) else node.expr1
        match node:
            case jinja2.nodes.Name(name=name):
                return name in names
            case jinja2.nodes.Getattr(attr=name) | jinja2.nodes.Getitem(arg=jinja2.nodes.Const(value=name)):
                return name == "content"
            case jinja2.nodes.Getitem(node=inner, arg=jinja2.nodes.Slice()):
                return is_content(inner)
            case jinja2.nodes.Call(node=jinja2.nodes.Getattr(attr="get"), args=[jinja2.nodes.Const(value="content"), *_]):
                return True
        return False

    for assignment in tree.find_all(jinja2.nodes.Assign):
        if is_content(assignment.node) and isinstance(assignment.target, jinja2.nodes.Name):
            names.add(assignment.target.name)
    return any(is_content(loop.iter) for loop in tree.find_all(jinja2.nodes.For))


def without_generation(template):
    for tag in ("generation", "endgeneration"):
        for start in ("{%-", "{%"):
            for end in ("-%}", "%}"):
                template = template.replace(f"{start} {tag} {end}", "")
    return template


def with_form(messages, keeps_parts, arguments_as_text, null_content):
    messages = copy.deepcopy(messages)
    for message in messages:
        if message["content"] is None and not (null_content and message.get("tool_calls")):
            del message["content"]
        elif isinstance(message["content"], list) and not keeps_parts:
            message["content"] = "\n".join(part["text"] for part in message["content"])
        for one in message.get("tool_calls", []) if arguments_as_text else []:
            one["function"]["arguments"] = json.dumps(one["function"]["arguments"], ensure_ascii=False)
    return messages


def prompt(tokenizer, case, keeps_parts):
    def render(arguments_as_text):
        return tokenizer.apply_chat_template(
            with_form(case["messages"], keeps_parts, arguments_as_text, null_content=False),
            tools=case.get("tools"),
            documents=case.get("documents"),
            add_generation_prompt=case.get("add_generation_prompt", not case.get("continue_final_message", False)),
            continue_final_message=case.get("continue_final_message", False),
            tokenize=False,
            **case.get("variables", {}),
        )

    def render_with_null(arguments_as_text):
        return chat_template_utils._compile_jinja_template(tokenizer.chat_template).render(
            messages=with_form(case["messages"], keeps_parts, arguments_as_text, null_content=True),
            tools=case.get("tools"),
            documents=case.get("documents"),
            add_generation_prompt=case.get("add_generation_prompt", True),
            **SPECIAL,
            **case.get("variables", {}),
        )

    try:
        return render(False)
    except Exception as error:
        has_calls = any(message.get("tool_calls") for message in case["messages"])
        for one, as_text in [(render, True), (render_with_null, False), (render_with_null, True)] if has_calls else []:
            try:
                return one(as_text)
            except Exception:
                pass
        if "'NoneType' object is not iterable" in str(error):
            return None
        is_refusal = type(error) is jinja2.TemplateError
        return {"error": str(error) if is_refusal else "", "kind": type(error).__name__}


def probe(source):
    try:
        template = chat_template_utils._compile_jinja_template(source)
        return template.render(**copy.deepcopy(CONTEXT))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def write(path, value):
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dir", nargs="?", type=pathlib.Path, default=ROOT / "tests/goldens/chat_templates")
    folder = parser.parse_args().dir
    chat_template_utils.datetime = Clock
    prompts = {}
    for file in sorted(folder.glob("*.jinja")):
        template = file.read_text()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>")), **SPECIAL)
        tokenizer.chat_template = template
        keeps_parts = iterates_content(template)
        found = {name: prompt(tokenizer, case, keeps_parts) for name, case in CASES.items()}
        prompts[file.stem] = {name: text for name, text in found.items() if text is not None}
    write(folder / "cases.json", CASES)
    write(folder / "prompts.json", prompts)
    write(folder / "probes.json", {"context": CONTEXT, "probes": [[source, probe(source)] for source in PROBES]})


if __name__ == "__main__":
    main()
