//! The regular expressions that response templates use for markers, as the few parts that they are made of.

/// A part of a pattern.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Text(String),
    /// White space, any or none.
    Space,
    /// A named group; what it matches is not looked at.
    Group(String),
    /// Any text.
    Any,
    /// The start of the turn, or the text behind it.
    Start(String),
}

/// Reads a pattern; an error names what is not understood.
pub(crate) fn parse(pattern: &str) -> Result<Vec<Part>, String> {
    let mut parts = Vec::new();
    let mut rest = pattern;
    while let Some(c) = rest.chars().next() {
        if let Some(after) = [r"\s*", r"\s+", r"\n?", r"\n*", r"\s"].iter().find_map(|space| rest.strip_prefix(space)) {
            parts.push(Part::Space);
            rest = after;
        } else if let Some(after) = rest.strip_prefix(".*?") {
            parts.push(Part::Any);
            rest = after;
        } else if let Some(after) = rest.strip_prefix("(?P<") {
            let (name, after) = after.split_once('>').ok_or("a group without a name")?;
            parts.push(Part::Group(name.to_owned()));
            rest = &after[group_end(after)?..];
        } else if let Some(after) = rest.strip_prefix("(?:^|") {
            let end = group_end(after)?;
            parts.push(Part::Start(texts(&parse(&after[..end - 1])?).concat()));
            rest = &after[end..];
        } else {
            let (c, len) = literal(rest, c)?;
            match parts.last_mut() {
                Some(Part::Text(text)) => text.push(c),
                _ => parts.push(Part::Text(c.to_string())),
            }
            rest = &rest[len..];
        }
    }
    Ok(parts)
}

/// The texts among the parts.
pub(crate) fn texts(parts: &[Part]) -> Vec<String> {
    let text = |part: &Part| match part {
        Part::Text(text) => Some(text.clone()),
        _ => None,
    };
    parts.iter().filter_map(text).collect()
}

/// The first character of `rest` as itself, and its length in the pattern.
fn literal(rest: &str, c: char) -> Result<(char, usize), String> {
    let (c, len) = match c {
        '\\' => {
            let escaped = rest[1..].chars().next().ok_or("a backslash at the end")?;
            let c = match escaped {
                'n' => '\n',
                't' => '\t',
                _ if escaped.is_alphanumeric() => return Err(format!("the escape `\\{escaped}`")),
                _ => escaped,
            };
            (c, 1 + escaped.len_utf8())
        }
        '.' | '^' | '$' | '*' | '+' | '?' | '(' | ')' | '[' | ']' | '{' | '}' | '|' => return Err(format!("`{rest}`")),
        _ => (c, c.len_utf8()),
    };
    match rest[len..].chars().next() {
        Some(repeat @ ('*' | '+' | '?' | '{')) => Err(format!("the repetition `{repeat}` of `{c}`")),
        _ => Ok((c, len)),
    }
}

/// Where the group ends whose inside `text` begins with.
fn group_end(text: &str) -> Result<usize, String> {
    let (mut depth, mut escaped) = (1, false);
    for (at, c) in text.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '(' => depth += 1,
            ')' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Ok(at + 1);
        }
    }
    Err("a group that does not end".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_of_markers_are_read_and_others_are_refused() {
        let text = |text: &str| Part::Text(text.into());
        let name = || Part::Group("name".into());
        assert_eq!(
            parse(r"<tool_call>\s*<function=(?P<name>\w+)>"),
            Ok(vec![text("<tool_call>"), Part::Space, text("<function="), name(), text(">")])
        );
        assert_eq!(
            parse(r"<\|x\|>to=functions\.(?P<name>(\w|\))+).*?<\|m\|>"),
            Ok(vec![text("<|x|>to=functions."), name(), Part::Any, text("<|m|>")])
        );
        assert_eq!(parse(r"(?:^|<think>\s*)"), Ok(vec![Part::Start("<think>".into())]));
        for bad in ["a+", "[ab]", r"\d", "(a", "a|b", "\\"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
