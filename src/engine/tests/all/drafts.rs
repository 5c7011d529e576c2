//! Drafts that the devices guess: they come with the outputs of steps and are verified by the next plan. [`World`] compares each
//! stream with what its request generates alone.

use engine::{Engine, EngineConfig, EngineStats, ForcedAcceptance, Policy, Request, StepCosts};

use crate::support::{Device, World, prompt, request};

fn config() -> EngineConfig {
    EngineConfig {
        max_rows: 4,
        max_step_tokens: 64,
        max_sequence_len: 512,
        max_drafts: 4,
        guesses_on_device: true,
        ..EngineConfig::default()
    }
}

fn run(config: EngineConfig, costs: Option<StepCosts>, max_drafts: u32) -> EngineStats {
    let mut world = World::new(config, 1);
    costs.into_iter().for_each(|costs| world.engine.set_costs(costs));
    for seed in 0..6 {
        world.submit(Request { max_drafts, ..request(prompt(seed, 30), 100) }).unwrap();
    }
    world.run_to_idle();
    world.engine.stats()
}

#[test]
fn guesses_of_the_devices_are_verified_and_those_that_are_right_save_steps() {
    let (without, with) = (run(config(), None, 0), run(config(), None, 4));
    assert_eq!(without.total_drafted_tokens, 0);
    let (drafted, accepted) = (with.total_drafted_tokens, with.total_accepted_tokens);
    assert!(accepted > 200 && accepted < drafted, "{accepted} of {drafted} drafts");
    assert!(with.total_steps * 3 < without.total_steps * 2, "{} and {} steps", with.total_steps, without.total_steps);
}

#[test]
fn drafts_take_free_rows_where_a_device_computes_them_as_generated_tokens() {
    // The world counts the rows of each step. Four of the six requests have all rows at first.
    let apart = run(EngineConfig { shares_output: false, ..config() }, None, 4);
    let together = run(config(), None, 4);
    let accepted = [apart, together].map(|stats| stats.total_accepted_tokens);
    assert!(accepted[0] > 0 && accepted[0] < accepted[1], "{accepted:?}");
}

#[test]
fn guesses_survive_preemption_and_recurrent_states_of_rejected_ones_go_back() {
    let small = EngineConfig { num_blocks: 20, policy: Policy::MaxUtilization, ..config() };
    for config in [small.clone(), EngineConfig { num_states: 12, state_interval: 2, ..small }] {
        let stats = run(config, None, 4);
        assert!(stats.total_preempted > 0 && stats.total_accepted_tokens > 0, "{stats:?}");
    }
}

#[test]
fn blocks_of_windows_suffice_when_recurrent_states_go_back_before_rejected_guesses() {
    let windows = vec![Some(4), Some(16), Some(13)];
    let config = EngineConfig {
        block_size: 1,
        num_blocks: 600,
        windows,
        num_states: 6,
        prefix_cache: false,
        policy: Policy::GuaranteedNoEvict,
        ..config()
    };
    // The world compares what a sequence holds with what it may hold at each step.
    let stats = run(config, None, 4);
    assert!(stats.total_drafted_tokens > stats.total_accepted_tokens, "{stats:?}");
}

#[test]
fn there_are_no_drafts_where_a_token_costs_as_much_as_it_gives() {
    let costs = |step, decode_token| StepCosts { step, decode_token, ..StepCosts::default() };
    // A token adds nothing to a step of 10 ms, or a hundredth of it; or steps consist of their tokens.
    let [free, cheap, dear] = [0.0, 1e-4, 10.0].map(|token| run(config(), Some(costs(0.01, token)), 4));
    assert!(free.total_drafted_tokens >= cheap.total_drafted_tokens, "{free:?} {cheap:?}");
    assert!(cheap.total_drafted_tokens > 250 && dear.total_drafted_tokens == 0, "{cheap:?} {dear:?}");
}

#[test]
fn there_are_no_drafts_where_a_guess_costs_as_much_as_it_gives() {
    let costs = |guess| StepCosts { step: 0.01, decode_token: 1e-5, guess, ..StepCosts::default() };
    // A pass of a head costs a twentieth of a step; one of a draft model as large as the model costs as much.
    let [head, large] = [0.0005, 0.01].map(|guess| run(config(), Some(costs(guess)), 4));
    assert!(head.total_drafted_tokens > 250 && large.total_drafted_tokens == 0, "{head:?} {large:?}");
}

#[test]
fn a_benchmark_forces_how_many_drafts_are_accepted_whatever_was_guessed() {
    for guesses_on_device in [true, false] {
        let forced = Some(ForcedAcceptance::of_tokens_per_step(2.5));
        let mut engine =
            Engine::new(EngineConfig { forced_acceptance: forced, guesses_on_device, ..config() }).unwrap();
        engine.submit(Request { max_drafts: 4, ..request(prompt(1, 30), 101) }).unwrap();
        let (mut device, mut lens) = (Device::new(&config()), Vec::new());
        while !engine.is_idle() {
            let mut events = Vec::new();
            if let Some(plan) = engine.plan() {
                engine.settle(device.run(&plan, &[]), &mut events).unwrap();
            }
            lens.extend(events.iter().map(|event| event.tokens.len()));
        }
        let stats = engine.stats();
        assert_eq!(lens[..5], [1, 2, 3, 2, 3], "the prompt gives a token, and then 2.5 come in a step");
        assert_eq!((lens.iter().sum::<usize>(), stats.total_accepted_tokens), (101, 60));
    }
}

#[test]
fn blocks_of_guesses_are_taken_ahead_while_some_are_free() {
    let config = |num_blocks| EngineConfig { num_blocks, policy: Policy::MaxUtilization, ..config() };
    // Nine blocks hold the whole sequence, and the last free one is left to sequences that need it at once.
    for (num_blocks, all_fit) in [(64, true), (9, false)] {
        let config = config(num_blocks);
        let block_size = config.block_size;
        let (mut engine, mut device) = (Engine::new(config.clone()).unwrap(), Device::new(&config));
        engine.submit(Request { max_drafts: 4, ..request(prompt(1, 30), 100) }).unwrap();
        let (mut num_held, mut num_asked, mut num_fitting) = (0, 0, 0);
        while !engine.is_idle() {
            let Some(plan) = engine.plan() else { continue };
            num_held +=
                plan.joined.iter().map(|joined| joined.tables[0].blocks.len()).sum::<usize>() + plan.grown.len();
            for work in plan.work.iter().filter(|work| work.start >= 30 && work.num_guesses > 0) {
                let needed = (work.start + work.num_tokens + work.num_guesses).min(129) as usize;
                num_asked += 1;
                num_fitting += usize::from(needed <= num_held * block_size);
            }
            engine.settle(device.run(&plan, &[]), &mut Vec::new()).unwrap();
        }
        assert!(num_asked > 10);
        assert_eq!(num_fitting == num_asked, all_fit, "{num_fitting} of {num_asked} with {num_blocks} blocks");
    }
}
