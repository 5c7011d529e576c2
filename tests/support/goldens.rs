//! Answers of a world beside those of goldens.

use serde_json::{Value, json};

use super::{TestWorld, golden_dir};

/// The golden in a folder of `tests/goldens`.
pub fn golden(dir: &str) -> Value {
    serde_json::from_slice(&std::fs::read(golden_dir(dir).join("golden.json")).unwrap()).unwrap()
}

/// The tokens that a model answers to the body of a `generate` request.
pub fn output_ids(world: &TestWorld, model: &str, body: &Value) -> Vec<u64> {
    let (status, text) = world.post(&format!("/v2/models/{model}/generate"), body);
    assert_eq!(status, 200, "{model}: {text}\n{}", world.log_text());
    numbers(&serde_json::from_str::<Value>(&text).unwrap()["output_ids"])
}

/// Compares a model's tokens with all sequences of a golden, as far as their margins are above an error of `allowed`.
pub fn check_golden(world: &TestWorld, model: &str, golden: &Value, allowed: f64) {
    for sequence in golden["sequences"].as_array().unwrap() {
        let (prompt, expected) = (&sequence["prompt"], numbers(&sequence["tokens"]));
        let length = prompt.as_array().unwrap().len();
        let body = json!({"input_ids": prompt, "input_lengths": length, "request_output_len": expected.len(), "end_id": -1,
                          "exclude_input_in_output": true});
        let found = output_ids(world, model, &body);
        let equal = found.iter().zip(&expected).take_while(|(found, expected)| found == expected).count();
        let margin = sequence["margins"].get(equal).and_then(Value::as_f64).unwrap_or(0.0);
        assert!(
            margin <= 2.0 * allowed,
            "{model}: token {equal} of {expected:?} differs at a margin of {margin}: {found:?}"
        );
    }
}

fn numbers(value: &Value) -> Vec<u64> {
    value.as_array().unwrap_or_else(|| panic!("{value}")).iter().map(|it| it.as_u64().unwrap()).collect()
}
