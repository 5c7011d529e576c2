//! Templates take bounded steps, and write bounded text.
//!
//! One thing is not bounded: the engine compares and joins values that a template built of the same lists many times over without
//! counting. Therefore a server takes templates from its clients only if its operator allows it.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use text::{ChatRequest, ChatTemplate};

/// The time that one template may take: a limit for tests without optimisation on a busy machine.
const MOST: Duration = Duration::from_secs(60);
/// As small as the stacks of the threads that render.
const STACK: usize = 2 << 20;

/// Renders a client's template for one message, on a thread of its own.
fn render(source: String) -> Result<usize, String> {
    let thread = std::thread::Builder::new().stack_size(STACK).spawn(move || {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("chat_template.jinja"), "own").unwrap();
        let template = ChatTemplate::from_dir(dir.path()).unwrap().unwrap();
        let messages = [json!({"role": "user", "content": "Hi"})];
        let request = ChatRequest { messages: &messages, template: Some(&source), ..ChatRequest::default() };
        template.render(&request).map(|prompt| prompt.len()).map_err(|error| error.to_string())
    });
    thread.unwrap().join().expect("the template does not end the thread")
}

/// Each template ends within the time, with an error that has `words`, or with any result if `words` is empty.
fn check(cases: &[(String, &str)]) {
    for (source, words) in cases {
        let start = Instant::now();
        let result = render(source.clone());
        let shown: String = source.chars().take(80).collect();
        assert!(start.elapsed() < MOST, "{shown} took {:?}", start.elapsed());
        if !words.is_empty() {
            let error = result.expect_err(&shown);
            assert!(error.contains(words), "{shown}: {error}");
        }
    }
}

/// A value that is doubled `times` times by an expression with `{x}`.
fn doubled(expression: &str, times: usize) -> String {
    format!(
        "{{% set ns = namespace(x=['a']) %}}{{% for i in range({times}) %}}{{% set ns.x = {expression} %}}{{% endfor %}}"
    )
}

#[test]
fn work_is_bounded() {
    let steps = "too many steps";
    check(&[
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}".to_owned(), steps),
        ("{% macro m(x) %}{{ m(x) }}{{ m(x) }}{% endmacro %}{{ m(1) }}".to_owned(), ""),
        ("{{ 'a' * 100000000000 }}".to_owned(), ""),
        ("{{ range(1000000000000) | list | length }}".to_owned(), ""),
        (
            "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
                .to_owned(),
            steps,
        ),
        ("{{ 'a'.center(100000000000) }}".to_owned(), steps),
        ("{{ 'a'.zfill(100000000000) }}".to_owned(), steps),
        ("{{ '\t'.expandtabs(100000000000) }}".to_owned(), steps),
        ("{{ '{:>99999999999}'.format('a') }}".to_owned(), "at most 4 digits"),
        ("{{ '%99999999999d' % 1 }}".to_owned(), ""),
        ("{{ '%*d' % (99999999999, 1) }}".to_owned(), ""),
        (
            "{{ 'aaaa'.replace('', 'b' * 1000000) | length }}{{ ('a' * 9999999).replace('a', 'b' * 9999999) }}"
                .to_owned(),
            "",
        ),
        ("{{ [1] | tojson(indent=100000000) }}".to_owned(), "indent above 64"),
        ("{{ 'x' | indent(100000000000) }}{{ '\n\n' | indent(100000000000) }}".to_owned(), ""),
        ("{{ [1, 2] | batch(100000000000, 'x') | list }}{{ [1] | slice(100000000000) | list }}".to_owned(), ""),
        ("{{ ('a' * 999999) | join('b' * 999999) | length }}".to_owned(), steps),
        ("{{ 2 ** 99999999 }}{{ 9999999999999999 * 9999999999999999999 }}".to_owned(), ""),
        ("{{ strftime_now('%99999999Y') }}".to_owned(), ""),
        ("{{ 'a' | truncate(99999999999) }}".to_owned(), ""),
    ]);
}

#[test]
fn values_that_share_their_parts_are_not_written_out() {
    let steps = "too many steps";
    check(&[
        (doubled("[ns.x, ns.x]", 99) + "{{ ns.x }}", steps),
        (doubled("[ns.x, ns.x]", 99) + "{{ ns.x | tojson }}", steps),
        (doubled("[ns.x, ns.x]", 99) + "{{ ns.x | string }}", steps),
        (doubled("{'a': ns.x, 'b': ns.x}", 99) + "{{ ns.x }}", steps),
    ]);
}

#[test]
fn depth_is_bounded() {
    let deep = |open: &str, middle: &str, close: &str, count: usize| open.repeat(count) + middle + &close.repeat(count);
    check(&[
        ("{% macro m(x) %}{{ m(x + 1) }}{% endmacro %}{{ m(1) }}".to_owned(), "recursion"),
        ("{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}".to_owned(), "recursion"),
        (format!("{{{{ {} }}}}", deep("(", "1", ")", 100_000)), ""),
        (format!("{{{{ {} }}}}", deep("[", "1", "]", 100_000)), ""),
        (deep("{% if 1 %}", "a", "{% endif %}", 30_000), ""),
        (deep("{% for i in [1] %}", "a", "{% endfor %}", 20_000), ""),
        ("{{ 'a' % (".repeat(50_000), ""),
        ("{{ '".repeat(100_000), ""),
        ("{%".repeat(300_000), "unknown"),
        (format!("{{% {} %}}", " ".repeat(900_000)), ""),
        ("{{ x }}".repeat(100_000), ""),
    ]);
}

#[test]
fn a_value_of_a_client_may_be_deep() {
    let deep = (0..120).fold(json!(1), |value, _| json!([value]));
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("chat_template.jinja"), "{{ x | tojson }}{{ x }}").unwrap();
    let template = ChatTemplate::from_dir(dir.path()).unwrap().unwrap();
    let variables: Value = json!({"x": deep});
    let request = ChatRequest { variables: variables.as_object(), ..ChatRequest::default() };
    assert_eq!(template.render(&request).unwrap().len(), 2 * 241);
}
