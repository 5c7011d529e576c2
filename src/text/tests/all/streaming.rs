//! For every kind of tokenizer, streamed tokens have the text that `tokenizers` decodes from the whole sequence.

use std::fs;
use std::sync::Arc;

use proptest::prelude::*;
use serde_json::{Value, json};
use text::{Detokenizer, TextError, Tokenizer};

/// One tokenizer file, read by this crate and by `tokenizers`, whose decoding of whole sequences is the reference.
struct Case {
    ours: Arc<Tokenizer>,
    reference: tokenizers::Tokenizer,
    num_ids: u32,
}

impl Case {
    fn new(vocabulary: &[String], model: &str, decoder: Value) -> Self {
        let specials = ["<s>", "</s>"];
        let num_ids = (vocabulary.len() + specials.len()) as u32;
        let added: Vec<Value> = specials
            .iter()
            .enumerate()
            .map(|(index, token)| {
                json!({"id": vocabulary.len() + index, "content": token, "special": true, "single_word": false,
                       "lstrip": false, "rstrip": false, "normalized": false})
            })
            .collect();
        let ids: serde_json::Map<String, Value> =
            vocabulary.iter().enumerate().map(|(id, token)| (token.clone(), json!(id))).collect();
        let model = match model {
            "BPE" => json!({"type": "BPE", "vocab": ids, "merges": []}),
            name => json!({"type": name, "vocab": ids, "unk_token": vocabulary[0]}),
        };
        let file = json!({"version": "1.0", "added_tokens": added, "model": model, "decoder": decoder}).to_string();
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("tokenizer.json"), &file).unwrap();
        let ours = Arc::new(Tokenizer::from_dir(dir.path()).unwrap());
        Self { ours, reference: file.parse().unwrap(), num_ids }
    }

    fn check(&self, ids: &[u32], skip_special: bool) -> Result<(), TestCaseError> {
        let expected = self.reference.decode(ids, skip_special).unwrap();
        let mut detokenizer = Detokenizer::new(Arc::clone(&self.ours), skip_special);
        let mut pieces: Vec<String> = ids.iter().filter_map(|&id| detokenizer.push(id)).collect();
        pieces.push(detokenizer.finish());
        prop_assert_eq!(pieces.concat(), &expected[..]);
        prop_assert_eq!(self.ours.decode(ids, skip_special), expected);
        Ok(())
    }
}

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

/// The byte-level alphabet of all 256 bytes, and a few merged tokens; two of them end inside a character.
fn byte_level() -> Case {
    let alphabet = tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet();
    let mut vocabulary: Vec<String> = alphabet.into_iter().map(String::from).collect();
    vocabulary.sort();
    vocabulary.extend(words(&["Ġthe", "Ċ", "Ġcafé", "ðŁ", "ðŁĺ", "Ģx", "not byte-level: 語"]));
    vocabulary.sort();
    vocabulary.dedup();
    Case::new(
        &vocabulary,
        "BPE",
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}),
    )
}

fn byte_fallback(strip: bool) -> Case {
    let mut vocabulary: Vec<String> = (0..=255).map(|byte| format!("<0x{byte:02X}>")).collect();
    vocabulary.extend(words(&["▁", "▁the", "a", "é", "▁▁x", "語", "<0xZZ>", "<0x1>", "\u{FFFD}"]));
    let mut steps = vec![
        json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if strip {
        steps.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    Case::new(&vocabulary, "BPE", json!({"type": "Sequence", "decoders": steps}))
}

fn metaspace(prepend_scheme: &str) -> Case {
    let vocabulary = words(&["x", "▁", "▁the", "▁cat▁s", "é", "語", "s▁"]);
    let split = prepend_scheme != "never";
    Case::new(
        &vocabulary,
        "WordLevel",
        json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": prepend_scheme, "split": split}),
    )
}

fn word_piece() -> Case {
    let vocabulary = words(&["[UNK]", "cat", "##s", ".", "##", "do", "not", "'s", "語", "##é"]);
    Case::new(&vocabulary, "WordLevel", json!({"type": "WordPiece", "prefix": "##", "cleanup": true}))
}

fn word_level() -> Case {
    Case::new(&words(&["unknown", "cat", "sat", "語", "é."]), "WordLevel", Value::Null)
}

/// Ids of the case, and some outside its vocabulary.
fn ids(num_ids: u32) -> impl Strategy<Value = Vec<u32>> {
    prop::collection::vec(0..num_ids + 2, 0..24)
}

macro_rules! streams_like_the_whole {
    ($($name:ident: $case:expr;)*) => {$(
        #[test]
        fn $name() {
            let case = $case;
            proptest!(ProptestConfig::with_cases(2000), |(ids in ids(case.num_ids), skip in any::<bool>())| {
                case.check(&ids, skip)?;
            });
        }
    )*};
}

streams_like_the_whole! {
    byte_level_tokens_stream_like_the_whole: byte_level();
    byte_fallback_tokens_stream_like_the_whole: byte_fallback(false);
    byte_fallback_with_a_stripped_space_streams_like_the_whole: byte_fallback(true);
    metaspace_tokens_stream_like_the_whole: metaspace("always");
    metaspace_tokens_without_a_prefix_stream_like_the_whole: metaspace("never");
    word_pieces_stream_like_the_whole: word_piece();
    words_stream_like_the_whole: word_level();
}

/// Random ids seldom form a character, so this test splits text into its bytes.
#[test]
fn characters_split_into_bytes_are_decoded_whole() {
    for case in [byte_level(), byte_fallback(false)] {
        proptest!(|(text in "\\PC{0,8}", cut in 0usize..4)| {
            let bytes = text.as_bytes();
            let kept = &bytes[..bytes.len().saturating_sub(cut)];
            let ids: Vec<u32> = kept.iter().map(|&byte| id_of_byte(&case, byte)).collect();
            case.check(&ids, true)?;
        });
    }
}

fn id_of_byte(case: &Case, byte: u8) -> u32 {
    let fallback = case.ours.token_to_id(&format!("<0x{byte:02X}>"));
    fallback.unwrap_or_else(|| {
        let spelled = (0..case.num_ids).find(|&id| {
            let token = case.ours.id_to_token(id).unwrap();
            token.chars().count() == 1 && case.reference.decode(&[id], false).unwrap().as_bytes() == [byte]
        });
        // A byte above 0x7F is not text alone; the alphabet's order identifies it.
        spelled.unwrap_or_else(|| case.ours.token_to_id(&byte_level_char(byte).to_string()).unwrap())
    })
}

fn byte_level_char(byte: u8) -> char {
    match byte {
        0xA1..=0xAC | 0xAE..=0xFF => char::from(byte),
        0x80..=0xA0 => char::from_u32(0x100 + 34 + u32::from(byte - 0x80)).unwrap(),
        0xAD => '\u{143}',
        _ => unreachable!("bytes below 0x80 are text alone"),
    }
}

#[test]
fn a_character_is_held_until_its_last_byte() {
    let case = byte_level();
    let mut detokenizer = Detokenizer::new(Arc::clone(&case.ours), true);
    let bytes: Vec<u32> = "😀".bytes().map(|byte| id_of_byte(&case, byte)).collect();
    let pieces: Vec<Option<String>> = bytes.iter().map(|&id| detokenizer.push(id)).collect();
    assert_eq!(pieces, [None, None, None, Some("😀".to_owned())]);
    assert_eq!(detokenizer.finish(), "");

    let mut incomplete = Detokenizer::new(Arc::clone(&case.ours), true);
    assert_eq!(bytes[..3].iter().filter_map(|&id| incomplete.push(id)).count(), 0);
    assert_eq!(incomplete.finish(), "\u{FFFD}");
}

#[test]
fn a_decoder_that_cannot_be_streamed_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let file = json!({"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
                      "decoder": {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": true}});
    fs::write(dir.path().join("tokenizer.json"), file.to_string()).unwrap();
    match Tokenizer::from_dir(dir.path()) {
        Err(TextError::Decoder { decoder, .. }) => assert_eq!(decoder, "CTC"),
        other => panic!("expected a decoder error, found {:?}", other.map(|_| "a tokenizer")),
    }
}
