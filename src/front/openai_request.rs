//! What a client of OpenAI's protocol asks.

use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value};
use serving::{Limit, Limits};

use crate::openai::ApiError;

/// Tokens to generate when the request does not say: OpenAI's own number for completions; chats have no bound there.
const COMPLETION_TOKENS: u32 = 16;
const CHAT_TOKENS: u32 = 512;
/// Most choices of a request.
const MAX_CHOICES: usize = 128;
/// Most prompts of a request.
const MAX_PROMPTS: usize = 1024;
/// Most stop strings of a request.
const MAX_STOPS: usize = 64;

/// Most values in a body, all levels together.
const MAX_VALUES: usize = 1 << 20;
/// What a value takes in a tree of them, its name included; the text of both aside.
const VALUE_BYTES: usize = 192;

/// What is to be completed.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Prompts {
    Texts(Vec<String>),
    Messages(Vec<Value>),
}

impl Default for Prompts {
    fn default() -> Self {
        Self::Texts(Vec::new())
    }
}

/// What a body takes at most as a tree of values.
///
/// # Errors
/// When there are more of them than any request has.
pub(crate) fn tree_bytes(body: &[u8]) -> Result<usize, ApiError> {
    let (mut count, mut in_string, mut is_escaped) = (1, false, false);
    for byte in body {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = in_string,
            b'"' => in_string = !in_string,
            b',' | b'[' | b'{' if !in_string => count += 1,
            _ => {}
        }
    }
    if count > MAX_VALUES {
        let words = format!("The body holds {count} values, at most {MAX_VALUES} are allowed.");
        return Err(ApiError::of_field("body", words));
    }
    // The texts are in the body, and again in the tree.
    Ok(count * VALUE_BYTES + body.len())
}

/// A request for completions.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Asked {
    pub is_chat: bool,
    pub model: String,
    pub prompts: Prompts,
    pub n: usize,
    pub stream: bool,
    pub include_usage: bool,
    pub max_tokens: u32,
    pub temperature: f64,
    pub top_p: f64,
    pub top_k: Option<u32>,
    pub seed: Option<u64>,
    /// In the place of a seed that was not given.
    pub drawn_seed: u64,
    pub presence_penalty: Option<f64>,
    pub frequency_penalty: Option<f64>,
    pub repetition_penalty: Option<f64>,
    pub min_tokens: Option<u32>,
    pub stop: Vec<String>,
    pub logprobs: bool,
    pub echo: bool,
    pub ignore_eos: bool,
}

impl Asked {
    /// Reads a request's body.
    ///
    /// # Errors
    /// When it is no JSON object, a field cannot be, or one holds more than `limits` allow.
    pub fn read(body: &[u8], is_chat: bool, limits: &Limits) -> Result<Self, ApiError> {
        let no_json =
            |error: serde_json::Error| ApiError::of_field("body", format!("The body is not a JSON object: {error}."));
        let mut fields = Fields(serde_json::from_slice(body).map_err(no_json)?);
        fields.refuse_unsupported(is_chat)?;
        let n = fields.whole("n", 1, MAX_CHOICES as u64)?.unwrap_or(1) as usize;
        let length = |name| fields.whole(name, 1, u64::from(u32::MAX / 2));
        let max_tokens = length("max_completion_tokens")?.or(length("max_tokens")?);
        let default = if is_chat { CHAT_TOKENS } else { COMPLETION_TOKENS };
        let model = fields.text("model")?.ok_or_else(|| ApiError::of_field("model", "`model` is missing."))?;
        check(limits, Limit::NameBytes, "model", model.len())?;
        Ok(Self {
            is_chat,
            model: model.to_owned(),
            prompts: if is_chat { fields.messages(limits)? } else { fields.prompts(limits)? },
            n,
            stream: fields.flag("stream")?.unwrap_or(false),
            include_usage: fields["stream_options"]["include_usage"].as_bool().unwrap_or(false),
            max_tokens: max_tokens.map_or(default, |length| length as u32),
            temperature: fields.number("temperature", 0.0, 2.0)?.unwrap_or(1.0),
            top_p: fields.number("top_p", 0.0, 1.0)?.filter(|top_p| *top_p > 0.0).unwrap_or(1.0),
            top_k: fields.whole("top_k", 0, u64::from(u32::MAX / 2))?.map(|top_k| top_k as u32),
            seed: fields.seed()?,
            drawn_seed: drawn_seed(),
            presence_penalty: fields.number("presence_penalty", -2.0, 2.0)?,
            frequency_penalty: fields.number("frequency_penalty", -2.0, 2.0)?,
            repetition_penalty: fields.number("repetition_penalty", 0.0, 10.0)?,
            min_tokens: fields.whole("min_tokens", 0, u64::from(u32::MAX / 2))?.map(|tokens| tokens as u32),
            stop: fields.stop(limits)?,
            logprobs: fields.logprobs(is_chat)?,
            echo: !is_chat && fields.flag("echo")?.unwrap_or(false),
            ignore_eos: fields.flag("ignore_eos")?.unwrap_or(false),
        })
    }
}

/// Another one for each request.
fn drawn_seed() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    // With room for the choices' numbers in the narrowest input that a model has for it.
    (now.as_nanos() as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 34
}

/// As [`Limits::check`], for a field.
fn check(limits: &Limits, limit: Limit, field: &'static str, found: usize) -> Result<(), ApiError> {
    limits.check(limit, found).map_err(|error| ApiError::of_field(field, error.message))
}

/// The fields of a body; null counts as absent.
struct Fields(Map<String, Value>);

impl std::ops::Index<&str> for Fields {
    type Output = Value;

    fn index(&self, name: &str) -> &Value {
        self.0.get(name).unwrap_or(&Value::Null)
    }
}

impl Fields {
    fn given(&self, name: &str) -> Option<&Value> {
        Some(&self[name]).filter(|value| !value.is_null())
    }

    fn text(&self, name: &'static str) -> Result<Option<&str>, ApiError> {
        let wrong = || ApiError::of_field(name, format!("`{name}` must be a string."));
        self.given(name).map(|value| value.as_str().ok_or_else(wrong)).transpose()
    }

    fn flag(&self, name: &'static str) -> Result<Option<bool>, ApiError> {
        let wrong = || ApiError::of_field(name, format!("`{name}` must be true or false."));
        self.given(name).map(|value| value.as_bool().ok_or_else(wrong)).transpose()
    }

    fn number(&self, name: &'static str, least: f64, most: f64) -> Result<Option<f64>, ApiError> {
        let fits = |number: &f64| (least..=most).contains(number);
        let wrong = || {
            ApiError::of_field(name, format!("`{name}` is {}, expected a number from {least} to {most}.", self[name]))
        };
        self.given(name).map(|value| value.as_f64().filter(fits).ok_or_else(wrong)).transpose()
    }

    fn whole(&self, name: &'static str, least: u64, most: u64) -> Result<Option<u64>, ApiError> {
        let fits = |number: &u64| (least..=most).contains(number);
        let wrong = || {
            ApiError::of_field(
                name,
                format!("`{name}` is {}, expected a whole number from {least} to {most}.", self[name]),
            )
        };
        self.given(name).map(|value| value.as_u64().filter(fits).ok_or_else(wrong)).transpose()
    }

    /// Any whole number, negative ones too.
    fn seed(&self) -> Result<Option<u64>, ApiError> {
        let wrong = || ApiError::of_field("seed", format!("`seed` is {}, expected a whole number.", self["seed"]));
        let number = |value: &Value| value.as_u64().or_else(|| value.as_i64().map(i64::cast_unsigned));
        self.given("seed").map(|value| number(value).ok_or_else(wrong)).transpose()
    }

    /// The prompts, which are taken out of the fields.
    fn prompts(&mut self, limits: &Limits) -> Result<Prompts, ApiError> {
        let wrong = |words: &str| ApiError::of_field("prompt", format!("`prompt` {words}."));
        let texts = match self.0.remove("prompt").filter(|value| !value.is_null()) {
            None => return Err(wrong("is missing")),
            Some(Value::String(text)) => vec![text],
            Some(Value::Array(items)) => {
                let text = |item| match item {
                    Value::String(text) => Some(text),
                    _ => None,
                };
                let texts: Option<Vec<String>> = items.into_iter().map(text).collect();
                texts.ok_or_else(|| {
                    wrong("must be text or a list of texts; token ids are taken by models of token ids, at /v2")
                })?
            }
            Some(_) => return Err(wrong("must be text or a list of texts")),
        };
        if limits.get(Limit::PromptBytes) > 0 {
            texts.iter().try_for_each(|text| check(limits, Limit::PromptBytes, "prompt", text.len()))?;
        }
        match texts.len() {
            1..=MAX_PROMPTS => Ok(Prompts::Texts(texts)),
            count => Err(wrong(&format!("holds {count} texts, expected 1 to {MAX_PROMPTS}"))),
        }
    }

    /// The messages, which are taken out of the fields. Content in parts becomes text; parts that are not text are refused.
    /// Text alone is what the user says, as LMDeploy's clients send it.
    fn messages(&mut self, limits: &Limits) -> Result<Prompts, ApiError> {
        let wrong = |words: String| ApiError::of_field("messages", words);
        let messages = match self.0.remove("messages") {
            Some(Value::String(text)) => {
                return Ok(Prompts::Messages(vec![serde_json::json!({"role": "user", "content": text})]));
            }
            Some(Value::Array(messages)) if !messages.is_empty() => messages,
            _ => return Err(wrong("`messages` must be a list of at least one message.".to_owned())),
        };
        check(limits, Limit::Messages, "messages", messages.len())?;
        let message = |(at, mut message): (usize, Value)| {
            if !message["role"].is_string() {
                return Err(wrong(format!("`messages[{at}].role` must be a string.")));
            }
            if let Some(parts) = message["content"].as_array() {
                let text: Option<String> = parts.iter().map(|part| part["text"].as_str()).collect();
                let text = text.ok_or_else(|| {
                    wrong(format!("`messages[{at}].content` holds more than text; models read text only."))
                })?;
                message["content"] = text.into();
            }
            Ok(message)
        };
        messages.into_iter().enumerate().map(message).collect::<Result<_, _>>().map(Prompts::Messages)
    }

    fn stop(&self, limits: &Limits) -> Result<Vec<String>, ApiError> {
        let wrong =
            || ApiError::of_field("stop", format!("`stop` must be text or a list of at most {MAX_STOPS} texts."));
        let stops = match self.given("stop") {
            None => Vec::new(),
            Some(Value::String(text)) => vec![text.clone()],
            Some(Value::Array(items)) => {
                items.iter().map(|item| item.as_str().map(str::to_owned)).collect::<Option<_>>().ok_or_else(wrong)?
            }
            Some(_) => return Err(wrong()),
        };
        if stops.len() > MAX_STOPS {
            return Err(wrong());
        }
        stops.iter().try_for_each(|stop: &String| check(limits, Limit::WordBytes, "stop", stop.len()))?;
        Ok(stops.into_iter().filter(|stop: &String| !stop.is_empty()).collect())
    }

    /// Whether log probabilities of the chosen tokens are requested; those of other tokens are not available.
    fn logprobs(&self, is_chat: bool) -> Result<bool, ApiError> {
        let none = "only the chosen tokens' probabilities are told";
        if is_chat {
            if self.whole("top_logprobs", 0, 20)?.is_some_and(|count| count > 0) {
                return Err(ApiError::of_field(
                    "top_logprobs",
                    format!("`top_logprobs` must be 0 or left out: {none}."),
                ));
            }
            return Ok(self.flag("logprobs")?.unwrap_or(false));
        }
        match self.whole("logprobs", 0, 5)? {
            Some(2..) => Err(ApiError::of_field("logprobs", format!("`logprobs` must be 0 or 1: {none}."))),
            asked => Ok(asked.is_some()),
        }
    }

    /// What would change the answer if it were ignored.
    fn refuse_unsupported(&self, is_chat: bool) -> Result<(), ApiError> {
        let refuse =
            |name: &'static str, why: &str| Err(ApiError::of_field(name, format!("`{name}` is not supported: {why}.")));
        if self.given("logit_bias").and_then(Value::as_object).is_some_and(|bias| !bias.is_empty()) {
            return refuse("logit_bias", "send `embedding_bias_words` to /v2/models/ensemble/generate");
        }
        if self.given("response_format").is_some_and(|format| format["type"] != "text") {
            return refuse("response_format", "answers are plain text");
        }
        if self.given("tools").and_then(Value::as_array).is_some_and(|tools| !tools.is_empty()) {
            return refuse("tools", "models answer with text alone");
        }
        if !is_chat && self.given("suffix").is_some() {
            return refuse("suffix", "models write behind a prompt, not within one");
        }
        let n = self.whole("n", 1, MAX_CHOICES as u64)?.unwrap_or(1);
        if self.whole("best_of", 1, 1024)?.is_some_and(|best_of| best_of != n) {
            return refuse("best_of", "every choice is returned; leave it out or make it `n`");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: &str, is_chat: bool) -> Result<Asked, String> {
        Asked::read(body.as_bytes(), is_chat, &Limits::default())
            .map_err(|error| error.json()["error"]["message"].to_string())
    }

    #[test]
    fn defaults_are_openais() {
        let asked = read(r#"{"model": "m", "prompt": "a", "top_p": null}"#, false).unwrap();
        assert_eq!((asked.max_tokens, asked.n, asked.temperature, asked.top_p), (16, 1, 1.0, 1.0));
        assert_eq!(asked.prompts, Prompts::Texts(vec!["a".into()]));
        assert!(!asked.stream && !asked.include_usage && !asked.logprobs && asked.stop.is_empty());
    }

    #[test]
    fn every_number_that_cannot_be_is_refused_with_its_field() {
        let whole = ["n", "max_tokens", "max_completion_tokens", "top_k", "min_tokens", "logprobs", "best_of"];
        let real = ["temperature", "top_p", "presence_penalty", "frequency_penalty", "repetition_penalty"];
        for field in whole.into_iter().chain(real).chain(["seed"]) {
            for value in ["-9223372036854775808", "2147483648", "1e300", "-1", "18446744073709551616", "\"1\"", "[1]"] {
                let is_fine = match field {
                    "seed" => ["-9223372036854775808", "2147483648", "-1"].contains(&value),
                    "presence_penalty" | "frequency_penalty" => value == "-1",
                    _ => false,
                };
                let asked = read(&format!(r#"{{"model": "m", "prompt": "a", "{field}": {value}}}"#), false);
                match asked {
                    Ok(_) => assert!(is_fine, "{field}: {value}"),
                    Err(error) => {
                        assert!(!is_fine && error.contains(&format!("`{field}`")), "{field}: {value}: {error}")
                    }
                }
            }
            for value in ["NaN", "Infinity", "1e999"] {
                let asked = read(&format!(r#"{{"model": "m", "prompt": "a", "{field}": {value}}}"#), false);
                assert!(asked.unwrap_err().contains("not a JSON object"), "{field}: {value}");
            }
        }
    }

    #[test]
    fn lists_and_names_have_limits() {
        let messages = vec![r#"{"role": "user", "content": ""}"#; 16385].join(",");
        let error = read(&format!(r#"{{"model": "m", "messages": [{messages}]}}"#), true).unwrap_err();
        assert!(error.contains("16385 messages"), "{error}");
        let error = read(&format!(r#"{{"model": "{}", "prompt": "a"}}"#, "m".repeat(5000)), false).unwrap_err();
        assert!(error.contains("5000 bytes of name"), "{error}");
        let stop = "s".repeat(5000);
        let error = read(&format!(r#"{{"model": "m", "prompt": "a", "stop": ["{stop}"]}}"#), false).unwrap_err();
        assert!(error.contains("5000 bytes of one word"), "{error}");
    }

    #[test]
    fn values_are_counted_outside_of_strings() {
        let bytes =
            |body: &str| tree_bytes(body.as_bytes()).map_err(|error| error.json()["error"]["message"].to_string());
        let body = r#"{"a": "[,,{\",,", "b": [1, 2]}"#;
        assert_eq!(bytes(body), Ok(5 * VALUE_BYTES + body.len()));
        assert!(bytes(&format!("[{}]", "0,".repeat(2_000_000))).unwrap_err().contains("values, at most 1048576"));
    }

    #[test]
    fn content_in_parts_becomes_text() {
        let body = r#"{"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]}"#;
        let Prompts::Messages(messages) = read(body, true).unwrap().prompts else { panic!("messages") };
        assert_eq!(messages[0]["content"], "ab");
        let whole = read(r#"{"model": "m", "messages": "ab"}"#, true).unwrap().prompts;
        assert_eq!(whole, Prompts::Messages(vec![serde_json::json!({"role": "user", "content": "ab"})]));
        let image = body.replace(r#"{"type": "text", "text": "b"}"#, r#"{"type": "image_url", "image_url": {}}"#);
        assert!(read(&image, true).unwrap_err().contains("models read text only"));
    }

    #[test]
    fn fields_that_cannot_be_are_named() {
        for (fields, words) in [
            (r#""temperature": 3"#, "`temperature` is 3, expected a number from 0 to 2"),
            (r#""n": 0"#, "`n` is 0"),
            (r#""max_tokens": 0"#, "`max_tokens` is 0"),
            (r#""stop": 5"#, "`stop` must be text"),
            (r#""logprobs": 3"#, "`logprobs` must be 0 or 1"),
            (r#""logit_bias": {"5": 1}"#, "`logit_bias` is not supported"),
            (r#""best_of": 3"#, "`best_of` is not supported"),
            (r#""stream": "yes""#, "`stream` must be true or false"),
        ] {
            let error = read(&format!(r#"{{"model": "m", "prompt": "a", {fields}}}"#), false).unwrap_err();
            assert!(error.contains(words), "{fields}: {error}");
        }
        assert!(read(r#"{"prompt": "a"}"#, false).unwrap_err().contains("`model` is missing"));
        assert!(read(r#"{"model": "m", "prompt": [1, 2]}"#, false).unwrap_err().contains("token ids"));
        assert!(read("[]", false).unwrap_err().contains("not a JSON object"));
    }
}
