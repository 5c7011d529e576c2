//! Models with recurrent states: sequences have slots, and start from snapshots. [`World`] checks at each step that a row's state
//! is that of the positions before it, and compares each stream with what its request generates alone.

use engine::{BeamParams, Engine, EngineConfig, Policy, Refused, Request, StepPlan, TokenId};

use crate::support::{Guesser, Random, World, computed, prompt, request};

const BLOCK_SIZE: usize = 16;

fn config() -> EngineConfig {
    EngineConfig {
        max_rows: 4,
        max_step_tokens: 64,
        max_sequence_len: 2048,
        block_size: BLOCK_SIZE,
        num_states: 16,
        state_interval: 4,
        ..EngineConfig::default()
    }
}

/// What a request generates.
fn output(request: &Request) -> Vec<TokenId> {
    crate::support::run_alone(request, config().max_sequence_len).0
}

#[test]
fn the_next_turn_of_a_conversation_computes_only_what_follows_the_last_full_block() {
    let mut world = World::new(config(), 1);
    let first = request(prompt(1, 100), 50);
    assert_eq!(computed(&mut world, first.clone()), 149);
    let text = [first.prompt.clone(), output(&first)].concat();
    // The last token of an answer is never computed. Of 149 positions, 144 are full blocks.
    let next = [text, prompt(2, 20)].concat();
    assert_eq!(computed(&mut world, request(next.clone(), 10)), next.len() - 144 + 9);
    // The same prompt again starts at its last full block, and another answer to the first one at that one's.
    assert_eq!(computed(&mut world, request(next.clone(), 10)), next.len() - 160 + 9);
    assert_eq!(computed(&mut world, request(first.prompt, 3)), 100 - 96 + 2);
}

#[test]
fn a_conversation_goes_on_from_its_last_answer_where_there_are_fewer_slots_than_rows() {
    let mut world = World::new(EngineConfig { num_states: 3, ..config() }, 1);
    let first = request(prompt(1, 100), 50);
    computed(&mut world, first.clone());
    let next = [first.prompt.clone(), output(&first), prompt(2, 20)].concat();
    assert_eq!(computed(&mut world, request(next.clone(), 10)), next.len() - 144 + 9);
}

#[test]
fn prompts_with_a_common_beginning_start_at_the_last_snapshot_within_it() {
    let mut world = World::new(config(), 1);
    let beginning = prompt(1, 150);
    let of = |seed: u64, len: usize| request([beginning.clone(), prompt(seed, len)].concat(), 1);
    computed(&mut world, of(2, 40));
    // A snapshot is taken every 4 blocks of 16 positions: the last one within 150 is at 128.
    assert_eq!(computed(&mut world, of(3, 25)), 150 + 25 - 128);
}

/// Ends a message.
const END: TokenId = TokenId(99);

/// Snapshots are 16 blocks apart: messages are shorter.
fn with_messages() -> EngineConfig {
    EngineConfig { state_interval: 16, message_ends: vec![END], ..config() }
}

/// A prompt of messages with these seeds and lengths.
fn chat(messages: &[(u64, usize)]) -> Vec<TokenId> {
    messages.iter().flat_map(|&(seed, len)| prompt(seed, len - 1).into_iter().chain([END])).collect()
}

#[test]
fn the_second_conversation_with_a_system_prompt_starts_at_its_end() {
    let mut world = World::new(with_messages(), 1);
    computed(&mut world, request(chat(&[(1, 100), (2, 70)]), 3));
    // The last full block of the system prompt ends at 96.
    assert_eq!(computed(&mut world, request(chat(&[(1, 100), (3, 55)]), 3)), 155 - 96 + 2);
    assert_eq!(computed(&mut world, request(chat(&[(1, 100), (4, 300)]), 3)), 400 - 96 + 2);
}

#[test]
fn tools_and_system_prompt_may_be_two_messages() {
    let mut world = World::new(with_messages(), 1);
    computed(&mut world, request(chat(&[(1, 100), (2, 60), (3, 70)]), 3));
    assert_eq!(computed(&mut world, request(chat(&[(1, 100), (2, 60), (4, 55)]), 3)), 215 - 160 + 2);
    assert_eq!(computed(&mut world, request(chat(&[(1, 100), (5, 60), (4, 55)]), 3)), 215 - 96 + 2);
}

#[test]
fn conversations_that_arrive_together_compute_their_system_prompt_once() {
    let mut world = World::new(with_messages(), 1);
    for seed in 2..6 {
        world.submit(request(chat(&[(1, 200), (seed, 40)]), 1)).unwrap();
    }
    let mut computed = 0;
    while !world.engine.is_idle() {
        computed += world.plan_tokens();
        world.settle();
    }
    world.run_to_idle();
    assert_eq!(computed, 192 + 4 * 48);
}

#[test]
fn another_last_message_starts_at_the_end_of_the_one_before_it() {
    let mut world = World::new(with_messages(), 1);
    let before = [(1, 50), (2, 60), (3, 70), (4, 41)];
    computed(&mut world, request(chat(&[&before[..], &[(5, 30)]].concat()), 3));
    // 221 tokens have 13 full blocks.
    assert_eq!(computed(&mut world, request(chat(&[&before[..], &[(6, 40)]].concat()), 3)), 261 - 208 + 2);
    // Those of the first two messages and of the last but one, and of each prompt. Where its last message ends, the prompt does.
    assert_eq!(world.engine.stats().num_states_cached, 5);
}

#[test]
fn a_message_that_is_not_worth_a_snapshot_has_none() {
    let mut world = World::new(EngineConfig { state_interval: 32, ..with_messages() }, 1);
    // 3 blocks, of 4 at least.
    computed(&mut world, request(chat(&[(1, 60), (2, 300)]), 1));
    assert_eq!(world.engine.stats().num_states_cached, 1);
    computed(&mut world, request(chat(&[(3, 64), (4, 300)]), 1));
    assert_eq!(world.engine.stats().num_states_cached, 1 + 2);
}

#[test]
fn a_beginning_that_no_message_ends_is_found_from_the_third_prompt_on() {
    let mut world = World::new(EngineConfig { state_interval: 16, ..config() }, 1);
    let of = |seed: u64| request([prompt(1, 150), prompt(seed, 50)].concat(), 1);
    assert_eq!([2, 3, 4, 5].map(|seed| computed(&mut world, of(seed))), [200, 200, 200 - 144, 200 - 144]);
}

#[test]
fn a_beginning_is_found_again_after_the_workers_were_lost() {
    let mut world = World::new(with_messages(), 1);
    let of = |seed: u64| request(chat(&[(1, 100), (seed, 70)]), 3);
    computed(&mut world, of(2));
    world.recover();
    assert_eq!([3, 4].map(|seed| computed(&mut world, of(seed))), [170 + 2, 170 - 96 + 2]);
    // In the middle of a prompt.
    world.submit(of(5)).unwrap();
    world.plan();
    world.recover();
    world.run_to_idle();
    assert_eq!(computed(&mut world, of(6)), 170 - 96 + 2);
}

#[test]
fn messages_change_no_token_where_blocks_and_slots_are_few() {
    for (num_states, num_blocks) in [(2, 30), (5, 40), (9, 25)] {
        let config = EngineConfig { num_states, num_blocks, policy: Policy::MaxUtilization, ..with_messages() };
        let mut world = World::new(EngineConfig { num_host_blocks: 20, num_host_states: 3, ..config }, 1);
        let mut random = Random(3);
        for seed in 0..30 {
            let messages: Vec<_> =
                (0..1 + random.below(4)).map(|_| (u64::from(random.below(4)), 20 + 40 * (seed as usize % 2))).collect();
            world.submit(request(chat(&messages), 20)).unwrap();
            (0..random.below(6)).for_each(|_| {
                world.plan();
                world.settle();
            });
        }
        world.run_to_idle();
        assert_eq!(world.engine.stats().num_states_used, 0);
    }
}

#[test]
fn prompts_that_arrive_together_compute_their_common_beginning_once() {
    let mut world = World::new(config(), 1);
    let text = prompt(1, 200);
    for _ in 0..4 {
        world.submit(request(text.clone(), 5)).unwrap();
    }
    let mut computed = 0;
    while !world.engine.is_idle() {
        computed += world.plan_tokens();
        world.settle();
    }
    world.run_to_idle();
    // The last full block of 200 positions ends at 192.
    assert_eq!(computed, 200 + 3 * 8 + 4 * 4);
}

#[test]
fn a_sequence_waits_until_a_slot_is_free() {
    let mut world = World::new(EngineConfig { num_states: 2, ..config() }, 1);
    for seed in 0..5 {
        world.submit(request(prompt(seed, 40), 30)).unwrap();
    }
    let mut most = 0;
    while !world.engine.is_idle() {
        world.plan();
        most = most.max(world.engine.stats().num_running);
        world.settle();
    }
    world.run_to_idle();
    assert_eq!((most, world.engine.stats().num_states_used), (2, 0));
}

#[test]
fn preempted_sequences_go_on_from_a_snapshot_of_their_output() {
    // Two texts of 20 blocks do not fit into 30 at once.
    let config = EngineConfig { policy: Policy::MaxUtilization, num_blocks: 30, max_rows: 2, ..config() };
    let mut world = World::new(config, 1);
    for seed in 0..2 {
        world.submit(request(prompt(seed, 200), 120)).unwrap();
    }
    let mut computed = 0;
    while !world.engine.is_idle() {
        computed += world.plan_tokens();
        world.settle();
    }
    world.run_to_idle();
    assert!(world.engine.stats().total_preempted > 0);
    assert!(computed < 2 * 319 + 200, "{computed} positions");
}

#[test]
fn lost_workers_lose_the_states_and_the_texts_go_on() {
    let mut world = World::new(config(), 1);
    world.submit(request(prompt(1, 100), 60)).unwrap();
    for _ in 0..30 {
        world.plan();
        world.settle();
    }
    assert!(world.engine.stats().num_states_cached > 0);
    world.recover();
    assert_eq!(world.engine.stats().num_states_cached, 0);
    world.run_to_idle();
}

#[test]
fn a_snapshot_is_dropped_with_its_block() {
    let mut world = World::new(EngineConfig { num_blocks: 16, ..config() }, 1);
    computed(&mut world, request(prompt(1, 200), 1));
    let before = world.engine.stats().num_states_cached;
    assert!(before >= 3, "{before} snapshots");
    // Another text needs all blocks.
    computed(&mut world, request(prompt(2, 250), 1));
    let found = computed(&mut world, request(prompt(1, 200), 1));
    assert_eq!(found, 200);
}

#[test]
fn without_the_prefix_cache_there_are_no_snapshots() {
    let mut world = World::new(EngineConfig { prefix_cache: false, ..config() }, 1);
    for _ in 0..2 {
        assert_eq!(computed(&mut world, request(prompt(1, 100), 50)), 149);
    }
    assert_eq!(world.engine.stats().num_states_cached, 0);
}

#[test]
fn rejected_drafts_leave_no_trace_in_a_state() {
    let mut world = World::new(EngineConfig { max_drafts: 4, ..config() }, 1);
    world.engine.set_drafter(Box::new(Guesser(Random(1))));
    for seed in 0..6 {
        world.submit(Request { max_drafts: 4, ..request(prompt(seed, 30), 100) }).unwrap();
    }
    world.run_to_idle();
    let stats = world.engine.stats();
    let (drafted, accepted) = (stats.total_drafted_tokens, stats.total_accepted_tokens);
    assert!(accepted > 0 && accepted < drafted, "{accepted} of {drafted} drafts");
    assert_eq!(stats.num_states_used, 0);
}

#[test]
fn without_a_slot_to_save_the_state_there_are_no_drafts() {
    let mut world = World::new(EngineConfig { max_drafts: 4, num_states: 4, ..config() }, 1);
    world.engine.set_drafter(Box::new(Guesser(Random(1))));
    for seed in 0..8 {
        world.submit(Request { max_drafts: 4, ..request(prompt(seed, 30), 20) }).unwrap();
    }
    // While all rows run, no slot is left.
    for _ in 0..6 {
        world.plan();
        world.settle();
    }
    assert_eq!((world.engine.stats().num_running, world.engine.stats().total_drafted_tokens), (4, 0));
    world.run_to_idle();
}

#[test]
fn there_are_drafts_where_fewer_slots_than_rows_are_left_and_a_sequence_that_arrives_takes_one_of_them() {
    let mut world = World::new(EngineConfig { max_drafts: 4, num_states: 2, prefix_cache: false, ..config() }, 1);
    world.engine.set_drafter(Box::new(Guesser(Random(1))));
    world.submit(Request { max_drafts: 4, ..request(prompt(0, 30), 200) }).unwrap();
    for _ in 0..20 {
        world.plan();
        world.settle();
    }
    assert!(world.engine.stats().total_drafted_tokens > 0);
    world.submit(Request { max_drafts: 4, ..request(prompt(1, 30), 200) }).unwrap();
    for _ in 0..6 {
        world.plan();
        world.settle();
    }
    assert_eq!(world.engine.stats().num_running, 2);
    world.run_to_idle();
}

#[test]
fn beam_searches_are_refused_with_the_reason() {
    let mut engine = Engine::new(config()).unwrap();
    let beams = BeamParams { width: 2, len_penalty: 0.0, early_stopping: false, diversity_rate: 0.0 };
    let refused = engine.submit(Request { beams: Some(beams), ..request(prompt(1, 5), 5) }).unwrap_err();
    assert_eq!(refused, Refused::RecurrentBeams);
    assert!(refused.to_string().contains("do not support beam search"), "{refused}");
}

#[test]
fn the_largest_plan_with_states_fits_its_bound() {
    let config = EngineConfig { max_rows: 64, max_step_tokens: 256, num_states: 300, num_blocks: 300, ..config() };
    let bound = config.max_plan_bytes();
    let mut engine = Engine::new(EngineConfig { policy: Policy::MaxUtilization, ..config }).unwrap();
    for seed in 0..64 {
        engine.submit(request(prompt(seed, 70), 90)).unwrap();
    }
    let mut bytes = Vec::new();
    let mut events = Vec::new();
    while !engine.is_idle() {
        let Some(plan) = engine.plan() else { break };
        engine::plan::encode::<StepPlan>(&plan, &mut bytes);
        assert!(bytes.len() <= bound, "{} bytes, bound {bound}", bytes.len());
        let token = |row| engine::SampledToken { row, token: TokenId(7), logprob: None, top: vec![] };
        let tokens = plan.work.iter().filter(|work| work.samples).map(|work| token(work.row)).collect();
        engine.settle(engine::StepOutput { step: plan.step, tokens, guesses: vec![] }, &mut events).unwrap();
    }
    assert!(engine.is_idle());
}
