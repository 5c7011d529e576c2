//! The messages of Harmony, the format of gpt-oss: `<|channel|>NAME to=RECIPIENT<|message|>TEXT<|end|>`.

use crate::TurnStart;

/// The longest header, in bytes.
pub(crate) const MAX_HEADER: usize = 512;

/// What a message is.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Message {
    Reasoning,
    Content,
    /// A call of the tool.
    Call(String),
}

/// Reads the header of a message, without `<|start|>` and `<|message|>`.
pub(crate) fn read(header: &str) -> Message {
    let channel = header.rsplit("<|channel|>").next().unwrap_or(header).split_whitespace().next().unwrap_or_default();
    let channel = channel.split('<').next().unwrap_or_default();
    let recipient = header.split("to=").nth(1).and_then(|rest| rest.split([' ', '<', '\n']).next());
    match recipient {
        Some(recipient) if recipient.starts_with("functions.") => {
            Message::Call(recipient["functions.".len()..].to_owned())
        }
        // Tools that run beside the model, such as `python`, are called in the channel of analysis.
        _ if channel == "analysis" => Message::Reasoning,
        _ => Message::Content,
    }
}

/// See `ChatFormat::turn_start`.
pub(crate) fn turn_start(prompt_tail: &str) -> TurnStart {
    let Some((_, turn)) = prompt_tail.rsplit_once("<|start|>assistant") else { return TurnStart::Fresh };
    match turn.rsplit_once("<|message|>") {
        Some((header, text)) if !["<|end|>", "<|call|>", "<|return|>"].iter().any(|end| text.contains(end)) => {
            match read(header) {
                Message::Reasoning => TurnStart::Thinking,
                _ => TurnStart::Content,
            }
        }
        _ => TurnStart::Fresh,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_names_the_channel_and_the_recipient() {
        for (header, message) in [
            ("<|channel|>analysis", Message::Reasoning),
            ("assistant<|channel|>final", Message::Content),
            ("<|channel|>commentary", Message::Content),
            ("<|channel|>commentary to=functions.f <|constrain|>json", Message::Call("f".into())),
            ("<|channel|>commentary to=functions.f<|constrain|>json", Message::Call("f".into())),
            ("assistant to=functions.a.b<|channel|>analysis json", Message::Call("a.b".into())),
            ("<|channel|>analysis to=python code", Message::Reasoning),
            ("", Message::Content),
        ] {
            assert_eq!(read(header), message, "{header}");
        }
    }

    #[test]
    fn the_prompt_tells_which_message_is_open() {
        for (tail, start) in [
            ("<|end|><|start|>assistant", TurnStart::Fresh),
            ("<|start|>assistant<|channel|>analysis<|message|>so", TurnStart::Thinking),
            ("<|start|>assistant<|channel|>final<|message|>", TurnStart::Content),
        ] {
            assert_eq!(turn_start(tail), start, "{tail}");
        }
    }
}
