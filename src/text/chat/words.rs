//! How Python divides and changes text: white space, lines, upper and lower case.

use minijinja::{Error, ErrorKind};

/// Whether Python takes a character for white space.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// `split` and `rsplit`: at a separator, or at white space without one; `most` times, from the right if `is_right`.
///
/// # Errors
/// When the separator is empty.
pub(super) fn split(
    text: &str,
    separator: Option<&str>,
    most: Option<usize>,
    is_right: bool,
) -> Result<Vec<String>, Error> {
    let most = most.unwrap_or(usize::MAX).saturating_add(1);
    let mut parts: Vec<&str> = match (separator, is_right) {
        (Some(""), _) => return Err(Error::new(ErrorKind::InvalidOperation, "empty separator")),
        (Some(separator), false) => text.splitn(most, separator).collect(),
        (Some(separator), true) => text.rsplitn(most, separator).collect(),
        (None, _) => at_spaces(text, most, is_right),
    };
    if is_right {
        parts.reverse();
    }
    Ok(parts.into_iter().map(str::to_owned).collect())
}

/// The words of a text, from the right if `is_right`; the last of `most` parts has the rest.
fn at_spaces(text: &str, most: usize, is_right: bool) -> Vec<&str> {
    let mut rest = if is_right { text.trim_end_matches(is_space) } else { text.trim_start_matches(is_space) };
    let mut parts = Vec::new();
    while !rest.is_empty() {
        let end = if is_right { rest.rfind(is_space) } else { rest.find(is_space) };
        let Some(end) = end.filter(|_| parts.len() + 1 < most) else {
            // What is left keeps the white space at its far end if the number of parts is reached.
            parts.push(rest);
            break;
        };
        if is_right {
            let space = rest[end..].chars().next().map_or(1, char::len_utf8);
            parts.push(&rest[end + space..]);
            rest = rest[..end].trim_end_matches(is_space);
        } else {
            parts.push(&rest[..end]);
            rest = rest[end..].trim_start_matches(is_space);
        }
    }
    parts
}

/// `splitlines`: the lines of a text, with their ends if `keeps_ends`.
pub(super) fn lines(text: &str, keeps_ends: bool) -> Vec<String> {
    let is_end = |c: char| {
        matches!(c, '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}')
    };
    let (mut lines, mut rest) = (Vec::new(), text);
    while let Some(at) = rest.find(is_end) {
        let length = match rest[at..].starts_with("\r\n") {
            true => 2,
            false => rest[at..].chars().next().map_or(1, char::len_utf8),
        };
        lines.push(rest[..if keeps_ends { at + length } else { at }].to_owned());
        rest = &rest[at + length..];
    }
    if !rest.is_empty() {
        lines.push(rest.to_owned());
    }
    lines
}

/// `title`: letters behind other characters in upper case, the others in lower case.
pub(super) fn title(text: &str) -> String {
    let mut is_inside = false;
    let mut titled = String::with_capacity(text.len());
    for c in text.chars() {
        match is_inside {
            true => titled.extend(c.to_lowercase()),
            false => titled.extend(c.to_uppercase()),
        }
        is_inside = c.is_alphabetic();
    }
    titled
}

/// `swapcase`.
pub(super) fn swapped(text: &str) -> String {
    let mut swapped = String::with_capacity(text.len());
    for c in text.chars() {
        match c.is_uppercase() {
            true => swapped.extend(c.to_lowercase()),
            false => swapped.extend(c.to_uppercase()),
        }
    }
    swapped
}
