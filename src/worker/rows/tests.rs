use engine::{AdapterSlot, HostCopies, HostSlot, JoinedRow, JoinedTable, RowWork, SamplingParams, TokenId};
use ops::SampleInput;

use super::*;

fn joined(row: u32, tokens: &[u32], blocks: &[u32]) -> JoinedRow {
    JoinedRow {
        row: RowId(row),
        sequence: SequenceId(100 + u64::from(row)),
        tokens: tokens.iter().map(|&token| TokenId(token)).collect(),
        num_prompt_tokens: tokens.len() as u32,
        num_computed: 0,
        state: None,
        adapter: None,
        tables: vec![JoinedTable { first: 0, blocks: blocks.iter().map(|&block| BlockId(block)).collect() }],
        sampling: SamplingParams::default(),
    }
}

fn work(row: u32, start: u32, num_tokens: u32, samples: bool) -> RowWork {
    RowWork { row: RowId(row), start, num_tokens, samples, num_guesses: 0 }
}

#[test]
fn a_prefill_and_then_a_decode_are_packed_for_the_device() {
    let (mut table, mut inputs) = (RowTable::new(4, vec![None], 2, 8, 1), StepInputs::default());
    let prefill = StepPlan {
        step: 1,
        joined: vec![joined(2, &[10, 11, 12], &[5, 3])],
        work: vec![work(2, 0, 3, true)],
        ..StepPlan::default()
    };
    table.apply(&prefill, &mut inputs).unwrap();
    assert_eq!(inputs.token_ids, [10, 11, 12]);
    assert_eq!(inputs.slots, [10, 11, 6]);
    assert_eq!(inputs.block_table(0, 0), [5, 3]);
    assert_eq!(inputs.samples, [SampleInput { row: RowId(2), token_index: 2, num_generated: 0 }]);

    let decode = StepPlan { step: 2, work: vec![work(2, 3, 1, true)], ..StepPlan::default() };
    table.apply(&decode, &mut inputs).unwrap();
    assert_eq!((inputs.token_ids.as_slice(), inputs.slots.as_slice()), (&[TOKEN_ON_DEVICE][..], &[7][..]));
    assert_eq!(inputs.samples[0].num_generated, 1);
    assert_eq!((inputs.num_prefill_rows, inputs.context_lens.as_slice()), (0, &[4][..]));

    let grown = vec![GrownTable { row: RowId(2), group: 0, block: BlockId(1) }];
    let further = StepPlan { step: 3, grown, work: vec![work(2, 4, 1, true)], ..StepPlan::default() };
    table.apply(&further, &mut inputs).unwrap();
    assert_eq!((inputs.token_ids.as_slice(), inputs.slots.as_slice()), (&[TOKEN_ON_DEVICE][..], &[2][..]));
    assert_eq!(inputs.samples[0].num_generated, 2);
}

#[test]
fn guesses_are_asked_for_behind_rows_that_sample() {
    let (mut table, mut inputs) = (RowTable::new(4, vec![None], 2, 8, 1), StepInputs::default());
    let asking = |num_guesses, work: RowWork| RowWork { num_guesses, ..work };
    let plan = StepPlan {
        step: 1,
        joined: vec![joined(0, &[1, 2, 3], &[0, 1]), joined(1, &[4, 5, 6], &[2, 3]), joined(2, &[7], &[4])],
        work: vec![asking(2, work(0, 0, 2, false)), asking(3, work(1, 0, 3, true)), work(2, 0, 1, true)],
        runs_drafter: true,
        ..StepPlan::default()
    };
    table.apply(&plan, &mut inputs).unwrap();
    assert!(inputs.runs_drafter);
    assert_eq!(inputs.guesses, [0, 3, 0]);
    // Three guesses behind position 2 need more than the two blocks that the row has.
    assert_eq!((&inputs.reach[..], inputs.max_blocks), (&[2, 4, 2][..], 2));
    let plan = StepPlan { step: 2, work: vec![work(1, 3, 1, true)], ..StepPlan::default() };
    table.apply(&plan, &mut inputs).unwrap();
    assert!(inputs.guesses.is_empty() && inputs.reach.is_empty() && !inputs.runs_drafter);
    let grown = [5, 6].map(|block| GrownTable { row: RowId(1), group: 0, block: BlockId(block) }).to_vec();
    let plan = StepPlan { step: 3, grown, work: vec![asking(1, work(1, 4, 1, true))], ..StepPlan::default() };
    table.apply(&plan, &mut inputs).unwrap();
    // Position 5 is in the block of position 4, and the last block is not needed.
    assert_eq!((&inputs.reach[..], inputs.max_blocks, &inputs.block_tables[..]), (&[6][..], 3, &[2, 3, 5][..]));
}

#[test]
fn a_single_token_of_a_prompt_is_a_prefill_chunk_where_prompts_are_kept_whole() {
    for keeps_prompts_whole in [false, true] {
        let table = RowTable::new(4, vec![None], 2, 8, 1);
        let (mut table, mut inputs) = (table.keeping_prompts_whole(keeps_prompts_whole), StepInputs::default());
        let last = StepPlan {
            step: 1,
            joined: vec![JoinedRow { num_computed: 2, ..joined(2, &[10, 11, 12], &[5, 3]) }],
            work: vec![work(2, 2, 1, true)],
            ..StepPlan::default()
        };
        table.apply(&last, &mut inputs).unwrap();
        assert_eq!(inputs.num_prefill_rows, usize::from(keeps_prompts_whole));
        assert_eq!(inputs.num_prompt_rows, keeps_prompts_whole.then_some(1));
        let decode = StepPlan { step: 2, work: vec![work(2, 3, 1, true)], ..StepPlan::default() };
        table.apply(&decode, &mut inputs).unwrap();
        assert_eq!(inputs.num_prefill_rows, 0);
        assert_eq!(inputs.num_prompt_rows, keeps_prompts_whole.then_some(0));
    }
}

#[test]
fn generated_tokens_with_a_recurrent_state_stay_in_their_row() {
    let table = RowTable::new(4, vec![None], 2, 8, 1).with_states(2).keeping_prompts_whole(true);
    let (mut table, mut inputs) = (table, StepInputs::default());
    let prompt = JoinedRow { state: Some(StateId(1)), num_computed: 0, ..joined(0, &[7, 8], &[1]) };
    let again = joined(2, &[10, 11, 12, 13, 14], &[5, 3, 6]);
    let again = JoinedRow { num_prompt_tokens: 2, num_computed: 2, state: Some(StateId(0)), ..again };
    let work = vec![work(0, 0, 2, true), work(2, 2, 2, false)];
    let plan = StepPlan { step: 1, joined: vec![prompt, again], work, ..StepPlan::default() };
    table.apply(&plan, &mut inputs).unwrap();
    assert_eq!((&inputs.rows[..], &inputs.row_starts[..]), (&[RowId(0), RowId(2)][..], &[0, 2, 4][..]));
    assert_eq!((&inputs.states[..], inputs.num_prefill_rows, inputs.num_prompt_rows), (&[1, 0][..], 2, Some(1)));
}

#[test]
fn generated_tokens_that_are_computed_again_are_decodes_where_prompts_are_kept_whole() {
    for keeps_prompts_whole in [false, true] {
        let table = RowTable::new(4, vec![None], 2, 8, 1);
        let (mut table, mut inputs) = (table.keeping_prompts_whole(keeps_prompts_whole), StepInputs::default());
        let again = JoinedRow { num_prompt_tokens: 2, ..joined(2, &[10, 11, 12, 13, 14], &[5, 3, 6]) };
        let work = vec![work(2, 2, 3, true)];
        let plan =
            StepPlan { step: 1, joined: vec![JoinedRow { num_computed: 2, ..again }], work, ..StepPlan::default() };
        table.apply(&plan, &mut inputs).unwrap();
        assert_eq!((&inputs.token_ids[..], &inputs.positions[..]), (&[12, 13, 14][..], &[2, 3, 4][..]));
        let sample = SampleInput { row: RowId(2), token_index: 2, num_generated: 3 };
        assert_eq!(inputs.samples, [sample]);
        let (rows, starts, lens): (_, &[u32], &[u32]) = match keeps_prompts_whole {
            true => (vec![RowId(2); 3], &[0, 1, 2, 3], &[3, 4, 5]),
            false => (vec![RowId(2)], &[0, 3], &[5]),
        };
        assert_eq!((&inputs.rows, &inputs.row_starts[..], &inputs.context_lens[..]), (&rows, starts, lens));
        assert_eq!(inputs.num_prefill_rows, usize::from(!keeps_prompts_whole));
        assert_eq!(inputs.block_tables.len(), rows.len() * inputs.max_blocks);
        assert!((0..rows.len()).all(|row| inputs.block_table(0, row).starts_with(&[5, 3])));
    }
}

#[test]
fn drafts_follow_the_newest_token_and_a_revision_keeps_the_accepted_ones() {
    let (mut table, mut inputs) = (RowTable::new(4, vec![None], 4, 8, 1), StepInputs::default());
    let join = StepPlan {
        step: 1,
        joined: vec![joined(2, &[10, 11], &[5, 3])],
        work: vec![work(2, 0, 2, true)],
        ..StepPlan::default()
    };
    table.apply(&join, &mut inputs).unwrap();
    let drafts = vec![(RowId(2), vec![TokenId(20), TokenId(21)])];
    let verify = StepPlan { step: 2, drafts, work: vec![work(2, 2, 3, true)], ..StepPlan::default() };
    table.apply(&verify, &mut inputs).unwrap();
    assert_eq!(inputs.token_ids, [TOKEN_ON_DEVICE, 20, 21]);
    let generated: Vec<_> = inputs.samples.iter().map(|sample| (sample.token_index, sample.num_generated)).collect();
    assert_eq!(generated, [(0, 1), (1, 2), (2, 3)]);

    let tokens = [12, 20, 30].map(TokenId).to_vec();
    let revised = vec![RevisedRow { row: RowId(2), parent: RowId(2), num_kept: 2, tokens }];
    let next = StepPlan { step: 3, revised, work: vec![work(2, 4, 1, true)], ..StepPlan::default() };
    table.apply(&next, &mut inputs).unwrap();
    assert_eq!((inputs.token_ids.as_slice(), inputs.slots.as_slice()), (&[30][..], &[12][..]));
    assert_eq!(inputs.samples[0].num_generated, 3);
}

#[test]
fn beams_continue_their_parents_and_write_into_their_own_blocks() {
    let (mut table, mut inputs) = (RowTable::new(4, vec![None], 4, 8, 1), StepInputs::default());
    let mut first = joined(0, &[10, 11, 12], &[5]);
    first.sampling.beam_candidates = 3;
    let join = StepPlan { step: 1, joined: vec![first], work: vec![work(0, 0, 3, true)], ..StepPlan::default() };
    table.apply(&join, &mut inputs).unwrap();
    let beam = |row, token| RevisedRow { row: RowId(row), parent: RowId(0), num_kept: 3, tokens: vec![TokenId(token)] };
    let fork = StepPlan {
        step: 2,
        revised: vec![beam(0, 20), beam(1, 21)],
        copied: vec![CopiedBlock { row: RowId(0), group: 0, from: BlockId(5), to: BlockId(6) }],
        work: vec![work(0, 3, 1, true), work(1, 3, 1, true)],
        ..StepPlan::default()
    };
    table.apply(&fork, &mut inputs).unwrap();
    assert_eq!((inputs.token_ids.as_slice(), inputs.slots.as_slice()), (&[20, 21][..], &[27, 23][..]));
    let wrong = CopiedBlock { row: RowId(0), group: 0, from: BlockId(5), to: BlockId(7) };
    let plan = StepPlan { step: 3, copied: vec![wrong], ..StepPlan::default() };
    assert!(matches!(table.apply(&plan, &mut inputs), Err(PlanMismatch::Copied { last: Some(6), .. })));
}

#[test]
fn requested_logits_carry_their_position_or_output_token() {
    let (mut table, mut inputs) = (RowTable::new(4, vec![None], 4, 8, 1), StepInputs::default());
    let mut requesting = joined(1, &[10, 11, 12, 13], &[5]);
    // The sequence was preempted: token 13 is output.
    (requesting.num_prompt_tokens, requesting.sampling.context_logits, requesting.sampling.generation_logits) =
        (3, true, true);
    let (other, sequence) = (joined(0, &[9, 9], &[3]), requesting.sequence);
    let work = vec![work(0, 0, 2, true), work(1, 0, 4, true)];
    let plan = StepPlan { step: 1, joined: vec![other, requesting], work, ..StepPlan::default() };
    table.apply(&plan, &mut inputs).unwrap();
    assert_eq!(inputs.logits, [2, 3, 4, 5]);
    let context = (0..3).map(LogitsPlace::Context);
    let expected: Vec<_> = context.chain([LogitsPlace::Generation(1)]).map(|place| (sequence, place)).collect();
    assert_eq!(table.take_reported(), expected);
    let decode = RowWork { row: RowId(1), start: 4, num_tokens: 1, samples: true, num_guesses: 0 };
    let grown = vec![GrownTable { row: RowId(1), group: 0, block: BlockId(6) }];
    let next = StepPlan { step: 2, grown, work: vec![decode], ..StepPlan::default() };
    table.apply(&next, &mut inputs).unwrap();
    assert_eq!(
        (inputs.logits.as_slice(), table.take_reported()),
        (&[0][..], vec![(sequence, LogitsPlace::Generation(2))])
    );
}

/// Two KV groups, the second with a window of 3 positions.
#[test]
fn each_kv_group_has_slots_and_tables_of_its_own() {
    let mut table = RowTable::new(2, vec![None, Some(3)], 2, 32, 1);
    let windowed = JoinedTable { first: 1, blocks: vec![BlockId(20)] };
    let mut row = joined(0, &[1, 2, 3, 4, 5], &[5, 6, 7]);
    row.num_computed = 4;
    row.tables.push(windowed.clone());
    let plan = StepPlan {
        step: 1,
        joined: vec![row],
        grown: vec![GrownTable { row: RowId(0), group: 1, block: BlockId(21) }],
        work: vec![work(0, 4, 1, true)],
        ..StepPlan::default()
    };
    let mut inputs = StepInputs::default();
    table.apply(&plan, &mut inputs).unwrap();
    assert_eq!((inputs.slots_of(0), inputs.slots_of(1)), (&[14][..], &[42][..]));
    assert_eq!((inputs.block_table(0, 0), inputs.block_table(1, 0)), (&[5, 6, 7][..], &[20, 20, 21][..]));

    let refused = |change: fn(&mut StepPlan)| {
        let mut plan = plan.clone();
        change(&mut plan);
        RowTable::new(2, vec![None, Some(3)], 2, 32, 1).apply(&plan, &mut StepInputs::default()).unwrap_err()
    };
    let error = refused(|plan| drop(plan.joined[0].tables.pop()));
    assert_eq!(error, PlanMismatch::Tables { step: 1, row: 0, found: 1, groups: 2 });
    let error = refused(|plan| plan.grown[0].group = 2);
    assert_eq!(error, PlanMismatch::GroupRange { step: 1, row: 0, group: 2, groups: 2 });
    // The token at position 4 sees positions 2 and 3, which are in block 1.
    let error = refused(|plan| plan.joined[0].tables[1].first = 2);
    assert_eq!(error, PlanMismatch::Released { step: 1, row: 0, group: 1, needed: 1, first: 2 });
    let error = refused(|plan| plan.joined[0].tables[1].first = u32::MAX);
    assert!(matches!(error, PlanMismatch::Blocks { .. }));
    let error = refused(|plan| plan.grown.clear());
    assert_eq!(error, PlanMismatch::Blocks { step: 1, row: 0, needed: 3, found: 2 });
}

#[test]
fn a_gap_in_step_numbers_is_named() {
    let mut table = RowTable::new(1, vec![None], 2, 8, 5);
    let plan = StepPlan { step: 6, ..StepPlan::default() };
    let error = table.apply(&plan, &mut StepInputs::default()).unwrap_err();
    assert_eq!(error.to_string(), "plan 6 came where plan 5 was due");
}

#[test]
fn work_beyond_the_blocks_or_the_tokens_is_refused() {
    let plan = |work| StepPlan { step: 1, joined: vec![joined(0, &[1, 2, 3], &[0])], work, ..StepPlan::default() };
    let apply =
        |plan: &StepPlan| RowTable::new(2, vec![None], 2, 8, 1).apply(plan, &mut StepInputs::default()).unwrap_err();
    assert!(matches!(apply(&plan(vec![work(0, 0, 3, true)])), PlanMismatch::Blocks { needed: 2, found: 1, .. }));
    assert!(matches!(apply(&plan(vec![work(0, 0, 4, true)])), PlanMismatch::NoToken { position: 3, .. }));
    assert!(matches!(apply(&plan(vec![work(0, 1, 1, false)])), PlanMismatch::Start { .. }));
    assert!(matches!(apply(&plan(vec![work(1, 0, 1, false)])), PlanMismatch::RowEmpty { row: 1, .. }));
}

#[test]
fn rows_name_the_slots_of_their_adapters_and_a_plan_without_one_has_no_list() {
    let mut table = RowTable::new(4, vec![None], 2, 8, 1).with_adapters(2);
    let mut inputs = StepInputs::default();
    let with = JoinedRow { adapter: Some(AdapterSlot(1)), ..joined(0, &[1, 2], &[0]) };
    let plan = StepPlan {
        step: 1,
        joined: vec![with.clone(), joined(1, &[3, 4], &[1])],
        work: vec![work(0, 0, 2, true), work(1, 0, 2, true)],
        ..StepPlan::default()
    };
    table.apply(&plan, &mut inputs).unwrap();
    assert_eq!(inputs.adapters, [1, NO_ADAPTER]);
    let left = StepPlan { step: 2, left: vec![RowId(0), RowId(1)], ..StepPlan::default() };
    table.apply(&left, &mut inputs).unwrap();
    let plain = StepPlan {
        step: 3,
        joined: vec![joined(1, &[3, 4], &[1])],
        work: vec![work(1, 0, 2, true)],
        ..StepPlan::default()
    };
    table.apply(&plain, &mut inputs).unwrap();
    assert!(inputs.adapters.is_empty());
    let wrong = JoinedRow { adapter: Some(AdapterSlot(2)), ..with };
    let plan = StepPlan { step: 4, joined: vec![wrong], ..StepPlan::default() };
    let error = table.apply(&plan, &mut inputs).unwrap_err().to_string();
    assert_eq!(error, "plan 4 names the slot 2 for an adapter, but there are 2");
}

#[test]
fn copies_of_blocks_or_slots_that_do_not_exist_are_refused() {
    let slots = HostSlots { num_blocks: 2, num_states: 1 };
    let table = || RowTable::new(4, vec![None], 2, 8, 1).with_states(3).with_host(slots);
    let mut inputs = StepInputs::default();
    let fitting = HostCopies {
        stored: vec![(BlockId(7), HostSlot(1))],
        loaded: vec![(BlockId(0), HostSlot(0))],
        stored_states: vec![(StateId(2), HostSlot(0))],
        loaded_states: vec![],
    };
    table().apply(&StepPlan { step: 1, host: fitting, ..StepPlan::default() }, &mut inputs).unwrap();
    for host in [
        HostCopies { stored: vec![(BlockId(8), HostSlot(0))], ..HostCopies::default() },
        HostCopies { loaded: vec![(BlockId(0), HostSlot(2))], ..HostCopies::default() },
        HostCopies { stored_states: vec![(StateId(3), HostSlot(0))], ..HostCopies::default() },
        HostCopies { loaded_states: vec![(StateId(0), HostSlot(1))], ..HostCopies::default() },
    ] {
        let error = table().apply(&StepPlan { step: 1, host, ..StepPlan::default() }, &mut inputs).unwrap_err();
        assert!(matches!(error, PlanMismatch::Host { .. }), "{error}");
        assert!(error.to_string().contains("of the host, but there are"), "{error}");
    }
}
