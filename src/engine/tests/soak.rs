//! Soak test of one engine: 100 000 requests of random size, priority and deadline. Workers are lost now and then.
//!
//! `cargo test --release -p engine --test soak -- --ignored --nocapture`

mod support;

use std::collections::VecDeque;
use std::time::Duration;

use engine::{EngineConfig, Policy, Request, SamplingParams, SequenceId, TokenId};
use support::{Random, VOCAB_SIZE, World};

const NUM_REQUESTS: usize = 100_000;

fn request(random: &mut Random) -> Request {
    let token = |random: &mut Random| TokenId(random.below(VOCAB_SIZE));
    let shared = vec![TokenId(random.below(4)); random.below(4) as usize * 16];
    let tail = (0..1 + random.below(40)).map(|_| token(random)).collect();
    let end_ids = if random.one_in(4) { vec![token(random)] } else { vec![] };
    let stop_words = if random.one_in(4) { vec![vec![token(random), token(random)]] } else { vec![] };
    Request {
        prompt: [shared, tail].concat(),
        max_tokens: 1 + random.below(160),
        sampling: SamplingParams { end_ids, ..SamplingParams::default() },
        stop_words,
        priority: u32::from(random.one_in(10)),
        ..Request::default()
    }
}

/// Keeps the queue full, cancels one request in twenty, lets the deadline of another pass, and loses all workers every
/// 5000 steps.
fn soak(policy: Policy) {
    let config = EngineConfig {
        max_rows: 64,
        max_step_tokens: 256,
        max_inter_token: Some(Duration::from_secs(128)),
        max_sequence_len: 280,
        num_blocks: 320,
        max_queue: 128,
        policy,
        ..EngineConfig::default()
    };
    let mut random = Random(7);
    let mut world = World::new(config, 1);
    let mut submitted: VecDeque<SequenceId> = VecDeque::new();
    let mut num_submitted = 0;
    while num_submitted < NUM_REQUESTS {
        while num_submitted < NUM_REQUESTS
            && let Some(id) = world.submit(request(&mut random))
        {
            num_submitted += 1;
            submitted.push_back(id);
            if submitted.len() > 256 {
                submitted.pop_front();
            }
            if random.one_in(20) {
                world.cancel(submitted[random.below(submitted.len() as u32) as usize]);
            }
            if random.one_in(20) {
                world.expire(submitted[random.below(submitted.len() as u32) as usize]);
            }
        }
        world.plan();
        if !random.one_in(10) {
            world.settle();
        }
        if random.one_in(5000) {
            world.recover();
        }
    }
    world.run_to_idle();
    assert_eq!(world.num_finished, NUM_REQUESTS);
    let stats = world.engine.stats();
    println!("{policy:?}: {stats:?}");
    assert!(stats.total_recovered > 0 && stats.total_discarded_tokens > 0 && stats.total_reused_blocks > 0);
    assert_eq!(stats.total_preempted > 0, policy == Policy::MaxUtilization);
}

#[test]
#[ignore = "takes a minute; run it in release"]
fn a_hundred_thousand_requests_leave_nothing_behind_under_max_utilization() {
    soak(Policy::MaxUtilization);
}

#[test]
#[ignore = "takes a minute; run it in release"]
fn a_hundred_thousand_requests_leave_nothing_behind_under_guaranteed_no_evict() {
    soak(Policy::GuaranteedNoEvict);
}
