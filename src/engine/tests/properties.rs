//! Random requests, cancels, stops and lost workers against a simulated device: streams are undisturbed, books balance.

mod support;

use engine::{BeamParams, EngineConfig, Policy, Request, SamplingParams, SequenceId, TokenId};
use proptest::collection::vec;
use proptest::prelude::*;
use support::{Guesser, Random, VOCAB_SIZE, World};

#[derive(Debug, Clone)]
enum Call {
    Submit(Box<Request>),
    Cancel(prop::sample::Index),
    Finish(prop::sample::Index),
    Plan,
    Settle,
    Recover,
}

fn token() -> impl Strategy<Value = TokenId> {
    (0..VOCAB_SIZE).prop_map(TokenId)
}

/// Prompts share prefixes often: a run of one token, then a random tail.
fn request() -> impl Strategy<Value = Request> {
    let prompt = (0u32..2, 0usize..24, vec(token(), 1..10))
        .prop_map(|(shared, len, tail)| [vec![TokenId(shared); len], tail].concat());
    let stop_words = vec(vec(token(), 1..4), 0..3);
    let drafts = prop_oneof![Just(0u32), 1u32..6];
    (prompt, 1u32..24, vec(token(), 0..2), stop_words, 0u32..3, beams(), drafts).prop_map(
        |(prompt, max_tokens, end_ids, stop_words, priority, beams, max_drafts)| Request {
            prompt,
            max_tokens,
            sampling: SamplingParams { end_ids, ..SamplingParams::default() },
            stop_words,
            priority,
            beams,
            max_drafts,
        },
    )
}

fn beams() -> impl Strategy<Value = Option<BeamParams>> {
    let rates = prop_oneof![Just(0.0f32), -1.0f32..1.0];
    let some = (2u32..5, -1.0f32..2.0, any::<bool>(), rates).prop_map(
        |(width, len_penalty, early_stopping, diversity_rate)| {
            Some(BeamParams { width, len_penalty, early_stopping, diversity_rate })
        },
    );
    prop_oneof![3 => Just(None), 1 => some]
}

fn call() -> impl Strategy<Value = Call> {
    prop_oneof![
        8 => request().prop_map(|request| Call::Submit(Box::new(request))),
        2 => any::<prop::sample::Index>().prop_map(Call::Cancel),
        1 => any::<prop::sample::Index>().prop_map(Call::Finish),
        20 => Just(Call::Plan),
        18 => Just(Call::Settle),
        1 => Just(Call::Recover),
    ]
}

fn config() -> impl Strategy<Value = EngineConfig> {
    let sizes = (1usize..6, 1usize..20, 1usize..12, 1usize..6, 1usize..24, 1usize..4);
    (sizes, any::<bool>(), any::<bool>(), 0usize..6).prop_map(
        |(
            (max_rows, spare_tokens, max_mixed_prefill_tokens, block_size, num_blocks, max_in_flight),
            evict,
            cache,
            max_drafts,
        )| {
            EngineConfig {
                max_rows,
                max_step_tokens: max_rows + spare_tokens,
                max_mixed_prefill_tokens,
                max_sequence_len: 48,
                block_size,
                num_blocks,
                max_queue: 16,
                max_in_flight,
                max_joined_tokens: 20,
                policy: if evict { Policy::MaxUtilization } else { Policy::GuaranteedNoEvict },
                prefix_cache: cache,
                max_drafts,
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_stream_is_what_its_request_gets_alone(config in config(), calls in vec(call(), 1..160)) {
        let mut world = World::new(config, 1);
        world.engine.set_drafter(Box::new(Guesser(Random(calls.len() as u64))));
        let mut submitted: Vec<SequenceId> = Vec::new();
        for call in calls {
            match call {
                Call::Submit(request) => submitted.extend(world.submit(*request)),
                Call::Cancel(index) if !submitted.is_empty() => world.cancel(*index.get(&submitted)),
                Call::Finish(index) if !submitted.is_empty() => world.finish(*index.get(&submitted)),
                Call::Cancel(_) | Call::Finish(_) => {}
                Call::Plan => { world.plan(); }
                Call::Settle => { world.settle(); }
                Call::Recover => world.recover(),
            }
        }
        world.run_to_idle();
        prop_assert_eq!(world.num_finished, submitted.len());
    }
}
