//! What host memory and disk have of conversations of agents beside long prompts that never come again, by simulation.
//! `docs/decisions/0023-useful-snapshots.md` has the figures of other rules.

use engine::EngineConfig;

use super::agents::{self, Pattern};

/// The device has room for 48 000 tokens.
const NUM_BLOCKS: usize = 3000;
const PATTERN: Pattern = Pattern { num_turns: 1200, system_len: 4000, turns_of_each: 12, one_off_each: 2 };

fn rates(config: EngineConfig, pattern: Pattern) -> [f64; 2] {
    let rates = agents::mixed(config, pattern).map(|hits| hits.rate());
    println!("{pattern:?}: {rates:.3?}");
    rates
}

#[test]
fn prompts_that_never_come_again_do_not_flush_conversations_from_host_memory() {
    let config = EngineConfig { num_host_blocks: 16_000, ..agents::config(0, NUM_BLOCKS) };
    let [first, later] = rates(config.clone(), PATTERN);
    // The one that was used longest ago first: 0.73.
    assert!(first > 0.95 && later > 0.76, "{first} {later}");
    let [first, later] = rates(config, Pattern { one_off_each: 0, ..PATTERN });
    // The one that was used longest ago first: 0.97.
    assert!(first > 0.99 && later > 0.95, "{first} {later}");
}

#[test]
fn prompts_that_never_come_again_do_not_flush_snapshots_from_host_memory() {
    let config = EngineConfig { num_host_blocks: 8000, num_host_states: 160, ..agents::config(60, NUM_BLOCKS) };
    let [first, later] = rates(config, Pattern { system_len: 500, ..PATTERN });
    // The one that was used longest ago first: 0.64 and 0.37.
    assert!(first > 0.85 && later > 0.4, "{first} {later}");
}

#[test]
fn what_leaves_host_memory_is_on_disk() {
    let config = EngineConfig { num_host_blocks: 4000, num_disk_blocks: 16_000, ..agents::config(0, NUM_BLOCKS) };
    let [first, later] = rates(config, Pattern { one_off_each: 0, ..PATTERN });
    assert!(first > 0.99 && later > 0.95, "{first} {later}");
}
