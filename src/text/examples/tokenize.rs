//! `tokenize DIR [auto|llama|t5] [plain]`: token ids and decoded text of each line of standard input, which is a JSON string.
//!
//! Each output line is `[ids, text]`; `plain` leaves out begin and end tokens.

use std::io::{BufRead as _, BufWriter, Write as _};

use text::{Tokenizer, TokenizerType};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let dir = arguments.first().ok_or("usage: tokenize DIR [auto|llama|t5] [plain]")?;
    let tokenizer_type = arguments.get(1).map_or(Ok(TokenizerType::Auto), |name| name.parse())?;
    let add_special = arguments.get(2).is_none_or(|word| word != "plain");
    let tokenizer = Tokenizer::open(dir.as_ref(), tokenizer_type)?;
    let mut out = BufWriter::new(std::io::stdout().lock());
    for line in std::io::stdin().lock().lines() {
        let text: String = serde_json::from_str(&line?)?;
        let ids = tokenizer.encode(&text, add_special)?;
        let decoded = tokenizer.decode(&ids, true);
        writeln!(out, "{}", serde_json::json!([ids, decoded]))?;
    }
    Ok(())
}
