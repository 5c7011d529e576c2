//! Flags of ranks that stand among those of the launcher, as users of Triton write them.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, bail};
use clap::error::{ContextKind, ContextValue, ErrorKind};

use crate::command::text_with_dashes;
use crate::flags::Flags;

/// A flag of a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
struct RankFlag {
    /// Its name with `--`.
    name: String,
    /// Whether the next word is its value if there is none behind `=`.
    takes_word: bool,
}

/// Flags with the path of the server program.
const PROGRAM_FLAGS: [&str; 2] = ["--trireme", "--tritonserver"];

/// Flags of ranks that the launcher must know, too, with its own names for them.
const NEEDED_HERE: [(&str, &str); 4] = [
    ("--http-port", "--http_port"),
    ("--grpc-port", "--grpc_port"),
    ("--metrics-port", "--metrics_port"),
    ("--exit-timeout-secs", "--exit_timeout"),
];

/// Checks the flags behind `--`: the last value of a flag counts, so there they would change what the launcher goes by, without its knowledge.
///
/// # Errors
/// Names a flag, also one that is shortened, that belongs before `--`.
pub(crate) fn check(rank_flags: &[String]) -> Result<()> {
    for name in rank_flags.iter().filter(|flag| flag.len() > 2 && flag.starts_with("--")).map(|flag| name_of(flag)) {
        if let Some((_, own)) = NEEDED_HERE.iter().find(|(full, _)| full.starts_with(&name)) {
            bail!("`{name}` is behind `--`, and `launch` itself needs its value: give {own} before the `--`");
        }
    }
    Ok(())
}

/// The same command line, program name first, with the flags of ranks behind `--`. The server program lists these flags; it is started
/// only if the line has a flag that the launcher does not know.
///
/// # Errors
/// The error of the original line, if it has a flag that neither knows.
pub(crate) fn behind_dashes(line: Vec<OsString>) -> Result<Vec<OsString>, clap::Error> {
    let Some((original, _)) = unknown_flag(&line) else { return Ok(line) };
    let known = program(&line).map(|trireme| flags_of_ranks(&trireme)).unwrap_or_default();
    separated(line, &known).ok_or(original)
}

/// The server program: that of the command line, unless it is a path in an image, or else that beside this program.
fn program(line: &[OsString]) -> Option<PathBuf> {
    let words: Vec<&str> = line.iter().map_while(|word| word.to_str()).take_while(|word| *word != "--").collect();
    let value = |at: usize, word: &str| match word.split_once('=') {
        Some((_, value)) => Some(value.to_owned()),
        None => words.get(at + 1).map(|next| (*next).to_owned()),
    };
    let has_image = words.iter().any(|word| name_of(word) == "--container-image");
    let given = words.iter().enumerate().find(|(_, word)| PROGRAM_FLAGS.contains(&name_of(word).as_str()));
    match given.filter(|_| !has_image) {
        Some((at, word)) => value(at, word).map(PathBuf::from),
        None => crate::trireme().ok(),
    }
}

/// The line with every flag that the launcher does not know behind `--`; `None` if ranks do not know it, either.
fn separated(mut line: Vec<OsString>, known: &[RankFlag]) -> Option<Vec<OsString>> {
    while let Some((_, name)) = unknown_flag(&line) {
        let flag = known.iter().find(|flag| flag.name == name)?;
        let end = line.iter().position(|word| word == "--").unwrap_or(line.len());
        let is_flag = |word: &OsString| word.to_str().is_some_and(|word| name_of(word) == name);
        let at = line[..end].iter().position(is_flag)?;
        let has_own_value = line[at].to_str().is_some_and(|word| word.contains('='));
        let has_next = at + 1 < end && !line[at + 1].to_string_lossy().starts_with("--");
        let count = if flag.takes_word && !has_own_value && has_next { 2 } else { 1 };
        let words: Vec<OsString> = line.drain(at..at + count).collect();
        if !line.iter().any(|word| word == "--") {
            line.push("--".into());
        }
        line.extend(words);
    }
    Some(line)
}

/// The name of a flag with `--`, as the launcher and ranks write it.
fn name_of(word: &str) -> String {
    let normal = text_with_dashes(word);
    normal.split_once('=').map_or(normal.as_str(), |(name, _)| name).to_owned()
}

/// The first flag that the launcher does not know, with the error that says so.
fn unknown_flag(line: &[OsString]) -> Option<(clap::Error, String)> {
    let error = Flags::parse_from_line(line.iter().cloned()).err()?;
    let name = match (error.kind(), error.get(ContextKind::InvalidArg)) {
        (ErrorKind::UnknownArgument, Some(ContextValue::String(name))) => name_of(name),
        _ => return None,
    };
    name.starts_with("--").then_some((error, name))
}

/// What `trireme rank-flags` prints: the name of a flag in each line, followed by ` VALUE` if it takes a word; nothing if it cannot
/// be asked.
fn flags_of_ranks(trireme: &Path) -> Vec<RankFlag> {
    let Ok(output) = Command::new(trireme).arg("rank-flags").output() else { return Vec::new() };
    let text = String::from_utf8_lossy(&output.stdout);
    let flag = |line: &str| match line.split_once(' ') {
        Some((name, _)) => RankFlag { name: name.to_owned(), takes_word: true },
        None => RankFlag { name: line.to_owned(), takes_word: false },
    };
    text.lines().map(flag).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(words: &str) -> Vec<OsString> {
        words.split(' ').map(OsString::from).collect()
    }

    #[test]
    fn flags_of_ranks_go_behind_the_dashes_with_their_values() {
        let flag = |name: &str, takes_word| RankFlag { name: name.to_owned(), takes_word };
        let known = [flag("--allow-client-shm", false), flag("--log-verbose", true), flag("--pinned-memory", true)];
        let moved = |words: &str| separated(line(words), &known);
        let expected = "launch --world_size=2 -- --allow_client_shm=true";
        assert_eq!(moved("launch --allow_client_shm=true --world_size=2").unwrap(), line(expected));
        let expected = "launch --detach -- --x=1 --log-verbose 1 --pinned-memory=1";
        assert_eq!(moved("launch --log-verbose 1 --detach --pinned-memory=1 -- --x=1").unwrap(), line(expected));
        assert_eq!(moved("launch --allow-client-shm --detach").unwrap(), line("launch --detach -- --allow-client-shm"));
        assert_eq!(moved("launch --no-such-flag"), None);
        assert_eq!(moved("launch --detach").unwrap(), line("launch --detach"));
        assert_eq!(moved("launch stop --pinned-memory=1"), None, "`stop` starts no rank");
    }

    #[test]
    fn flags_that_the_launcher_needs_are_refused_behind_the_dashes() {
        let check = |flag: &str| check(&["--id=me".to_owned(), flag.to_owned()]).map_err(|error| error.to_string());
        for (flag, own) in [
            ("--http-port=1", "give --http_port before"),
            ("--grpc_port=1", "give --grpc_port before"),
            ("--metrics-p=1", "give --metrics_port before"),
            ("--exit_timeout_secs=1", "give --exit_timeout before"),
        ] {
            let error = check(flag).unwrap_err();
            assert!(error.contains(own), "{error}");
        }
        for flag in ["--http-address=::1", "--exit-on-error=false", "--metrics-interval-ms=1", "--http-port-x=1", "-h"]
        {
            check(flag).unwrap();
        }
    }

    #[test]
    fn the_server_program_of_the_line_is_asked_unless_it_is_in_an_image() {
        let beside = crate::trireme().ok();
        for (words, expected) in [
            ("launch --trireme=/a/b --id=me", Some(PathBuf::from("/a/b"))),
            ("launch --id=me --tritonserver /a/c", Some(PathBuf::from("/a/c"))),
            ("launch --container_image=x.sif --trireme=/a/b", beside.clone()),
            ("launch -- --trireme=/a/b", beside),
        ] {
            assert_eq!(program(&line(words)), expected, "{words}");
        }
    }
}
