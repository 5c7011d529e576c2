use std::path::{Path, PathBuf};

use minijinja::value::{Kwargs, Value};
use minijinja::{Environment, Error, ErrorKind};
use serde::Serialize;
use serde_json::ser::Formatter;

use crate::TextError;
use crate::files::Files;

const NAME: &str = "chat";

/// Instructions that a template may execute for one conversation, and in addition for each of its messages; a few hundred are
/// usual. The limit takes a second at most.
const FUEL: u64 = 20_000_000;
const FUEL_PER_MESSAGE: u64 = 1000;

/// Longest prompt that a template may write.
const MAX_PROMPT_BYTES: usize = 128 << 20;

/// A checkpoint's chat template: renders the messages of a conversation as a prompt.
///
/// Templates are Jinja with the settings of `apply_chat_template` of transformers: trimmed blocks, loop controls, `tojson` with
/// Python's spacing, `raise_exception`, `strftime_now`, methods of Python's strings, lists and dictionaries.
pub struct ChatTemplate {
    environment: Environment<'static>,
    special: Vec<(&'static str, String)>,
    path: PathBuf,
}

impl ChatTemplate {
    /// The template of a checkpoint directory: `chat_template.jinja`, else `chat_template` of `tokenizer_config.json` (of a list,
    /// the one named `default`); `None` if there is neither.
    ///
    /// # Errors
    /// When a file cannot be read, or the template is not valid Jinja.
    pub fn from_dir(dir: &Path) -> Result<Option<Self>, TextError> {
        let files = Files::of(dir)?;
        let path = dir.join("chat_template.jinja");
        let (path, source) = match std::fs::read_to_string(&path) {
            Ok(source) => (path, Some(source)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                (dir.join("tokenizer_config.json"), in_config(&files.config))
            }
            Err(source) => return Err(TextError::Read { path, source }),
        };
        source.map(|source| Self::new(source, files.named_tokens(), path)).transpose()
    }

    fn new(source: String, special: Vec<(&'static str, String)>, path: PathBuf) -> Result<Self, TextError> {
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment.add_filter("tojson", to_json);
        environment.add_template_owned(NAME, source).map_err(|error| wrong(&path, &error))?;
        Ok(Self { environment, special, path })
    }

    /// The prompt of a conversation: `messages` are maps with `role` and `content`, as clients of OpenAI's API send them.
    /// `add_generation_prompt` appends the start of the model's turn. The prompt contains its special tokens, so encode it
    /// without adding more.
    ///
    /// # Errors
    /// When the template rejects the conversation, with the template's message, or exceeds the limits for steps or length.
    pub fn render<M: Serialize>(&self, messages: &[M], add_generation_prompt: bool) -> Result<String, TextError> {
        let mut names: Vec<(&str, Value)> =
            self.special.iter().map(|(name, token)| (*name, Value::from(token))).collect();
        names.push(("messages", Value::from_serialize(messages)));
        names.push(("add_generation_prompt", Value::from(add_generation_prompt)));
        let mut environment = self.environment.clone();
        environment.set_fuel(Some(FUEL + FUEL_PER_MESSAGE * messages.len() as u64));
        let template = environment.get_template(NAME).expect("the template was added");
        let mut prompt = Prompt::default();
        template.render_captured_to(Value::from_iter(names), &mut prompt).map_err(|error| match error.kind() {
            ErrorKind::OutOfFuel => self.too_much("it takes too many steps for this conversation"),
            ErrorKind::WriteFailure => self.too_much(&format!("the prompt has more than {MAX_PROMPT_BYTES} bytes")),
            _ => wrong(&self.path, &error),
        })?;
        Ok(String::from_utf8(prompt.0).expect("templates write strings"))
    }

    fn too_much(&self, reason: &str) -> TextError {
        TextError::ChatTemplate { path: self.path.clone(), reason: reason.to_owned() }
    }
}

/// The prompt while the template writes it.
#[derive(Default)]
struct Prompt(Vec<u8>);

impl std::io::Write for Prompt {
    fn write(&mut self, piece: &[u8]) -> std::io::Result<usize> {
        if piece.len() > MAX_PROMPT_BYTES - self.0.len() {
            return Err(std::io::ErrorKind::FileTooLarge.into());
        }
        self.0.extend_from_slice(piece);
        Ok(piece.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// `chat_template` of `tokenizer_config.json`.
fn in_config(config: &serde_json::Value) -> Option<String> {
    let template = config.get("chat_template")?;
    let named = || {
        let templates = template.as_array()?;
        templates.iter().find(|one| one["name"] == "default")?["template"].as_str()
    };
    template.as_str().or_else(named).map(str::to_owned)
}

fn wrong(path: &Path, error: &Error) -> TextError {
    let place = error.line().map(|line| format!(" in its line {line}")).unwrap_or_default();
    let reason = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    TextError::ChatTemplate { path: path.to_owned(), reason: format!("{reason}{place}") }
}

fn raise_exception(words: String) -> Result<String, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, words))
}

/// The date in UTC. Templates use days and months, so the time zone seldom matters.
fn strftime_now(format: String) -> Result<String, Error> {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    crate::date::strftime(now.as_secs(), &format).map_err(|directive| {
        Error::new(ErrorKind::InvalidOperation, format!("strftime_now does not know `%{directive}`"))
    })
}

/// JSON in the form of Python's `json.dumps(value, ensure_ascii=False)`: no HTML escapes, a space after `,` and `:`.
fn to_json(value: Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let failed = |error: serde_json::Error| Error::new(ErrorKind::BadSerialization, error.to_string());
    let mut json = Vec::new();
    match indent {
        Some(width) => {
            let indent = " ".repeat(width);
            let pretty = serde_json::ser::PrettyFormatter::with_indent(indent.as_bytes());
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut json, pretty)).map_err(failed)?;
        }
        None => value.serialize(&mut serde_json::Serializer::with_formatter(&mut json, Spaced)).map_err(failed)?,
    }
    Ok(Value::from_safe_string(String::from_utf8(json).expect("JSON is UTF-8")))
}

/// JSON on one line, with a space after `,` and `:`.
struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, writer: &mut W) -> std::io::Result<()> {
        writer.write_all(b": ")
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const LLAMA2: &str = "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}\
        {% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}\
        {% set system_message = false %}{% endif %}{% for message in loop_messages %}\
        {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
        {{ raise_exception('roles must alternate') }}{% endif %}\
        {% if loop.index0 == 0 and system_message != false %}\
        {% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}\
        {% else %}{% set content = message['content'] %}{% endif %}\
        {% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}\
        {% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}";

    #[test]
    fn work_and_prompt_of_a_template_are_bounded() {
        let render = |source: &str, messages: &[serde_json::Value]| {
            template(json!({"chat_template": source})).unwrap().unwrap().render(messages, true)
        };
        let many: Vec<_> = (0..2000).map(|_| json!({"role": "user", "content": "a"})).collect();
        let plain = "{% for m in messages %}{{ m['role'] + m['content'] }}{% endfor %}";
        assert_eq!(render(plain, &many).unwrap().len(), 10_000);
        let nested = "{% for a in messages %}{% for b in messages %}{% for c in messages %}{{ '' }}{% endfor %}{% endfor %}{% endfor %}";
        let words = render(nested, &many).unwrap_err().to_string();
        assert!(words.contains("it takes too many steps for this conversation"), "{words}");
        let wide = "{% for a in messages %}{{ messages[0]['content'] }}{% endfor %}";
        let mut long = many;
        long[0] = json!({"role": "user", "content": "a".repeat(100_000)});
        let words = render(wide, &long).unwrap_err().to_string();
        assert!(words.contains("the prompt has more than 134217728 bytes"), "{words}");
    }

    fn template(config: serde_json::Value) -> Result<Option<ChatTemplate>, TextError> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("tokenizer_config.json"), config.to_string()).unwrap();
        ChatTemplate::from_dir(dir.path())
    }

    fn turns(turns: &[(&str, &str)]) -> Vec<serde_json::Value> {
        turns.iter().map(|(role, content)| json!({"role": role, "content": content})).collect()
    }

    #[test]
    fn a_conversation_becomes_the_prompt_of_its_template() {
        let config = json!({"chat_template": LLAMA2, "bos_token": "<s>", "eos_token": {"content": "</s>"}});
        let template = template(config).unwrap().unwrap();
        let messages = turns(&[("system", "Be short."), ("user", " Hi "), ("assistant", "Yes?"), ("user", "Bye")]);
        assert_eq!(
            template.render(&messages, true).unwrap(),
            "<s>[INST] <<SYS>>\nBe short.\n<</SYS>>\n\n Hi [/INST] Yes? </s><s>[INST] Bye [/INST]"
        );
        let message = template.render(&turns(&[("assistant", "no")]), true).unwrap_err().to_string();
        assert!(message.contains("roles must alternate"), "{message}");
    }

    #[test]
    fn blocks_are_trimmed_and_python_is_understood() {
        let source = "{% for message in messages %}\n    {% if message.role == 'tool' %}\n{% continue %}\n    {% endif %}\n\
                      {{ message.content | trim }}{{ message.items() | list | length }}\n{% endfor %}\n\
                      {%- if add_generation_prompt %}\nA:{% endif %}";
        let template = template(json!({"chat_template": [{"name": "default", "template": source}]})).unwrap().unwrap();
        assert_eq!(template.render(&turns(&[("tool", "x"), ("user", " y ")]), true).unwrap(), "y2\nA:");
        assert_eq!(template.render(&turns(&[("user", "é")]), false).unwrap(), "é2\n");
    }

    #[test]
    fn json_is_written_as_python_writes_it() {
        let template = template(json!({"chat_template": "{{ messages[0].content | tojson }}"})).unwrap().unwrap();
        let message = json!({"content": {"a": ["<é>", 1, null], "b": true}});
        assert_eq!(template.render(&[message], false).unwrap(), r#"{"a": ["<é>", 1, null], "b": true}"#);
    }

    #[test]
    fn a_checkpoint_may_have_none_and_a_broken_one_is_named() {
        assert!(template(json!({})).unwrap().is_none());
        let message = template(json!({"chat_template": "{% if %}"})).err().unwrap().to_string();
        assert!(message.contains("tokenizer_config.json") && message.contains("line 1"), "{message}");
    }

    #[test]
    fn a_file_of_its_own_comes_first() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("tokenizer_config.json"), r#"{"chat_template": "old"}"#).unwrap();
        std::fs::write(dir.path().join("chat_template.jinja"), "new {{ strftime_now('%Y') | length }}").unwrap();
        let template = ChatTemplate::from_dir(dir.path()).unwrap().unwrap();
        assert_eq!(template.render::<()>(&[], false).unwrap(), "new 4");
    }
}
