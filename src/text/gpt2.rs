//! Byte-level BPE (Radford et al. 2019) from `vocab.json` and `merges.txt`.

use std::path::Path;

use tokenizers::models::bpe::BPE;
use tokenizers::normalizers::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::processors::template::TemplateProcessing;
use tokenizers::{AddedToken, PreTokenizerWrapper, SplitDelimiterBehavior, Tokenizer};

use crate::TextError;
use crate::files::Files;

/// The published pattern by which Qwen2 splits a text into words before BPE.
const QWEN2_WORDS: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Tokenizer classes whose files are read here; an empty class is taken for GPT-2's.
const CLASSES: [&str; 4] = ["", "GPT2Tokenizer", "CodeGenTokenizer", "Qwen2Tokenizer"];

/// The tokenizer of a directory with `vocab.json` and `merges.txt`.
pub(crate) fn read(dir: &Path, files: &Files) -> Result<Tokenizer, TextError> {
    let path = dir.join("vocab.json");
    if !CLASSES.contains(&files.class()) {
        let path = dir.join("tokenizer_config.json");
        return Err(TextError::Class { path, class: files.class().to_owned(), expected: CLASSES[1..].join("`, `") });
    }
    build(dir, files).map_err(|reason| TextError::Parse { path, reason: reason.to_string() })
}

fn build(dir: &Path, files: &Files) -> tokenizers::Result<Tokenizer> {
    let is_qwen2 = files.class() == "Qwen2Tokenizer";
    let file = |name: &str| dir.join(name).to_string_lossy().into_owned();
    let model = BPE::from_file(&file("vocab.json"), &file("merges.txt")).build()?;
    let mut tokenizer = Tokenizer::new(model);
    let prefix = files.flag("add_prefix_space").unwrap_or(false);
    if is_qwen2 {
        let pattern = SplitPattern::Regex(QWEN2_WORDS.to_owned());
        let words = Split::new(pattern, SplitDelimiterBehavior::Isolated, false)?;
        let steps: Vec<PreTokenizerWrapper> = vec![words.into(), ByteLevel::new(prefix, true, false).into()];
        tokenizer.with_pre_tokenizer(Some(Sequence::new(steps)));
        tokenizer.with_normalizer(Some(NFC))?;
    } else {
        tokenizer.with_pre_tokenizer(Some(ByteLevel::new(prefix, true, true)));
    }
    tokenizer.with_decoder(Some(ByteLevel::default()));
    add_tokens(&mut tokenizer, files)?;
    add_ends(&mut tokenizer, files)?;
    Ok(tokenizer)
}

/// Adds the tokens of the JSON files in the order of their ids, so that new tokens get these ids.
fn add_tokens(tokenizer: &mut Tokenizer, files: &Files) -> tokenizers::Result<()> {
    let mut added = files.added();
    added.sort_by_key(|(id, _)| id.unwrap_or(u32::MAX));
    if added.iter().all(|(_, token)| token.content != "<|endoftext|>")
        && tokenizer.token_to_id("<|endoftext|>").is_some()
    {
        added.push((None, crate::files::AddedToken::plain("<|endoftext|>".to_owned(), true)));
    }
    for (id, token) in added {
        let content = token.content.clone();
        let token = AddedToken::from(token.content, token.special)
            .lstrip(token.lstrip)
            .rstrip(token.rstrip)
            .single_word(token.single_word)
            .normalized(token.normalized);
        tokenizer.add_tokens(vec![token])?;
        let given = tokenizer.token_to_id(&content);
        if id.is_some() && id != given {
            let given = given.map_or("none".to_owned(), |id| id.to_string());
            return Err(format!("token `{content}` has the id {given} here, expected {}", id.unwrap_or(0)).into());
        }
    }
    Ok(())
}

/// Adds begin and end tokens to every text where the configuration enables them.
fn add_ends(tokenizer: &mut Tokenizer, files: &Files) -> tokenizers::Result<()> {
    let end = |flag: &str, role: &str| -> Option<(String, u32)> {
        let token =
            files.role(role).or_else(|| Some("<|endoftext|>".to_owned())).filter(|_| files.flag(flag) == Some(true))?;
        let id = tokenizer.token_to_id(&token)?;
        Some((token, id))
    };
    let (bos, eos) = (end("add_bos_token", "bos_token"), end("add_eos_token", "eos_token"));
    let name = |end: &Option<(String, u32)>| end.as_ref().map(|(token, _)| token.clone());
    let template: Vec<String> = name(&bos).into_iter().chain(["$A".to_owned()]).chain(name(&eos)).collect();
    let mut ends: Vec<(String, u32)> = bos.into_iter().chain(eos).collect();
    ends.dedup();
    if !ends.is_empty() {
        let template = TemplateProcessing::builder().try_single(template)?.special_tokens(ends).build()?;
        tokenizer.with_post_processor(Some(template));
    }
    Ok(())
}
