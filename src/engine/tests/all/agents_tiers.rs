//! What host memory and disk have of conversations of agents, by simulation.

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
fn what_leaves_host_memory_is_on_disk() {
    let config = EngineConfig { num_host_blocks: 4000, num_disk_blocks: 16_000, ..agents::config(0, NUM_BLOCKS) };
    let [first, later] = rates(config, Pattern { one_off_each: 0, ..PATTERN });
    assert!(first > 0.99 && later > 0.95, "{first} {later}");
}
