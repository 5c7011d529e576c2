//! The disk tier of the prefix cache: what leaves host memory comes back from slots of a file. [`World`] checks at each step that blocks
//! and states hold what their positions need, and carries out copies of the disk late.

use engine::{EngineConfig, EngineStats, Policy, StepCosts};

use crate::support::{World, computed, prompt, request};

/// Room for one text of 200 tokens on the device, for two on the host, and for many on disk.
fn config() -> EngineConfig {
    EngineConfig {
        max_rows: 4,
        max_step_tokens: 64,
        max_sequence_len: 512,
        block_size: 16,
        num_blocks: 16,
        num_host_blocks: 26,
        num_disk_blocks: 200,
        policy: Policy::MaxUtilization,
        ..EngineConfig::default()
    }
}

/// Runs some texts one after the other, with enough steps for the copies between them.
fn run_texts(world: &mut World, seeds: std::ops::Range<u64>) {
    for seed in seeds {
        computed(world, request(prompt(seed, 200), 30));
    }
}

/// What the first of six texts computes when it comes again. The host alone has room for two others.
fn first_again(config: EngineConfig) -> (usize, EngineStats) {
    let mut world = World::new(config, 1);
    run_texts(&mut world, 1..7);
    let computed = computed(&mut world, request(prompt(1, 200), 1));
    world.run_to_idle();
    (computed, world.engine.stats())
}

#[test]
fn what_has_left_host_memory_comes_back_from_the_disk() {
    let (again, stats) = first_again(config());
    assert_eq!(again, 8, "the last block is not full");
    assert_eq!((stats.total_disk_hit_blocks, stats.total_host_hit_blocks), (12, 12));
    assert!(stats.total_disk_stored_blocks > 26 && stats.total_disk_loaded_blocks == 12);
    assert!(stats.num_host_blocks_used <= 26);
    let (again, stats) = first_again(EngineConfig { num_disk_blocks: 0, ..config() });
    assert_eq!((again, stats.total_disk_stored_blocks, stats.total_disk_loaded_blocks), (200, 0, 0));
}

#[test]
fn recurrent_states_and_windows_come_back_from_the_disk() {
    let hybrid =
        EngineConfig { num_states: 3, state_interval: 4, num_host_states: 12, num_disk_states: 60, ..config() };
    let (again, stats) = first_again(hybrid.clone());
    assert_eq!(again, 8);
    assert!(stats.total_disk_loaded_states == 1 && stats.total_disk_stored_states > 0);
    let (again, _) = first_again(EngineConfig { num_disk_states: 0, ..hybrid });
    assert_eq!(again, 200);
    let windows = EngineConfig { windows: vec![None, Some(40)], num_blocks: 40, num_host_blocks: 60, ..config() };
    let (again, stats) = first_again(windows);
    assert_eq!(again, 8);
    assert!(stats.total_disk_loaded_blocks > 12);
}

#[test]
fn the_disk_is_bounded_and_the_oldest_text_goes_first() {
    let mut world = World::new(EngineConfig { num_disk_blocks: 54, ..config() }, 1);
    for seed in 1..10 {
        run_texts(&mut world, seed..seed + 1);
        assert!(world.engine.stats().num_disk_blocks_used <= 54);
    }
    assert_eq!(computed(&mut world, request(prompt(1, 200), 1)), 200);
    assert_eq!(computed(&mut world, request(prompt(6, 200), 1)), 8);
    assert!(world.engine.stats().total_disk_hit_blocks > 0);
}

#[test]
fn a_copy_that_cannot_be_read_is_computed_again_with_what_comes_after_it() {
    let mut world = World::new(config(), 1);
    run_texts(&mut world, 1..7);
    world.disk_fails = 1;
    let before = world.engine.stats().num_disk_blocks_used;
    assert_eq!(computed(&mut world, request(prompt(1, 200), 1)), 200);
    let stats = world.engine.stats();
    assert_eq!((stats.total_disk_failed, stats.total_disk_hit_blocks), (12, 0));
    assert!(stats.num_disk_blocks_used < before + 12);
    world.disk_fails = 0;
    assert_eq!(computed(&mut world, request(prompt(2, 200), 1)), 8);
}

#[test]
fn a_prefix_that_is_longer_than_host_memory_comes_back_in_part() {
    let mut world = World::new(EngineConfig { num_host_blocks: 18, num_blocks: 30, ..config() }, 1);
    for seed in 1..5 {
        computed(&mut world, request(prompt(seed, 400), 30));
        run_texts(&mut world, 10 * seed..10 * seed + 4);
    }
    let positions = computed(&mut world, request(prompt(4, 400), 1));
    assert!(positions < 400, "{positions} positions");
    world.run_to_idle();
}

#[test]
fn the_disk_outlives_workers_and_their_host_memory_but_not_a_reset() {
    let mut world = World::new(config(), 1);
    run_texts(&mut world, 1..7);
    world.recover();
    assert_eq!(computed(&mut world, request(prompt(1, 200), 1)), 8);
    world.recover_without_host();
    assert!(world.engine.stats().num_disk_blocks_used > 0);
    assert_eq!(computed(&mut world, request(prompt(2, 200), 1)), 8);
    world.reset_prefix_cache();
    assert_eq!(computed(&mut world, request(prompt(2, 200), 1)), 200);
}

#[test]
fn after_a_failure_of_the_file_host_memory_serves_alone() {
    let mut world = World::new(config(), 1);
    run_texts(&mut world, 1..7);
    world.close_disk();
    assert_eq!(computed(&mut world, request(prompt(1, 200), 1)), 200);
    run_texts(&mut world, 7..9);
    let stats = world.engine.stats();
    assert_eq!((stats.num_disk_blocks, stats.num_disk_blocks_used), (0, 0));
    assert_eq!(computed(&mut world, request(prompt(7, 200), 1)), 8);
}

#[test]
fn saved_seconds_are_those_of_the_tokens_by_tier() {
    let mut world = World::new(config(), 1);
    run_texts(&mut world, 1..7);
    let saved = |world: &World| world.engine.stats().total_saved_seconds;
    assert_eq!(saved(&world), [0.0; 3], "no step was measured");
    world.engine.set_costs(StepCosts { step: 1.0, prompt_token: 0.5, prompt_position: 0.25, ..StepCosts::default() });
    computed(&mut world, request(prompt(1, 200), 1));
    // 192 tokens that each read 97 positions as a mean.
    let seconds = 192.0 * 0.5 + 192.0 * 97.0 * 0.25;
    assert_eq!(saved(&world), [0.0, 0.0, seconds]);
    computed(&mut world, request(prompt(1, 200), 1));
    assert_eq!(saved(&world), [seconds, 0.0, seconds]);
}
