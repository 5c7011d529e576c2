//! The search of markers in a text that comes one character at a time.

/// Finds the first of some markers. Text is held back only while it is a proper prefix of a marker.
#[derive(Default)]
pub(crate) struct MarkerScan {
    held: String,
}

impl MarkerScan {
    /// Takes `c`. Text that belongs to no marker goes to `text`; returns the index of the marker that ends here.
    ///
    /// No marker may be a proper prefix of another.
    pub(crate) fn push<M: AsRef<str>>(&mut self, c: char, markers: &[M], text: &mut String) -> Option<usize> {
        if self.held.is_empty() && !markers.iter().any(|marker| marker.as_ref().starts_with(c)) {
            text.push(c);
            return None;
        }
        self.held.push(c);
        loop {
            if let Some(index) = markers.iter().position(|marker| marker.as_ref() == self.held) {
                self.held.clear();
                return Some(index);
            }
            if self.held.is_empty() || markers.iter().any(|marker| marker.as_ref().starts_with(&self.held)) {
                return None;
            }
            text.push(self.held.remove(0));
        }
    }

    /// Takes the text that is held back: the input has ended.
    pub(crate) fn take(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// The text that is held back.
    pub(crate) fn held(&self) -> &str {
        &self.held
    }
}

#[cfg(test)]
mod tests {
    use super::MarkerScan;

    fn split(text: &str, markers: &[&str]) -> (String, Vec<usize>) {
        let (mut scan, mut rest, mut found) = (MarkerScan::default(), String::new(), Vec::new());
        for c in text.chars() {
            found.extend(scan.push(c, markers, &mut rest));
        }
        rest.push_str(&scan.take());
        (rest, found)
    }

    #[test]
    fn a_marker_is_found_behind_its_own_prefix_and_nothing_else_is_lost() {
        let markers = ["<think>", "<tool_call>", "aab"];
        assert_eq!(split("x<<think>y", &markers), ("x<y".into(), vec![0]));
        assert_eq!(split("<tool_<tool_call>", &markers), ("<tool_".into(), vec![1]));
        assert_eq!(split("aaab<thin", &markers), ("a<thin".into(), vec![2]));
        assert_eq!(split("é<thinké>", &markers), ("é<thinké>".into(), vec![]));
    }
}
