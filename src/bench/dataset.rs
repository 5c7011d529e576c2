//! Prompts from files in several formats, or generated.

use std::path::{Path, PathBuf};

use client::ClientError;
use serde_json::Value;
use text::Tokenizer;

use crate::random::Random;

/// One request to send.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Prompt {
    /// The text; empty if a file of token ids was read without a tokenizer.
    pub text: String,
    /// Its tokens; empty without a tokenizer.
    pub ids: Vec<u32>,
    /// Tokens to generate.
    pub max_tokens: usize,
    /// Its priority, if the file has one: a level over Triton's protocols, a value over OpenAI's.
    pub priority: Option<i64>,
}

/// Source of the prompts.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Source {
    File(PathBuf),
    /// `generated:INPUT:OUTPUT`; each is a length or `LENGTH~DEVIATION`.
    Generated {
        input: Length,
        output: Length,
    },
}

/// A normally distributed length in tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Length {
    mean: f64,
    deviation: f64,
}

impl Length {
    /// A length with this mean and standard deviation.
    pub(crate) fn new(mean: f64, deviation: f64) -> Self {
        Self { mean, deviation }
    }

    fn parse(text: &str) -> Option<Self> {
        let (mean, deviation) = text.split_once('~').unwrap_or((text, "0"));
        let (mean, deviation): (f64, f64) = (mean.parse().ok()?, deviation.parse().ok()?);
        ((1.0..=1e7).contains(&mean) && (0.0..=1e7).contains(&deviation)).then_some(Self { mean, deviation })
    }

    /// A random length, at least 1.
    pub(crate) fn draw(self, random: &mut Random) -> usize {
        random.normal(self.mean, self.deviation).round().max(1.0) as usize
    }
}

impl Source {
    /// Parses the command-line argument.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let Some(lengths) = text.strip_prefix("generated:") else { return Ok(Source::File(text.into())) };
        let parsed =
            lengths.split_once(':').and_then(|(input, output)| Some((Length::parse(input)?, Length::parse(output)?)));
        let (input, output) =
            parsed.ok_or_else(|| format!("`{text}` is not `generated:INPUT[~DEVIATION]:OUTPUT[~DEVIATION]`"))?;
        Ok(Source::Generated { input, output })
    }
}

/// Which prompts of a source are used.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Choice {
    pub count: usize,
    pub seed: u64,
    /// Prompts with more tokens are not used.
    pub max_input_len: usize,
    /// Tokens to request for each word of an example output.
    pub tokens_per_word: f64,
}

/// Bounds of LMDeploy's profile scripts for ShareGPT: least length of prompt and of output, greatest length of the prompt and of both.
const SHARE_GPT_MIN: usize = 4;
const SHARE_GPT_MAX_INPUT: usize = 1024;
const SHARE_GPT_MAX_WHOLE: usize = 2048;

/// Tokens to generate if the file does not specify it.
const DEFAULT_MAX_TOKENS: usize = 128;

/// The prompts of a source.
///
/// # Errors
/// When a file cannot be read, has another format, or contains no usable prompt.
pub(crate) fn load(source: &Source, tokenizer: Option<&Tokenizer>, choice: Choice) -> Result<Vec<Prompt>, ClientError> {
    let path = match source {
        Source::Generated { input, output } => return Ok(generate(*input, *output, tokenizer, choice)),
        Source::File(path) => path,
    };
    let mut random = Random::new(choice.seed);
    let (records, is_fixed) = records(path)?;
    // Like the scripts: a sample of a large file is enough, and saves encoding all of it.
    let enough = (choice.count + choice.count / 5).max(1000);
    let records = if is_fixed { records } else { random.sample(records, enough) };
    let mut prompts = Vec::new();
    for (at, record) in records.iter().enumerate() {
        let wrong = |words: &str| ClientError::Usage(format!("`{}`, request {}: {words}", path.display(), at + 1));
        prompts.extend(prompt(record, tokenizer, choice).map_err(|words| wrong(&words))?);
    }
    let prompts =
        if is_fixed { prompts.into_iter().take(choice.count).collect() } else { random.sample(prompts, choice.count) };
    match prompts.is_empty() {
        true => Err(ClientError::Usage(format!("`{}` holds no request of fitting length", path.display()))),
        false => Ok(prompts),
    }
}

/// The objects of a JSON array or of JSON lines, and whether their order must be kept.
fn records(path: &Path) -> Result<(Vec<Value>, bool), ClientError> {
    let text = crate::files::read(path)?;
    if text.trim_start().starts_with('[')
        && let Ok(records) = serde_json::from_str(&text)
    {
        return Ok((records, false));
    }
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let record = |(number, line): (usize, &str)| {
        serde_json::from_str(line)
            .map_err(|error| ClientError::Usage(format!("{}:{}: {error}", path.display(), number + 1)))
    };
    Ok((lines.map(record).collect::<Result<_, _>>()?, true))
}

/// Converts a record to a request; `None` if a length is out of bounds.
fn prompt(record: &Value, tokenizer: Option<&Tokenizer>, choice: Choice) -> Result<Option<Prompt>, String> {
    let text = |key: &str| record[key].as_str();
    let encode = |text: &str| encode(tokenizer, text);
    if let Some(turns) = record["conversations"].as_array() {
        let [first, second, ..] = turns.as_slice() else { return Ok(None) };
        let turn = |turn: &Value| turn["value"].as_str().unwrap_or_default().to_owned();
        let (question, answer) = (turn(first), turn(second));
        let (ids, max_tokens) = (encode(&question)?, encode(&answer)?.len());
        let fits = ids.len() >= SHARE_GPT_MIN
            && max_tokens >= SHARE_GPT_MIN
            && ids.len() <= SHARE_GPT_MAX_INPUT.min(choice.max_input_len)
            && ids.len() + max_tokens <= SHARE_GPT_MAX_WHOLE;
        return Ok(fits.then_some(Prompt { text: question, ids, max_tokens, ..Prompt::default() }));
    }
    if let (Some(input), Some(instruction), Some(output)) = (text("input"), text("instruction"), text("output")) {
        let question = format!("{input} {instruction}");
        let ids = encode(&question)?;
        let max_tokens = (output.split(' ').count() as f64 * choice.tokens_per_word) as usize;
        let fits = ids.len() <= choice.max_input_len;
        return Ok(fits.then_some(Prompt { text: question, ids, max_tokens: max_tokens.max(1), ..Prompt::default() }));
    }
    let number = |key: &str| record[key].as_u64().map(|number| number as usize);
    let max_tokens = number("max_tokens").or_else(|| number("output_len")).unwrap_or(DEFAULT_MAX_TOKENS).max(1);
    let priority = match &record["priority"] {
        Value::Null => None,
        value => Some(value.as_i64().ok_or("`priority` must be a whole number")?),
    };
    if let Some(ids) = record["prompt_token_ids"].as_array() {
        let id = |id: &Value| {
            id.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or("`prompt_token_ids` must be token ids")
        };
        let ids: Vec<u32> = ids.iter().map(id).collect::<Result<_, _>>()?;
        let text = tokenizer.map(|tokenizer| tokenizer.decode(&ids, true)).unwrap_or_default();
        return Ok((ids.len() <= choice.max_input_len).then_some(Prompt { text, ids, max_tokens, priority }));
    }
    let Some(question) = ["prompt", "text_input", "text", "question"].into_iter().find_map(text) else {
        return Err(
            "expected `conversations`, `input` with `instruction` and `output`, `prompt` or `prompt_token_ids`".into(),
        );
    };
    let ids = encode(question)?;
    Ok((ids.len() <= choice.max_input_len).then(|| Prompt { text: question.to_owned(), ids, max_tokens, priority }))
}

fn encode(tokenizer: Option<&Tokenizer>, text: &str) -> Result<Vec<u32>, String> {
    let tokenizer = tokenizer
        .ok_or("this file holds text, which needs a tokenizer to be measured: name a checkpoint's directory")?;
    tokenizer.encode(text, true).map_err(|error| error.to_string())
}

/// Ids that are ordinary tokens in all common vocabularies.
const GENERATED_IDS: std::ops::Range<usize> = 10..250;

fn generate(input: Length, output: Length, tokenizer: Option<&Tokenizer>, choice: Choice) -> Vec<Prompt> {
    let mut random = Random::new(choice.seed);
    let special = tokenizer.map(Tokenizer::special_ids).unwrap_or_default();
    let vocab = tokenizer.map_or(GENERATED_IDS.end, Tokenizer::vocab_size);
    let ordinary: Vec<u32> =
        (GENERATED_IDS.start.min(vocab / 2)..vocab).map(|id| id as u32).filter(|id| !special.contains(id)).collect();
    let one = |_| {
        let length = input.draw(&mut random).min(choice.max_input_len);
        let mut ids: Vec<u32> = (0..length).map(|_| ordinary[random.below(ordinary.len())]).collect();
        let text = tokenizer.map(|tokenizer| tokenizer.decode(&ids, true)).unwrap_or_default();
        if let Some(encoded) = tokenizer.and_then(|tokenizer| tokenizer.encode(&text, true).ok()) {
            ids = encoded; // The server will encode the text the same way.
        }
        Prompt { text, ids, max_tokens: output.draw(&mut random), ..Prompt::default() }
    };
    (0..choice.count).map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORDS: &str = r#"{"version":"1.0","added_tokens":[],"model":{"type":"WordLevel",
        "vocab":{"a":0,"b":1,"c":2,"d":3,"e":4},"unk_token":"a"},"pre_tokenizer":{"type":"Whitespace"}}"#;

    fn tokenizer() -> Tokenizer {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("tokenizer.json"), WORDS).unwrap();
        Tokenizer::from_dir(dir.path()).unwrap()
    }

    fn read(text: &str, choice: Choice) -> Result<Vec<Prompt>, ClientError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("data");
        std::fs::write(&path, text).unwrap();
        load(&Source::File(path), Some(&tokenizer()), choice)
    }

    const CHOICE: Choice = Choice { count: 10, seed: 0, max_input_len: 100, tokens_per_word: 1.3 };

    #[test]
    fn share_gpt_uses_the_first_two_turns_of_valid_length() {
        let text = r#"[{"conversations": [{"value": "a b c d e"}, {"value": "a b c d"}, {"value": "a"}]},
            {"conversations": [{"value": "a b c"}, {"value": "a b c d"}]}, {"conversations": [{"value": "a b c d e"}]}]"#;
        let prompts = read(text, CHOICE).unwrap();
        assert_eq!(
            prompts,
            [Prompt { text: "a b c d e".into(), ids: vec![0, 1, 2, 3, 4], max_tokens: 4, priority: None }]
        );
    }

    #[test]
    fn the_length_of_a_summary_follows_from_the_words_of_its_example() {
        let text = r#"[{"input": "a b", "instruction": "c", "output": "a b c d e a b c d e"}]"#;
        let prompts = read(text, CHOICE).unwrap();
        assert_eq!(prompts, [Prompt { text: "a b c".into(), ids: vec![0, 1, 2], max_tokens: 13, priority: None }]);
        assert!(read(text, Choice { max_input_len: 2, ..CHOICE }).is_err());
    }

    #[test]
    fn json_lines_keep_their_order() {
        let text = "{\"prompt\": \"b\", \"max_tokens\": 3}\n\n{\"prompt_token_ids\": [4, 3]}\n";
        let prompts = read(text, CHOICE).unwrap();
        assert_eq!((prompts[0].max_tokens, &prompts[0].ids[..]), (3, &[1][..]));
        assert_eq!((prompts[1].max_tokens, &prompts[1].text[..]), (DEFAULT_MAX_TOKENS, "e d"));
    }

    #[test]
    fn another_format_is_an_error_with_its_position() {
        let error = read("{\"prompt\": \"b\"}\n{\"x\": 1}\n", CHOICE).unwrap_err().to_string();
        assert!(error.contains("request 2: expected `conversations`"), "{error}");
        let error = read("{\"prompt\": \"b\"}\nnot json\n", CHOICE).unwrap_err().to_string();
        assert!(error.contains("data:2: "), "{error}");
    }

    #[test]
    fn generated_prompts_have_their_lengths() {
        let source = Source::parse("generated:20:7").unwrap();
        let prompts = load(&source, Some(&tokenizer()), CHOICE).unwrap();
        assert!(prompts.iter().all(|prompt| prompt.ids.len() == 20 && prompt.max_tokens == 7));
        assert_ne!(prompts[0].ids, prompts[1].ids);
        assert!(Source::parse("generated:20").is_err() && Source::parse("generated:0:1").is_err());
        assert_eq!(Source::parse("file").unwrap(), Source::File("file".into()));
    }
}
