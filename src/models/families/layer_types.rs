//! Which layers have a sliding window.

use serde_json::Value;

use super::WindowRule;
use crate::ModelError;
use crate::fields::Fields;

/// The window of each layer.
pub(super) fn windows(fields: &Fields, rule: WindowRule, num_layers: usize) -> Result<Vec<Option<usize>>, ModelError> {
    let is_on = match rule {
        WindowRule::Never => return Ok(vec![None; num_layers]),
        WindowRule::IfEnabled => fields.flag("use_sliding_window", false)?,
        _ => true,
    };
    // Read even if they have no effect, so that they are known. A window that is off may have any value.
    let window = match is_on {
        true => fields.size("sliding_window")?,
        false => fields.get("sliding_window").and(None),
    };
    let first = first_window_layer(fields)?;
    let listed = layer_types(fields, num_layers)?;
    let pattern = match rule {
        WindowRule::Pattern(usual) if listed.is_none() => pattern(fields)?.unwrap_or(usual),
        WindowRule::Pattern(_) => {
            fields.ignore(&["sliding_window_pattern", "_sliding_window_pattern"]);
            1
        }
        _ => 1,
    };
    let Some(window) = window else {
        return match listed.filter(|types| types.contains(&true)) {
            Some(_) => Err(fields.wrong(
                "layer_types",
                "`full_attention` for all layers, since no window is set",
                fields.get("layer_types").expect("it was just read"),
            )),
            None => Ok(vec![None; num_layers]),
        };
    };
    let has_window = match (listed, rule) {
        (Some(types), WindowRule::AllLayers) if types.contains(&false) => {
            let found = fields.get("layer_types").expect("it was just read");
            return Err(fields.wrong("layer_types", "absent: this architecture has a window in all layers", found));
        }
        (Some(types), _) => types,
        (None, WindowRule::IfEnabled) => (0..num_layers).map(|index| index >= first).collect(),
        (None, WindowRule::Pattern(_)) => (1..=num_layers).map(|number| !number.is_multiple_of(pattern)).collect(),
        (None, WindowRule::PatternFromFirst(n)) => (0..num_layers).map(|index| !index.is_multiple_of(n)).collect(),
        (None, _) => vec![true; num_layers],
    };
    Ok(has_window.into_iter().map(|has| has.then_some(window)).collect())
}

/// Layers before this one have no window.
fn first_window_layer(fields: &Fields) -> Result<usize, ModelError> {
    match fields.get("max_window_layers") {
        None => Ok(28), // The default of Qwen2 and Qwen3.
        Some(value) => match value.as_u64() {
            Some(first) => Ok(usize::try_from(first).unwrap_or(usize::MAX)),
            None => Err(fields.wrong("max_window_layers", "a whole number", value)),
        },
    }
}

/// Every n-th layer has no window.
fn pattern(fields: &Fields) -> Result<Option<usize>, ModelError> {
    let (usual, saved) = (fields.size("sliding_window_pattern")?, fields.size("_sliding_window_pattern")?);
    Ok(usual.or(saved))
}

/// Whether each layer is one of sliding attention, if `layer_types` is given.
pub(super) fn layer_types(fields: &Fields, num_layers: usize) -> Result<Option<Vec<bool>>, ModelError> {
    let Some(value) = fields.get("layer_types") else { return Ok(None) };
    let expected = format!("a list of {num_layers} names, `full_attention` or `sliding_attention`");
    let wrong = || fields.wrong("layer_types", &expected, value);
    let names = value.as_array().filter(|names| names.len() == num_layers).ok_or_else(wrong)?;
    let is_sliding = |name: &Value| match name.as_str() {
        Some("full_attention") => Ok(false),
        Some("sliding_attention") => Ok(true),
        _ => Err(wrong()),
    };
    names.iter().map(is_sliding).collect::<Result<_, _>>().map(Some)
}
