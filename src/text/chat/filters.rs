//! Filters and tests of Jinja that differ from those of the engine, or that it lacks.

use minijinja::value::ValueKind;
use minijinja::{Environment, State, Value};

use super::python;

/// Adds the filters and tests to the settings of all templates.
pub(super) fn add(environment: &mut Environment) {
    environment.add_filter("string", |state: &State, value: &Value| python::str(state, value));
    environment.add_test("sequence", is_sequence);
    environment.add_test("iterable", is_iterable);
    environment.add_test("callable", |_: &State, value: &Value| value.kind() == ValueKind::Plain);
}

/// What has a length and items: as in Python also text, dictionaries and undefined values.
fn is_sequence(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::String | ValueKind::Map | ValueKind::Undefined)
}

/// What a loop can run over.
fn is_iterable(value: &Value) -> bool {
    is_sequence(value) || value.kind() == ValueKind::Iterable
}
