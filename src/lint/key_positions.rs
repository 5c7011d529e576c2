//! Finds the lines of the keys of a `config.pbtxt`.

/// A key and its line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct KeyPosition {
    /// The top-level field, such as `input`.
    pub field: String,
    /// The `name` or `key` of an entry of the field, such as `input_ids`; `None` for the field itself.
    pub entry: Option<String>,
    /// From 1.
    pub line: usize,
}

/// All keys in the order of the text. For text that does not parse, the keys that can be recognized.
pub(crate) fn key_positions(text: &str) -> Vec<KeyPosition> {
    let tokens = tokens(text);
    let (mut depth, mut brackets, mut field) = (0usize, 0usize, String::new());
    let mut positions = Vec::new();
    for (index, (token, line)) in tokens.iter().enumerate() {
        let next = tokens.get(index + 1).map(|(token, _)| token);
        let is_key = matches!(next, Some(Token::Mark(':' | '{' | '[')));
        match token {
            Token::Mark('{') => depth += 1,
            Token::Mark('}') => depth = depth.saturating_sub(1),
            Token::Mark('[') => brackets += 1,
            Token::Mark(']') => brackets = brackets.saturating_sub(1),
            Token::Word(word) if depth == 0 && brackets == 0 && is_key => {
                field.clone_from(word);
                positions.push(KeyPosition { field: field.clone(), entry: None, line: *line });
            }
            Token::Word(word) if depth == 1 && is_key && (word == "name" || word == "key") => {
                if let Some((Token::Text(entry), _)) = tokens.get(index + 2) {
                    positions.push(KeyPosition { field: field.clone(), entry: Some(entry.clone()), line: *line });
                }
            }
            _ => {}
        }
    }
    positions
}

/// The line of each `${variable}` outside comments.
pub(crate) fn variables(text: &str) -> Vec<(String, usize)> {
    let mut found = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.split('#').next().unwrap_or_default();
        let names = line.split("${").skip(1).filter_map(|part| part.split_once('}'));
        found.extend(names.map(|(name, _)| (name.to_owned(), index + 1)));
    }
    found
}

#[derive(Debug, PartialEq)]
enum Token {
    Word(String),
    Text(String),
    Mark(char),
}

fn tokens(text: &str) -> Vec<(Token, usize)> {
    let mut tokens = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let mut rest = line.trim_start();
        while let Some(first) = rest.chars().next() {
            let length = match first {
                '#' => break,
                '"' | '\'' => {
                    let end = rest[1..].find(first).map_or(rest.len() - 1, |end| end);
                    tokens.push((Token::Text(rest[1..1 + end].to_owned()), index + 1));
                    (end + 2).min(rest.len())
                }
                first if first.is_ascii_alphabetic() || first == '_' => {
                    let is_word = |char: char| char.is_ascii_alphanumeric() || char == '_';
                    let end = rest.find(|char| !is_word(char)).unwrap_or(rest.len());
                    tokens.push((Token::Word(rest[..end].to_owned()), index + 1));
                    end
                }
                first => {
                    tokens.push((Token::Mark(first), index + 1));
                    first.len_utf8()
                }
            };
            rest = rest[length..].trim_start();
        }
    }
    tokens
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_found_with_their_lines() {
        let text = "name: \"m\" # x: 1\ninput [\n  { name: \"a\" data_type: TYPE_INT32 dims: [ -1 ] },\n  { name: 'b' }\n]\n\
                    parameters {\n  key: \"tp\"\n  value: { string_value: \"2\" }\n}\nmodel_transaction_policy { decoupled: true }\n";
        let position = |field: &str, entry: Option<&str>, line| KeyPosition {
            field: field.into(),
            entry: entry.map(str::to_owned),
            line,
        };
        let expected = [
            position("name", None, 1),
            position("input", None, 2),
            position("input", Some("a"), 3),
            position("input", Some("b"), 4),
            position("parameters", None, 6),
            position("parameters", Some("tp"), 7),
            position("model_transaction_policy", None, 10),
        ];
        assert_eq!(key_positions(text), expected);
    }

    #[test]
    fn text_that_does_not_parse_causes_no_panic() {
        for text in ["\"", "}}]]", "input [ { name: ", "é: 1", "name"] {
            key_positions(text);
        }
    }

    #[test]
    fn variables_are_found_outside_comments() {
        assert_eq!(variables("a: ${x} # ${y}\nb: \"${z}\""), [("x".to_owned(), 1), ("z".to_owned(), 2)]);
    }
}
