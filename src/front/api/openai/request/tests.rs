use std::fs;
use std::path::Path;

use super::*;
use serde_json::{Map, Value, json};

fn read(body: &str, is_chat: bool) -> Result<CompletionRequest, String> {
    let read = CompletionRequest::read(body.as_bytes(), is_chat, &Limits::default(), UnknownFields::Refuse);
    read.map_err(|error| error.json()["error"]["message"].as_str().unwrap().to_owned())
}

fn with(fields: &str) -> Result<CompletionRequest, String> {
    read(&format!(r#"{{"model": "m", "prompt": "a", {fields}}}"#), false)
}

#[test]
fn numbers_out_of_range_are_refused_with_their_field() {
    let whole = ["n", "max_tokens", "top_k", "min_tokens", "logprobs", "best_of", "prompt_logprobs"];
    let real = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"];
    for field in whole.into_iter().chain(real).chain(["seed"]) {
        for value in ["-9223372036854775808", "2147483648", "1e300", "-1", "18446744073709551616", "\"1\"", "[1]"] {
            let is_fine = match field {
                "seed" => ["-9223372036854775808", "2147483648", "-1"].contains(&value),
                "presence_penalty" | "frequency_penalty" | "top_k" => value == "-1",
                _ => false,
            };
            match with(&format!(r#""{field}": {value}"#)) {
                Ok(_) => assert!(is_fine, "{field}: {value}"),
                Err(error) => {
                    assert!(!is_fine && error.contains(&format!("`{field}`")), "{field}: {value}: {error}")
                }
            }
        }
        for value in ["NaN", "Infinity", "1e999"] {
            let error = with(&format!(r#""{field}": {value}"#)).unwrap_err();
            assert!(error.contains("not a JSON object"), "{field}: {value}");
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
    let error = with(&format!(r#""stop": ["{stop}"]"#)).unwrap_err();
    assert!(error.contains("5000 bytes of one word"), "{error}");
    let ids = vec!["7"; 65].join(",");
    assert!(with(&format!(r#""stop_token_ids": [{ids}]"#)).unwrap_err().contains("65 token ids"));
    let bias: Vec<String> = (0..1025).map(|id| format!(r#""{id}": 1"#)).collect();
    assert!(with(&format!(r#""logit_bias": {{{}}}"#, bias.join(","))).unwrap_err().contains("1025 words"));
}

#[test]
fn prompts_are_texts_or_token_ids() {
    let prompts = |json: &str| match read(&format!(r#"{{"model": "m", "prompt": {json}}}"#), false).unwrap().input {
        Input::Prompts(prompts) => prompts,
        other => panic!("{other:?}"),
    };
    let text = |text: &str| Prompt::Text(text.to_owned());
    assert_eq!(prompts(r#""a""#), [text("a")]);
    assert_eq!(prompts(r#"["a", "b"]"#), [text("a"), text("b")]);
    assert_eq!(prompts("[1, 2]"), [Prompt::Tokens(vec![1, 2])]);
    assert_eq!(prompts("[[1], [2, 3]]"), [Prompt::Tokens(vec![1]), Prompt::Tokens(vec![2, 3])]);
    for wrong in ["null", "[]", "5", "[1, \"a\"]", "[-1]", "[4294967296]", "[[1.5]]", "{}"] {
        let error = read(&format!(r#"{{"model": "m", "prompt": {wrong}}}"#), false).unwrap_err();
        assert!(error.contains("`prompt`"), "{wrong}: {error}");
    }
}

#[test]
fn conversations_keep_their_messages_and_refuse_what_is_not_text() {
    let body = r#"{"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]}"#;
    let conversation = |body: &str| match read(body, true).unwrap().input {
        Input::Conversation(conversation) => conversation,
        other => panic!("{other:?}"),
    };
    assert_eq!(conversation(body).messages[0]["content"].as_array().unwrap().len(), 2);
    let text = r#"{"model": "m", "messages": "ab", "chat_template_kwargs": {"x": 1}, "reasoning_effort": "none"}"#;
    let found = conversation(text);
    assert_eq!(found.messages, [json!({"role": "user", "content": "ab"})]);
    let variables = json!({"x": 1, "enable_thinking": false, "thinking": false, "reasoning_effort": "none"});
    assert_eq!(json!(found.variables), variables);
    assert!(found.add_generation_prompt && !found.continue_final_message);
    let image = body.replace(r#"{"type": "text", "text": "b"}"#, r#"{"type": "image_url", "image_url": {}}"#);
    assert!(read(&image, true).unwrap_err().contains("part of type `image_url`; models read text only"));
    let both = r#"{"model": "m", "messages": "a", "continue_final_message": true, "add_generation_prompt": true}"#;
    assert!(read(both, true).unwrap_err().contains("exclude each other"));
}

/// The conversations whose prompts are compared with those of transformers, as requests.
fn golden_conversations() -> Vec<(String, Value)> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens/chat_templates/cases.json");
    let cases: Map<String, Value> = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
    let request = |(name, mut case): (String, Value)| {
        let fields = case.as_object_mut().unwrap();
        fields.insert("model".to_owned(), json!("m"));
        if let Some(variables) = fields.remove("variables") {
            fields.insert("chat_template_kwargs".to_owned(), variables);
        }
        (name, case)
    };
    cases.into_iter().map(request).collect()
}

#[test]
fn the_conversations_that_are_compared_with_transformers_reach_the_template_as_they_are() {
    for (name, body) in golden_conversations() {
        let Input::Conversation(found) = read(&body.to_string(), true).unwrap().input else { panic!("{name}") };
        assert_eq!(json!(found.messages), body["messages"], "{name}");
        assert_eq!(json!(found.tools), *body.get("tools").unwrap_or(&json!([])), "{name}");
        assert_eq!(json!(found.documents), body["documents"], "{name}");
        assert_eq!(json!(found.variables), *body.get("chat_template_kwargs").unwrap_or(&json!({})), "{name}");
        assert_eq!(found.continue_final_message, body["continue_final_message"] == json!(true), "{name}");
        let begins_turn =
            body.get("add_generation_prompt").map_or(!found.continue_final_message, |flag| *flag == json!(true));
        assert_eq!(found.add_generation_prompt, begins_turn, "{name}");
    }
}

#[test]
fn each_message_with_an_image_or_another_medium_is_refused_with_its_place() {
    let media = [
        ("image_url", json!({"url": "data:image/png;base64,AAAA"})),
        ("image", json!("picture.png")),
        ("input_image", json!("data:image/png;base64,AAAA")),
        ("video_url", json!({"url": "http://localhost/film.mp4"})),
        ("input_audio", json!({"data": "AAAA", "format": "wav"})),
        ("audio_url", json!({"url": "http://localhost/sound.wav"})),
        ("file", json!({"file_id": "f"})),
    ];
    for (name, body) in golden_conversations() {
        for at in 0..body["messages"].as_array().unwrap().len() {
            for (kind, value) in &media {
                let mut body = body.clone();
                let content = &mut body["messages"][at]["content"];
                let mut parts = match content.take() {
                    Value::Array(parts) => parts,
                    Value::String(text) => vec![json!({"type": "text", "text": text})],
                    _ => Vec::new(),
                };
                parts.push(json!({"type": kind, *kind: value}));
                *content = Value::Array(parts);
                let error = read(&body.to_string(), true).unwrap_err();
                let words = format!("`messages[{at}].content` has a part of type `{kind}`; models read text only");
                assert!(error.contains(&words), "{name}: {error}");
            }
        }
    }
}

#[test]
fn invalid_fields_are_named() {
    for (fields, words) in [
        (r#""temperature": 3"#, "`temperature` is 3, expected a number from 0 to 2"),
        (r#""n": 0"#, "`n` is 0"),
        (r#""stop": 5"#, "`stop` must be text"),
        (r#""logprobs": 21"#, "`logprobs` is 21"),
        (r#""logit_bias": {"x": 1}"#, "`logit_bias` has the key `x`"),
        (r#""logit_bias": {"5": 101}"#, "`logit_bias.5` is 101"),
        (r#""best_of": 3"#, "`best_of` is not supported"),
        (r#""stream": "yes""#, "`stream` must be true or false"),
        (r#""temprature": 1"#, "`temprature` is not known"),
        (r#""guided_regexp": "a""#, "`guided_regexp` is not known"),
        (r#""stream_options": {"include_usage": true}"#, "`stream_options` is allowed only with"),
        (r#""stream": true, "stream_options": {"usage": true}"#, "`stream_options.usage` is not known"),
        (r#""stream": true, "prompt_logprobs": 1"#, "`prompt_logprobs` is not available"),
        (r#""use_beam_search": true"#, "needs `n` of at least 2"),
        (r#""length_penalty": 2"#, "`length_penalty` needs `use_beam_search"),
        (r#""truncate_prompt_tokens": 0"#, "`truncate_prompt_tokens` is 0"),
        (r#""suffix": "x""#, "`suffix` is not supported"),
    ] {
        let error = with(fields).unwrap_err();
        assert!(error.contains(words), "{fields}: {error}");
    }
    assert!(read(r#"{"prompt": "a"}"#, false).unwrap_err().contains("`model` is missing"));
    assert!(read("[]", false).unwrap_err().contains("not a JSON object"));
    let chat = r#"{"model": "m", "messages": "a", "top_logprobs": 2}"#;
    assert!(read(chat, true).unwrap_err().contains("needs `logprobs: true`"));
}
