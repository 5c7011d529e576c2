//! 100 000 random requests with cancels, stops, priorities, deadlines, adapters, salts, late masks, lost workers, sleeps, failing
//! copies of the disk and resets of the prefix cache against a simulated device. All streams must be correct, and the counters must be
//! right after every call. A failure is shrunk to the shortest list of calls that shows it.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use engine::{
    Adapter, AdapterId, BeamParams, EngineConfig, Policy, Request, RequestConstraint, SamplingParams, SequenceId,
    StepCosts, TokenId,
};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use support::{Expected, Guesser, Random, VOCAB_SIZE, World};

/// Number of engines with random limits, each with its own calls: enough for 100 000 requests.
const NUM_WORLDS: u32 = 4600;

#[derive(Debug, Clone)]
enum Call {
    Submit(Vec<Request>),
    Cancel(prop::sample::Index),
    /// A deadline passes for a sequence that has had no step: it is refused (`Expire`) or moved behind the others
    /// (`Delay`).
    Expire(prop::sample::Index),
    Delay(prop::sample::Index),
    Finish(prop::sample::Index),
    Plan,
    Settle,
    Recover,
    /// The same, and the host memory is new.
    RecoverWithoutHost,
    /// All that workers and disk hold is void.
    Sleep,
    /// The workers do not come back, and another engine goes on.
    Move,
    /// The file fails.
    CloseDisk,
    /// Sequences that have not begun stay in the queue, or no longer do.
    Hold(bool),
    ResetPrefixCache,
    /// Drafts become worth their time, or no longer are.
    Price(Price),
}

/// What drafts cost from now on.
#[derive(Debug, Clone, Copy)]
enum Price {
    Nothing,
    /// Sequences whose guesses are often right have drafts.
    HalfAStep,
    /// The gap behind a step is too long, so that sequences have two steps in flight.
    LongGap,
}

impl Price {
    /// Steps are so short that they change no chunk of a prompt.
    fn costs(self) -> StepCosts {
        const STEP: f64 = 1e-9;
        let [decode_token, gap] = match self {
            Price::Nothing => [0.0, 0.0],
            Price::HalfAStep => [STEP / 4.0, STEP / 10.0],
            Price::LongGap => [0.0, 100.0 * STEP],
        };
        StepCosts { step: STEP, decode_token, gap, prompt_token: 1.0, ..StepCosts::default() }
    }
}

fn token() -> impl Strategy<Value = TokenId> {
    (0..VOCAB_SIZE).prop_map(TokenId)
}

/// Prompts often share prefixes: a run of one token, then a random tail.
fn request() -> impl Strategy<Value = Request> {
    let prompt = (0u32..2, 0usize..24, vec(token(), 1..10))
        .prop_map(|(shared, len, tail)| [vec![TokenId(shared); len], tail].concat());
    let stop_words = vec(vec(token(), 1..4), 0..3);
    let drafts = prop_oneof![Just(0u32), 1u32..6];
    let constrained = prop_oneof![2 => Just(false), 1 => Just(true)];
    // A salt is the seed, too, so that the device knows it.
    let salt = prop_oneof![3 => Just(0u64), 1 => 1u64..3];
    let reports = (prop_oneof![Just(None), (0u32..3).prop_map(Some)], prop_oneof![9 => Just(false), 1 => Just(true)]);
    let sampling = (vec(token(), 0..2), salt, reports).prop_map(|(end_ids, seed, (num_logprobs, context_logits))| {
        SamplingParams { end_ids, seed, num_logprobs, context_logits, ..SamplingParams::default() }
    });
    (prompt, 1u32..24, sampling, stop_words, 0u32..3, beams(), drafts, constrained).prop_map(
        |(prompt, max_tokens, sampling, stop_words, priority, beams, max_drafts, constrained)| Request {
            cache_salt: (sampling.seed > 0).then_some(sampling.seed),
            prompt,
            max_tokens,
            sampling,
            stop_words,
            priority,
            beams,
            max_drafts,
            // Two adapters, and the model itself.
            adapter: (priority > 0)
                .then(|| Arc::new(Adapter { id: AdapterId(u64::from(priority)), weights: Vec::new() })),
            constraint: (constrained && beams.is_none()).then(|| RequestConstraint(Box::new(Expected::default()))),
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
        32 => vec(request(), 1..10).prop_map(Call::Submit),
        8 => any::<prop::sample::Index>().prop_map(Call::Cancel),
        8 => any::<prop::sample::Index>().prop_map(Call::Expire),
        4 => any::<prop::sample::Index>().prop_map(Call::Delay),
        4 => any::<prop::sample::Index>().prop_map(Call::Finish),
        80 => Just(Call::Plan),
        72 => Just(Call::Settle),
        4 => Just(Call::Recover),
        1 => Just(Call::RecoverWithoutHost),
        1 => Just(Call::Sleep),
        1 => Just(Call::Move),
        1 => Just(Call::CloseDisk),
        4 => any::<bool>().prop_map(Call::Hold),
        4 => Just(Call::ResetPrefixCache),
        8 => prop_oneof![Just(Price::Nothing), Just(Price::HalfAStep), Just(Price::LongGap)].prop_map(Call::Price),
    ]
}

/// KV groups: half of the engines have no window.
fn windows() -> impl Strategy<Value = Vec<Option<usize>>> {
    let some = (0usize..3, vec(1usize..20, 1..4))
        .prop_map(|(full, windows)| std::iter::repeat_n(None, full).chain(windows.into_iter().map(Some)).collect());
    prop_oneof![Just(vec![None]), some]
}

fn config() -> impl Strategy<Value = EngineConfig> {
    let sizes = (1usize..6, 1usize..20, 1usize..12, 1usize..6, 1usize..24, 1usize..4);
    // A third of the engines have recurrent states, often fewer than rows.
    let states = prop_oneof![2 => Just((0usize, 1usize)), 1 => (1usize..12, 1usize..4)];
    // Half of the engines keep evicted blocks and states on the host.
    let host = prop_oneof![Just((0usize, 0usize)), (1usize..30, 0usize..8)];
    // Half of these on disk, too.
    let disk = prop_oneof![Just((0usize, 0usize)), (1usize..40, 0usize..12)];
    let cache = (any::<bool>(), any::<bool>(), host, disk);
    // In half of the engines chunks end with blocks, or with tiles of a step.
    let tiles = (any::<bool>(), 1usize..6);
    let drafts = (0usize..6, any::<bool>());
    (sizes, any::<bool>(), cache, drafts, 1usize..4, tiles, windows(), states).prop_map(
        |(
            (max_rows, spare_tokens, max_mixed, block_size, num_blocks, max_in_flight),
            evict,
            (prefix_cache, shares_output, (num_host_blocks, num_host_states), (num_disk_blocks, num_disk_states)),
            (max_drafts, guesses_on_device),
            num_stages,
            (has_prompt_tiles, token_tile),
            windows,
            (num_states, state_interval),
        )| {
            let prompt_tile = if has_prompt_tiles { block_size } else { 1 };
            EngineConfig {
                max_rows,
                max_step_tokens: max_rows + spare_tokens.max(prompt_tile - 1),
                max_inter_token: (max_mixed > 1).then_some(Duration::from_secs(max_mixed as u64)),
                max_inter_token_of: [(1, Duration::from_secs(3))].into(),
                min_prompt_tokens: prompt_tile.max(1 + max_mixed % 3),
                num_experts: 0,
                num_active_experts: 0,
                token_tile: if has_prompt_tiles { 1 } else { token_tile },
                prompt_tile,
                max_sequence_len: 48,
                block_size,
                num_blocks: num_blocks * windows.len(),
                windows,
                num_states,
                state_interval,
                message_ends: vec![TokenId(1)],
                num_host_blocks,
                num_host_states,
                num_disk_blocks,
                num_disk_states,
                max_queue: 64,
                max_queue_each: 56,
                max_queue_of: [(1, 48)].into(),
                max_in_flight,
                max_joined_tokens: 20,
                policy: if evict { Policy::MaxUtilization } else { Policy::GuaranteedNoEvict },
                prefix_cache,
                shares_output,
                max_drafts,
                guesses_on_device,
                forced_acceptance: None,
                max_adapters: 1 + max_mixed % 2,
                num_stages,
            }
        },
    )
}

/// Runs the calls, then the remaining work until the engine is idle. Returns the number of accepted requests.
fn run_calls(config: EngineConfig, calls: Vec<Call>) -> usize {
    let mut world = World::new(config, 1);
    world.disk_fails = 5;
    world.engine.set_drafter(Box::new(Guesser(Random(calls.len() as u64))));
    let mut submitted: Vec<SequenceId> = Vec::new();
    for call in calls {
        match call {
            Call::Submit(requests) => {
                submitted.extend(requests.into_iter().filter_map(|request| world.submit(request)))
            }
            Call::Cancel(index) if !submitted.is_empty() => world.cancel(*index.get(&submitted)),
            Call::Finish(index) if !submitted.is_empty() => world.finish(*index.get(&submitted)),
            Call::Expire(index) if !submitted.is_empty() => world.expire(*index.get(&submitted)),
            Call::Delay(index) if !submitted.is_empty() => world.delay(*index.get(&submitted)),
            Call::Cancel(_) | Call::Finish(_) | Call::Expire(_) | Call::Delay(_) => {}
            Call::Plan => {
                world.plan();
            }
            Call::Settle => {
                world.settle();
            }
            Call::Recover => world.recover(),
            Call::RecoverWithoutHost => world.recover_without_host(),
            Call::Sleep => world.sleep(),
            Call::Move => {
                let ids = world.move_sequences();
                let ended = SequenceId(u64::MAX);
                submitted.iter_mut().for_each(|id| *id = ids.get(id).copied().unwrap_or(ended));
                world.engine.set_drafter(Box::new(Guesser(Random(submitted.len() as u64))));
            }
            Call::CloseDisk => world.close_disk(),
            Call::Hold(holds) => world.engine.hold_new(holds),
            Call::ResetPrefixCache => world.reset_prefix_cache(),
            Call::Price(price) => world.engine.set_costs(price.costs()),
        }
    }
    world.engine.hold_new(false);
    world.run_to_idle();
    assert_eq!(world.num_finished, submitted.len());
    submitted.len()
}

#[test]
fn every_stream_equals_that_of_its_request_alone_and_no_resource_is_held_at_the_end() {
    let config_of_test = ProptestConfig { cases: NUM_WORLDS, failure_persistence: None, ..ProptestConfig::default() };
    let num_requests = AtomicUsize::new(0);
    let played = TestRunner::new(config_of_test).run(&(config(), vec(call(), 1..160)), |(config, calls)| {
        num_requests.fetch_add(run_calls(config, calls), Ordering::Relaxed);
        Ok(())
    });
    played.unwrap_or_else(|error| panic!("{error}"));
    let num_requests = num_requests.into_inner();
    assert!(num_requests >= 100_000, "{num_requests} requests in {NUM_WORLDS} worlds");
}

/// A chunk that finds no blocks for its window leaves the plan empty, and a plan without work is not sent.
#[test]
fn a_snapshot_of_a_prompt_is_not_lost_with_a_plan_without_work() {
    let config = EngineConfig {
        max_rows: 2,
        max_step_tokens: 4,
        max_inter_token: None,
        max_inter_token_of: [(1, Duration::from_secs(3))].into(),
        min_prompt_tokens: 2,
        token_tile: 1,
        prompt_tile: 1,
        num_experts: 0,
        num_active_experts: 0,
        max_sequence_len: 48,
        block_size: 5,
        num_blocks: 12,
        windows: vec![None, Some(7)],
        num_states: 3,
        state_interval: 3,
        message_ends: vec![],
        num_host_blocks: 0,
        num_host_states: 0,
        num_disk_blocks: 0,
        num_disk_states: 0,
        max_queue: 64,
        max_queue_each: 56,
        max_queue_of: [(1, 48)].into(),
        max_in_flight: 1,
        max_joined_tokens: 20,
        policy: Policy::MaxUtilization,
        prefix_cache: true,
        shares_output: true,
        max_drafts: 0,
        guesses_on_device: false,
        forced_acceptance: None,
        max_adapters: 2,
        num_stages: 2,
    };
    let request = |prompt: &[u32], max_tokens: u32, priority: u32, constrained: bool| Request {
        prompt: prompt.iter().map(|&t| TokenId(t)).collect(),
        max_tokens,
        sampling: SamplingParams::default(),
        stop_words: vec![],
        priority,
        beams: None,
        max_drafts: 0,
        cache_salt: None,
        adapter: (priority > 0).then(|| Arc::new(Adapter { id: AdapterId(u64::from(priority)), weights: Vec::new() })),
        constraint: constrained.then(|| RequestConstraint(Box::new(Expected::default()))),
    };
    let long: Vec<u32> = [vec![0; 19], vec![11, 6, 8, 5, 0]].concat();
    let calls = vec![Call::Submit(vec![
        request(&[0], 1, 0, false),
        request(&[0], 1, 0, false),
        request(&long, 5, 1, true),
        request(&[1, 1, 1, 1, 0, 0], 1, 1, false),
        request(&[0], 1, 0, false),
        request(&[0], 1, 0, false),
        request(&[0], 1, 0, false),
        request(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 6, 2, 2], 4, 2, true),
        request(&[0, 0, 0, 0, 0, 0, 0, 1, 1], 5, 2, true),
    ])];
    run_calls(config, calls);
}
