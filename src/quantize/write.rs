//! Writes the tensors of a plan to safetensors files. One matrix is in memory at once.

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::Path;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::{Map, Value, json};

use crate::QuantizeError;
use crate::error::io;
use crate::plan::{Item, Output, Plan};

/// Writes all weights: one file, or several of `max_bytes` each and their index.
///
/// # Errors
/// When a file cannot be written.
pub(crate) fn weights(plan: &Plan<'_>, dir: &Path, max_bytes: u64) -> Result<(), QuantizeError> {
    let (_, total) = plan.bytes();
    let shards = shards(plan, max_bytes);
    let bar = progress(total);
    let mut files = Map::new();
    for (index, items) in shards.iter().enumerate() {
        let name = match shards.len() {
            1 => "model.safetensors".to_owned(),
            count => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
        };
        let outputs: Vec<Vec<Output>> = items.iter().map(|item| item.outputs(plan.form)).collect();
        files.extend(outputs.iter().flatten().map(|output| (output.name.clone(), json!(name))));
        write_shard(plan, &dir.join(&name), items, &outputs, &bar)?;
    }
    bar.finish_and_clear();
    if shards.len() > 1 {
        let path = dir.join("model.safetensors.index.json");
        let index = json!({"metadata": {"total_size": total}, "weight_map": files});
        std::fs::write(&path, format!("{index:#}\n")).map_err(io("cannot write", &path))?;
    }
    Ok(())
}

/// A bar in a terminal; elsewhere it draws nothing.
fn progress(total: u64) -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:30} {bytes}/{total_bytes} {bytes_per_sec} {eta} left");
    let style = style.expect("the template is constant");
    ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr_with_hz(5)).with_style(style)
}

/// Divides the tensors among files. The tensors of a layer are in one file.
fn shards<'p, 'a>(plan: &'p Plan<'a>, max_bytes: u64) -> Vec<Vec<&'p Item<'a>>> {
    let (mut shards, mut used) = (vec![Vec::new()], 0);
    for item in &plan.items {
        let bytes: u64 = item.outputs(plan.form).iter().map(|output| output.bytes).sum();
        if used > 0 && used + bytes > max_bytes {
            shards.push(Vec::new());
            used = 0;
        }
        used += bytes;
        shards.last_mut().expect("there is one").push(item);
    }
    shards
}

fn write_shard(
    plan: &Plan<'_>,
    path: &Path,
    items: &[&Item<'_>],
    outputs: &[Vec<Output>],
    bar: &ProgressBar,
) -> Result<(), QuantizeError> {
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path).map_err(io("cannot create", path))?);
    let header = header(outputs.iter().flatten());
    let length = (header.len() as u64).to_le_bytes();
    file.write_all(&[&length, header.as_bytes()].concat()).map_err(io("cannot write", path))?;
    for (item, outputs) in items.iter().zip(outputs) {
        for (data, output) in item.data(plan.form).iter().zip(outputs) {
            assert_eq!(data.len() as u64, output.bytes, "`{}` has the size that the header says", output.name);
            file.write_all(data).map_err(io("cannot write", path))?;
            bar.inc(output.bytes);
        }
    }
    let file = file.into_inner().map_err(|error| io("cannot write", path)(error.into_error()))?;
    file.sync_all().map_err(io("cannot write", path))
}

/// The header of a safetensors file, padded to a multiple of 8 bytes.
fn header<'o>(outputs: impl Iterator<Item = &'o Output>) -> String {
    let mut tensors = Map::new();
    tensors.insert("__metadata__".to_owned(), json!({"format": "pt"}));
    let mut start = 0;
    for output in outputs {
        let end = start + output.bytes;
        let entry: Value = json!({"dtype": output.dtype, "shape": output.shape, "data_offsets": [start, end]});
        tensors.insert(output.name.clone(), entry);
        start = end;
    }
    let header = Value::Object(tensors).to_string();
    let padded = header.len().next_multiple_of(8);
    format!("{header:<padded$}")
}
