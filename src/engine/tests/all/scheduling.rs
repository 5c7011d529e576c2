//! Guarantees of the scheduler, checked on its plans: bounded gaps, prefixes computed once, order of service.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use engine::{Engine, EngineConfig, Policy, Request, RowId, SequenceId, StepPlan, TokenEvent, TokenId};

use crate::support::{Device, VOCAB_SIZE, World, computed, run_alone};

/// An engine, its device, and the events of the last plan. Runs one step at a time.
struct Steps {
    engine: Engine,
    device: Device,
    events: Vec<TokenEvent>,
    /// The sequence in each row.
    rows: BTreeMap<RowId, SequenceId>,
}

impl Steps {
    fn new(config: EngineConfig) -> Self {
        let device = Device::new(&config);
        let engine = crate::support::new_engine(config);
        Self { engine, device, events: Vec::new(), rows: BTreeMap::new() }
    }

    fn submit(&mut self, request: Request) -> SequenceId {
        self.engine.submit(request).unwrap()
    }

    /// Plans, runs and settles one step; `None` when there is nothing to do.
    fn step(&mut self) -> Option<StepPlan> {
        let plan = self.engine.plan()?;
        for row in &plan.left {
            self.rows.remove(row);
        }
        self.rows.extend(plan.joined.iter().map(|joined| (joined.row, joined.sequence)));
        let output = self.device.run(&plan, &[]);
        self.events.clear();
        self.engine.settle(output, &mut self.events).unwrap();
        Some(plan)
    }

    /// Number of tokens that the plan computes for a sequence.
    fn num_tokens(&self, plan: &StepPlan, sequence: SequenceId) -> u32 {
        let own = plan.work.iter().filter(|work| self.rows[&work.row] == sequence);
        own.map(|work| work.num_tokens).sum()
    }
}

/// Random tokens; prompts of different seeds differ from the start.
fn prompt(seed: u32, len: usize) -> Vec<TokenId> {
    let mut random = crate::support::Random(u64::from(seed));
    (0..len).map(|_| TokenId(random.below(VOCAB_SIZE))).collect()
}

fn request(seed: u32, len: usize, max_tokens: u32) -> Request {
    Request { prompt: prompt(seed, len), max_tokens, ..Request::default() }
}

#[test]
fn streams_get_a_token_in_every_step_and_steps_stay_short_while_a_prompt_of_4096_arrives() {
    const MIXED: u32 = 256;
    for policy in [Policy::GuaranteedNoEvict, Policy::MaxUtilization] {
        let mut steps = Steps::new(EngineConfig {
            max_rows: 32,
            max_step_tokens: 2048,
            max_inter_token: Some(Duration::from_secs(u64::from(MIXED))),
            max_sequence_len: 8192,
            policy,
            ..EngineConfig::default()
        });
        let streams: Vec<SequenceId> = (0..16).map(|seed| steps.submit(request(seed, 8, 400))).collect();
        (0..4).for_each(|_| drop(steps.step().unwrap()));
        let long = steps.submit(request(99, 4096, 8));
        let mut num_steps = 0;
        while !steps.events.iter().any(|event| event.sequence == long) {
            let plan = steps.step().unwrap();
            num_steps += 1;
            let released: HashSet<SequenceId> = steps.events.iter().map(|event| event.sequence).collect();
            assert!(streams.iter().all(|stream| released.contains(stream)), "a stream waits in step {num_steps}");
            let num_tokens: u32 = plan.work.iter().map(|work| work.num_tokens).sum();
            assert!(num_tokens <= 16 + MIXED, "step {num_steps} computes {num_tokens} tokens");
            // The prompt gets all of its own budget, so it does not starve.
            assert_eq!(steps.num_tokens(&plan, long), MIXED, "step {num_steps}");
        }
        assert_eq!(num_steps, 4096 / MIXED);
    }
}

#[test]
fn prompts_beside_many_decodes_fill_whole_tiles_of_the_device_and_are_all_computed() {
    const TILE: u32 = 16;
    let mut steps = Steps::new(EngineConfig {
        max_rows: 64,
        token_tile: TILE as usize,
        max_inter_token: Some(Duration::from_secs(2048)),
        ..EngineConfig::default()
    });
    let streams: Vec<SequenceId> = (0..20).map(|seed| steps.submit(request(seed, 8, 100))).collect();
    (0..4).for_each(|_| drop(steps.step().unwrap()));
    let prompts: Vec<SequenceId> = (0..4).map(|seed| steps.submit(request(50 + seed, 37, 50))).collect();
    let mut sizes = Vec::new();
    while !prompts.iter().all(|prompt| steps.events.iter().any(|event| event.sequence == *prompt)) {
        let plan = steps.step().unwrap();
        sizes.push(plan.work.iter().map(|work| work.num_tokens).sum::<u32>());
        assert!(streams.iter().all(|stream| steps.num_tokens(&plan, *stream) == 1), "a stream waits");
    }
    // There are 20 decodes and 148 prompt tokens. The tokens beyond ten tiles are too few to fill another one and wait
    // for the next step.
    assert_eq!(sizes[..2], [10 * TILE, 20 + 3 + 8], "{sizes:?}");
}

#[test]
fn a_prompt_that_arrives_alone_takes_whole_steps() {
    let mut steps = Steps::new(EngineConfig {
        max_step_tokens: 2048,
        max_inter_token: Some(Duration::from_secs(64)),
        max_sequence_len: 8192,
        ..EngineConfig::default()
    });
    let long = steps.submit(request(1, 4096, 2));
    let plans: Vec<StepPlan> = (0..2).map(|_| steps.step().unwrap()).collect();
    assert!(plans.iter().all(|plan| steps.num_tokens(plan, long) == 2048), "{plans:?}");
}

#[test]
fn requests_with_a_common_prefix_compute_it_once_even_when_they_arrive_at_once() {
    let config = EngineConfig { block_size: 16, max_step_tokens: 128, max_rows: 16, ..EngineConfig::default() };
    let (prefix, tail, num_requests) = (prompt(7, 320), 5, 8);
    let mut computed = Vec::new();
    for prefix_cache in [true, false] {
        let mut steps = Steps::new(EngineConfig { prefix_cache, ..config.clone() });
        for seed in 0..num_requests {
            // The first token after the prefix is different in each prompt.
            let own = [vec![TokenId(seed)], prompt(seed, tail - 1)].concat();
            steps.submit(Request { prompt: [prefix.clone(), own].concat(), max_tokens: 1, ..Request::default() });
        }
        let mut num_tokens = 0;
        while let Some(plan) = steps.step() {
            num_tokens += plan.work.iter().map(|work| work.num_tokens as usize).sum::<usize>();
        }
        assert!(steps.engine.is_idle() && steps.engine.ledger().is_zero());
        computed.push(num_tokens);
    }
    let num_requests = num_requests as usize;
    assert_eq!(computed, [prefix.len() + num_requests * tail, num_requests * (prefix.len() + tail)]);
}

/// [`World`] compares each stream with what its request generates alone.
#[test]
fn cache_hits_change_no_token_and_are_reported() {
    let mut world = World::new(EngineConfig { num_blocks: 64, ..EngineConfig::default() }, 1);
    for _ in 0..3 {
        for seed in 0..6 {
            world.submit(Request {
                prompt: [prompt(1, 64), prompt(seed, 9)].concat(),
                max_tokens: 40,
                ..Request::default()
            });
        }
        world.run_to_idle();
    }
    let stats = world.engine.stats();
    assert_eq!(stats.total_reused_blocks, 17 * 4, "each but the first finds the 4 blocks of the prefix");
}

#[test]
fn a_prompt_does_not_find_the_answer_that_new_workers_computed_again_where_output_is_not_shared() {
    let mut world = World::new(EngineConfig { block_size: 16, shares_output: false, ..EngineConfig::default() }, 1);
    let first = Request { prompt: prompt(3, 40), max_tokens: 60, ..Request::default() };
    let tokens = run_alone(&first, 4096).0;
    world.submit(first.clone());
    for _ in 0..50 {
        world.plan();
        world.settle();
    }
    world.recover();
    world.run_to_idle();
    let next = [first.prompt, tokens, prompt(9, 20)].concat();
    let len = next.len();
    let found = len - computed(&mut world, Request { prompt: next, max_tokens: 1, ..Request::default() });
    assert_eq!(found, 32, "the full blocks of the first prompt");
}

#[test]
fn chunks_end_at_tiles_of_a_prompt_beside_decodes_and_without_them() {
    let config =
        EngineConfig { block_size: 32, prompt_tile: 16, min_prompt_tokens: 16, max_rows: 8, ..EngineConfig::default() };
    for max_step_tokens in [23, 40, 64] {
        let mut world = World::new(EngineConfig { max_step_tokens, ..config.clone() }, 1);
        for (seed, len) in [40, 5, 100, 16, 33, 64, 1, 90, 17].into_iter().enumerate() {
            world.submit(Request { prompt: prompt(seed as u32, len), max_tokens: 30, ..Request::default() });
        }
        // Checks each plan.
        world.run_to_idle();
    }
}

#[test]
fn a_prompt_with_an_earlier_answer_finds_its_blocks_only_if_output_is_shared() {
    for (shares_output, expected) in [(true, 32 + 48), (false, 32)] {
        let mut steps = Steps::new(EngineConfig { block_size: 16, shares_output, ..EngineConfig::default() });
        let first = Request { prompt: prompt(3, 32), max_tokens: 60, ..Request::default() };
        let tokens = run_alone(&first, 4096).0;
        steps.submit(first.clone());
        while steps.step().is_some() {}
        let next = [first.prompt, tokens, prompt(9, 20)].concat();
        let (len, mut computed) = (next.len(), 0);
        steps.submit(Request { prompt: next, max_tokens: 1, ..Request::default() });
        while let Some(plan) = steps.step() {
            computed += plan.work.iter().map(|work| work.num_tokens as usize).sum::<usize>();
        }
        assert_eq!(len - computed, expected, "shares_output is {shares_output}");
    }
}

#[test]
fn a_preempted_stream_goes_on_with_the_tokens_that_would_have_come() {
    let config = EngineConfig {
        max_rows: 8,
        num_blocks: 24,
        policy: Policy::MaxUtilization,
        max_sequence_len: 200,
        ..EngineConfig::default()
    };
    let mut world = World::new(config, 1);
    for seed in 0..8 {
        world.submit(request(seed, 20, 120)).unwrap();
    }
    world.run_to_idle();
    assert!(world.engine.stats().total_preempted > 0);
    assert_eq!(world.num_finished, 8);
}

/// The order in which sequences join.
fn order_of_service(steps: &mut Steps) -> Vec<SequenceId> {
    let mut order = Vec::new();
    while let Some(plan) = steps.step() {
        order.extend(plan.joined.iter().map(|joined| joined.sequence));
    }
    order
}

#[test]
fn higher_priority_is_served_first_then_arrival_and_delayed_ones_last_of_theirs() {
    let mut steps = Steps::new(EngineConfig { max_rows: 1, ..EngineConfig::default() });
    let mut submit = |seed, priority| steps.submit(Request { priority, ..request(seed, 4, 3) });
    let [running, late, low, high, middle] = [submit(0, 0), submit(1, 0), submit(2, 0), submit(3, 9), submit(4, 5)];
    // All are still waiting: nothing was planned.
    assert!(steps.engine.is_new(late) && steps.engine.delay(late));
    assert_eq!(order_of_service(&mut steps), [high, middle, running, low, late]);
    assert!(!steps.engine.is_new(late) && !steps.engine.delay(late));
}

#[test]
fn while_new_sequences_are_held_those_that_have_begun_run_to_their_end() {
    // The blocks do not suffice for both sequences, so that one is preempted and resumed.
    let config = EngineConfig {
        max_rows: 2,
        max_step_tokens: 16,
        block_size: 2,
        num_blocks: 12,
        policy: Policy::MaxUtilization,
        prefix_cache: false,
        ..EngineConfig::default()
    };
    let mut steps = Steps::new(config);
    let begun = [1, 2].map(|seed| steps.submit(request(seed, 4, 12)));
    assert_eq!(steps.step().unwrap().joined.len(), 2);
    let held = steps.submit(request(3, 4, 4));
    steps.engine.hold_new(true);
    assert!(!steps.engine.is_unbegun());
    while let Some(plan) = steps.step() {
        assert!(plan.joined.iter().all(|joined| begun.contains(&joined.sequence)), "{plan:?}");
    }
    assert!(steps.engine.stats().total_preempted > 0);
    assert!(steps.engine.is_unbegun() && !steps.engine.is_idle());
    steps.engine.hold_new(false);
    assert_eq!(steps.step().unwrap().joined[0].sequence, held);
    while steps.step().is_some() {}
    assert!(steps.engine.is_idle());
}
