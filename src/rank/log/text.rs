//! Text in log lines: escaped to one line, and cut to a bounded length.

use std::fmt::{self, Write};

/// Longest message in bytes.
pub(super) const MAX_MESSAGE: usize = 16 << 10;
/// Longest field in bytes: ids and names come from clients.
const MAX_FIELD: usize = 256;
/// Longest field with the reason of a failure, in bytes.
const MAX_REASON: usize = 4 << 10;

/// The longest value of the field `name`, in bytes.
pub(super) fn max_field(name: &str) -> usize {
    match name {
        "error" | "reason" => MAX_REASON,
        _ => MAX_FIELD,
    }
}

/// A writer that keeps the first bytes and counts the rest, so that memory is bounded for text of any length.
pub(super) struct Cut {
    kept: String,
    max: usize,
    len: usize,
}

impl Cut {
    /// Keeps at most `max` bytes.
    pub(super) fn new(max: usize) -> Self {
        Self { kept: String::new(), max, len: 0 }
    }

    /// The `Display` form of `value`, cut to `max` bytes.
    pub(super) fn display(value: impl fmt::Display, max: usize) -> String {
        let mut cut = Self::new(max);
        let _ = write!(cut, "{value}"); // `Cut` accepts every write; if `value` fails to display, the text ends there.
        cut.finish()
    }

    /// The kept text, followed by the full length if it was cut.
    pub(super) fn finish(mut self) -> String {
        if self.len > self.kept.len() {
            let _ = write!(self.kept, "… ({} bytes)", self.len); // Writes to a String do not fail.
        }
        self.kept
    }
}

impl Write for Cut {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        // After the first cut nothing is kept.
        if self.len == self.kept.len() {
            let room = self.max - self.kept.len();
            self.kept.push_str(&text[..text.floor_char_boundary(room)]);
        }
        self.len += text.len();
        Ok(())
    }
}

/// Whether a character could end a line, move a terminal's cursor or change the order of displayed text.
fn is_control(character: char) -> bool {
    character.is_control()
        || matches!(
            character,
            '\u{2028}' | '\u{2029}' // line and paragraph separator
            | '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' // direction
        )
}

/// A text with control characters escaped as `\n`, `\t`, `\u{1b}`.
pub(super) struct Escaped<'a>(pub(super) &'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_parts(self.0, is_control, out, |control, out| write!(out, "{}", control.escape_default()))
    }
}

/// As [`Escaped`], but line breaks are kept. For tables of this program.
pub(super) struct Table<'a>(pub(super) &'a str);

impl fmt::Display for Table<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_special = |character| character != '\n' && is_control(character);
        write_parts(self.0, is_special, out, |control, out| write!(out, "{}", control.escape_default()))
    }
}

/// A text as a JSON string.
pub(super) struct Json<'a>(pub(super) &'a str);

impl fmt::Display for Json<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_char('"')?;
        let is_special = |character| matches!(character, '"' | '\\') || is_control(character);
        write_parts(self.0, is_special, out, |special, out| match special {
            '"' | '\\' => write!(out, "\\{special}"),
            '\n' => out.write_str("\\n"),
            // All control characters are in the basic multilingual plane.
            control => write!(out, "\\u{:04x}", control as u32),
        })?;
        out.write_char('"')
    }
}

/// Writes `text`, with each special character written by `write_special`.
fn write_parts(
    text: &str,
    is_special: impl Fn(char) -> bool,
    out: &mut fmt::Formatter<'_>,
    write_special: impl Fn(char, &mut fmt::Formatter<'_>) -> fmt::Result,
) -> fmt::Result {
    let mut rest = text;
    while let Some(at) = rest.find(&is_special) {
        let (plain, special) = rest.split_at(at);
        out.write_str(plain)?;
        let mut characters = special.chars();
        write_special(characters.next().expect("one was found"), out)?;
        rest = characters.as_str();
    }
    out.write_str(rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_text_begins_a_new_line() {
        let hostile = "a\nE b\r\tc\u{7f}\u{1b}[31m\u{85}\u{2028}\u{202e}\u{2066}\u{200f}é\"\\";
        let escaped = r#"a\nE b\r\tc\u{7f}\u{1b}[31m\u{85}\u{2028}\u{202e}\u{2066}\u{200f}é"\"#;
        assert_eq!(Escaped(hostile).to_string(), escaped);
        let json = r#""a\nE b\u000d\u0009c\u007f\u001b[31m\u0085\u2028\u202e\u2066\u200fé\"\\""#;
        assert_eq!(Json(hostile).to_string(), json);
        assert_eq!(serde_json::from_str::<String>(json).unwrap(), hostile);
        assert_eq!(Table("\n| a |\n| \u{1b} |\n").to_string(), "\n| a |\n| \\u{1b} |\n");
    }

    #[test]
    fn long_values_are_cut_and_followed_by_their_length() {
        let id = "é".repeat(1 << 20);
        let cut = Cut::display(&id, 256);
        assert_eq!(cut, format!("{}… (2097152 bytes)", "é".repeat(128)));
        assert_eq!(Cut::display("é".repeat(2), 3), "é… (4 bytes)");
        assert_eq!(Cut::display(format_args!("{}{}{}", "ab", "é", "c"), 3), "ab… (5 bytes)");
        assert_eq!(Cut::display("abc", 3), "abc");
        assert_eq!((max_field("id"), max_field("error")), (256, 4096));
    }
}
