//! A constraint that starts after a marker: masks, rollback and clones, against a replay from the start.

use constraint::{Compiler, Constraint, ConstraintError, ConstraintSpec, Limits, Mask, StartAfter, Token, Vocabulary};

const END: u32 = 256;
const ABSENT: u32 = 257;

/// All bytes, an end id, an absent id, and tokens that hold a part of the marker `</t>`.
fn compiler() -> Compiler {
    let parts = ["</", "t>", "</t", "/t>", "</t>", "x</", "</t>y", "<"].map(|part| Token::Text(part.into()));
    let bytes = (0..=255).map(|byte| Token::Text(vec![byte]));
    let tokens = bytes.chain([Token::Special("</s>".into()), Token::Absent]).chain(parts).collect();
    Compiler::new(Vocabulary::new(tokens, &[END]).unwrap(), Limits::default()).unwrap()
}

fn fresh(compiler: &Compiler, after: &StartAfter) -> Constraint {
    let choice = ConstraintSpec::Choice(vec!["yes".into(), "no".into()]);
    compiler.compile(&choice).unwrap().start_after(after).unwrap()
}

fn replay(compiler: &Compiler, after: &StartAfter, tokens: &[u32]) -> Constraint {
    let mut constraint = fresh(compiler, after);
    tokens.iter().for_each(|&token| constraint.accept(token).unwrap());
    constraint
}

/// Compares all that can be observed; `accept` must agree with the mask on every id, and beyond the vocabulary.
fn assert_same(left: &mut Constraint, right: &mut Constraint) {
    let (mut a, mut b) = (Mask::default(), Mask::default());
    left.mask(&mut a).unwrap();
    right.mask(&mut b).unwrap();
    let seen = left.tokens().to_vec();
    assert_eq!(a, b, "{seen:?}");
    assert_eq!(seen, right.tokens());
    assert_eq!((left.is_started(), left.is_ended()), (right.is_started(), right.is_ended()), "{seen:?}");
    assert_eq!(left.may_end(), right.may_end(), "{seen:?}");
    for token in 0..a.vocab_size() as u32 + 2 {
        let valid = left.validate(&[token]).unwrap() == 1;
        assert_eq!(valid, a.allows(token), "token {token} after {seen:?}");
        assert_eq!(right.clone().accept(token).is_ok(), valid, "token {token} after {seen:?}");
    }
}

/// Every way to spell `text` in tokens.
fn splits(text: &[u8], words: &[(u32, Vec<u8>)]) -> Vec<Vec<u32>> {
    if text.is_empty() {
        return vec![vec![]];
    }
    let fits = words.iter().filter(|(_, word)| text.starts_with(word));
    let with = |(id, word): &(u32, Vec<u8>)| {
        let rest = splits(&text[word.len()..], words);
        rest.into_iter().map(|rest| [vec![*id], rest].concat()).collect::<Vec<_>>()
    };
    fits.flat_map(with).collect()
}

#[test]
fn a_text_marker_split_in_every_way_starts_the_constraint_and_every_rollback_equals_a_replay() {
    let compiler = compiler();
    let parts = ["</", "t>", "</t", "/t>", "</t>", "x</"].map(|part| part.as_bytes().to_vec());
    let words: Vec<_> = (0..=255u8).map(|byte| (u32::from(byte), vec![byte])).chain((258..).zip(parts)).collect();
    let after = StartAfter::Text("</t>".into());
    let ways = splits(b"x</</t>", &words);
    assert!(ways.len() > 20, "{}", ways.len());
    for way in ways {
        let tokens = [way.clone(), vec![u32::from(b'n'), u32::from(b'o')]].concat();
        let whole = replay(&compiler, &after, &tokens);
        assert!(whole.is_ended() && replay(&compiler, &after, &way).is_started());
        assert!(!replay(&compiler, &after, &way[..way.len() - 1]).is_started());
        for kept in 0..=tokens.len() {
            let mut back = whole.clone();
            back.rollback(tokens.len() - kept).unwrap();
            assert_eq!(back.tokens(), &tokens[..kept]);
            let mut again = replay(&compiler, &after, &tokens[..kept]);
            let (mut a, mut b) = (Mask::default(), Mask::default());
            back.mask(&mut a).unwrap();
            again.mask(&mut b).unwrap();
            assert_eq!((a, back.is_started(), back.is_ended()), (b, again.is_started(), again.is_ended()));
            assert_eq!(back.validate(&tokens[kept..]).unwrap(), tokens.len() - kept);
            assert_eq!(back.tokens(), &tokens[..kept]);
        }
    }
}

#[test]
fn the_mask_and_accept_agree_on_every_token_before_and_after_the_start() {
    let compiler = compiler();
    for after in [StartAfter::Text("</t>".into()), StartAfter::Tokens(vec![258, 259])] {
        let tokens = [u32::from(b'a'), 258, 258, 259, u32::from(b'n')];
        for kept in 0..=tokens.len() {
            let mut back = replay(&compiler, &after, &tokens);
            back.rollback(tokens.len() - kept).unwrap();
            assert_same(&mut back, &mut replay(&compiler, &after, &tokens[..kept]));
        }
    }
}

#[test]
fn before_the_start_an_absent_id_an_end_id_and_text_behind_the_marker_are_forbidden() {
    let compiler = compiler();
    let mut constraint = fresh(&compiler, &StartAfter::Text("</t>".into()));
    let mut mask = Mask::default();
    constraint.mask(&mut mask).unwrap();
    let overshoot = 264;
    let forbidden: Vec<u32> = (0..mask.vocab_size() as u32).filter(|&token| !mask.allows(token)).collect();
    assert_eq!(forbidden, [END, ABSENT, overshoot]);
    for token in forbidden {
        assert_eq!(constraint.accept(token), Err(ConstraintError::Forbidden { token, position: 0 }));
    }
}
