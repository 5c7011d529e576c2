use serde_json::{Value, json};

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
/// Prints role and content, in parts if the content has parts.
const PARTS: &str = "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}\
    {% for part in m.content %}[{{ part.type }} {{ part.text }}]{% endfor %}{% endif %};{% endfor %}";

fn template(config: Value) -> Result<Option<ChatTemplate>, TextError> {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    ChatTemplate::from_dir(dir.path())
}

fn of(source: &str) -> ChatTemplate {
    template(json!({"chat_template": source})).unwrap().unwrap()
}

fn turns(turns: &[(&str, &str)]) -> Vec<Value> {
    turns.iter().map(|(role, content)| json!({"role": role, "content": content})).collect()
}

fn chat(messages: &[Value]) -> ChatRequest<'_> {
    ChatRequest { messages, add_generation_prompt: true, ..Default::default() }
}

/// The prompt of a template for one message of the user, `Hi`; the error if there is one.
fn rendered(source: &str) -> String {
    of(source).render(&chat(&turns(&[("user", "Hi")]))).unwrap_or_else(|error| error.to_string())
}

#[test]
fn work_and_prompt_of_a_template_are_bounded() {
    let render = |source: &str, messages: &[Value]| of(source).render(&chat(messages));
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

#[test]
fn a_conversation_becomes_the_prompt_of_its_template() {
    let config = json!({"chat_template": LLAMA2, "bos_token": "<s>", "eos_token": {"content": "</s>"}});
    let template = template(config).unwrap().unwrap();
    let messages = turns(&[("system", "Be short."), ("user", " Hi "), ("assistant", "Yes?"), ("user", "Bye")]);
    assert_eq!(
        template.render(&chat(&messages)).unwrap(),
        "<s>[INST] <<SYS>>\nBe short.\n<</SYS>>\n\n Hi [/INST] Yes? </s><s>[INST] Bye [/INST]"
    );
    let message = template.render(&chat(&turns(&[("assistant", "no")]))).unwrap_err().to_string();
    assert!(message.contains("roles must alternate"), "{message}");
}

#[test]
fn blocks_are_trimmed_and_python_is_understood() {
    let source = "{% for message in messages %}\n    {% if message.role == 'tool' %}\n{% continue %}\n    {% endif %}\n\
                  {{ message.content | trim }}{{ message.items() | list | length }}\n{% endfor %}\n\
                  {%- if add_generation_prompt %}\nA:{% endif %}";
    let template = template(json!({"chat_template": [{"name": "default", "template": source}]})).unwrap().unwrap();
    assert_eq!(template.render(&chat(&turns(&[("tool", "x"), ("user", " y ")]))).unwrap(), "y2\nA:");
    let request = ChatRequest { messages: &turns(&[("user", "é")]), ..Default::default() };
    assert_eq!(template.render(&request).unwrap(), "é2\n");
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
    assert_eq!(template.render(&ChatRequest::default()).unwrap(), "new 4");
}

#[test]
fn templates_are_chosen_by_tools_and_by_name() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("additional_chat_templates")).unwrap();
    for (file, text) in [
        ("chat_template.jinja", "plain"),
        ("additional_chat_templates/tool_use.jinja", "{{ tools[0].name }}"),
        ("additional_chat_templates/rag.jinja", "{{ documents[0].title }}"),
        ("additional_chat_templates/broken.jinja", "{% if %}"),
    ] {
        std::fs::write(dir.path().join(file), text).unwrap();
    }
    let template = ChatTemplate::from_dir(dir.path()).unwrap().unwrap();
    let tools = [json!({"name": "f"})];
    let documents = [json!({"title": "T"})];
    let render = |tools, template_name| {
        let request =
            ChatRequest { tools, documents: Some(&documents), template: template_name, ..ChatRequest::default() };
        template.render(&request).unwrap_or_else(|error| error.to_string())
    };
    assert_eq!(render(&[], None), "plain");
    assert_eq!(render(&tools, None), "f");
    assert_eq!(render(&tools, Some("default")), "plain");
    assert_eq!(render(&[], Some("rag")), "T");
    assert_eq!(render(&tools, Some("own {{ tools | length }}")), "own 1");
    let words = render(&[], Some("other"));
    assert!(words.contains("which has `broken`, `default`, `rag`, `tool_use`"), "{words}");
    assert!(render(&[], Some("broken")).contains("broken.jinja"));
    assert!(render(&[], Some("{% if %}")).starts_with("the chat template of the request: "));
    let long = format!("{{{{ 1 }}}}{}", " ".repeat(2 << 20));
    assert!(render(&[], Some(&long)).contains("more than 1048576 bytes"));
}

#[test]
fn content_in_parts_is_a_list_for_templates_that_read_lists() {
    let parts = json!([{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}]);
    let messages = [json!({"role": "user", "content": parts})];
    assert_eq!(of(PARTS).render(&chat(&messages)).unwrap(), "user:[text a][text b];");
    let joined = of("{{ messages[0].content }}").render(&chat(&messages)).unwrap();
    assert_eq!(joined, "a\nb");
    let is_list = [
        "{% for x in m['content'] %}",
        "{%- for x in message.content -%}",
        "{% set parts = m.get('content', []) %}{% for p in parts | list %}",
        "{% macro show(content) %}{% for x in content if x.text %}",
        "{% set c = messages[0]['content'] %}{%- for x in c[1:] %}",
    ];
    let is_text = [
        "{% for x in messages %}{{ x.content }}",
        "{% for line in message.content.split('\\n') %}",
        "{% for x in contents %}",
        "{# {% for x in m.other %} #}",
    ];
    assert!(is_list.iter().all(|template| source::iterates_content(template)));
    assert!(!is_text.iter().any(|template| source::iterates_content(template)));
}

#[test]
fn fields_that_are_absent_are_none_and_variables_reach_the_template() {
    assert_eq!(rendered("{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}"), "TrueTrueTrue");
    let template = template(json!({"chat_template": "{{ bos_token }}{{ enable_thinking }}", "bos_token": "<s>"}));
    let template = template.unwrap().unwrap();
    let render = |variables: Value| {
        let request = ChatRequest { variables: variables.as_object(), ..ChatRequest::default() };
        template.render(&request).map_err(|error| error.to_string())
    };
    assert_eq!(render(json!({"enable_thinking": false})).unwrap(), "<s>False");
    assert_eq!(render(json!({"bos_token": "B"})).unwrap(), "B");
    let words = render(json!({"messages": []})).unwrap_err();
    assert!(words.contains("`chat_template_kwargs` has `messages`; use the field"), "{words}");
}

#[test]
fn generation_tags_leave_their_text() {
    let source = "{% for m in messages %}\n{%- generation %}\n{{ m.content }}{% set x = 1 %}\n{% endgeneration -%}\n  {{ x }}.\
                  {% endfor %}";
    assert_eq!(rendered(source), "Hi.");
}

#[test]
fn reasoning_has_every_name_and_null_fields_are_left_out() {
    let source = "{% for m in messages %}{{ 'content' in m }}{{ m.reasoning_content }}{{ m.thinking }}{{ m.reasoning }}{% endfor %}";
    for name in ["reasoning_content", "thinking", "reasoning"] {
        let messages = [json!({"role": "assistant", "content": null, name: "why"})];
        assert_eq!(of(source).render(&chat(&messages)).unwrap(), "Falsewhywhywhy");
    }
}

#[test]
fn arguments_that_are_text_become_objects_if_they_are_json() {
    let source = "{% for c in messages[0].tool_calls %}{{ c.function.arguments }};{% endfor %}";
    let calls =
        [r#"{"z": 1.0, "a": [true, null]}"#, "{broken", "", "[1]"].map(|text| json!({"function": {"arguments": text}}));
    let messages = [json!({"role": "assistant", "tool_calls": calls})];
    assert_eq!(of(source).render(&chat(&messages)).unwrap(), "{'z': 1.0, 'a': [True, None]};{broken;{};[1];");
    let joining = "{{ 'A' + messages[0].tool_calls[0].function.arguments }}";
    assert_eq!(of(joining).render(&chat(&messages)).unwrap(), r#"A{"z": 1.0, "a": [true, null]}"#);
}

#[test]
fn tool_calls_without_content_have_null_content_for_templates_that_look_for_it() {
    // As DeepSeek V3 and R1 have it.
    let source = "{% for m in messages %}{% if m.content is none %}{% for c in m.tool_calls %}\
                  {{ '<call>' + c.function.name + c.function.arguments }}{% endfor %}{% endif %}\
                  {% if m.content is not none %}{{ '<text>' + m.content }}{% endif %}{% endfor %}";
    let calls = json!([{"type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}}]);
    let with_null = json!({"role": "assistant", "content": null, "tool_calls": calls});
    let without = json!({"role": "assistant", "tool_calls": calls});
    let user = json!({"role": "user", "content": "Hi"});
    for message in [with_null, without] {
        assert_eq!(of(source).render(&chat(&[user.clone(), message])).unwrap(), "<text>Hi<call>f{\"a\": 1}");
    }
    // Without tool calls there is nothing that could stand in its place.
    let empty = [json!({"role": "assistant", "content": null})];
    assert!(of(source).render(&chat(&empty)).unwrap_err().to_string().contains("undefined"));
}

#[test]
fn a_prompt_ends_behind_the_text_that_is_continued() {
    let source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}";
    let messages = turns(&[("user", "Hi"), ("assistant", "Yes, ")]);
    let request = ChatRequest { messages: &messages, continue_final_message: true, ..Default::default() };
    assert_eq!(of(source).render(&request).unwrap(), "<user>Hi</><assistant>Yes, ");
    assert_eq!(
        of(&source.replace("content", "content | trim")).render(&request).unwrap(),
        "<user>Hi</><assistant>Yes,"
    );
    let words = of(&source.replace("content", "content | upper")).render(&request).unwrap_err().to_string();
    assert!(words.contains("it changes or drops the text"), "{words}");
    let parts = [json!({"role": "assistant", "content": [{"type": "text", "text": "So"}]})];
    let request = ChatRequest { messages: &parts, ..request };
    assert_eq!(of(PARTS).render(&request).unwrap(), "assistant:[text So");
    let request = ChatRequest { messages: &[json!({"role": "assistant"})], ..request };
    assert!(of(PARTS).render(&request).unwrap_err().to_string().contains("needs text in `content`"));
}

#[test]
fn what_is_not_supported_is_refused() {
    for source in [
        "{{ {} | xmlattr }}",
        "{{ 'a' | wordwrap }}",
        "{{ 1 | filesizeformat }}",
        "{% macro m() %}{% endmacro %}{{ m(1) }}",
    ] {
        assert!(rendered(source).starts_with("the chat template of `"), "{source}");
    }
    for source in ["{% include 'a' %}", "{% import 'a' as a %}", "{% extends 'a' %}"] {
        assert!(template(json!({"chat_template": source})).is_err(), "{source}");
    }
}
