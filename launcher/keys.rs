//! API keys. Only rank 0 gets them, through files that only this user can read, so that no command line and no environment of
//! another process contains one.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::command::text_with_dashes;

/// The environment variable with API keys, separated by commas.
const API_KEYS: &str = "TRIREME_API_KEYS";
/// Flags whose value is a rule, `APIS:NAME=KEY`.
const RULE_FLAGS: [&str; 2] = ["--http-restricted-api", "--grpc-restricted-protocol"];
const API_KEY_FILE: &str = "--api-key-file";
/// Replaces a key where a command line is shown.
const HIDDEN: &str = "***";

/// The flags, key files and environment variables that only rank 0 may see.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Keys {
    /// Flags for rank 0 alone.
    pub(crate) flags: Vec<String>,
    /// Files to write before it starts, and their contents.
    files: Vec<(PathBuf, String)>,
    /// Environment variables to remove from the world's environment.
    pub(crate) variables: Vec<String>,
    /// Whether a key was given on the command line.
    pub(crate) has_literal: bool,
}

impl Keys {
    /// Moves the flags with keys out of `flags`. Keys given literally or in a variable are to be written to files in `run_dir`.
    ///
    /// # Errors
    /// If a named variable is missing or contains no key.
    pub(crate) fn take(
        rank_flags: &mut Vec<String>,
        run_dir: &Path,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Self> {
        let mut keys = Self::default();
        let given = std::mem::take(rank_flags);
        let mut words = given.into_iter();
        while let Some(word) = words.next() {
            let Some((name, value)) = split_flag(&word) else {
                rank_flags.push(word);
                continue;
            };
            // The server reports the missing value.
            let Some(value) = value.or_else(|| words.next()) else {
                rank_flags.push(word);
                continue;
            };
            let value = if name == API_KEY_FILE { value } else { keys.hide(&name, &value, run_dir, &variable)? };
            keys.flags.push(format!("{name}={value}"));
        }
        if let Some(value) = variable(API_KEYS) {
            let lines = lines_of(&value);
            if lines.is_empty() {
                bail!("{API_KEYS} is set and holds no key; unset it to serve everyone");
            }
            keys.variables.push(API_KEYS.to_owned());
            let file = keys.file(run_dir, lines);
            keys.flags.push(format!("{API_KEY_FILE}={}", file.display()));
        }
        Ok(keys)
    }

    /// The value of a rule flag with its key replaced by the path of a key file.
    fn hide(
        &mut self,
        name: &str,
        rule: &str,
        run_dir: &Path,
        variable: &impl Fn(&str) -> Option<String>,
    ) -> Result<String> {
        let Some((head, key)) = split_rule(rule) else { return Ok(rule.to_owned()) };
        if key.starts_with('@') || key.is_empty() {
            return Ok(rule.to_owned());
        }
        let lines = match key.strip_prefix("env:") {
            None => {
                self.has_literal = true;
                format!("{key}\n")
            }
            Some(variable_name) => {
                let value = variable(variable_name)
                    .with_context(|| format!("{name}: the environment has no variable {variable_name}"))?;
                let lines = lines_of(&value);
                if lines.is_empty() {
                    bail!("{name}: {variable_name} holds no key");
                }
                self.variables.push(variable_name.to_owned());
                lines
            }
        };
        Ok(format!("{head}@{}", self.file(run_dir, lines).display()))
    }

    fn file(&mut self, run_dir: &Path, contents: String) -> PathBuf {
        let path = run_dir.join(format!("keys-{}-{}", std::process::id(), self.files.len()));
        self.files.push((path.clone(), contents));
        path
    }

    /// Whether key files are written, which rank 0 can read on this machine only.
    pub(crate) fn has_files(&self) -> bool {
        !self.files.is_empty()
    }

    /// Writes the files. Dropping the result removes them.
    pub(crate) fn write(&self) -> Result<Written> {
        let mut written = Written(Vec::new());
        for (path, contents) in &self.files {
            // A killed launcher with the same pid may have left a file.
            let _ = fs::remove_file(path);
            let open = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
            written.0.push(path.clone());
            open.and_then(|mut file| file.write_all(contents.as_bytes()))
                .with_context(|| format!("cannot write keys to {}", path.display()))?;
        }
        Ok(written)
    }
}

/// Key files, removed on drop.
pub(crate) struct Written(Vec<PathBuf>);

impl Drop for Written {
    fn drop(&mut self) {
        for path in &self.0 {
            // It does not matter if the file is gone already.
            let _ = fs::remove_file(path);
        }
    }
}

/// The arguments of this process with literal keys hidden. None if there are no such keys.
pub(crate) fn without_literals(arguments: &[String]) -> Option<Vec<String>> {
    let mut has_literal = false;
    let mut is_value = false;
    let shown = arguments.iter().map(|word| {
        let flag = split_flag(word).filter(|(name, _)| name != API_KEY_FILE);
        let is_rule = std::mem::replace(&mut is_value, flag.as_ref().is_some_and(|(_, value)| value.is_none()));
        let rule = flag.and_then(|(_, value)| value).or_else(|| is_rule.then(|| word.clone()));
        match rule.as_deref().and_then(split_rule) {
            Some((head, key)) if !key.starts_with('@') && !key.starts_with("env:") && !key.is_empty() => {
                has_literal = true;
                // The flag's name, as it was typed, comes before the rule.
                let start = word.len() - head.len() - key.len();
                format!("{}{head}{HIDDEN}", &word[..start])
            }
            _ => word.clone(),
        }
    });
    let shown = shown.collect();
    has_literal.then_some(shown)
}

/// Recognizes a flag with keys: its full name, and its value if that is in the same argument.
fn split_flag(word: &str) -> Option<(String, Option<String>)> {
    let normal = text_with_dashes(word);
    let (name, value) = normal.split_once('=').map_or((&normal[..], None), |(name, value)| (name, Some(value)));
    // Names may be abbreviated. The server rejects ambiguous ones.
    let matches = |full: &&str| full.starts_with(name) && name.len() > "--http-".len();
    let full = RULE_FLAGS.iter().chain([&API_KEY_FILE]).find(|full| matches(full))?;
    Some(((*full).to_owned(), value.map(str::to_owned)))
}

/// `APIS:NAME=KEY` → `APIS:NAME=` and `KEY`.
fn split_rule(rule: &str) -> Option<(&str, &str)> {
    let (_, opens) = rule.split_once(':')?;
    let (_, key) = opens.split_once('=')?;
    Some(rule.split_at(rule.len() - key.len()))
}

/// Keys separated by commas, as the lines of a file.
fn lines_of(keys: &str) -> String {
    let keys = keys.split([',', '\n']).map(str::trim).filter(|key| !key.is_empty());
    keys.map(|key| format!("{key}\n")).collect()
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use crate::flags::{Flags, WorldFlags};

    fn taken(line: &str, run_dir: &Path, variables: &[(&str, &str)]) -> Result<(WorldFlags, Keys)> {
        let words = std::iter::once("launch").chain(line.split_whitespace());
        let mut flags = Flags::parse_from_line(words.map(OsString::from)).unwrap().world;
        let variable = |name: &str| {
            variables.iter().find(|(candidate, _)| *candidate == name).map(|(_, value)| (*value).to_owned())
        };
        let keys = Keys::take(&mut flags.rank_flags, run_dir, variable)?;
        Ok((flags, keys))
    }

    #[test]
    fn keys_reach_rank_0_through_files_only() {
        let dir = tempfile::tempdir().unwrap();
        let line = "-- --http_restricted_api=inference,health:x-key=one=1 --id=me --grpc-restr infer:k=env:MINE \
                    --http-restricted-api=logging:a=@/etc/keys --api-key-file /etc/api";
        let (flags, keys) = taken(line, dir.path(), &[("MINE", "two, three"), (API_KEYS, "four")]).unwrap();
        assert_eq!(flags.rank_flags, ["--id=me"]);
        let file = |n: u32| dir.path().join(format!("keys-{}-{n}", std::process::id()));
        let expected = [
            format!("--http-restricted-api=inference,health:x-key=@{}", file(0).display()),
            format!("--grpc-restricted-protocol=infer:k=@{}", file(1).display()),
            "--http-restricted-api=logging:a=@/etc/keys".to_owned(),
            "--api-key-file=/etc/api".to_owned(),
            format!("--api-key-file={}", file(2).display()),
        ];
        assert_eq!(keys.flags, expected);
        assert_eq!(keys.variables, ["MINE", API_KEYS]);
        assert!(keys.has_literal && !file(0).exists(), "a plan writes nothing");
        let written = keys.write().unwrap();
        let contents = [0, 1, 2].map(|n| fs::read_to_string(file(n)).unwrap());
        assert_eq!(contents, ["one=1\n", "two\nthree\n", "four\n"]);
        assert_eq!(fs::metadata(file(0)).unwrap().permissions().mode() & 0o777, 0o600);
        drop(written);
        assert!(!file(0).exists());
    }

    #[test]
    fn variables_without_a_key_are_refused_and_other_flags_stay_as_they_are() {
        let none = Path::new("/nowhere");
        let refusal = |line, variables| format!("{:#}", taken(line, none, variables).unwrap_err());
        let line = "-- --http-restricted-api=inference:k=env:MINE";
        assert_eq!(refusal(line, &[]), "--http-restricted-api: the environment has no variable MINE");
        assert_eq!(refusal(line, &[("MINE", " ,")]), "--http-restricted-api: MINE holds no key");
        assert!(refusal("", &[(API_KEYS, "")]).contains("TRIREME_API_KEYS is set and holds no key"));
        let (flags, keys) = taken("-- --http-port=1 --http-address 1.2.3.4 --http-restricted-api", none, &[]).unwrap();
        assert_eq!(flags.rank_flags, ["--http-port=1", "--http-address", "1.2.3.4", "--http-restricted-api"]);
        assert_eq!(keys, Keys::default());
    }

    #[test]
    fn a_command_line_is_shown_without_its_keys() {
        let words = |line: &str| line.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let line = "--world_size=2 -- --http_restricted_api=a:k=s3cret --grpc-restricted-protocol b:k=t0p --id=x:y=z";
        let shown = "--world_size=2 -- --http_restricted_api=a:k=*** --grpc-restricted-protocol b:k=*** --id=x:y=z";
        assert_eq!(without_literals(&words(line)).unwrap(), words(shown));
        assert_eq!(without_literals(&words("-- --http-restricted-api=a:k=@/keys --api-key-file=a:b=c")), None);
    }
}
