use super::*;
use engine::RowId;
use ops::SampleInput;

fn bounds() -> StepBounds {
    StepBounds {
        max_tokens: 8,
        max_rows: 4,
        max_samples: 6,
        num_blocks: 10,
        block_size: 4,
        tables: TableShape { stride: 3, num_groups: 1 },
        max_positions: 12,
        vocab_size: 100,
        adapters: AdapterBounds::default(),
    }
}

fn inputs() -> StepInputs {
    StepInputs {
        step: 1,
        rows: vec![RowId(2), RowId(0)],
        num_prefill_rows: 1,
        num_prompt_rows: None,
        row_starts: vec![0, 3, 4],
        token_ids: vec![5, 6, 7, ops::TOKEN_ON_DEVICE],
        positions: vec![0, 1, 2, 6],
        slots: vec![36, 37, 38, 6],
        context_lens: vec![3, 7],
        block_tables: vec![9, 0, 3, 1],
        max_blocks: 2,
        samples: vec![SampleInput { row: RowId(0), token_index: 3, num_generated: 2 }],
        masked: Vec::new(),
        logits: Vec::new(),
        states: vec![5, 1],
        saved_states: Vec::new(),
        adapters: vec![ops::NO_ADAPTER; 2],
        runs_drafter: false,
        guesses: Vec::new(),
        reach: Vec::new(),
    }
}

#[test]
fn a_step_is_packed_with_tables_at_the_fixed_stride_and_padded() {
    let (inputs, bounds) = (inputs(), bounds());
    assert!(check(&inputs, &bounds).is_ok());
    let shape = StepShape { tokens: 6, rows: 3, samples: 2, ..StepShape::of(&inputs) };
    let mut words = vec![u32::MAX - 1; Layout::max_words(&bounds)];
    let layout = pack([&inputs, &inputs], &bounds, shape, 3, &mut words);
    assert_eq!(words[layout.slot], 3);
    assert_eq!(words[layout.token_rows..][..6], [2, 2, 2, 0, 4, 4]);
    assert_eq!(words[layout.token_tables..][..6], [0, 0, 0, 1, 0, 0]);
    assert_eq!(words[layout.slots..][..6], [36, 37, 38, 6, PADDING, PADDING]);
    assert_eq!(words[layout.row_starts..][..4], [0, 3, 4, 4]);
    assert_eq!(words[layout.context_lens..][..3], [3, 7, 0]);
    assert_eq!(words[layout.states..][..3], [5, 1, PADDING]);
    assert_eq!(words[layout.block_tables..][..9], [9, 0, 0, 3, 1, 0, 0, 0, 0]);
    assert_eq!(words[layout.sample_rows..][..2], [0, 4]);
}

#[test]
fn each_kv_group_has_slots_and_tables_of_its_own() {
    let mut inputs = inputs();
    inputs.slots.extend([8, 9, 10, 22]);
    inputs.block_tables.extend([2, 0, 7, 5]);
    let bounds = StepBounds { tables: TableShape { stride: 3, num_groups: 2 }, ..bounds() };
    assert!(check(&inputs, &bounds).is_ok());
    let shape = StepShape { tokens: 6, rows: 3, samples: 2, ..StepShape::of(&inputs) };
    let mut words = vec![u32::MAX - 1; Layout::max_words(&bounds)];
    let layout = pack([&inputs, &inputs], &bounds, shape, 3, &mut words);
    let (slots, tables) = (&words[layout.slots..], &words[layout.block_tables..]);
    assert_eq!(slots[..6], [36, 37, 38, 6, PADDING, PADDING]);
    assert_eq!(slots[slot_stride(6)..][..6], [8, 9, 10, 22, PADDING, PADDING]);
    assert_eq!(tables[..9], [9, 0, 0, 3, 1, 0, 0, 0, 0]);
    assert_eq!(tables[group_stride(3, bounds.tables)..][..9], [2, 0, 0, 7, 5, 0, 0, 0, 0]);
    inputs.block_tables[7] = 10;
    assert!(check(&inputs, &bounds).is_err());
    inputs.block_tables.truncate(4);
    assert!(check(&inputs, &bounds).is_err());
}

#[test]
fn samples_of_a_row_that_verifies_drafts_are_marked() {
    let (mut inputs, bounds) = (inputs(), bounds());
    let sample = |row, token_index| SampleInput { row: RowId(row), token_index, num_generated: token_index };
    inputs.samples = vec![sample(2, 0), sample(2, 1), sample(2, 2), sample(0, 3)];
    assert!(check(&inputs, &bounds).is_ok());
    let mut words = vec![0; Layout::max_words(&bounds)];
    let layout = pack([&inputs, &inputs], &bounds, StepShape::of(&inputs), 0, &mut words);
    assert_eq!(words[layout.sample_rows..][..4], [2 | VERIFIES, 2 | VERIFIES, 2 | VERIFIES, 0]);
}

#[test]
fn a_step_that_points_outside_is_refused() {
    let spoil: [fn(&mut StepInputs); 7] = [
        |i| i.rows[0] = RowId(4),
        |i| i.token_ids[0] = 100,
        |i| i.positions[3] = 12,
        |i| i.slots[0] = 40,
        |i| i.block_tables[0] = 10,
        |i| i.context_lens[1] = 9,
        |i| i.row_starts[1] = 2,
    ];
    for (index, spoil) in spoil.iter().enumerate() {
        let mut inputs = inputs();
        spoil(&mut inputs);
        assert!(check(&inputs, &bounds()).is_err(), "case {index}");
    }
}

#[test]
fn tokens_have_the_slots_of_their_rows() {
    let bounds = StepBounds { adapters: AdapterBounds { num_slots: 20, rank: 16 }, ..bounds() };
    let inputs = StepInputs { adapters: vec![19, ops::NO_ADAPTER], ..inputs() };
    assert!(check(&inputs, &bounds).is_ok());
    let shape = StepShape { tokens: 6, ..StepShape::of(&inputs) };
    let mut words = vec![0; Layout::max_words(&bounds)];
    let layout = pack([&inputs, &inputs], &bounds, shape, 0, &mut words);
    assert_eq!(words[layout.adapters..][..6], [19, 19, 19, ops::NO_ADAPTER, ops::NO_ADAPTER, ops::NO_ADAPTER]);
    // Sixty-four columns are four slots.
    assert_eq!(words[layout.adapter_slices..][..2], [1 << 4, 0]);
    for adapters in [vec![20, 0], vec![0], vec![0; 3]] {
        assert!(check(&StepInputs { adapters, ..inputs.clone() }, &bounds).is_err());
    }
    // A device without slots.
    assert!(check(&inputs, &StepBounds { adapters: AdapterBounds::default(), ..bounds }).is_err());
}

#[test]
fn a_step_has_the_contexts_of_its_prefilling_rows() {
    let contexts = |num_prefill_rows| StepShape::of(&StepInputs { num_prefill_rows, ..inputs() }).contexts;
    assert_eq!(contexts(0), Contexts::default());
    assert_eq!(contexts(1), Contexts { sum: 3, longest: 3 });
    assert_eq!(contexts(2), Contexts { sum: 10, longest: 7 });
    assert_eq!(StepShape::decode(8, false).contexts, Contexts::default());
}
