//! The part of a log that an error message shows: the cause, other errors, then the last lines.

use std::path::Path;

use crate::crash;

/// Errors that are shown at most.
const MAX_ERRORS: usize = 8;
/// Last lines that are shown, and how many where the log has no errors.
const LAST_LINES: usize = 4;
const LAST_LINES_ALONE: usize = 15;
/// Lines of the longest message that `mpirun` puts between two rules.
const MAX_BOX_LINES: usize = 24;

/// What the log at this path says about the end of its world.
pub(crate) fn of(log: &Path) -> String {
    excerpt(&crash::end_of(log))
}

fn excerpt(log: &str) -> String {
    let lines = without_boxes(log.lines().filter(|line| !is_of_table(line)).collect());
    let Some(cause) = cause(&lines) else { return shown(&lines) };
    // What repeats the cause, or follows from it, is left out.
    let more: Vec<&str> =
        lines.into_iter().filter(|line| !unescaped(line).contains(&cause) && !line.contains(DEPENDS)).collect();
    format!("{cause}\n{}", shown(&more)).trim_end().to_owned()
}

/// Words of the error of a model that needs another one, which could not be loaded.
const DEPENDS: &str = "which has no loaded version";

/// What the first model that failed to load was refused for.
fn cause(lines: &[&str]) -> Option<String> {
    let failures = lines.iter().filter(|line| is_error(line) && line.contains("failed to load '"));
    let first = failures.into_iter().find(|line| !line.contains(DEPENDS))?;
    let (_, words) = first.split_once("failed to load '")?;
    // `NAME' version 1: KIND: WHY`, with quotation marks around all of it.
    let (_, words) = words.split_once("' version ")?;
    let why = words.splitn(3, ": ").nth(2)?;
    Some(unescaped(why.strip_suffix('"').unwrap_or(why)))
}

/// The text of a field in the log, where quotation marks and backslashes have a backslash before them.
fn unescaped(text: &str) -> String {
    text.replace("\\\"", "\"").replace("\\\\", "\\")
}

fn shown(lines: &[&str]) -> String {
    let errors: Vec<usize> = (0..lines.len()).filter(|index| is_error(lines[*index])).collect();
    let num_last = if errors.is_empty() { LAST_LINES_ALONE } else { LAST_LINES };
    let last = lines.len().saturating_sub(num_last);
    let earlier = errors.into_iter().filter(|index| *index < last).collect::<Vec<_>>();
    // The first errors are causes, later ones may be consequences.
    let shown = earlier.into_iter().take(MAX_ERRORS).chain(last..lines.len());
    shown.map(|index| lines[index]).collect::<Vec<_>>().join("\n")
}

/// Whether a line is one of the log's errors (`E1124 …`), or the last words of a program.
fn is_error(line: &str) -> bool {
    let is_logged = |rest: &str| rest.get(..4).is_some_and(|date| date.bytes().all(|byte| byte.is_ascii_digit()));
    line.strip_prefix('E').is_some_and(is_logged) || line.contains("error: ") || line.contains("panicked at")
}

fn is_of_table(line: &str) -> bool {
    line.trim().is_empty() || line.starts_with("+--") || line.starts_with("| ")
}

/// The lines without the messages of `mpirun`, which stand between two rules.
fn without_boxes(lines: Vec<&str>) -> Vec<&str> {
    let is_rule = |line: &str| line.len() >= 40 && line.bytes().all(|byte| byte == b'-');
    let mut kept = Vec::with_capacity(lines.len());
    let mut index = 0;
    while index < lines.len() {
        let inside = lines[index + 1..].iter().take(MAX_BOX_LINES);
        let end = inside.into_iter().position(|line| is_rule(line)).filter(|_| is_rule(lines[index]));
        match end {
            Some(count) => index += count + 2,
            None => {
                kept.push(lines[index]);
                index += 1;
            }
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_shown_before_the_last_lines_and_tables_and_boxes_of_mpirun_are_not() {
        let rule = "-".repeat(74);
        let log = format!(
            "I1124 00:00:00 1 a.rs:1] \"started\"\nE1124 00:00:01 1 b.rs:2] \"failed to load 'm'\"\n\
             +---+---+\n| m | 1 |\n+---+---+\n\n1\n2\nerror: creating server\n{rule}\nmpirun detected\nthat\n{rule}\n\
             {rule}\nPrimary job\n{rule}\nlaunch: died\nlaunch: report\n"
        );
        let expected =
            "E1124 00:00:01 1 b.rs:2] \"failed to load 'm'\"\n2\nerror: creating server\nlaunch: died\nlaunch: report";
        assert_eq!(excerpt(&log), expected);
    }

    #[test]
    fn the_cause_comes_first_and_what_follows_from_it_is_left_out() {
        let log = "E1124 00:00:01 1 a.rs:1] \"failed to load 'a' version 1: Invalid argument: ensemble 'a' depends on 'b' which has no loaded version\"\n\
                   E1124 00:00:02 1 a.rs:1] \"failed to load 'b' version 1: Invalid argument: model `b`: 3 workers; \\\"2\\\" would do\"\n\
                   E1124 00:00:03 1 b.rs:2] \"failed to load 'b': version 1 is at UNAVAILABLE state: Invalid argument: model `b`: 3 workers; \\\"2\\\" would do;\"\n\
                   error: creating server\nlaunch: died\n";
        assert_eq!(excerpt(log), "model `b`: 3 workers; \"2\" would do\nerror: creating server\nlaunch: died");
    }

    #[test]
    fn a_log_without_errors_shows_its_last_lines_and_a_rule_without_a_second_hides_nothing() {
        let lines: Vec<String> = (0..20).map(|number| format!("line {number}")).collect();
        assert_eq!(excerpt(&lines.join("\n")), lines[5..].join("\n"));
        let log = format!("{}\nsomething\nelse", "-".repeat(74));
        assert_eq!(excerpt(&log), log);
        assert_eq!(excerpt(""), "");
    }
}
