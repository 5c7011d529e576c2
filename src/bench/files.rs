//! Reads and writes the tool's files, and prints its text.

use std::path::{Path, PathBuf};

use client::ClientError;

/// Reads a file; the error contains its path.
pub(crate) fn read(path: &Path) -> Result<String, ClientError> {
    std::fs::read_to_string(path)
        .map_err(|source| ClientError::Io { what: format!("reading `{}`", path.display()), source })
}

/// Writes a file; the error contains its path.
pub(crate) fn write(path: &Path, text: &str) -> Result<(), ClientError> {
    std::fs::write(path, text)
        .map_err(|source| ClientError::Io { what: format!("writing `{}`", path.display()), source })
}

/// Writes figures as JSON; to standard output if the path is `-`.
pub(crate) fn write_json(path: &Path, figures: &impl serde::Serialize) -> Result<(), ClientError> {
    let text = serde_json::to_string_pretty(figures).expect("figures are numbers under names") + "\n";
    if path.as_os_str() == "-" {
        print!("{text}");
        return Ok(());
    }
    write(path, &text)
}

/// Prints text for people: to standard error if standard output is used for JSON.
pub(crate) fn print_text(json: Option<&PathBuf>, text: &str) {
    match json.is_some_and(|path| path.as_os_str() == "-") {
        true => eprintln!("{text}"),
        false => println!("{text}"),
    }
}
