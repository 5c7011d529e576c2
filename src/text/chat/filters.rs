//! Filters and tests of Jinja that differ from those of the engine, or that it lacks.

use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Environment, Error, State, Value};

use super::{methods, python, words};

/// The filter that stands for the operator `%` behind text.
pub(super) const PERCENT: &str = "percent_format";

/// Adds the filters, tests and functions to the settings of all templates.
pub(super) fn add(environment: &mut Environment) {
    environment.add_filter("string", |state: &State, value: &Value| python::str(state, value));
    environment.add_filter("pprint", |state: &State, value: &Value| python::repr(state, value));
    environment.add_filter("join", join);
    environment.add_filter("int", int);
    environment.add_filter("float", float);
    environment.add_filter("wordcount", word_count);
    environment.add_filter("center", center);
    environment.add_filter("truncate", truncate);
    environment.add_filter("striptags", minijinja_contrib::filters::striptags);
    environment.add_filter(PERCENT, percent);
    environment.add_test("sequence", is_sequence);
    environment.add_test("iterable", is_iterable);
    environment.add_test("callable", |value: &Value| value.kind() == ValueKind::Plain);
    environment.add_function("joiner", minijinja_contrib::globals::joiner);
    environment.add_function("cycler", |items: Rest<Value>| minijinja_contrib::globals::cycler(items.0));
}

/// What has a length and items: as in Python also text, dictionaries and undefined values.
fn is_sequence(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::String | ValueKind::Map | ValueKind::Undefined)
}

/// What a loop can run over.
fn is_iterable(value: &Value) -> bool {
    is_sequence(value) || value.kind() == ValueKind::Iterable
}

/// `join(values, d='', attribute=none)`, with each value as Python prints it.
fn join(
    state: &State,
    values: &Value,
    d: Option<String>,
    attribute: Option<String>,
    named: Kwargs,
) -> Result<String, Error> {
    let between = d.or(named.get("d")?).unwrap_or_default();
    let attribute = attribute.or(named.get("attribute")?);
    named.assert_all_used()?;
    let mut text = String::new();
    for (at, value) in values.try_iter()?.enumerate() {
        let value = match &attribute {
            Some(path) => path.split('.').try_fold(value, |value, name| value.get_attr(name))?,
            None => value,
        };
        state.consume_fuel(1 + between.len() as u64 / 64)?;
        text.push_str(if at > 0 { &between } else { "" });
        match value.as_str() {
            Some(part) => {
                state.consume_fuel(part.len() as u64 / 64)?;
                text.push_str(part);
            }
            None => text.push_str(&python::str(state, &value)?),
        }
    }
    Ok(text)
}

/// `int(value, default=0)`: the whole part of a number or of its text.
fn int(value: &Value, default: Option<Value>, named: Kwargs) -> Result<Value, Error> {
    let default = default.or(named.get("default")?).unwrap_or_else(|| Value::from(0));
    named.assert_all_used()?;
    let whole = |number: f64| (number.is_finite() && number.abs() < 1e18).then(|| Value::from(number.trunc() as i64));
    Ok(match value.kind() {
        ValueKind::Number if value.is_integer() => Some(value.clone()),
        ValueKind::Number => f64::try_from(value.clone()).ok().and_then(whole),
        ValueKind::Bool => Some(Value::from(i64::from(value.is_true()))),
        ValueKind::String => {
            let text = value.as_str().unwrap_or_default().trim_matches(words::is_space);
            text.parse().map(|number: i64| Value::from(number)).ok().or_else(|| text.parse().ok().and_then(whole))
        }
        _ => None,
    }
    .unwrap_or(default))
}

/// `float(value, default=0.0)`.
fn float(value: &Value, default: Option<Value>, named: Kwargs) -> Result<Value, Error> {
    let default = default.or(named.get("default")?).unwrap_or_else(|| Value::from(0.0));
    named.assert_all_used()?;
    let number = match value.kind() {
        ValueKind::Number | ValueKind::Bool => f64::try_from(value.clone()).ok(),
        ValueKind::String => value.as_str().and_then(|text| text.trim_matches(words::is_space).parse().ok()),
        _ => None,
    };
    Ok(number.map_or(default, Value::from))
}

/// The number of words: runs of letters, digits and underscores.
fn word_count(text: &str) -> usize {
    text.split(|c: char| !(c.is_alphanumeric() || c == '_')).filter(|word| !word.is_empty()).count()
}

fn center(state: &mut State, value: &Value, width: Option<i64>) -> Result<Value, Error> {
    let text = Value::from(python::str(state, value)?);
    methods::call(state, &text, "center", &[Value::from(width.unwrap_or(80))])
}

/// `truncate(text, length=255, killwords=false, end='...', leeway=5)`.
fn truncate(
    text: &str,
    length: Option<usize>,
    killwords: Option<bool>,
    end: Option<String>,
    named: Kwargs,
) -> Result<String, Error> {
    let length = length.or(named.get("length")?).unwrap_or(255);
    let end = end.or(named.get("end")?).unwrap_or_else(|| "...".to_owned());
    let leeway = named.get::<Option<usize>>("leeway")?.unwrap_or(5);
    let killwords = killwords.or(named.get("killwords")?).unwrap_or(false);
    named.assert_all_used()?;
    if text.chars().count() <= length.saturating_add(leeway) {
        return Ok(text.to_owned());
    }
    let kept: String = text.chars().take(length.saturating_sub(end.chars().count())).collect();
    let kept = if killwords { &kept } else { kept.rsplit_once(' ').map_or(&kept[..], |(before, _)| before) };
    Ok(format!("{kept}{end}"))
}

/// `text % value` of Python: a tuple has the values of several fields.
fn percent(state: &mut State, text: &Value, value: &Value) -> Result<Value, Error> {
    let mut arguments = vec![text.clone()];
    match value.is_tuple() {
        true => arguments.extend(value.try_iter()?),
        false => arguments.push(value.clone()),
    }
    state.apply_filter("format", &arguments)
}
