//! Syntax errors of a configuration: their position, and advice.

use prost_reflect::text_format::ParseError;

use crate::proto;

/// A syntax error. Lines and columns count from 1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SyntaxError {
    pub line: usize,
    pub column: usize,
    pub message: String,
}

/// Maps the parser's error in the prepared text to one in `text`, which the user wrote. `inserted` are the offsets of bytes in the
/// prepared text that are not in `text`.
pub(crate) fn explain(text: &str, inserted: &[usize], error: &ParseError) -> SyntaxError {
    use miette::Diagnostic as _;
    let label = error.labels().and_then(|mut labels| labels.next());
    let offset = match label {
        Some(label) => label.offset() - inserted.iter().filter(|&&insert| insert < label.offset()).count(),
        None => text.trim_end().len(),
    };
    let before = &text.as_bytes()[..offset.min(text.len())];
    let line_start = before.iter().rposition(|&byte| byte == b'\n').map_or(0, |newline| newline + 1);
    SyntaxError {
        line: before.iter().filter(|&&byte| byte == b'\n').count() + 1,
        column: String::from_utf8_lossy(&before[line_start..]).chars().count() + 1,
        message: advise(&error.to_string()),
    }
}

/// The parser's message, with advice.
fn advise(message: &str) -> String {
    let quoted: Vec<&str> = message.split('\'').skip(1).step_by(2).collect();
    match quoted[..] {
        [field, owner] if message.starts_with("field ") => unknown_name("field", field, owner, &field_names(owner)),
        [value, owner] if message.starts_with("value ") => unknown_name("value", value, owner, &value_names(owner)),
        [field] if message.ends_with("is already set") => format!("`{field}` is set twice; keep one of them"),
        [choice] if message.contains("oneof") => {
            format!("a second choice for `{choice}`; keep one of {}", choice_names(choice).join(", "))
        }
        _ if message.contains("end of input") => format!("{message}; a closing `}}` or `]` may be missing"),
        _ => message.to_owned(),
    }
}

fn unknown_name(kind: &str, name: &str, owner: &str, known: &[String]) -> String {
    let owner = owner.rsplit('.').next().unwrap_or(owner);
    let nearest = known.iter().map(|known| (distance(name, known), known)).min();
    match nearest {
        Some((distance, known)) if distance <= 2.max(name.len() / 3) => {
            format!("`{owner}` has no {kind} `{name}`; did you mean `{known}`?")
        }
        _ => format!("`{owner}` has no {kind} `{name}`; it has {}", known.join(", ")),
    }
}

fn field_names(message: &str) -> Vec<String> {
    let message = proto::model_config_descriptor().parent_pool().get_message_by_name(message);
    message.map(|message| message.fields().map(|field| field.name().to_owned()).collect()).unwrap_or_default()
}

fn value_names(name: &str) -> Vec<String> {
    let values = proto::model_config_descriptor().parent_pool().get_enum_by_name(name);
    values.map(|values| values.values().map(|value| value.name().to_owned()).collect()).unwrap_or_default()
}

fn choice_names(choice: &str) -> Vec<String> {
    let pool = proto::model_config_descriptor().parent_pool().clone();
    let choices = pool.all_messages().flat_map(|message| message.oneofs().collect::<Vec<_>>());
    let found = choices.into_iter().find(|oneof| oneof.name() == choice || oneof.full_name() == choice);
    found.map(|oneof| oneof.fields().map(|field| field.name().to_owned()).collect()).unwrap_or_default()
}

/// Levenshtein distance.
fn distance(left: &str, right: &str) -> usize {
    let right: Vec<char> = right.chars().collect();
    let mut row: Vec<usize> = (0..=right.len()).collect();
    for (i, a) in left.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, &b) in right.iter().enumerate() {
            let substituted = diagonal + usize::from(a != b);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[right.len()]
}
