use super::*;
use crate::chat::UnknownFields;
use repository::proto::ModelInput;

/// A model that takes text by these names.
fn model(inputs: &[(&str, ConfigType)]) -> ModelConfig {
    let input = |&(name, data_type): &(&str, ConfigType)| {
        let mut input = ModelInput { name: name.to_owned(), dims: vec![1], ..ModelInput::default() };
        input.set_data_type(data_type);
        input
    };
    ModelConfig { name: "m".to_owned(), input: inputs.iter().map(input).collect(), ..ModelConfig::default() }
}

fn request(more: &str, is_chat: bool) -> CompletionRequest {
    let what = if is_chat { "messages" } else { "prompt" };
    let body = format!(r#"{{"model": "m", "{what}": "a"{more}}}"#);
    CompletionRequest::read(body.as_bytes(), is_chat, &Limits::default(), UnknownFields::Refuse).unwrap()
}

/// The tensors of a request, or its refusal.
fn convert(config: &ModelConfig, more: &str, is_chat: bool) -> Result<InferRequest, String> {
    let request = request(more, is_chat);
    let refused = unsupported(&request).map(|field| Err(no_input(field, "m")));
    refused.unwrap_or_else(|| tensors(config, &request, 16, &Limits::default())).map_err(|error| error.message)
}

fn refusal(field: &str) -> String {
    format!("`{field}` is not supported by model `m`, which has no input for it.")
}

#[test]
fn what_a_model_has_no_input_for_is_refused_where_it_would_change_the_answer() {
    let config = model(&[("prompt", ConfigType::TypeString)]);
    let neutral = r#", "seed": 3, "presence_penalty": 0, "repetition_penalty": 1, "min_tokens": 0, "priority": 0,
        "skip_special_tokens": true, "response_format": {"type": "text"}"#;
    for more in ["", neutral] {
        assert_eq!(convert(&config, more, false).unwrap().inputs.len(), 1, "{more}");
    }
    for (field, value) in [
        ("presence_penalty", "0.5"),
        ("min_tokens", "2"),
        ("logprobs", "1"),
        ("min_p", "0.1"),
        ("logit_bias", r#"{"5": 1}"#),
        ("stop_token_ids", "[5]"),
        ("allowed_token_ids", "[5]"),
        ("cache_salt", r#""s""#),
        ("priority", "1"),
        ("skip_special_tokens", "false"),
        ("thinking_token_budget", "8"),
        ("response_format", r#"{"type": "json_object"}"#),
        ("structured_outputs", r#"{"regex": "a"}"#),
        ("guided_choice", r#"["a"]"#),
    ] {
        assert_eq!(convert(&config, &format!(r#", "{field}": {value}"#), false).unwrap_err(), refusal(field));
    }
}

#[test]
fn chats_with_tools_and_likeliest_tokens_are_refused() {
    let config = model(&[("prompt", ConfigType::TypeString), ("return_log_probs", ConfigType::TypeBool)]);
    let tools = r#", "tools": [{"type": "function", "function": {"name": "f"}}]"#;
    for more in ["", r#", "tool_choice": "required""#] {
        assert_eq!(convert(&config, &format!("{tools}{more}"), true).unwrap_err(), refusal("tools"));
    }
    assert!(convert(&config, &format!(r#"{tools}, "tool_choice": "none""#), true).is_ok());
    assert_eq!(convert(&config, r#", "include_reasoning": false"#, true).unwrap_err(), refusal("include_reasoning"));
    assert!(convert(&config, r#", "logprobs": true"#, true).is_ok());
    let likeliest = r#", "logprobs": true, "top_logprobs": 2"#;
    assert_eq!(convert(&config, likeliest, true).unwrap_err(), refusal("top_logprobs"));
    assert!(convert(&config, r#", "logprobs": 1"#, false).is_ok());
    assert_eq!(convert(&config, r#", "logprobs": 2"#, false).unwrap_err(), refusal("logprobs"));
    assert_eq!(convert(&config, r#", "logprobs": 1, "echo": true"#, false).unwrap_err(), refusal("echo"));
}

#[test]
fn constraints_are_values_of_the_inputs_that_models_have_for_them() {
    let names = ["prompt", "guided_decoding_guide_type", "guided_decoding_guide"];
    let config = model(&names.map(|name| (name, ConfigType::TypeString)));
    for (more, kind, guide) in [
        (r#""response_format": {"type": "json_object"}"#, "json_schema", r#"{"type": "object"}"#),
        (r#""guided_json": {"b": 1, "a": 2}"#, "json_schema", r#"{"b":1,"a":2}"#),
        (r#""guided_json": "{}""#, "json_schema", "{}"),
        (r#""regex": "a+""#, "regex", "a+"),
        (r#""guided_choice": ["a.b", "ü|"]"#, "regex", r"a\.b|ü\|"),
        (r#""guided_grammar": "root ::= \"a\"""#, "ebnf_grammar", "root ::= \"a\""),
    ] {
        let request = convert(&config, &format!(", {more}"), false).unwrap();
        let text = |name: &str| request.input(name).and_then(|tensor| tensor.to_byte_strings()).unwrap()[0].to_vec();
        assert_eq!(text(names[1]), kind.as_bytes(), "{more}");
        assert_eq!(text(names[2]), guide.as_bytes(), "{more}");
    }
    let half = model(&[("prompt", ConfigType::TypeString), (names[1], ConfigType::TypeString)]);
    assert_eq!(convert(&half, r#", "regex": "a+""#, false).unwrap_err(), refusal("regex"));
}
