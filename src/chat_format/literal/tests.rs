use super::*;

fn run(text: &str, quote: Option<&str>) -> (String, Step) {
    let (mut literal, mut out, mut last) = (Literal::new(quote.map(str::to_owned)), String::new(), Step::More);
    for c in text.chars() {
        last = literal.push(c, &mut out);
        if last != Step::More {
            break;
        }
    }
    literal.close(&mut out);
    (out, last)
}

#[test]
fn values_of_python_become_json() {
    for (text, json) in [
        ("[1, -2.5, .5, 5., 1_000, +3, 1e5, ] ", "[1, -2.5, 0.5, 5.0, 1000, 3, 1e5]"),
        (r#"{'a': True, "b": (None, False), 3: 'it\'s "x"'}"#, r#"{"a":true, "b":[null, false], "3":"it's \"x\""}"#),
        (r#"'\x41\u00e9\ud83d\ude00\n\d'"#, "\"Aé😀\\n\\\\d\""),
        ("{}", "{}"),
        ("'\\日'", "\"\\\\日\""),
    ] {
        assert_eq!(run(text, None).0, json);
        assert!(matches!(run(text, None).1, Step::Done));
    }
    assert_eq!(run("[nan]", None), ("[]".into(), Step::Broken));
    assert_eq!(run("{'a': f(", None), ("{\"a\":null}".into(), Step::Broken));
}

#[test]
fn values_of_gemma_become_json() {
    let quote = Some("<|\"|>");
    for (text, json) in [
        (
            "{a:<|\"|>x\"<|y\n<|\"|>,b:[1,true,None],c:{d:-0.5},e f:word:x}",
            "{\"a\":\"x\\\"<|y\\n\", \"b\":[1, true, null], \"c\":{\"d\":-0.5}, \"e f\":\"word:x\"}",
        ),
        ("{<|\"|>k<|\"|>:[]}", "{\"k\":[]}"),
    ] {
        assert_eq!(run(text, quote), (json.into(), Step::Done));
    }
}

#[test]
fn every_prefix_is_closed_to_valid_json() {
    let text = r#"{'a': [1, -2.5, (True, None)], "k\u00e9": {'x': 'y\n\ud83d\ude00'}, 'z': {}}"#;
    for end in 1..text.len() {
        let closed = run(&text[..end], None).0;
        assert!(serde_json::from_str::<serde_json::Value>(&closed).is_ok(), "{} -> {closed}", &text[..end]);
    }
}
