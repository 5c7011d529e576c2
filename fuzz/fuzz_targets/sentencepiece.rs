//! SentencePiece models. Input: the length of the model in two bytes, the model, and a text to tokenize.
#![no_main]

use std::path::PathBuf;
use std::sync::LazyLock;

use fuzz::{expand, within};
use libfuzzer_sys::fuzz_target;
use text::Tokenizer;

static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| fuzz::scratch("sentencepiece"));

fuzz_target!(|input: &[u8]| {
    let Some((len, rest)) = input.split_first_chunk::<2>() else { return };
    let (model, text) = rest.split_at(rest.len().min(usize::from(u16::from_le_bytes(*len))));
    let path = FOLDER.join("tokenizer.model");
    std::fs::write(&path, model).expect("/dev/shm can be written");
    let text = String::from_utf8_lossy(&expand(text)[..]).into_owned();
    let text = &text[..text.floor_char_boundary(16 << 10)];
    within(model.len() + text.len(), 16 << 20, 256, || {
        let Ok(tokenizer) = Tokenizer::from_dir(&FOLDER) else { return };
        let Ok(ids) = tokenizer.encode(text, true) else { return };
        for &id in &ids {
            assert!((id as usize) < tokenizer.vocab_size(), "{id} of {}", tokenizer.vocab_size());
        }
        tokenizer.decode(&ids, true);
    });
});
