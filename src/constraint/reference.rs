//! Rewrites each `$ref` as a plain path from the root, the only form that the compiler follows.
//!
//! References follow RFC 3986 and JSON Schema 2020-12: an `$id` starts a resource of its own, a fragment is a JSON pointer within its resource or
//! an anchor. Nothing is fetched: a reference to another document is refused by name.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use crate::ConstraintError;
use crate::limits::Limits;
use crate::subschemas::{LIST, NAMED, ONE, Place, WHAT};

/// Where parts of a schema are, by resource and anchor: `uri` or `uri#anchor`.
type Places = HashMap<String, Vec<String>>;

/// The schema with plain references. Its nesting must have been bounded before.
///
/// # Errors
/// When a reference names no part of the schema, or the parts that had to be copied are larger than a description may be.
pub(crate) fn plain(schema: Value, limits: &Limits) -> Result<Value, ConstraintError> {
    let mut places = Places::from([(String::new(), Vec::new())]);
    let id_key = id_key(&schema);
    collect(&schema, id_key, "", &mut Vec::new(), &mut places);
    let mut rewriting = Rewriting { root: &schema, id_key, places, copies: Map::new() };
    let mut rewritten = rewriting.schema(&schema, "", &mut Place::default())?;
    let copies = rewriting.copies;
    if let Some(fields) = rewritten.as_object_mut().filter(|_| !copies.is_empty()) {
        limits.check_bytes(WHAT, copies.values().map(|copy| copy.to_string().len()).sum())?;
        let definitions = fields.entry("$defs").or_insert_with(|| json!({}));
        definitions.as_object_mut().into_iter().for_each(|known| known.extend(copies.clone()));
    }
    Ok(rewritten)
}

/// Adds the resources and anchors of a schema at `path`, within the resource `base`.
fn collect(schema: &Value, id_key: &str, base: &str, path: &mut Vec<String>, places: &mut Places) {
    let Value::Object(fields) = schema else { return };
    let base = base_of(fields, id_key, base);
    if let Some(id) = fields.get(id_key).and_then(Value::as_str) {
        let (uri, fragment) = id.split_once('#').unwrap_or((id, ""));
        let name = if fragment.is_empty() { base.clone() } else { format!("{}#{fragment}", join(&base, uri)) };
        places.entry(name).or_insert_with(|| path.clone());
    }
    if let Some(anchor) = fields.get("$anchor").and_then(Value::as_str) {
        places.entry(format!("{base}#{anchor}")).or_insert_with(|| path.clone());
    }
    for (steps, part) in parts(fields) {
        let length = path.len();
        path.extend(steps);
        collect(part, id_key, &base, path, places);
        path.truncate(length);
    }
}

struct Rewriting<'a> {
    root: &'a Value,
    id_key: &'static str,
    places: Places,
    /// Parts whose path cannot be written without escapes, by their name in `$defs`.
    copies: Map<String, Value>,
}

impl Rewriting<'_> {
    fn schema(&mut self, schema: &Value, base: &str, place: &mut Place) -> Result<Value, ConstraintError> {
        let Value::Object(fields) = schema else { return Ok(schema.clone()) };
        let base = base_of(fields, self.id_key, base);
        let mut rewritten = fields.clone();
        if let Some(reference) = fields.get("$ref").and_then(Value::as_str) {
            rewritten.insert("$ref".into(), self.reference(reference, &base, place)?.into());
        }
        for (steps, part) in parts(fields) {
            let part = place.within_all(&steps, |place| self.schema(part, &base, place))?;
            put(&mut rewritten, &steps, part);
        }
        Ok(Value::Object(rewritten))
    }

    /// A reference as a path from the root.
    fn reference(&mut self, reference: &str, base: &str, place: &Place) -> Result<String, ConstraintError> {
        let (uri, fragment) = reference.split_once('#').unwrap_or((reference, ""));
        let uri = join(base, uri);
        let unknown = || {
            let reason =
                format!("the `$ref` `{reference}` at `{place}` names no part of this schema, and nothing else is read");
            ConstraintError::Invalid { what: WHAT, reason }
        };
        let found = match fragment.strip_prefix('/') {
            Some(pointer) => {
                let mut path = self.places.get(&uri).ok_or_else(unknown)?.clone();
                path.extend(pointer.split('/').map(segment));
                path
            }
            None if fragment.is_empty() => self.places.get(&uri).ok_or_else(unknown)?.clone(),
            None => self.places.get(&format!("{uri}#{fragment}")).ok_or_else(unknown)?.clone(),
        };
        let target = found.iter().try_fold(self.root, |part, step| match part {
            Value::Array(items) => items.get(step.parse::<usize>().ok()?),
            part => part.get(step),
        });
        let target = target.ok_or_else(unknown)?;
        if found.iter().any(|step| step.contains('/')) || found == [""] {
            // Its own references are rewritten at its place; a copy with references would need another pass.
            if target.to_string().contains("\"$ref\"") {
                let reason = format!(
                    "the `$ref` `{reference}` at `{place}` leads to a part whose name holds `/` and which has references: move it to `$defs`"
                );
                return Err(ConstraintError::Invalid { what: WHAT, reason });
            }
            let name = format!("copy of {}", found.join("|").replace('/', "|"));
            self.copies.insert(name.clone(), target.clone());
            return Ok(format!("#/$defs/{name}"));
        }
        Ok(if found.is_empty() { "#".to_owned() } else { format!("#/{}", found.join("/")) })
    }
}

/// The schemas directly within one, and the steps to them.
fn parts(fields: &Map<String, Value>) -> Vec<(Vec<String>, &Value)> {
    let mut found = Vec::new();
    for (key, value) in fields {
        let step = |inner: &str| vec![key.clone(), inner.to_owned()];
        match value {
            Value::Array(items) if LIST.contains(&key.as_str()) => {
                found.extend(items.iter().enumerate().map(|(index, item)| (step(&index.to_string()), item)));
            }
            Value::Object(named) if NAMED.contains(&key.as_str()) => {
                found.extend(named.iter().map(|(name, part)| (step(name), part)));
            }
            value if ONE.contains(&key.as_str()) => found.push((vec![key.clone()], value)),
            _ => {}
        }
    }
    found
}

/// Replaces the part that `steps` lead to.
fn put(fields: &mut Map<String, Value>, steps: &[String], part: Value) {
    let Some(outer) = steps.first().and_then(|key| fields.get_mut(key)) else { return };
    let place = match (outer, steps.get(1)) {
        (outer, None) => Some(outer),
        (Value::Array(items), Some(index)) => index.parse().ok().and_then(|index: usize| items.get_mut(index)),
        (outer, Some(name)) => outer.get_mut(name),
    };
    place.into_iter().for_each(|place| *place = part.clone());
}

/// The keyword that starts a resource: draft 4 spells it `id`.
fn id_key(schema: &Value) -> &'static str {
    let dialect = schema.get("$schema").and_then(Value::as_str).unwrap_or_default();
    if ["draft-03", "draft-04"].iter().any(|draft| dialect.contains(draft)) { "id" } else { "$id" }
}

/// The URI of the resource that a schema belongs to. An `$id` of a fragment alone is an anchor in the older drafts.
fn base_of(fields: &Map<String, Value>, id_key: &str, base: &str) -> String {
    let id = fields.get(id_key).and_then(Value::as_str);
    match id.map(|id| id.split_once('#').map_or(id, |(uri, _)| uri)) {
        Some(uri) => join(base, uri),
        None => base.to_owned(),
    }
}

/// A URI relative to another (RFC 3986, section 5.2), without the segments `.` and `..`, whose references are not found.
fn join(base: &str, uri: &str) -> String {
    let scheme_end = |text: &str| {
        let end = text.find(':')?;
        text[..end].chars().all(|char| char.is_ascii_alphanumeric() || "+-.".contains(char)).then_some(end)
    };
    if uri.is_empty() {
        return base.to_owned();
    }
    if scheme_end(uri).is_some() {
        return uri.to_owned();
    }
    // Where the path of the base starts: behind the scheme and the authority.
    let start = scheme_end(base).map_or(0, |end| end + 1);
    let start = match base[start..].strip_prefix("//") {
        Some(rest) => start + 2 + rest.find('/').unwrap_or(rest.len()),
        None => start,
    };
    let folder = base[start..].rfind('/').map_or(start, |end| start + end + 1);
    match uri.strip_prefix('/') {
        Some(_) => format!("{}{uri}", &base[..start]),
        None if folder == base.len() && start == base.len() && start > 0 => format!("{base}/{uri}"),
        None => format!("{}{uri}", &base[..folder]),
    }
}

/// One step of a JSON pointer in a fragment, without its escapes.
fn segment(step: &str) -> String {
    let (mut bytes, mut rest) = (Vec::new(), step.as_bytes());
    while let Some((&byte, after)) = rest.split_first() {
        let hex = after.get(..2).and_then(|two| std::str::from_utf8(two).ok());
        match hex.and_then(|two| u8::from_str_radix(two, 16).ok()).filter(|_| byte == b'%') {
            Some(escaped) => {
                bytes.push(escaped);
                rest = &after[2..];
            }
            None => {
                bytes.push(byte);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).replace("~1", "/").replace("~0", "~")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rewritten(schema: Value) -> Value {
        plain(schema, &Limits::default()).unwrap()
    }

    #[test]
    fn anchors_ids_and_escapes_become_paths() {
        let schema = json!({
            "$id": "https://example.com/root.json",
            "properties": {
                "anchor": {"$ref": "#there"},
                "root": {"$ref": "#"},
                "own": {"$ref": "https://example.com/root.json#/$defs/A"},
                "relative": {"$ref": "other.json"},
                "inner": {"$ref": "other.json#in"},
                "pointer": {"$ref": "/other.json#/$defs/B"},
                "escaped": {"$ref": "#/$defs/a~0%25"},
            },
            "$defs": {
                "A": {"$anchor": "there"},
                "a~%": {"type": "null"},
                "O": {"$id": "other.json", "$defs": {"B": {"$anchor": "in", "type": "null"}}, "items": {"$ref": "#/$defs/B"}},
            },
        });
        let found = rewritten(schema);
        let to = |name: &str| found["properties"][name]["$ref"].as_str().unwrap().to_owned();
        assert_eq!(to("anchor"), "#/$defs/A");
        assert_eq!(to("root"), "#");
        assert_eq!(to("own"), "#/$defs/A");
        assert_eq!(to("relative"), "#/$defs/O");
        assert_eq!(to("inner"), "#/$defs/O/$defs/B");
        assert_eq!(to("pointer"), "#/$defs/O/$defs/B");
        assert_eq!(to("escaped"), "#/$defs/a~%");
        // A pointer belongs to its resource, not to the document.
        assert_eq!(found["$defs"]["O"]["items"]["$ref"], "#/$defs/O/$defs/B");
    }

    #[test]
    fn a_part_whose_name_holds_a_slash_is_copied() {
        let found = rewritten(json!({"properties": {"a/b": {"type": "null"}, "c": {"$ref": "#/properties/a~1b"}}}));
        let name = found["properties"]["c"]["$ref"].as_str().unwrap().strip_prefix("#/$defs/").unwrap().to_owned();
        assert_eq!(found["$defs"][name], json!({"type": "null"}));
    }

    #[test]
    fn plain_schemas_stay_and_values_are_no_schemas() {
        for schema in [
            json!({"$ref": "#/$defs/N", "$defs": {"N": {"items": {"$ref": "#/$defs/N"}}}}),
            json!({"enum": [{"$ref": "elsewhere"}], "const": {"$id": "x"}, "properties": {"$ref": {"type": "string"}}}),
            json!({"properties": {"id": {"type": "string"}}, "$defs": {}}),
        ] {
            assert_eq!(rewritten(schema.clone()), schema);
        }
    }

    #[test]
    fn what_leads_out_of_the_schema_is_refused() {
        for reference in ["https://example.com/x", "x.json", "#nowhere", "#/$defs/none", "#/properties/a/9"] {
            let error = plain(json!({"properties": {"a": {"$ref": reference}}}), &Limits::default()).unwrap_err();
            assert!(error.to_string().contains(&format!("`{reference}` at `#/properties/a` names no part")), "{error}");
        }
    }
}
