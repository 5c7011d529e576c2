//! Sequences that could have drafts have two steps in flight while drafts are not worth their time, and so are not slower than without.

use std::collections::VecDeque;

use engine::{
    Drafter, Engine, EngineConfig, Policy, Request, SampledToken, StepCosts, StepOutput, StepPlan, TokenEvent, TokenId,
};

use crate::support::{Guesser, Random, World, prompt, request};

fn config() -> EngineConfig {
    EngineConfig { max_rows: 4, max_step_tokens: 64, max_sequence_len: 512, max_drafts: 4, ..EngineConfig::default() }
}

/// Steps that take the same time with drafts, and a gap behind those with drafts.
fn costs(gap: f64) -> StepCosts {
    StepCosts { step: 0.01, gap, ..StepCosts::default() }
}

#[test]
fn two_steps_are_in_flight_unless_drafts_are_worth_the_gap() {
    for guesses_on_device in [true, false] {
        for (gap, num_in_flight) in [(0.001, 1), (1.0, 2)] {
            let mut world = World::new(EngineConfig { guesses_on_device, ..config() }, 1);
            world.engine.set_drafter(Box::new(Guesser(Random(1))));
            world.engine.set_costs(costs(gap));
            for seed in 0..4 {
                world.submit(Request { max_drafts: 4, ..request(prompt(seed, 30), 400) }).unwrap();
            }
            for step in 0..60 {
                while world.plan() {}
                if step > 20 && guesses_on_device {
                    assert_eq!(world.engine.num_in_flight(), num_in_flight, "with a gap of {gap} s");
                }
                world.settle();
            }
            assert_eq!(world.engine.stats().total_drafted_tokens > 0, num_in_flight == 1);
            world.run_to_idle();
        }
    }
}

/// [`World`] compares each stream with what its request generates alone.
#[test]
fn sequences_change_between_both_forms_and_have_the_same_tokens() {
    let small = EngineConfig { num_blocks: 26, policy: Policy::MaxUtilization, ..config() };
    let configs = [
        EngineConfig { max_joined_tokens: 16, ..config() },
        small.clone(),
        EngineConfig { shares_output: false, max_rows: 14, ..config() },
        EngineConfig { num_states: 12, state_interval: 2, ..small },
        EngineConfig { windows: vec![None, Some(20)], ..config() },
        EngineConfig { max_in_flight: 3, ..config() },
    ];
    for (config, guesses_on_device) in configs.into_iter().flat_map(|config| [(config.clone(), true), (config, false)])
    {
        let (mut world, mut random) = (World::new(EngineConfig { guesses_on_device, ..config.clone() }, 1), Random(3));
        world.engine.set_drafter(Box::new(Guesser(Random(1))));
        for seed in 0..12 {
            world.submit(Request { max_drafts: 4, ..request(prompt(seed, 30), 120) }).unwrap();
        }
        let (mut drafted, mut num_changes, mut num_ahead) = (0, 0, 0);
        while !world.engine.is_idle() {
            let gap = if random.one_in(2) { 1.0 } else { 0.0 };
            world.engine.set_costs(costs(gap));
            for _ in 0..1 + random.below(12) {
                while world.plan() {}
                num_ahead += u32::from(world.engine.num_in_flight() > 1);
                world.settle();
            }
            let now = world.engine.stats().total_drafted_tokens;
            num_changes += u32::from((now > drafted) == (gap > 0.0));
            drafted = now;
        }
        let stats = world.engine.stats();
        assert!(stats.total_accepted_tokens > 100 && num_ahead > 40, "{num_ahead} ahead, {stats:?} of {config:?}");
        assert!(num_changes < 60, "{num_changes} of {config:?}");
        world.run_to_idle();
    }
}

/// A device on which steps take the time of their tokens, and wait for plans that are not made ahead.
#[derive(Clone, Copy)]
struct Device {
    step: f64,
    token: f64,
    guess: f64,
    gap: f64,
}

const GPU: Device = Device { step: 4e-3, token: 30e-6, guess: 0.15e-3, gap: 0.3e-3 };

/// The token of all positions.
const TOKEN: TokenId = TokenId(7);

/// Guesses right with this probability.
#[derive(Debug)]
struct Coin(Random, u32);

impl Drafter for Coin {
    fn draft(&mut self, _: &[TokenId], max: usize, drafts: &mut Vec<TokenId>) {
        drafts.extend((0..max).map(|_| TokenId(TOKEN.0 + u32::from(self.0.below(100) >= self.1))));
    }
}

/// Tokens per second of `rows` streams, if `percent` of the drafts are right.
fn speed(device: Device, config: EngineConfig, rows: u32, percent: u32) -> f64 {
    let (max_rows, max_drafts) = (rows as usize, config.max_drafts as u32);
    let on_device = config.guesses_on_device;
    let mut engine = Engine::new(EngineConfig {
        max_rows,
        max_step_tokens: 2048,
        num_blocks: 65_536,
        prefix_cache: false,
        ..config
    })
    .unwrap();
    engine.set_drafter(Box::new(Coin(Random(1), percent)));
    let mut coin = Coin(Random(2), percent);
    // As before a model is ready.
    for (tokens, guesses) in [(1, 0), (4, 3), (3, 2), (1, 0), (16, 0)] {
        let load = engine::StepLoad { decode_tokens: tokens, guesses, ..engine::StepLoad::default() };
        let seconds = device.step + tokens as f64 * device.token + guesses as f64 * device.guess;
        engine.learn(&load, seconds);
    }
    let submit = |engine: &mut Engine, max_tokens: u32| {
        engine.submit(Request { prompt: vec![TokenId(1); 4], max_tokens, max_drafts, ..Request::default() }).unwrap();
    };
    (0..rows).for_each(|row| submit(&mut engine, 20 + row * 400 / rows));
    let (mut in_flight, mut seconds, mut tokens): (VecDeque<StepPlan>, f64, usize) = Default::default();
    for step in 0..3000 {
        if step == 100 {
            (seconds, tokens) = (0.0, 0);
        }
        let mut wait = if in_flight.is_empty() && step > 0 { device.gap } else { 0.0 };
        while let Some(plan) = engine.plan() {
            in_flight.push_back(plan);
        }
        let plan = in_flight.pop_front().expect("there is work");
        let num_tokens: u32 = plan.work.iter().map(|work| work.num_tokens).sum();
        let num_guesses = plan.work.iter().map(|work| work.num_guesses).max().unwrap_or(0);
        let num_passes = if plan.runs_drafter { num_guesses.max(1) } else { 0 };
        wait += device.step + f64::from(num_tokens) * device.token + f64::from(num_passes) * device.guess;
        engine.measure(wait);
        seconds += wait;
        let mut events: Vec<TokenEvent> = Vec::new();
        engine.settle(output(&plan, &mut coin, on_device), &mut events).unwrap();
        tokens += events.iter().map(|event| event.tokens.len()).sum::<usize>();
        events.iter().filter(|event| event.finished.is_some()).for_each(|_| submit(&mut engine, 400));
    }
    tokens as f64 / seconds
}

fn output(plan: &StepPlan, coin: &mut Coin, guesses_on_device: bool) -> StepOutput {
    let (mut tokens, mut guesses) = (Vec::new(), Vec::new());
    for work in plan.work.iter().filter(|work| work.samples) {
        let drafts = plan.drafts.iter().find(|(row, _)| *row == work.row).map_or(0, |(_, drafts)| drafts.len());
        let sampled = SampledToken { row: work.row, token: TOKEN, logprob: None, top: vec![] };
        tokens.extend(std::iter::repeat_n(sampled, 1 + drafts));
        if guesses_on_device && work.num_guesses > 0 {
            let mut guessed = Vec::new();
            coin.draft(&[], work.num_guesses as usize, &mut guessed);
            guesses.push((work.row, guessed));
        }
    }
    StepOutput { step: plan.step, tokens, guesses }
}

#[test]
fn a_model_with_drafts_is_not_slower_than_without_at_any_number_of_rows() {
    for guesses_on_device in [true, false] {
        for rows in [1, 8, 64, 256] {
            let config = |max_drafts| EngineConfig { max_drafts, guesses_on_device, ..EngineConfig::default() };
            let without = speed(GPU, config(0), rows, 0);
            for percent in [0, 50, 80] {
                let share = speed(GPU, config(3), rows, percent) / without;
                assert!(share > 0.985, "{share:.3} at {rows} rows with {percent} % of the drafts right");
                assert!(rows > 8 || percent < 80 || share > 1.8, "{share:.3} at {rows} rows");
            }
        }
    }
}

#[test]
fn a_new_model_has_drafts_in_its_first_steps_and_then_in_few() {
    let mut engine = Engine::new(EngineConfig { guesses_on_device: true, ..config() }).unwrap();
    let mut coin = Coin(Random(1), 0);
    engine.submit(Request { max_drafts: 4, ..request(prompt(1, 30), 400) }).unwrap();
    let (mut first, mut last) = (0, 0);
    while !engine.is_idle() {
        let plan = engine.plan().unwrap();
        // A guess takes ten times as long as a step.
        let guesses = plan.work.iter().map(|work| f64::from(work.num_guesses)).sum::<f64>();
        engine.measure(0.01 + 0.1 * guesses);
        *(if plan.step < 40 { &mut first } else { &mut last }) += plan.drafts.len();
        engine.settle(output(&plan, &mut coin, true), &mut Vec::new()).unwrap();
    }
    assert!(first >= 20 && last <= 2, "{first}, then {last} steps with drafts");
}

#[test]
fn a_guess_at_a_token_that_is_in_flight_is_no_draft() {
    let mut world = World::new(EngineConfig { guesses_on_device: true, ..config() }, 1);
    world.submit(request(prompt(9, 30), 460)).unwrap();
    world.run_to_idle();
    // Four drafts that are all right would be worth it.
    world.engine.set_costs(costs(0.035));
    for seed in 0..4 {
        world.submit(Request { max_drafts: 4, ..request(prompt(seed, 30), 100) }).unwrap();
    }
    // Steps from 496 on have guesses.
    while world.engine.next_step() < 498 {
        while world.plan() {}
        world.settle();
    }
    assert_eq!((world.engine.num_in_flight(), world.engine.stats().total_drafted_tokens), (1, 0));
    world.engine.set_costs(costs(0.0));
    world.plan();
    assert_eq!((world.engine.num_in_flight(), world.engine.stats().total_drafted_tokens), (2, 0));
    world.run_to_idle();
    assert!(world.engine.stats().total_drafted_tokens > 0);
}
