"""JSON schemas that ship inside of installed packages: what llguidance serves is served, and each answer that ends validates."""

import check_json_schemas
import pytest
from check_json_schemas import SAMPLE, Schema, Server, check, check_all, collect, distinct, faults

# Of the models of OpenAI's client, which are many and alike.
STRIDE = 40


def test_a_sample_of_published_schemas_is_served_as_by_llguidance(world):
    every = distinct(collect(SAMPLE))
    chosen = [it for it in every if it.source not in check_json_schemas.MODELS] + [it for it in every if it.source in check_json_schemas.MODELS][::STRIDE]
    outcomes = check_all(Server(world.http, "ensemble", 200), chosen)
    assert not faults(outcomes)
    # The check compares something: both kinds of outcome are in the sample, and most answers of the models end.
    served = [it for it in outcomes if not it.refusal]
    assert len(served) >= 20 and any(it.is_deliberate for it in outcomes)
    assert sum(it.answer == "valid" for it in served) >= len(served) / 3


@pytest.mark.parametrize(
    "reference, definitions",
    [
        ("#there", {"$defs": {"A": {"$anchor": "there", "type": "boolean"}}}),
        ("https://example.com/root#/$defs/A", {"$id": "https://example.com/root", "$defs": {"A": {"type": "boolean"}}}),
        ("other", {"$id": "https://example.com/root", "$defs": {"A": {"$id": "other", "type": "boolean"}}}),
        ("#/$defs/a~0b", {"$defs": {"a~b": {"type": "boolean"}}}),
        ("#/$defs/a~1b", {"$defs": {"a/b": {"type": "boolean"}}}),
    ],
)
def test_references_by_anchor_id_and_escaped_pointer_are_followed(world, reference, definitions):
    schema = {**definitions, "type": "object", "properties": {"x": {"$ref": reference}}, "required": ["x"], "additionalProperties": False}
    outcome = check(Server(world.http, "ensemble", 60), Schema("test", reference, schema))
    assert (outcome.refusal, outcome.answer) == ("", "valid")


def test_a_reference_out_of_the_schema_is_refused_by_name(world):
    outcome = check(Server(world.http, "ensemble", 8), Schema("test", "remote", {"properties": {"x": {"$ref": "https://example.com/x"}}}))
    assert outcome.refusal.startswith("400") and "`https://example.com/x` at `#/properties/x`" in outcome.refusal
