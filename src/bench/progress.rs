//! The progress bar of a run.

use indicatif::{ProgressBar, ProgressStyle};

/// A bar on standard error; hidden if that is not a terminal.
pub(crate) fn bar(what: &str, count: usize) -> ProgressBar {
    let template = "{prefix} [{elapsed_precise}] {bar:32} {pos}/{len} requests, {msg} {eta} left";
    let style = ProgressStyle::with_template(template).expect("the template is valid");
    ProgressBar::new(count as u64).with_style(style).with_prefix(what.to_owned())
}
