//! Compares the kernels between passes of guesses with what they stand for, on made-up steps.

mod gpu;

use gpu::open;
use kernels::cuda::embed::TokenSource;
use kernels::cuda::guess::{
    self, FollowRow, Followed, GuessRows, NO_GUESS, NO_OUTPUT, Newest, NextPass, PairPass, Results,
};
use kernels::cuda::{DeviceBuffer, PinnedBuffer};

const NOTHING: u32 = u32::MAX;

#[test]
fn tokens_are_followed_by_those_that_were_chosen_up_to_the_first_wrong_draft() {
    let Some((gpu, q)) = open() else { return };
    let upload = |values: &[u32]| DeviceBuffer::from_slice(&gpu, values).unwrap();
    // A chunk of a prompt; a row with drafts 21, 22, 23, of which the last is wrong; one whose drafts are all right, behind a token
    // that it computes again; one with a wrong first draft; the last chunk of a prompt; a decode; padding.
    let row = |first, end, first_sample, num_samples, next_token, guess| FollowRow {
        first,
        end,
        first_sample,
        num_samples,
        next_token,
        num_generated: 100 * first_sample,
        guess,
        reserved: 0,
    };
    let rows = [
        row(0, 3, 0, 0, 77, NO_GUESS),
        row(3, 7, 0, 4, 0, 0),
        row(7, 11, 4, 3, 0, 1),
        row(11, 13, 7, 2, 0, NO_GUESS),
        row(13, 16, 9, 1, 0, 2),
        row(16, 17, 10, 1, 0, 3),
        FollowRow::default(),
    ];
    let token_ids = [1, 2, 3, 20, 21, 22, 23, 30, 31, 32, 33, 40, 41, 50, 51, 52, 60, 0];
    let positions: Vec<u32> = (0..18).map(|token| 500 + token).collect();
    let chosen = [21, 22, 88, 99, 32, 33, 34, 45, 46, 53, 61];
    let (slot, slot_words) = (2, 12);
    let mut outputs = PinnedBuffer::new(&gpu, 3 * slot_words * 4).unwrap();
    bytemuck::cast_slice_mut::<u8, u32>(&mut outputs)[slot * slot_words..][..chosen.len()].copy_from_slice(&chosen);
    let [dtokens, dpositions, dslot, wanted] = [&token_ids[..], &positions, &[slot as u32], &[1; 8]].map(upload);
    let drows = DeviceBuffer::from_slice(&gpu, &rows).unwrap();
    let [followed, index, made, places, generated] = [18, 4, 4, 4, 4].map(|count| upload(&vec![NOTHING; count]));
    let step = Followed {
        rows: drows.span(),
        num_rows: rows.len(),
        token_ids: dtokens.span(),
        positions: dpositions.span(),
        outputs: outputs.span(),
        slot: dslot.span(),
        slot_bytes: slot_words * 4,
    };
    let [wanted, made, places, generated] = [&wanted, &made, &places, &generated].map(DeviceBuffer::span);
    let guesses = GuessRows { wanted, made, positions: places, num_generated: generated, count: 4 };
    guess::follow(&q, &step, followed.span(), index.span(), &guesses).unwrap();
    q.wait().unwrap();
    let found: Vec<u32> = followed.span().read(18).unwrap();
    assert_eq!(found, [2, 3, 77, 21, 22, 88, 0, 31, 32, 33, 34, 45, 0, 51, 52, 53, 61, NOTHING]);
    let read = |span: kernels::cuda::Span| span.read::<u32>(4).unwrap();
    assert_eq!(read(index.span()), [5, 10, 15, 16]);
    assert_eq!(read(places), [505, 510, 515, 516]);
    assert_eq!(read(generated), [3, 403, 901, 1001]);
    assert_eq!(read(made), [0; 4]);
}

#[test]
fn rows_guess_until_they_have_all_or_no_block_is_left() {
    let Some((gpu, q)) = open() else { return };
    let upload = |values: &[u32]| DeviceBuffer::from_slice(&gpu, values).unwrap();
    let (block_size, max_blocks, most, max_rows) = (16, 3, 4, 5);
    // Row 0 wants 3 guesses, row 1 only 1, row 2 has blocks up to position 32, row 3 is padding.
    let wanted = [[3, 48], [1, 48], [4, 32], [0, 0]];
    let start = [14, 3, 30, 0];
    let (count, groups) = (wanted.len(), 2);
    let tables: Vec<u32> = (0..groups * 16).map(|word| word as u32 + 100).collect();
    let [dwanted, places, dtables, dslot] = [&wanted.concat()[..], &start, &tables, &[1]].map(upload);
    let [guessed, made, tokens, slots, contexts, generated] =
        [&[0; 4][..], &[0, 0, 0, NOTHING], &[9; 4], &[9; 16], &[9; 4], &[5, 6, 7, 8]].map(upload);
    let mut results = PinnedBuffer::new(&gpu, 2 * Results::slot_bytes(max_rows, most)).unwrap();
    results.fill(0);
    let guesses = GuessRows {
        wanted: dwanted.span(),
        made: made.span(),
        positions: places.span(),
        num_generated: generated.span(),
        count,
    };
    let next = NextPass {
        token_ids: tokens.span(),
        context_lens: contexts.span(),
        slots: slots.span(),
        slot_stride: 8,
        block_tables: dtables.span(),
        table_stride: 16,
        max_blocks,
        block_size,
        num_groups: groups,
    };
    let report = Results { base: results.span(), slot: dslot.span(), max_rows, most };
    let place = |group: usize, row: usize, position: usize| {
        tables[group * 16 + row * max_blocks + position / block_size] * 16 + (position % block_size) as u32
    };
    for pass in 0..4u32 {
        guessed.span().write(&[1000 + pass, 2000 + pass, 3000 + pass, 4000 + pass]).unwrap();
        guess::advance(&q, Newest::Guessed(guessed.span()), &guesses, &next, &report).unwrap();
        q.wait().unwrap();
        let read = |buffer: &DeviceBuffer, count| buffer.span().read::<u32>(count).unwrap();
        let goes_on = [pass < 2, false, pass < 1, false];
        for row in 0..count {
            let position = start[row] as usize + pass as usize + 1;
            let expected = match goes_on[row] {
                true => [1000 * (row as u32 + 1) + pass, position as u32, position as u32 + 1],
                false => [0; 3],
            };
            let found = [&tokens, &places, &contexts].map(|buffer| read(buffer, 4)[row]);
            assert_eq!(found, expected, "row {row}, pass {pass}");
            for group in 0..groups {
                let expected = if goes_on[row] { place(group, row, position) } else { NOTHING };
                assert_eq!(read(&slots, 16)[group * 8 + row], expected, "row {row}, group {group}, pass {pass}");
            }
        }
        assert_eq!(read(&generated, 4), [5 + 2.min(pass + 1), 6, 8, 8], "pass {pass}");
    }
    let words: &[u32] = bytemuck::cast_slice(&results);
    let own = &words[max_rows * (1 + most)..];
    assert!(words[..max_rows * (1 + most)].iter().all(|&word| word == 0), "another slot is written");
    assert_eq!(own[..5], [3, 1000, 1001, 1002, 0]);
    assert_eq!(own[5..10], [1, 2000, 0, 0, 0]);
    assert_eq!(own[10..15], [2, 3000, 3001, 0, 0]);
    assert_eq!(own[15..], [0; 10]);
}

#[test]
fn a_draft_model_goes_on_from_the_tokens_that_the_step_has_chosen() {
    let Some((gpu, q)) = open() else { return };
    let upload = |values: &[u32]| DeviceBuffer::from_slice(&gpu, values).unwrap();
    // Row 0 has a block for its new token, row 1 has none, row 2 is padding.
    let [wanted, places, tables, slot] = [&[3, 32, 2, 16, 0, 0][..], &[20, 15, 0], &[7; 16], &[0]].map(upload);
    let [followed, index] = [&[10, 11, 12, 13, 14, 15][..], &[4, 1, 0]].map(upload);
    let [made, tokens, slots, contexts, generated] =
        [&[0, 0, NOTHING][..], &[9; 3], &[9; 4], &[9; 3], &[5, 6, 7]].map(upload);
    let mut results = PinnedBuffer::new(&gpu, Results::slot_bytes(3, 3)).unwrap();
    results.fill(255);
    let [wanted, positions] = [&wanted, &places].map(DeviceBuffer::span);
    let guesses = GuessRows { wanted, made: made.span(), positions, num_generated: generated.span(), count: 3 };
    let next = NextPass {
        token_ids: tokens.span(),
        context_lens: contexts.span(),
        slots: slots.span(),
        slot_stride: 4,
        block_tables: tables.span(),
        table_stride: 16,
        max_blocks: 4,
        block_size: 16,
        num_groups: 1,
    };
    let report = Results { base: results.span(), slot: slot.span(), max_rows: 3, most: 3 };
    let newest = Newest::Chosen { followed: followed.span(), index: index.span() };
    guess::advance(&q, newest, &guesses, &next, &report).unwrap();
    q.wait().unwrap();
    let read = |buffer: &DeviceBuffer| buffer.span().read::<u32>(3).unwrap();
    assert_eq!(read(&tokens), [14, 0, 0]);
    assert_eq!(read(&places), [21, 0, 0]);
    assert_eq!(read(&contexts), [22, 0, 0]);
    assert_eq!(read(&slots), [7 * 16 + 5, NOTHING, NOTHING]);
    assert_eq!(read(&generated), [5, 6, 7], "nothing is guessed yet");
    assert_eq!(read(&made), [0, 2, NOTHING]);
    let words: &[u32] = bytemuck::cast_slice(&results);
    assert_eq!([words[0], words[1], words[4], words[8]], [0, NOTHING, 0, NOTHING]);
    // The last tokens of the step at `index`, and then these.
    let [kept, of_step] = [&[20, 21, 22, 23, 24, 25][..], &[5, 15, 17, 18, 20, 21]].map(upload);
    let [two, two_positions, two_contexts, two_slots] = [6, 6, 6, 8].map(|count| upload(&vec![9; count]));
    let to = PairPass {
        token_ids: two.span(),
        positions: two_positions.span(),
        context_lens: two_contexts.span(),
        slots: two_slots.span(),
        slot_stride: 8,
    };
    guess::pair(&q, [&kept, &of_step, &index].map(DeviceBuffer::span), &guesses, &next, &to).unwrap();
    q.wait().unwrap();
    let read = |buffer: &DeviceBuffer| buffer.span().read::<u32>(6).unwrap();
    assert_eq!(read(&two), [24, 21, 0, 14, 0, 0]);
    assert_eq!(read(&two_positions), [20, 15, 0, 21, 0, 0]);
    assert_eq!(read(&two_contexts), [21, 16, 0, 22, 0, 0]);
    assert_eq!(read(&two_slots), [7 * 16 + 4, 7 * 16 + 15, NOTHING, 7 * 16 + 5, NOTHING, NOTHING]);
}

#[test]
fn tokens_are_kept_with_those_that_only_the_gpu_knows() {
    let Some((gpu, q)) = open() else { return };
    let upload = |values: &[u32]| DeviceBuffer::from_slice(&gpu, values).unwrap();
    let ids: Vec<u32> = (0..200).map(|token| if token % 3 == 0 { NOTHING } else { token }).collect();
    let rows: Vec<u32> = (0..200).map(|token| token % 5).collect();
    let [token_ids, token_rows, last_tokens, kept] = [&ids[..], &rows, &[50, 51, 52, 53, 54], &[9; 201]].map(upload);
    let tokens =
        TokenSource { token_ids: token_ids.span(), token_rows: token_rows.span(), last_tokens: last_tokens.span() };
    guess::keep(&q, kept.span(), tokens, 200).unwrap();
    q.wait().unwrap();
    let expected = |token: u32| if token.is_multiple_of(3) { 50 + token % 5 } else { token };
    assert_eq!(kept.span().read::<u32>(201).unwrap(), (0..200).map(expected).chain([9]).collect::<Vec<_>>());
}

#[test]
fn logits_of_some_tokens_become_those_of_all() {
    let Some((gpu, q)) = open() else { return };
    let (rows, vocab, stride, count) = (3, 1000, 1008, 250);
    let columns: Vec<u32> = (0..vocab as u32).map(|token| if token % 4 == 2 { token / 4 } else { NO_OUTPUT }).collect();
    let outputs: Vec<f32> = (0..rows * count).map(|index| index as f32 * 0.5 - 100.0).collect();
    let of_tokens = DeviceBuffer::from_slice(&gpu, &columns).unwrap();
    let of_head = DeviceBuffer::from_slice(&gpu, &outputs).unwrap();
    let logits = DeviceBuffer::from_slice(&gpu, &vec![7f32; rows * stride]).unwrap();
    guess::spread(&q, [&logits, &of_head, &of_tokens].map(DeviceBuffer::span), [rows, stride, count]).unwrap();
    q.wait().unwrap();
    let found: Vec<f32> = logits.span().read(rows * stride).unwrap();
    for (row, found) in found.chunks(stride).enumerate() {
        for (token, &logit) in found.iter().enumerate() {
            let expected = match columns.get(token) {
                None => 7.0,
                Some(&NO_OUTPUT) => f32::NEG_INFINITY,
                Some(&column) => outputs[row * count + column as usize],
            };
            assert_eq!(logit, expected, "row {row}, token {token}");
        }
    }
}
