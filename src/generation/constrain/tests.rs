use super::*;

fn budget(max_tokens: usize, is_open: bool) -> Reasoning {
    Reasoning::new(ReasoningBudget { max_tokens, is_open, open: [1, 2].into(), close: [7, 8].into() })
}

#[test]
fn reasoning_ends_behind_its_budget() {
    let mut reasoning = budget(2, true);
    let mut forced = Vec::new();
    for token in [5, 5, 7, 8, 5, 5, 5] {
        forced.push(reasoning.forced());
        reasoning.push(token);
    }
    assert_eq!(forced, [None, None, Some(7), Some(8), None, None, None]);
    reasoning.rollback(4);
    assert_eq!(reasoning.forced(), Some(8));
    reasoning.rollback(2);
    assert_eq!(reasoning.forced(), None);
}

#[test]
fn reasoning_that_a_marker_opens_is_counted_from_there() {
    let mut reasoning = budget(1, false);
    for token in [5, 5, 1, 2] {
        assert_eq!(reasoning.forced(), None);
        reasoning.push(token);
    }
    reasoning.push(7);
    assert_eq!(reasoning.forced(), Some(7), "a part of the end inside of the budget does not count");
    reasoning.push(7);
    assert_eq!(reasoning.forced(), Some(8));
}

#[test]
fn a_text_may_begin_with_reasoning_that_the_constraint_does_not_see() {
    // One token a byte; 256 opens the reasoning, 257 closes it, 258 ends the text.
    let tokens = (0..=255).map(|byte| constraint::Token::Text(vec![byte]));
    let special = ["<think>", "</think>", "</s>"].map(|name| constraint::Token::Special(name.to_owned()));
    let vocabulary = Vocabulary::new(tokens.chain(special).collect(), &[258]).unwrap();
    let compiler = Compiler::new(vocabulary, Limits::default()).unwrap();
    let constraint = compiler.compile(&ConstraintSpec::Regex("ab".into())).unwrap();
    let preface = Some(Preface { open: 256, close: [257].into() });
    let fresh = Prefaced { constraint, preface, end_ids: vec![258], tokens: Vec::new(), begins_at: None };
    let allowed = |state: &mut Prefaced| {
        let mut words = Vec::new();
        state.mask(259, &mut Mask::default(), &mut words).unwrap();
        (0..259u32).filter(|id| words[*id as usize / 32] >> (id % 32) & 1 == 1).collect::<Vec<_>>()
    };
    let (a, b) = (u32::from(b'a'), u32::from(b'b'));
    let mut state = fresh.clone();
    assert_eq!(allowed(&mut state), [a, 256]);
    for token in [256, 7, 258 - 200, 257] {
        state.accept(token).unwrap();
        assert!(!state.is_ended());
    }
    assert_eq!(allowed(&mut state), [a]);
    state.accept(a).unwrap();
    state.accept(b).unwrap();
    assert!(state.is_ended());
    for (count, expected) in [(1, vec![b]), (1, vec![a])] {
        state.rollback(count).unwrap();
        assert_eq!(allowed(&mut state), expected);
    }
    state.rollback(1).unwrap();
    assert_eq!(allowed(&mut state).len(), 258, "inside of the reasoning all but the end is allowed");
    state.rollback(3).unwrap();
    assert_eq!(allowed(&mut state), [a, 256]);
    let mut without = fresh;
    without.accept(a).unwrap();
    assert_eq!(allowed(&mut without), [b]);
    without.rollback(1).unwrap();
    assert_eq!(allowed(&mut without), [a, 256]);
}

#[test]
fn all_tokens_are_those_of_the_vocabulary() {
    let mut words = Vec::new();
    all_tokens(35, &mut words);
    assert_eq!(words, [u32::MAX, 0b111]);
}
