//! Random turns, whole, divided, cut and damaged.

use chat_format::{ChatDelta, ChatFormat, TurnStart};

use super::{Forms, Parsed, Rng, chunks, joined, tools, write};

fn parse(format: &ChatFormat, start: TurnStart, text: &[&str]) -> Vec<ChatDelta> {
    let (mut parser, mut out) = (format.parser(start, &tools(false)), Vec::new());
    for chunk in text {
        parser.push(chunk, &mut out);
    }
    parser.finish(&mut out);
    joined(&out)
}

/// Parses the random turn of a seed, which must be what was written however its text is split.
pub fn check(family: &str, seed: u64) {
    let mut rng = Rng(seed);
    let format = ChatFormat::named(family).unwrap();
    let turn = write::turn(family, &mut rng);
    let (text, arguments) = write::write(family, &turn, &mut rng, Forms::All);
    let whole = parse(&format, TurnStart::Fresh, &[&text]);
    let parsed = Parsed::of(&whole);
    assert_eq!(parsed.turn(), turn, "{family}, seed {seed}: {text}");
    if let Some(arguments) = arguments {
        let texts: Vec<_> = parsed.calls.iter().map(|(_, _, text)| text.clone()).collect();
        assert_eq!(texts, arguments, "{family}, seed {seed}");
    }
    let parts = chunks(&text, &mut rng);
    assert_eq!(parse(&format, TurnStart::Fresh, &parts), whole, "{family}, seed {seed}: {parts:?}");

    // A turn that is cut or damaged anywhere is parsed to calls whose arguments are JSON.
    let mut damaged: Vec<char> = text.chars().collect();
    for _ in 0..rng.below(3) {
        let at = rng.below(damaged.len() + 1);
        match rng.below(3) {
            0 => damaged.truncate(at),
            1 => damaged.insert(at, rng.pick(&["x", "{", "\"", "<", "]", "\\", "\n", "日"]).chars().next().unwrap()),
            _ if at < damaged.len() => drop(damaged.remove(at)),
            _ => {}
        }
    }
    let damaged = String::from_iter(damaged);
    let whole = parse(&format, TurnStart::Fresh, &[&damaged]);
    for (_, value) in Parsed::of(&whole).turn().calls {
        assert!(value.is_object(), "{family}, seed {seed}: {damaged}");
    }
    let parts = chunks(&damaged, &mut rng);
    assert_eq!(parse(&format, TurnStart::Fresh, &parts), whole, "{family}, seed {seed}: {parts:?}");
}
