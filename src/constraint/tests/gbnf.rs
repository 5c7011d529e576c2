//! Grammars in llama.cpp's format, with texts that they have and texts that they lack.

use constraint::{Compiler, ConstraintSpec, Limits, Token, Vocabulary};

fn compiler() -> Compiler {
    let tokens = (0..=255).map(|byte| Token::Text(vec![byte])).chain([Token::Special("</s>".into())]).collect();
    Compiler::new(Vocabulary::new(tokens, &[256]).unwrap(), Limits::default()).unwrap()
}

/// Whether the grammar has the text as a whole.
fn has(grammar: &str, text: &str) -> bool {
    let spec = ConstraintSpec::Grammar(grammar.into());
    let mut constraint = compiler().compile(&spec).unwrap_or_else(|error| panic!("{grammar}: {error}"));
    let bytes: Vec<u32> = text.bytes().map(u32::from).collect();
    if constraint.validate(&bytes).unwrap() < bytes.len() {
        return false;
    }
    bytes.iter().for_each(|&byte| constraint.accept(byte).unwrap());
    constraint.may_end().unwrap()
}

fn check(grammar: &str, inside: &[&str], outside: &[&str]) {
    inside.iter().for_each(|text| assert!(has(grammar, text), "{text:?} is missing in {grammar}"));
    outside.iter().for_each(|text| assert!(!has(grammar, text), "{text:?} is in {grammar}"));
}

fn refused(grammar: &str) -> String {
    compiler()
        .compile(&ConstraintSpec::Grammar(grammar.into()))
        .err()
        .map(|error| error.to_string())
        .unwrap_or_default()
}

#[test]
fn each_element_of_the_format_is_converted() {
    check(r#"root ::= "yes" | "no""#, &["yes", "no"], &["", "y", "yesno"]);
    check("root ::= [a-cX] [^a-c\\n\"]", &["aX", "X\u{e9}", "b]"], &["aa", "a\n", "a\"", "d1"]);
    check("root ::= .", &["a", "\n", "\u{1f600}"], &["", "ab"]);
    check(r#"root ::= "a"* "b"+ "c"?"#, &["b", "aabbc"], &["", "a", "bcc"]);
    check(
        r#"root ::= [0-9]{2} "-" [0-9]{2,} "-" [0-9]{1,3} "-" [0-9]{0,1}"#,
        &["12-123-1-", "12-12-123-4"],
        &["1-12-1-", "12-1-1-"],
    );
    check(r#"root ::= "\x41\u00e9\U0001F600\t\\\"[\]""#, &["A\u{e9}\u{1f600}\t\\\"[]"], &["A"]);
    check(r"root ::= [\]\[\-\\]+", &["][-\\"], &["a"]);
    check(r#"root ::= ("a" | "b" ("c" | "d"))+"#, &["a", "bcabd"], &["b", "ac"]);
    check("root ::= [a-]", &["a", "-"], &["b"]);
}

#[test]
fn comments_line_breaks_and_names_are_read() {
    let grammar = "# A list of things.\nroot ::= # the root\n  item-one\n  | item_2 \", \" root\nitem-one ::= \"a#b\"\n\nitem_2::=(\"c\"\n  | \"d\")\n";
    check(grammar, &["a#b", "c, d, a#b"], &["c", "a#b, c"]);
}

#[test]
fn an_empty_alternative_is_optional() {
    check(
        r#"root ::= "a" ws "b"
ws ::= | " " | "\n" [ \t]{0,3}"#,
        &["ab", "a b", "a\n \t b"],
        &["a  b", "a\n    b"],
    );
    check(r#"root ::= "a" ("" | "b")"#, &["a", "ab"], &["b"]);
}

#[test]
fn parts_without_recursion_match_whatever_could_also_end_earlier() {
    // A greedy lexer would take "ab" for the start of "abc", or the letters for the word.
    check(r#"root ::= "a" | [a-z] "b" | "abc""#, &["a", "ab", "qb", "abc"], &["b", "abd"]);
    check(r#"root ::= [a-z]* "end""#, &["end", "theend", "endend"], &["en", "ends"]);
}

#[test]
fn recursive_rules_nest() {
    check(r#"root ::= "(" root ")" | [a-z]+"#, &["a", "((abc))"], &["(a", "a)", "()"]);
    let arithmetic = r#"
        root  ::= (expr "=" ws term "\n")+
        expr  ::= term ([-+*/] term)*
        term  ::= ident | num | "(" ws expr ")" ws
        ident ::= [a-z] [a-z0-9_]* ws
        num   ::= [0-9]+ ws
        ws    ::= [ \t\n]*
    "#;
    check(arithmetic, &["a=1\n", "(a1 +2)*b = c\n", "1+2=3\nx=y\n"], &["a=1", "=1\n", "(a=1\n", "1a=2\n"]);
}

#[test]
fn a_grammar_of_json_takes_json_alone() {
    let grammar = r#"
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

# Optional space: by convention, applied in this grammar after literal chars when allowed
ws ::= | " " | "\n" [ \t]{0,20}
"#;
    let inside = [
        r#"{}"#,
        r#"{"a": [1, -2.5e3, {"b": null}], "c\n\u00e9": "x"}"#,
        "{\n  \"a\": true\n}",
        r#"{"a":{"b":{"c":[[[]]]}}}"#,
    ];
    inside.iter().for_each(|text| assert!(serde_json::from_str::<serde_json::Value>(text).is_ok(), "{text}"));
    check(grammar, &inside, &["", "[]", "{", r#"{"a"}"#, r#"{"a":1,}"#, r#"{a:1}"#, r#"{"a":tru}"#, "{\"a\":\"\n\"}"]);
}

#[test]
fn what_is_wrong_is_named_with_its_line() {
    for (grammar, words) in [
        ("root ::= \"a\"\nother ::= missing", "`missing` is not defined"),
        ("other ::= \"a\"", "no rule `root`"),
        ("root ::= \"a\"\nroot ::= \"b\"", "`root` is defined twice, in line 2"),
        ("root ::= \"a", "a `\"` is not closed, in line 1"),
        ("root ::= [a", "a `[` is not closed"),
        ("root ::= (\"a\"", "a `(` is not closed"),
        ("root ::= \"a\")", "expected a rule"),
        ("root ::= [z-a]", "`z-a` is empty"),
        ("root ::= \"\\q\"", "`\\q` is not known"),
        ("root ::= \"\\xZZ\"", "2 hexadecimal digits"),
        ("root ::= \"a\"{3,2}", "below its smallest"),
        ("root ::= \"a\"{200000}", "over the limit of 100000"),
        ("root ::= \"a\"{x}", "expected `{m}`"),
        ("root ::= <think> \"a\"", "`<token>` at `line 1 of the GBNF grammar` is not supported"),
        ("root ::= \"a\" ; b", "`;` is not expected here, in line 1"),
        ("root ::= root", "no text can satisfy it"),
    ] {
        let found = refused(grammar);
        assert!(found.contains(words), "{grammar:?}: {found}");
    }
    let deep = format!("root ::= {}\"a\"{}", "(".repeat(20_000), ")".repeat(20_000));
    assert!(refused(&deep).contains("nest deeper than 64 levels"));
}

#[test]
fn a_lark_grammar_that_speaks_of_gbnf_is_lark() {
    check("start: \"root ::= a\"", &["root ::= a"], &["a"]);
}
