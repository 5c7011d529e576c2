//! The operator `%` behind a string literal, which formats in Python. The engine knows it for numbers alone, so it becomes a filter.

use super::filters::PERCENT;

/// Most values within each other that are rewritten; deeper ones stay as they are.
const MAX_DEPTH: usize = 16;

/// Longest brackets that are rewritten in bytes.
const MAX_BRACKETS: usize = 4096;

/// A template's source with a filter for each `%` behind a string literal.
pub(super) fn rewritten(source: &str) -> String {
    let mut text = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = tag_start(rest) {
        let (before, tag) = rest.split_at(at);
        text.push_str(before);
        let end = if tag.starts_with("{#") { tag.find("#}").map_or(tag.len(), |end| end + 2) } else { tag_length(tag) };
        let (tag, behind) = tag.split_at(end);
        rest = behind;
        match tag.contains('%') && !tag.starts_with("{#") {
            true => text.push_str(&expression(tag, 0)),
            false => text.push_str(tag),
        }
        let is_raw = tag.starts_with("{%") && tag.trim_matches(['{', '}', '%', '-', '+', ' ', '\n', '\t']) == "raw";
        if is_raw {
            let end = rest.find("endraw").unwrap_or(rest.len());
            text.push_str(&rest[..end]);
            rest = &rest[end..];
        }
    }
    text.push_str(rest);
    text
}

/// Where the first tag of a text begins.
fn tag_start(text: &str) -> Option<usize> {
    let is_tag = |at: &usize| matches!(text.as_bytes().get(at + 1), Some(b'{' | b'%' | b'#'));
    text.match_indices('{').map(|(at, _)| at).find(is_tag)
}

/// The length of a tag with both delimiters. Delimiters in string literals do not count.
fn tag_length(tag: &str) -> usize {
    let close = if tag.starts_with("{{") { "}}" } else { "%}" };
    let mut at = 2;
    while at < tag.len() {
        if tag[at..].starts_with(close) {
            return at + 2;
        }
        at += step(&tag[at..]);
    }
    tag.len()
}

/// The length of the string literal that a text begins with, else of its first character.
fn step(text: &str) -> usize {
    literal(text).unwrap_or_else(|| text.chars().next().map_or(1, char::len_utf8))
}

/// The length of the string literal that a text begins with.
fn literal(text: &str) -> Option<usize> {
    let quote = text.chars().next().filter(|c| matches!(c, '\'' | '"'))?;
    let mut is_escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            c if c == quote => return Some(at + 1),
            _ => {}
        }
    }
    None
}

/// An expression with the filter for each `%` behind a string literal.
fn expression(source: &str, depth: usize) -> String {
    let (mut text, mut rest) = (String::with_capacity(source.len()), source);
    while !rest.is_empty() {
        let (token, behind) = rest.split_at(step(rest));
        text.push_str(token);
        rest = behind;
        if !token.starts_with(['\'', '"']) || token.len() < 2 || depth == MAX_DEPTH {
            continue;
        }
        let Some(value) = rest.trim_start().strip_prefix('%').filter(|value| !value.starts_with('}')) else { continue };
        let value = value.trim_start();
        let (value, behind) = value.split_at(operand_length(value));
        text.push_str(&format!(" | {PERCENT}({})", expression(value, depth + 1)));
        rest = behind;
    }
    text
}

/// The length of the value at the start of a text: a literal, a name or brackets, with attributes, items, calls and filters.
fn operand_length(text: &str) -> usize {
    let mut at = usize::from(text.starts_with('-'));
    at += match bracket_length(&text[at..]) {
        0 => literal(&text[at..]).unwrap_or_else(|| name_length(&text[at..])),
        length => length,
    };
    loop {
        let rest = &text[at..];
        let next = rest.trim_start();
        let space = rest.len() - next.len();
        let length = match next.chars().next() {
            Some('(' | '[') => bracket_length(next),
            Some('.') => 1 + name_length(&next[1..]),
            Some('|') => {
                let name = next[1..].trim_start();
                next.len() - name.len() + name_length(name)
            }
            _ => 0,
        };
        if length == 0 {
            return at;
        }
        at += space + length;
    }
}

/// The length of a name or number.
fn name_length(text: &str) -> usize {
    text.find(|c: char| !(c.is_alphanumeric() || c == '_')).unwrap_or(text.len())
}

/// The length of the brackets that a text begins with, up to the closing one; zero without brackets, and for long ones.
fn bracket_length(text: &str) -> usize {
    let (mut at, mut depth) = (0, 0_usize);
    while at < text.len().min(MAX_BRACKETS) {
        match text.as_bytes()[at] {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        at += step(&text[at..]);
        if depth == 0 {
            return if matches!(text.as_bytes()[0], b'(' | b'[' | b'{') { at } else { 0 };
        }
    }
    0
}

#[cfg(test)]
mod tests {
    use super::rewritten;

    #[test]
    fn percent_behind_text_becomes_a_filter() {
        for (source, expected) in [
            ("{{ '%s' % x }}", "{{ '%s' | percent_format(x) }}"),
            ("{{ 'a' ~ \"%s\" % (a, b[1].c) ~ d }}", "{{ 'a' ~ \"%s\" | percent_format((a, b[1].c)) ~ d }}"),
            ("{%- set x = '%d%%'%-n.y|abs -%} 5", "{%- set x = '%d%%' | percent_format(-n.y|abs) -%} 5"),
            ("{{ '%s' % ('%s' % f(1)) }}", "{{ '%s' | percent_format(('%s' | percent_format(f(1)))) }}"),
            ("{% if i % 2 %}'a' % b{% endif %}{# '%s' % x #}", "{% if i % 2 %}'a' % b{% endif %}{# '%s' % x #}"),
            ("{% raw %}{{ '%s' % x }}{% endraw %}", "{% raw %}{{ '%s' % x }}{% endraw %}"),
            ("{{ '}}' }}{% if x == 'a' %}é{% endif %}{{ 'open", "{{ '}}' }}{% if x == 'a' %}é{% endif %}{{ 'open"),
        ] {
            assert_eq!(rewritten(source), expected);
        }
    }
}
