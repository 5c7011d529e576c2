//! Reads the keys of clients from files and environment variables, which no other user of the machine can read.

use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

/// Environment variable with keys for inference, separated by commas.
const API_KEYS: &str = "TRIREME_API_KEYS";

/// Largest file of keys in bytes.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// The keys that the value of a rule refers to. `option` is the name of the rule's option without dashes.
///
/// # Errors
/// When the value refers to no key.
pub(crate) fn read(option: &str, value: &str) -> Result<Vec<String>, String> {
    if let Some(path) = value.strip_prefix('@') {
        return read_file(Path::new(path));
    }
    if let Some(name) = value.strip_prefix("env:") {
        let keys = std::env::var(name).map_err(|_| format!("the environment has no variable {name}"))?;
        return at_least_one(split(&keys), || format!("{name} holds no key"));
    }
    tracing::warn!(
        "--{option} has a key on the command line, which every user of this machine can read (`ps`); put it into a file \
         and give VALUE as @FILE"
    );
    Ok(vec![value.to_owned()])
}

/// The names of the environment variables that `rules` take keys from. Processes of models do not need them.
pub(crate) fn variables<'a>(rules: impl Iterator<Item = &'a String>) -> Vec<String> {
    rules.filter_map(|rule| rule.split_once("=env:")).map(|(_, name)| name.to_owned()).collect()
}

/// The keys for inference: those in `files` and in the environment. Empty where neither is given.
///
/// # Errors
/// When a file cannot be read, or a file or the environment variable contains no key.
pub(crate) fn api_keys(files: &[PathBuf]) -> Result<Vec<String>, String> {
    let mut keys = Vec::new();
    for path in files {
        keys.extend(read_file(path).map_err(|why| format!("--api-key-file: {why}"))?);
    }
    if let Ok(more) = std::env::var(API_KEYS) {
        keys.extend(at_least_one(split(&more), || {
            format!("{API_KEYS} is set and holds no key; unset it to serve everyone")
        })?);
    }
    Ok(keys)
}

/// The lines of a file, without empty ones and those that begin with `#`.
fn read_file(path: &Path) -> Result<Vec<String>, String> {
    let cannot = |error: std::io::Error| format!("cannot read keys from {}: {error}", path.display());
    let file = File::open(path).map_err(cannot)?;
    if file.metadata().map_err(cannot)?.permissions().mode() & 0o004 != 0 {
        tracing::warn!(
            "every user of this machine can read the keys in {0}; `chmod 600 {0}` keeps them",
            path.display()
        );
    }
    let mut text = String::new();
    file.take(MAX_FILE_BYTES).read_to_string(&mut text).map_err(cannot)?;
    let keys = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    at_least_one(keys.map(str::to_owned).collect(), || format!("{} holds no key; write one a line", path.display()))
}

fn split(keys: &str) -> Vec<String> {
    keys.split([',', '\n']).map(str::trim).filter(|key| !key.is_empty()).map(str::to_owned).collect()
}

/// Returns `keys` unless there are none: an API that no key opens is an error of the configuration.
fn at_least_one(keys: Vec<String>, none: impl FnOnce() -> String) -> Result<Vec<String>, String> {
    if keys.is_empty() { Err(none()) } else { Ok(keys) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_come_from_files_and_variables_and_none_is_an_error() {
        let folder = std::env::temp_dir().join(format!("trireme-keys-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let (full, empty) = (folder.join("full"), folder.join("empty"));
        std::fs::write(&full, "# of team a\none\n\n  two \n").unwrap();
        std::fs::write(&empty, "# none yet\n").unwrap();
        assert_eq!(read("x", &format!("@{}", full.display())).unwrap(), ["one", "two"]);
        assert_eq!(api_keys(&[full.clone(), full.clone()]).unwrap(), ["one", "two", "one", "two"]);
        let refused = api_keys(&[full.clone(), empty.clone()]).unwrap_err();
        assert!(refused.starts_with("--api-key-file: ") && refused.contains("holds no key"), "{refused}");
        let absent = read("x", "@/nonexistent/keys").unwrap_err();
        assert!(absent.starts_with("cannot read keys from /nonexistent/keys: "), "{absent}");
        // Cargo sets this one.
        assert_eq!(read("x", "env:CARGO_PKG_NAME").unwrap(), ["rank"]);
        assert_eq!(read("x", "env:NO_SUCH_VARIABLE").unwrap_err(), "the environment has no variable NO_SUCH_VARIABLE");
        assert_eq!(read("x", "s3cret").unwrap(), ["s3cret"]);
        assert_eq!(split("a, b\n,,c"), ["a", "b", "c"]);
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
