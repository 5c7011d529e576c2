//! For random texts, SentencePiece models have the ids and the text of Python's sentencepiece; long runs take linear time.
//!
//! The reference needs a Python with sentencepiece and protobuf: `TRIREME_TEST_PYTHON`, or `python3` if that is unset.
//! `TRIREME_TEST_SEED` selects other texts.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use text::{Tokenizer, TokenizerType};

fn manifest_dir() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// `None` if Python has no sentencepiece; prints that the test is skipped.
fn python() -> Option<PathBuf> {
    let program = std::env::var_os("TRIREME_TEST_PYTHON").map_or_else(|| "python3".into(), PathBuf::from);
    let has_packages = Command::new(&program).args(["-c", "import google.protobuf, sentencepiece"]).output();
    if has_packages.is_ok_and(|output| output.status.success()) {
        return Some(program);
    }
    println!("skipped: {} has no sentencepiece; set TRIREME_TEST_PYTHON", program.display());
    None
}

#[test]
fn random_texts_give_the_tokens_and_the_text_of_sentencepiece() {
    let Some(python) = python() else { return };
    let seed = std::env::var("TRIREME_TEST_SEED").unwrap_or_else(|_| "1".into());
    let dir = tempfile::tempdir().unwrap();
    let script = manifest_dir().join("tests/sentencepiece_cases.py");
    let status = Command::new(python).arg(script).arg(dir.path()).arg(&seed).status().unwrap();
    assert!(status.success(), "sentencepiece_cases.py: {status}");
    let mut wrong = Vec::new();
    for folder in std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().path()) {
        let name = folder.file_name().unwrap().to_string_lossy().into_owned();
        let tokenizer = Tokenizer::open(&folder, TokenizerType::Auto).unwrap();
        let cases: Vec<(String, Vec<u32>, String)> =
            serde_json::from_slice(&std::fs::read(folder.join("cases.json")).unwrap()).unwrap();
        for (text, ids, decoded) in &cases {
            let (found, back) = (tokenizer.encode(text, false).unwrap(), tokenizer.decode(ids, true));
            if &found != ids || &back != decoded {
                let start: String = text.chars().take(60).collect();
                wrong.push(format!("{name}: {start:?}: ids {}, text {}", &found == ids, &back == decoded));
            }
        }
        assert!(cases.len() > 300, "{name} has only {} texts", cases.len());
    }
    assert!(
        wrong.is_empty(),
        "seed {seed}: {} texts differ:\n{}",
        wrong.len(),
        wrong[..wrong.len().min(40)].join("\n")
    );
}

#[test]
fn a_mebibyte_of_one_character_is_encoded_in_seconds() {
    for name in ["llama", "no_prefix", "unused", "bpe_nfkc", "t5", "unigram"] {
        let folder = manifest_dir().join("../../tests/goldens/tokenizers").join(name);
        let tokenizer = Tokenizer::from_dir(&folder).unwrap();
        for character in ["a", " ", "\u{0}"] {
            let text = character.repeat(1 << 20);
            let begun = Instant::now();
            let num_ids = tokenizer.encode(&text, false).unwrap().len();
            let took = begun.elapsed();
            println!("{name}: {character:?} {num_ids} tokens in {took:?}");
            // Quadratic work would take hours.
            assert!(took < Duration::from_secs(60), "{name}: {character:?} took {took:?}");
        }
    }
}
