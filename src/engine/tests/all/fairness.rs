//! Service under overload: no priority starves, a deep queue costs no steps and hardly any time, cancels leave nothing behind.

use std::collections::{HashMap, HashSet};

use engine::{
    Engine, EngineConfig, Policy, Request, SampledToken, SequenceId, StepCosts, StepOutput, TokenEvent, TokenId,
};

fn request(first: u32, len: usize, max_tokens: u32, priority: u32) -> Request {
    let prompt = (0..len as u32).map(|token| TokenId(first.wrapping_mul(131).wrapping_add(token))).collect();
    Request { prompt, max_tokens, priority, ..Request::default() }
}

/// Plans and settles one step; returns the sequences that joined and those that ended.
fn step(engine: &mut Engine, events: &mut Vec<TokenEvent>) -> (Vec<SequenceId>, Vec<SequenceId>) {
    let Some(plan) = engine.plan() else { return (vec![], vec![]) };
    let sampled = plan.work.iter().filter(|work| work.samples);
    let token = |work: &engine::RowWork| SampledToken { row: work.row, token: TokenId(3), logprob: None, top: vec![] };
    let output = StepOutput { step: plan.step, tokens: sampled.map(token).collect(), guesses: vec![] };
    events.clear();
    engine.settle(output, events).unwrap();
    let ended = events.iter().filter(|event| event.finished.is_some()).map(|event| event.sequence).collect();
    (plan.joined.iter().map(|joined| joined.sequence).collect(), ended)
}

#[test]
fn a_low_priority_begins_although_higher_ones_always_wait() {
    let config = EngineConfig { max_rows: 4, max_queue: 64, prefix_cache: false, ..EngineConfig::default() };
    let mut engine = Engine::new(config).unwrap();
    let (mut events, mut number, mut num_high) = (Vec::new(), 0, 0);
    let low: Vec<SequenceId> = (0..5).map(|seed| engine.submit(request(900 + seed, 8, 3, 0)).unwrap()).collect();
    let mut began: HashMap<SequenceId, u32> = HashMap::new();
    while began.len() < low.len() {
        while engine.stats().num_waiting < 32 {
            number += 1;
            engine.submit(request(number, 8, 3, 1 + number % 2)).unwrap();
        }
        for joined in step(&mut engine, &mut events).0 {
            match low.contains(&joined) {
                true => drop(began.insert(joined, num_high)),
                false => num_high += 1,
            }
        }
        assert!(num_high <= 17 * low.len() as u32, "{num_high} of higher priority began, {began:?} of the low ones");
    }
    // Higher ones still come first.
    assert!(began.values().all(|&before| before >= 16), "{began:?}");
}

#[test]
fn of_two_priorities_the_order_is_strict_while_few_wait() {
    let mut engine = Engine::new(EngineConfig { max_rows: 1, ..EngineConfig::default() }).unwrap();
    let low = engine.submit(request(1, 4, 2, 0)).unwrap();
    let high: Vec<SequenceId> = (0..16).map(|seed| engine.submit(request(10 + seed, 4, 2, 1)).unwrap()).collect();
    let (mut events, mut order) = (Vec::new(), Vec::new());
    while !engine.is_idle() {
        order.extend(step(&mut engine, &mut events).0);
    }
    assert_eq!(order, [high, vec![low]].concat());
}

#[test]
fn a_deep_queue_takes_as_many_steps_as_a_short_one() {
    let num_steps = |depth: usize| {
        let config = EngineConfig { max_rows: 32, max_queue: 8192, num_blocks: 8192, ..EngineConfig::default() };
        let mut engine = Engine::new(config).unwrap();
        let (mut events, mut number, mut count) = (Vec::new(), 0, 0);
        while number < 4096 || !engine.is_idle() {
            while number < 4096 && engine.stats().num_waiting < depth {
                number += 1;
                engine.submit(request(number, 24, 8, number % 3)).unwrap();
            }
            step(&mut engine, &mut events);
            count += 1;
        }
        count
    };
    let (short, deep) = (num_steps(64), num_steps(4096));
    assert!(deep * 100 <= short * 101, "{deep} steps with a deep queue, {short} with a short one");
}

/// 4096 rows, with several times as many requests; most are cancelled, waiting or running, in bursts.
#[test]
fn storms_of_cancels_with_4096_rows_leave_nothing_behind() {
    for policy in [Policy::GuaranteedNoEvict, Policy::MaxUtilization] {
        let config = EngineConfig {
            max_rows: 4096,
            max_step_tokens: 8192,
            num_blocks: 40_000,
            max_queue: 16_384,
            max_sequence_len: 256,
            policy,
            ..EngineConfig::default()
        };
        let mut engine = Engine::new(config).unwrap();
        engine.set_costs(StepCosts { step: 1e-3, prompt_token: 1e-6, ..StepCosts::default() });
        let mut random = crate::support::Random(7);
        let (mut events, mut live, mut ended) = (Vec::new(), Vec::new(), HashSet::new());
        for number in 0..12_000 {
            live.push(engine.submit(request(number, 16, 64, number % 4)).unwrap());
        }
        for round in 0..24 {
            // Those cancelled before the step are among them.
            for id in step(&mut engine, &mut events).1 {
                assert!(ended.insert(id), "{id:?} ends twice");
            }
            live.retain(|id| !ended.contains(id));
            if round % 3 == 2 {
                live.retain(|id| random.below(3) > 0 || !engine.cancel(*id));
                engine.audit().unwrap();
            }
        }
        assert!(engine.stats().num_running > 100, "{:?}", engine.stats());
        assert!(live.iter().all(|id| engine.cancel(*id)), "those that live can be cancelled");
        events.clear();
        engine.drain_events(&mut events);
        ended.extend(events.iter().filter(|event| event.finished.is_some()).map(|event| event.sequence));
        assert_eq!(ended.len(), 12_000, "each request ends");
        assert!(step(&mut engine, &mut events).0.is_empty() && engine.is_idle());
        assert!(engine.ledger().is_zero(), "{:?}", engine.ledger());
    }
}
