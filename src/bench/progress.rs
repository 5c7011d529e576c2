//! A bar that moves while a run goes on.

use indicatif::{ProgressBar, ProgressStyle};

/// Shown on standard error where that is a terminal.
pub(crate) fn bar(what: &str, count: usize) -> ProgressBar {
    let template = "{prefix} [{elapsed_precise}] {bar:32} {pos}/{len} requests, {msg} {eta} left";
    let style = ProgressStyle::with_template(template).expect("the template is ours");
    ProgressBar::new(count as u64).with_style(style).with_prefix(what.to_owned())
}
