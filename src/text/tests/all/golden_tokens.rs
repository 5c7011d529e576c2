//! Tokenizers of every format have the ids and the text of sentencepiece and transformers for multilingual text and code.
//!
//! `scripts/goldens/make_tokenizer_goldens.py` writes the files and goldens; it can also compare a far larger sample.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;
use text::{Detokenizer, Tokenizer, TokenizerType};

#[derive(Deserialize)]
struct Golden {
    tokenizer_type: String,
    model: Expected,
    special: Option<Special>,
}

/// Results for the samples that all tokenizers share, without begin and end tokens.
#[derive(Deserialize)]
struct Expected {
    ids: Vec<Vec<u32>>,
    texts: Vec<String>,
}

/// Texts that contain added tokens, and their ids with begin and end tokens.
#[derive(Deserialize)]
struct Special {
    samples: Vec<String>,
    ids: Vec<Vec<u32>>,
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens/tokenizers")
}

fn load(name: &str) -> (Arc<Tokenizer>, Golden) {
    let folder = folder().join(name);
    let golden: Golden = serde_json::from_slice(&fs::read(folder.join("golden.json")).unwrap()).unwrap();
    let tokenizer = Tokenizer::open(&folder, golden.tokenizer_type.parse().unwrap()).unwrap();
    (Arc::new(tokenizer), golden)
}

fn check(name: &str) {
    let samples: Vec<String> = serde_json::from_slice(&fs::read(folder().join("samples.json")).unwrap()).unwrap();
    let (tokenizer, golden) = load(name);
    assert_eq!((golden.model.ids.len(), golden.model.texts.len()), (samples.len(), samples.len()));
    for ((text, ids), decoded) in samples.iter().zip(&golden.model.ids).zip(&golden.model.texts) {
        // Texts that contain an added token are in the other list.
        if !["<s>", "</s>", "<unk>", "<pad>"].iter().any(|token| text.contains(token)) {
            assert_eq!(&tokenizer.encode(text, false).unwrap(), ids, "{name}: {text:?}");
        }
        assert_eq!(&tokenizer.decode(ids, true), decoded, "{name}: {text:?}");
        let mut detokenizer = Detokenizer::new(Arc::clone(&tokenizer), true);
        let mut pieces: Vec<String> = ids.iter().filter_map(|&id| detokenizer.push(id)).collect();
        pieces.push(detokenizer.finish());
        assert_eq!(&pieces.concat(), decoded, "{name}: {text:?}");
    }
    if let Some(special) = golden.special {
        for (text, ids) in special.samples.iter().zip(&special.ids) {
            assert_eq!(&tokenizer.encode(text, true).unwrap(), ids, "{name}: {text:?}");
        }
    }
}

macro_rules! gives_the_reference_tokens {
    ($($test:ident: $name:literal;)*) => {$(
        #[test]
        fn $test() {
            check($name);
        }
    )*};
}

gives_the_reference_tokens! {
    bpe_with_byte_fallback_gives_the_tokens_of_sentencepiece: "llama";
    legacy_llama_gives_the_tokens_of_sentencepiece: "legacy";
    pieces_out_of_use_are_taken_apart_as_in_sentencepiece: "unused";
    normalised_bpe_gives_the_tokens_of_sentencepiece: "bpe_nfkc";
    bpe_without_a_leading_space_gives_the_tokens_of_sentencepiece: "no_prefix";
    t5_gives_the_tokens_of_sentencepiece: "t5";
    unigram_with_byte_fallback_gives_the_tokens_of_sentencepiece: "unigram";
    gpt2_files_give_the_tokens_of_transformers: "gpt2";
    qwen2_files_give_the_tokens_of_transformers: "qwen2";
}

/// Upper bound for the bytes of `text`, from the number of its tokens.
fn most_bytes(tokenizer: &Tokenizer, text: &str) -> usize {
    tokenizer.encode(text, false).unwrap().len() * tokenizer.coverage().max_bytes
}

#[test]
fn no_text_is_longer_than_its_tokens_may_represent() {
    let samples: Vec<String> = serde_json::from_slice(&fs::read(folder().join("samples.json")).unwrap()).unwrap();
    let hangul = "\u{1100}\u{1161}\u{11a8}".repeat(50);
    let others = ["\u{2581}".repeat(90), " ".repeat(200), hangul, "e\u{301}".repeat(40), "\u{0}\u{fffd}".repeat(9)];
    for (name, is_certain) in [("llama", true), ("gpt2", true), ("qwen2", true), ("t5", false), ("bpe_nfkc", false)] {
        let (tokenizer, _) = load(name);
        assert_eq!(tokenizer.coverage().is_certain, is_certain, "{name}: {:?}", tokenizer.coverage());
        for text in samples.iter().chain(&others).filter(|_| is_certain) {
            let most = most_bytes(&tokenizer, text);
            assert!(most >= text.len(), "{name}: {} bytes of {most}: {text:?}", text.len());
        }
        for id in 0..tokenizer.vocab_size() as u32 {
            let len = tokenizer.decode(&[id], false).len();
            assert!(len <= tokenizer.coverage().max_bytes, "{name}: token {id}");
        }
    }
}

#[test]
fn a_tokenizer_that_drops_or_joins_characters_is_not_certain() {
    let alphabet = "\"a\":0,\"<u>\":1";
    let model = |rest: &str| format!(r#"{{"type":"BPE","vocab":{{{alphabet}}},"merges":[]{rest}}}"#);
    let unknown = |fuses: bool| model(&format!(r#","unk_token":"<u>","fuse_unk":{fuses}"#));
    let cases = [
        (unknown(false), "null", "null", true),
        (unknown(true), "null", "null", false),
        (model(""), "null", "null", false),
        (unknown(false), r#"{"type":"NFC"}"#, "null", true),
        (unknown(false), r#"{"type":"Strip","strip_left":true,"strip_right":true}"#, "null", false),
        (unknown(false), r#"{"type":"Replace","pattern":{"String":"  "},"content":" "}"#, "null", true),
        (unknown(false), r#"{"type":"Replace","pattern":{"String":"  "},"content":""}"#, "null", false),
        (unknown(false), r#"{"type":"Replace","pattern":{"Regex":" +"},"content":" "}"#, "null", false),
        (unknown(false), "null", r#"{"type":"WhitespaceSplit"}"#, false),
        (
            unknown(false),
            "null",
            r#"{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true}"#,
            false,
        ),
    ];
    let dir = tempfile::tempdir().unwrap();
    for (model, normalizer, pre_tokenizer, is_certain) in cases {
        let added = "\"version\":\"1.0\",\"added_tokens\":[]";
        let json = format!(r#"{{{added},"normalizer":{normalizer},"pre_tokenizer":{pre_tokenizer},"model":{model}}}"#);
        fs::write(dir.path().join("tokenizer.json"), &json).unwrap();
        let tokenizer = Tokenizer::from_dir(dir.path()).unwrap();
        assert_eq!(tokenizer.coverage().is_certain, is_certain, "{json}");
        let text = "a \u{e9}\u{1f600}  e\u{301}".repeat(20);
        assert!(!is_certain || most_bytes(&tokenizer, &text) >= text.len(), "{json}");
    }
}

#[test]
fn the_type_selects_begin_and_end_tokens() {
    let open = |name: &str, kind| Tokenizer::open(&folder().join(name), kind).unwrap();
    let ends = |tokenizer: &Tokenizer| {
        let ids = tokenizer.encode("x", true).unwrap();
        let token = |id: Option<&u32>| tokenizer.id_to_token(*id.unwrap()).unwrap();
        (token(ids.first()), token(ids.last()))
    };
    // Without a configuration the type of the model decides.
    assert_eq!(ends(&open("unused", TokenizerType::Auto)).0, "<s>");
    assert_eq!(ends(&open("unigram", TokenizerType::T5)).1, "</s>");
    // With `legacy` each part of the text gets a leading space; with type `llama` only the first does.
    let ids = |kind| open("legacy", kind).encode("<s>a", false).unwrap();
    assert_ne!(ids(TokenizerType::Auto), ids(TokenizerType::Llama));
    // A path to the file instead of the directory, as in `T5Tokenizer(vocab_file=…)`.
    let file = Tokenizer::open(&folder().join("t5/spiece.model"), TokenizerType::T5).unwrap();
    assert_eq!(file.encode("x", true).unwrap(), open("t5", TokenizerType::T5).encode("x", true).unwrap());
    assert_eq!(file.token_to_id("<extra_id_0>").map(|id| id as usize), Some(file.vocab_size() - 1));
}

#[test]
fn a_damaged_model_is_an_error_and_never_a_panic() {
    let model = fs::read(folder().join("t5/spiece.model")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tokenizer.model");
    let mut state = 1u64;
    for _ in 0..60 {
        let mut damaged = model.clone();
        for _ in 0..8 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let place = (state >> 33) as usize % damaged.len();
            damaged[place] ^= (state >> 24) as u8;
        }
        fs::write(&path, &damaged).unwrap();
        if let Ok(tokenizer) = Tokenizer::open(&path, TokenizerType::Auto) {
            let ids = tokenizer.encode("ﬁne ½ 全角 x", true).unwrap();
            tokenizer.decode(&ids, false);
        }
    }
}
