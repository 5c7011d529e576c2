//! The text of one section of a turn, without the white space that belongs to the markers around it.

/// The most white space, in bytes, that waits for what follows it.
const MAX_HELD: usize = 256;

/// A section of reasoning or content.
///
/// Line breaks beside a marker belong to the marker, and so does a section that is white space alone. Other white
/// space, such as the indentation of a first line, belongs to the text.
pub(crate) struct Section {
    /// A marker stands before the section.
    after_marker: bool,
    /// Something was given to the caller.
    started: bool,
    exact: bool,
    held: String,
}

impl Section {
    pub(crate) fn new(after_marker: bool) -> Self {
        Self { after_marker, started: false, exact: false, held: String::new() }
    }

    /// A section whose white space is all its own.
    pub(crate) fn exact() -> Self {
        Self { exact: true, ..Self::new(false) }
    }

    /// Nothing but white space has come so far.
    pub(crate) fn is_blank(&self) -> bool {
        !self.started
    }

    /// Takes `c`; `separators` count as white space until the text begins.
    pub(crate) fn push(&mut self, c: char, separators: &str, out: &mut String) {
        if self.exact {
            self.started = true;
            return out.push(c);
        }
        if self.started {
            if matches!(c, '\n' | '\r') && self.held.len() < MAX_HELD {
                return self.held.push(c);
            }
            out.push_str(&self.held);
            self.held.clear();
            return out.push(c);
        }
        let blank = c.is_whitespace() || separators.contains(c);
        self.held.push(c);
        if !blank || self.held.len() >= MAX_HELD {
            self.started = true;
            let text = if self.after_marker { self.held.trim_start_matches(['\n', '\r']) } else { &self.held };
            out.push_str(text);
            self.held.clear();
        }
    }

    /// Ends the section at the end of the turn.
    pub(crate) fn finish(&mut self, out: &mut String) {
        if self.started || !self.after_marker {
            out.push_str(&self.held);
        }
        self.held.clear();
    }
}
