//! What of a text a log line takes: one line, whatever the text holds, and of a bounded length.

use std::fmt::{self, Write};

/// Longest message, in bytes.
pub(super) const MAX_MESSAGE: usize = 16 << 10;
/// Longest field: ids and names come from clients.
const MAX_FIELD: usize = 256;
/// Longest field of those that tell why something failed.
const MAX_REASON: usize = 4 << 10;

/// The longest value of the field `name`, in bytes.
pub(super) fn max_field(name: &str) -> usize {
    match name {
        "error" | "reason" => MAX_REASON,
        _ => MAX_FIELD,
    }
}

/// Takes the first bytes of what is written to it and counts the rest, so that a text of any length costs what is kept of it.
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

    /// `value` as it displays, cut.
    pub(super) fn display(value: impl fmt::Display, max: usize) -> String {
        let mut cut = Self::new(max);
        let _ = write!(cut, "{value}"); // It takes everything; a value that fails to display is cut there.
        cut.finish()
    }

    /// What was kept; where something was left out, it says so, with the length of the whole.
    pub(super) fn finish(mut self) -> String {
        if self.len > self.kept.len() {
            let _ = write!(self.kept, "… ({} bytes)", self.len); // A String takes it.
        }
        self.kept
    }
}

impl Write for Cut {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        // Nothing follows a gap.
        if self.len == self.kept.len() {
            let room = self.max - self.kept.len();
            self.kept.push_str(&text[..text.floor_char_boundary(room)]);
        }
        self.len += text.len();
        Ok(())
    }
}

/// Whether a character could end a line, move a terminal's cursor or change the order of what is shown.
fn is_control(character: char) -> bool {
    character.is_control()
        || matches!(
            character,
            '\u{2028}' | '\u{2029}' // line and paragraph separator
            | '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' // direction
        )
}

/// A text with its control characters as `\n`, `\t`, `\u{1b}`.
pub(super) struct Escaped<'a>(pub(super) &'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_parts(self.0, is_control, out, |control, out| write!(out, "{}", control.escape_default()))
    }
}

/// A table of this program: as [`Escaped`], but its lines stay.
pub(super) struct Table<'a>(pub(super) &'a str);

impl fmt::Display for Table<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_special = |character| character != '\n' && is_control(character);
        write_parts(self.0, is_special, out, |control, out| write!(out, "{}", control.escape_default()))
    }
}

/// A text as a string of JSON.
pub(super) struct Json<'a>(pub(super) &'a str);

impl fmt::Display for Json<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_char('"')?;
        let is_special = |character| matches!(character, '"' | '\\') || is_control(character);
        write_parts(self.0, is_special, out, |special, out| match special {
            '"' | '\\' => write!(out, "\\{special}"),
            '\n' => out.write_str("\\n"),
            // All of them are in the basic plane.
            control => write!(out, "\\u{:04x}", control as u32),
        })?;
        out.write_char('"')
    }
}

/// Writes `text` with each special character as `write_special` has it; what lies between in one piece.
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
    fn no_text_begins_a_line_of_its_own() {
        let hostile = "a\nE b\r\tc\u{7f}\u{1b}[31m\u{85}\u{2028}\u{202e}\u{2066}\u{200f}é\"\\";
        let escaped = r#"a\nE b\r\tc\u{7f}\u{1b}[31m\u{85}\u{2028}\u{202e}\u{2066}\u{200f}é"\"#;
        assert_eq!(Escaped(hostile).to_string(), escaped);
        let json = r#""a\nE b\u000d\u0009c\u007f\u001b[31m\u0085\u2028\u202e\u2066\u200fé\"\\""#;
        assert_eq!(Json(hostile).to_string(), json);
        assert_eq!(serde_json::from_str::<String>(json).unwrap(), hostile);
        assert_eq!(Table("\n| a |\n| \u{1b} |\n").to_string(), "\n| a |\n| \\u{1b} |\n");
    }

    #[test]
    fn long_values_are_cut_and_say_how_long_they_are() {
        let id = "é".repeat(1 << 20);
        let cut = Cut::display(&id, 256);
        assert_eq!(cut, format!("{}… (2097152 bytes)", "é".repeat(128)));
        assert_eq!(Cut::display("é".repeat(2), 3), "é… (4 bytes)");
        assert_eq!(Cut::display(format_args!("{}{}{}", "ab", "é", "c"), 3), "ab… (5 bytes)");
        assert_eq!(Cut::display("abc", 3), "abc");
        assert_eq!((max_field("id"), max_field("error")), (256, 4096));
    }
}
