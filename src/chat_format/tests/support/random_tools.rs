//! Tools with random schemas.

use chat_format::ToolSchema;
use serde_json::{Map, Value, json};

use super::Rng;

const TOOLS: [&str; 6] = ["get_weather", "fs.write-file", "now", "a", "Search2", "x_y"];
/// Identifiers, because some families write arguments as those of a Python function.
const PROPERTIES: [&str; 10] =
    ["city", "days", "x", "y_1", "Name", "unit", "tags", "where", "a", "longer_name_of_a_property"];
/// Objects and lists inside of each other.
const MAX_DEPTH: usize = 2;

/// One to three strict tools.
pub fn random_tools(rng: &mut Rng) -> Vec<ToolSchema> {
    let first = rng.below(TOOLS.len());
    let tool = |at: usize, rng: &mut Rng| {
        let name = TOOLS[(first + at) % TOOLS.len()].to_owned();
        ToolSchema { name, parameters: object(rng, 0), strict: true }
    };
    (0..1 + rng.below(3)).map(|at| tool(at, rng)).collect()
}

fn object(rng: &mut Rng, depth: usize) -> Value {
    let (first, count) = (rng.below(PROPERTIES.len()), rng.below(if depth == 0 { 6 } else { 4 }));
    let (mut properties, mut required) = (Map::new(), Vec::new());
    for at in 0..count {
        let name = PROPERTIES[(first + at) % PROPERTIES.len()];
        properties.insert(name.to_owned(), schema(rng, depth));
        if rng.one_in(2) {
            required.push(name);
        }
    }
    json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false})
}

/// A schema of one value.
fn schema(rng: &mut Rng, depth: usize) -> Value {
    match rng.below(if depth < MAX_DEPTH { 11 } else { 8 }) {
        0 => json!({"type": "string"}),
        1 => {
            let least = rng.below(3);
            json!({"type": "string", "minLength": least, "maxLength": least + 1 + rng.below(6)})
        }
        2 => json!({"type": "integer"}),
        3 => {
            let least = rng.below(200) as i64 - 100;
            json!({"type": "integer", "minimum": least, "maximum": least + rng.below(50) as i64})
        }
        4 => json!({"type": "number"}),
        5 => json!({"type": "boolean"}),
        6 => choice(rng),
        7 => json!({"type": (["integer", "null"])}),
        8 => json!({"type": "array", "items": schema(rng, depth + 1), "maxItems": 1 + rng.below(3)}),
        9 => json!({"type": "array", "items": schema(rng, depth + 1)}),
        _ => object(rng, depth + 1),
    }
}

fn choice(rng: &mut Rng) -> Value {
    let values = [json!("celsius"), json!("kelvin"), json!("a b"), json!("é"), json!("")];
    let first = rng.below(values.len());
    let count = 1 + rng.below(values.len());
    let chosen: Vec<_> = values.iter().cycle().skip(first).take(count).collect();
    if rng.one_in(4) { json!({"const": chosen[0]}) } else { json!({"type": "string", "enum": chosen}) }
}
