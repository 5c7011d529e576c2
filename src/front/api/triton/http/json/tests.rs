use serving::{DataType, InferError, Limits};

use super::parser::MAX_DEPTH;
use super::*;

type Result<T> = std::result::Result<T, InferError>;

fn parsed(body: &[u8]) -> Result<Value<'_>> {
    parse(body, &Limits::default())
}

fn elements<'a>(array: &Value<'a>) -> Vec<Value<'a>> {
    let mut elements = Vec::new();
    let push = |value| {
        elements.push(value);
        Ok(())
    };
    array.as_array().unwrap().for_each(push).unwrap();
    elements
}

fn message(text: &str) -> String {
    parsed(text.as_bytes()).unwrap_err().message
}

#[test]
fn all_kinds_of_values_are_parsed() {
    let value =
        parsed(r#" {"a": [1, [2.5, "x"]], "b": {"c": null, "d": true}, "e": "\u00e9\ud83d\ude00\n"} "#.as_bytes())
            .unwrap();
    assert_eq!(value.member("b").unwrap().member("d"), Some(&Value::Bool(true)));
    assert_eq!(value.member("e").unwrap().as_str().unwrap(), "é😀\n");
    let outer = elements(value.member("a").unwrap());
    assert_eq!(outer[0], Value::Number("1"));
    assert_eq!(elements(&outer[1])[1], Value::String("x".into()));
}

#[test]
fn errors_have_a_reason_and_an_offset() {
    let head = "failed to parse the request JSON buffer: ";
    assert_eq!(message(""), format!("{head}The document is empty. at 0"));
    assert_eq!(message("{nope"), format!("{head}Missing a name for object member. at 1"));
    assert_eq!(message("{}x"), format!("{head}The document root must not be followed by other values. at 2"));
    assert_eq!(message("[1 2]"), format!("{head}Missing a comma or ] after an array element. at 3"));
    assert_eq!(message(r#"{"a" 1}"#), format!("{head}Missing a colon after a name of object member. at 5"));
    assert_eq!(message(r#"{"a": tru}"#), format!("{head}Invalid value. at 9"));
    assert_eq!(message(r#"["a"#), format!("{head}Missing a closing quotation mark in string. at 3"));
    assert_eq!(message("[1e400]"), format!("{head}Number too big to be stored in double. at 1"));
    assert_eq!(message(r#"["\ud800"]"#), format!("{head}The surrogate pair in string is invalid. at 2"));
}

#[test]
fn truncated_or_corrupted_bodies_do_not_panic() {
    let whole = r#"{"inputs":[{"name":"é\u00e9\ud83d\ude00","shape":[1,2],"data":[-1.5e+3,NaN,-Infinity,null,true]}]}"#;
    for end in 0..whole.len() {
        assert!(parsed(&whole.as_bytes()[..end]).is_err(), "{end}");
        let mut twisted = whole.as_bytes().to_vec();
        twisted[end] = b'\\';
        let _ = parsed(&twisted);
        twisted[end] = 0xff;
        assert!(parsed(&twisted).is_err());
    }
}

#[test]
fn nesting_is_limited() {
    let deep = |levels: usize| "[".repeat(levels) + "1" + &"]".repeat(levels);
    assert!(parsed(deep(MAX_DEPTH).as_bytes()).is_ok());
    let error = parsed(deep(100_000).as_bytes()).unwrap_err();
    assert_eq!(error.kind, serving::ErrorKind::InvalidArgument);
}

#[test]
fn nested_data_flattens_in_row_major_order() {
    let value = parsed(b"[[1, 2], [3, [4]]]").unwrap();
    let mut data = Vec::new();
    let count = value.as_array().unwrap().flatten(DataType::Uint16, 4, &mut data).unwrap();
    assert_eq!((count, data), (4, vec![1, 0, 2, 0, 3, 0, 4, 0]));
}

#[test]
fn nested_data_is_read_in_linear_time() {
    let text = "[".repeat(MAX_DEPTH) + &"1,".repeat(500_000) + "1" + &"]".repeat(MAX_DEPTH);
    let value = parsed(text.as_bytes()).unwrap();
    let (begun, mut data) = (std::time::Instant::now(), Vec::new());
    assert_eq!(value.as_array().unwrap().flatten(DataType::Uint8, usize::MAX, &mut data).unwrap(), 500_001);
    // One pass per level takes minutes without optimization.
    assert!(begun.elapsed() < std::time::Duration::from_secs(10));
    assert!(value.as_array().unwrap().flatten(DataType::Uint8, 7, &mut data).is_err());
}

#[test]
fn members_that_are_held_are_bounded() {
    let members = |count: usize| (0..count).map(|key| format!("\"{key}\":0")).collect::<Vec<_>>().join(",");
    assert!(parsed(format!("{{{}}}", members(3000)).as_bytes()).is_ok());
    let error = parsed(format!("{{{}}}", members(100_000)).as_bytes()).unwrap_err();
    assert!(error.message.contains("--max-request-parameters"), "{}", error.message);
    let nested = format!("{{\"a\":{{{}}},\"b\":{{{}}}}}", members(3000), members(3000));
    assert!(parsed(nested.as_bytes()).is_err());
    let elements = format!("[{}]", vec![format!("{{{}}}", members(10)); 1000].join(","));
    assert!(parsed(elements.as_bytes()).is_ok(), "elements of arrays are not held");
}

#[test]
fn values_that_do_not_fit_are_refused() {
    for (text, datatype) in [("300", DataType::Uint8), ("1099511627776", DataType::Int32), ("-129", DataType::Int8)] {
        let value = parsed(text.as_bytes()).unwrap();
        assert!(push_element(&value, datatype, &mut Vec::new()).unwrap_err().message.contains("does not fit"));
    }
}

#[test]
fn not_a_number_is_a_float() {
    let mut data = Vec::new();
    parsed(b"[NaN, -Infinity]").unwrap().as_array().unwrap().flatten(DataType::Fp32, 2, &mut data).unwrap();
    assert!(f32::from_le_bytes(data[..4].try_into().unwrap()).is_nan());
    assert_eq!(f32::from_le_bytes(data[4..].try_into().unwrap()), f32::NEG_INFINITY);
}
