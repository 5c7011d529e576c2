//! JSON strings as text.

/// Appends `c` to a JSON string, as an escape if it is a control character.
pub(crate) fn push_escaped_control(c: char, out: &mut String) {
    match c {
        '\n' => out.push_str("\\n"),
        '\r' => out.push_str("\\r"),
        '\t' => out.push_str("\\t"),
        '\0'..='\x1f' => out.push_str(&format!("\\u{:04x}", c as u32)),
        _ => out.push(c),
    }
}

/// Appends `c` to a JSON string.
pub(crate) fn push_escaped(c: char, out: &mut String) {
    match c {
        '"' => out.push_str("\\\""),
        '\\' => out.push_str("\\\\"),
        _ => push_escaped_control(c, out),
    }
}

/// `text` as a JSON string.
pub(crate) fn quoted(text: &str) -> String {
    let mut out = String::from('"');
    text.chars().for_each(|c| push_escaped(c, &mut out));
    out.push('"');
    out
}
