#!/usr/bin/env python3
"""Sends JSON schemas that ship inside of PyPI packages to a running server, and compares what it serves with llguidance's own package.

Usage, with a server of this repository's `model_repository` on port 8000:

    python3 -m venv .cache/venv_schemas
    .cache/venv_schemas/bin/python -m pip install llguidance==1.9.1 jsonschema==4.26.0 openai==3.54.0 check-jsonschema==0.39.0 nbformat==5.11.1
    .cache/venv_schemas/bin/python -m pip install --no-deps cfn-lint ansible-lint cyclonedx-python-lib validate-pyproject altair
    .cache/venv_schemas/bin/python tests/clients/check_json_schemas.py localhost:8000

A package that is not installed is skipped and named. `--suite FOLDER` adds the schemas of the JSON Schema test suite, which the source archive
of `jsonschema` holds in `json/tests`.

For each schema, the server gets a chat with the `response_format` `json_schema`. llguidance compiles the same schema with the limits of the server.
Every answer that is not cut by its length must validate. The report has the rates of both, the answers, and the schemas where both differ, by cause.
A keyword that the server refuses by name, although llguidance takes the schema, is counted apart: such a refusal is deliberate.
Returns 1 when an answer does not validate, or when the server refuses a schema for another reason and llguidance takes it.
"""

import argparse
import http.client
import importlib
import importlib.metadata
import json
import pkgutil
import re
import sys
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import jsonschema
import llguidance

# Packages with files of schemas, and packages with pydantic models below a module.
FILES = ["jsonschema-specifications", "openapi-schema-validator", "openapi-spec-validator", "nbformat", "check-jsonschema", "validate-pyproject",
         "ansible-lint", "cyclonedx-python-lib", "altair", "cfn-lint"]
MODELS = ["openai.types"]
# Those that the bounded sample of the tests needs.
SAMPLE = ["jsonschema-specifications", "openapi-schema-validator", "openapi-spec-validator", "openai.types"]

# What the front and the compiler bound; llguidance gets the same bounds of the grammar.
LIMITS = llguidance.LLParserLimits(max_grammar_size=200_000, max_lexer_states=50_000, step_lexer_fuel=200_000, step_max_items=50_000, verbose_errors=False)


@dataclass
class Schema:
    """A schema and where it is from."""

    source: str
    name: str
    value: dict


@dataclass
class Outcome:
    """What the server and llguidance made of one schema."""

    schema: Schema
    # The server's refusal; empty when it served the schema.
    refusal: str
    # llguidance's refusal; empty when it compiled the schema.
    reference: str
    # "valid", "cut", "invalid: …" for an answer; empty without one.
    answer: str
    seconds: float

    @property
    def cause(self) -> str:
        """The class of the server's refusal."""
        if found := re.search(r"`([^`]*)` at `[^`]*` is not supported", self.refusal):
            return f"keyword {found[1]}"
        for words, cause in [("over the limit of", "too large"), ("nests deeper", "too deep"), ("ms to compile", "too slow"), ("being compiled", "busy")]:
            if words in self.refusal:
                return cause
        return self.refusal[:160]

    @property
    def is_deliberate(self) -> bool:
        """Whether the server refused a keyword by name, or a schema beyond its bounds."""
        return self.cause.startswith("keyword ") or self.cause in ("too large", "too deep", "too slow")


def is_schema(value) -> bool:
    """Whether a document is a JSON schema: it says so, or has properties and either a type or definitions."""
    if not isinstance(value, dict):
        return False
    dialect = value.get("$schema")
    if isinstance(dialect, str):
        return "json-schema.org" in dialect
    return isinstance(value.get("properties"), dict) and (value.get("type") == "object" or "definitions" in value)


def file_schemas(package: str) -> list[Schema]:
    """The schemas among the JSON files of an installed package, in the order of their paths."""
    found = []
    for file in sorted(importlib.metadata.files(package) or [], key=str):
        # Files without an ending are in `jsonschema-specifications`.
        if file.suffix not in (".json", "") or file.name == "RECORD":
            continue
        try:
            value = json.loads(Path(file.locate()).read_text())
        except (OSError, ValueError):
            continue
        if is_schema(value):
            found.append(Schema(package, str(file), value))
    return found


def model_schemas(package: str) -> list[Schema]:
    """The schemas of the pydantic models below a module, in the order of their names."""
    import pydantic

    root, found = importlib.import_module(package), {}
    for module in pkgutil.walk_packages(root.__path__, f"{package}."):
        try:
            members = vars(importlib.import_module(module.name))
        except ImportError:
            continue
        for name, member in members.items():
            if isinstance(member, type) and issubclass(member, pydantic.BaseModel) and member.__module__ == module.name:
                try:
                    found[f"{module.name}.{name}"] = member.model_json_schema()
                except pydantic.errors.PydanticUserError:
                    continue
    return [Schema(package, name, value) for name, value in sorted(found.items())]


def suite_schemas(folder: Path) -> list[Schema]:
    """The schemas of the JSON Schema test suite."""
    return [
        Schema("test suite", f"{file.relative_to(folder)}#{number} {group['description']}", group["schema"])
        for file in sorted(folder.glob("draft*/**/*.json"))
        for number, group in enumerate(json.loads(file.read_text()))
        if isinstance(group["schema"], dict)
    ]


def collect(sources: list[str]) -> list[Schema]:
    """The schemas of packages and modules; what is not installed is named."""
    found = []
    for source in sources:
        try:
            found += model_schemas(source) if source in MODELS else file_schemas(source)
        except (importlib.metadata.PackageNotFoundError, ModuleNotFoundError):
            print(f"{source} is not installed: skipped", file=sys.stderr)
    return found


def distinct(schemas: list[Schema]) -> list[Schema]:
    """The schemas without those that are equal to an earlier one but for titles and descriptions at their top."""
    found = {}
    for schema in schemas:
        bare = {key: value for key, value in schema.value.items() if key not in ("title", "description", "$id", "id")}
        found.setdefault(json.dumps(bare, sort_keys=True), schema)
    return list(found.values())


def reference_error(schema: dict) -> str:
    """Why llguidance does not take a schema; empty when it does. A warning counts as a refusal, as in the server."""
    try:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
        is_refused, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, reference_error.tokenizer, limits=LIMITS)
        return messages[0] if messages else "refused" * is_refused
    except ValueError as error:
        return str(error)


reference_error.tokenizer = llguidance.LLTokenizer("byte")


def validity(schema: dict, text: str) -> str:
    """Whether a text is a JSON value that the schema accepts."""
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"invalid: no JSON: {error}: {text[:200]}"
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        validator.check_schema(schema)
        error = next(validator(schema).iter_errors(value), None)
    # The schema is of another draft than it says, its reference leads out of it, or a pattern is none of Python.
    except Exception as error:  # noqa: BLE001 (jsonschema passes on what `re` and `referencing` raise)
        return f"not checked: {type(error).__name__}"
    return f"invalid: {error.message[:200]} at {error.json_path}: {text[:300]}" if error else "valid"


class Server:
    """A running server, and what of its vocabulary closes a JSON value."""

    def __init__(self, address: str, model: str, max_tokens: int):
        self.address, self.model, self.max_tokens = address, model, max_tokens
        # A model that knows nothing of schemas writes strings and lists without end.
        self.bias = {str(id): 4 for text in '"}]' for id in self.post("/tokenize", {"prompt": text, "add_special_tokens": False})[1]["tokens"][-1:]}

    def post(self, path: str, body: dict) -> tuple[int, dict]:
        """The status and the body of an answer."""
        host, _, port = self.address.rpartition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=300)
        try:
            connection.request("POST", path, json.dumps({"model": self.model, **body}), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def ask(self, schema: dict) -> tuple[int, dict]:
        """A chat that must follow a schema."""
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        sampling = {"max_tokens": self.max_tokens, "temperature": 1, "seed": 7, "logit_bias": self.bias}
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "response_format": form, **sampling})


def check(server: Server, schema: Schema) -> Outcome:
    """Sends one schema to the server, and to llguidance."""
    started = time.monotonic()
    status, body = server.ask(schema.value)
    seconds = time.monotonic() - started
    refusal, answer = "", ""
    if status == 200:
        (choice,) = body["choices"]
        is_cut = choice["finish_reason"] == "length"
        answer = "cut" if is_cut else validity(schema.value, choice["message"]["content"])
    else:
        refusal = f"{status} {body['error']['message']}"
    return Outcome(schema, refusal, reference_error(schema.value), answer, seconds)


def check_all(server: Server, schemas: list[Schema], at_once: int = 2) -> list[Outcome]:
    """The outcomes in the order of the schemas."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda schema: check(server, schema), schemas))


def faults(outcomes: list[Outcome]) -> list[str]:
    """What is wrong on the server's side: answers that do not validate, and refusals that are not deliberate."""
    found = [f"{it.schema.source}: {it.schema.name}: {it.answer}" for it in outcomes if it.answer.startswith("invalid")]
    undue = [it for it in outcomes if it.refusal and not it.reference and not it.is_deliberate]
    return found + [f"{it.schema.source}: {it.schema.name}: llguidance takes it, the server says: {it.refusal}" for it in undue]


def report(outcomes: list[Outcome]) -> None:
    """Prints the rates of both sides by source, and where they differ."""
    groups = defaultdict(list)
    for outcome in outcomes:
        groups[outcome.schema.source].append(outcome)
    print(f"{'source':28} {'schemas':>7} {'server':>14} {'llguidance':>14} {'valid':>6} {'cut':>5} {'invalid':>7} {'unchecked':>9}")
    for source, group in [*groups.items(), ("all", outcomes)]:
        count = len(group)
        ours, theirs = sum(not it.refusal for it in group), sum(not it.reference for it in group)
        answers = Counter(it.answer.partition(":")[0] for it in group)
        rates = f"{ours:6} {ours / count:6.1%} {theirs:7} {theirs / count:6.1%}"
        print(f"{source:28} {count:7} {rates} {answers['valid']:6} {answers['cut']:5} {answers['invalid']:7} {answers['not checked']:9}")
    for title, chosen, cause in [
        ("refused by the server, taken by llguidance, deliberately", [it for it in outcomes if it.refusal and not it.reference and it.is_deliberate], lambda it: it.cause),
        ("refused by the server, taken by llguidance, not deliberately", [it for it in outcomes if it.refusal and not it.reference and not it.is_deliberate], lambda it: it.cause),
        ("taken by the server, refused by llguidance", [it for it in outcomes if it.reference and not it.refusal], lambda it: re.sub(r"`[^`]*`|'[^']*'|\"[^\"]*\"|\d+", "…", it.reference)[:120]),
        ("refused by both, cause at the server", [it for it in outcomes if it.reference and it.refusal], lambda it: it.cause),
    ]:
        print(f"\n{title}: {len(chosen)}")
        by_cause = defaultdict(list)
        for outcome in chosen:
            by_cause[cause(outcome)].append(f"{outcome.schema.source}: {outcome.schema.name}")
        for words, names in sorted(by_cause.items(), key=lambda item: -len(item[1])):
            print(f"  {len(names):5}  {words}\n           for example {names[0]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address", help="host:port of the server's HTTP service")
    parser.add_argument("--model", default="ensemble")
    parser.add_argument("--package", action="append", help="a source; may be repeated; all that are known when absent")
    parser.add_argument("--suite", type=Path, help="the folder `json/tests` of the JSON Schema test suite")
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--stride", type=int, default=1, help="check every n-th schema only")
    arguments = parser.parse_args()
    schemas = collect(arguments.package or FILES + MODELS)
    schemas += suite_schemas(arguments.suite) if arguments.suite else []
    outcomes = check_all(Server(arguments.address, arguments.model, arguments.max_tokens), distinct(schemas)[:: arguments.stride])
    report(outcomes)
    slowest = max(outcomes, key=lambda it: it.seconds)
    print(f"\nslowest: {slowest.seconds:.1f} s, {slowest.schema.source}: {slowest.schema.name}")
    found = faults(outcomes)
    for line in found:
        print(f"FAULT {line}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
