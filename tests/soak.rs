//! A soak test on the CPU device: random requests, priorities, timeouts, sizes and clients that disconnect. The server's resource
//! counts must be consistent throughout and zero at the end. A short soak is part of every run; a longer one is started by hand:
//!
//! `SOAK_MINUTES=30 cargo test --release --test soak -- --ignored --nocapture`

mod support;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::{Options, TestWorld, eventually};

const NUM_CLIENTS: u64 = 16;
const REQUESTS_EACH: u64 = 8;

/// Random numbers (SplitMix64, Steele et al. 2014), the same in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        ((mixed ^ (mixed >> 27)) >> 33) % end
    }
}

fn ledger(world: &mut TestWorld) -> Value {
    let (status, text) = world.get_metrics("/debug/ledger");
    assert_eq!(status, 200, "{text}");
    let ledger: Value = serde_json::from_str(&text).unwrap();
    ledger["models"].as_array().unwrap().iter().find(|model| model["name"] == "tensorrt_llm").unwrap().clone()
}

/// Numbers of requests by outcome.
#[derive(Default)]
struct Counts {
    whole: AtomicUsize,
    left: AtomicUsize,
    refused: AtomicUsize,
}

/// Sends one random request and counts its outcome.
fn send_one(world: &TestWorld, random: &mut Random, counts: &Counts) {
    let words = "there was a little dog ".repeat(random.below(30) as usize);
    let mut body = json!({"text_input": format!("Story {}. {words}", random.below(6)), "max_tokens": 1 + random.below(60),
        "stream": true, "seed": random.below(1000), "temperature": random.below(2) as f64, "top_p": 1.0, "priority": random.below(4),
        "end_id": if random.below(2) == 0 { 3071 } else { 2 }});
    if random.below(4) == 0 {
        body["timeout"] = 20_000.into();
        let (status, text) = world.post("/v2/models/ensemble/generate_stream", &body);
        let refused = status == 503 && text.contains("Request timeout expired");
        assert!(refused || status == 200, "{status} {text}");
        let count = if refused { &counts.refused } else { &counts.whole };
        count.fetch_add(1, Ordering::Relaxed);
        return;
    }
    let leaves_after = if random.below(4) == 0 { random.below(10) as usize } else { usize::MAX };
    let mut stream = world.stream_request(&body);
    let events: Vec<Value> = std::iter::from_fn(|| stream.next_event()).take(leaves_after).collect();
    assert!(events.iter().all(|event| event.get("error").is_none()), "a stream breaks off: {events:?}");
    let count = if leaves_after == usize::MAX { &counts.whole } else { &counts.left };
    count.fetch_add(1, Ordering::Relaxed);
}

/// A world with few rows and blocks, so that requests wait and are preempted.
fn small_world() -> (TestWorld, tempfile::TempDir) {
    let queue = "priority_levels: 3 default_priority_level: 2 \
                 default_queue_policy { max_queue_size: 200 allow_timeout_override: true }";
    let repository = support::repository_with_queue(6, queue, &[("max_tokens_in_paged_kv_cache", 512)]);
    let args = vec!["--debug-endpoints=true".to_owned()];
    let options = Options { repository: repository.path().to_owned(), args, ..Options::default() };
    (TestWorld::start(options), repository)
}

/// Runs clients that send requests until `goes_on`, called with the number of requests sent, returns false.
fn soak(world: &TestWorld, goes_on: impl Fn(u64) -> bool + Sync) -> Counts {
    let counts = Counts::default();
    thread::scope(|scope| {
        for client in 0..NUM_CLIENTS {
            let (counts, goes_on) = (&counts, &goes_on);
            scope.spawn(move || {
                let mut random = Random(client);
                (0..).take_while(|number| goes_on(*number)).for_each(|_| send_one(world, &mut random, counts));
            });
        }
    });
    counts
}

/// Checks that no resource is in use, and that sequences had been preempted meanwhile.
fn check_idle(world: &mut TestWorld, counts: &Counts) {
    assert!(counts.whole.load(Ordering::Relaxed) > 0);
    eventually("nothing is held", || {
        let ledger = ledger(world);
        assert_eq!(ledger["wrong"], Value::Null, "{ledger}");
        ledger["idle"] == true
    });
    let idle = ledger(world);
    for book in ["queue_slots", "rows", "kv_blocks", "kv_blocks_reserved", "steps_in_flight", "sequences_listening"] {
        assert_eq!(idle[book], 0, "{idle}");
    }
    assert!(world.metric("trireme_llm_preemptions_total") > 0.0, "blocks were never short");
}

#[test]
fn no_resource_is_in_use_after_random_requests_with_deadlines_and_disconnects() {
    let (mut world, _repository) = small_world();
    let counts = soak(&world, |number| number < REQUESTS_EACH);
    check_idle(&mut world, &counts);
}

#[test]
#[ignore = "takes the minutes that SOAK_MINUTES says, 30 by default"]
fn no_resource_is_in_use_after_minutes_of_random_requests() {
    let minutes = std::env::var("SOAK_MINUTES").map_or(30, |text| text.parse().expect("SOAK_MINUTES is a number"));
    let (mut world, _repository) = small_world();
    let (start, mut rounds) = (Instant::now(), 0);
    let total = Counts::default();
    // The server is idle between rounds, so leaks of a round show in the check after it.
    while start.elapsed() < Duration::from_secs(60 * minutes) {
        let until = Instant::now() + Duration::from_secs(20);
        let counts = soak(&world, |_| Instant::now() < until);
        check_idle(&mut world, &counts);
        for (total, count) in
            [(&total.whole, counts.whole), (&total.left, counts.left), (&total.refused, counts.refused)]
        {
            total.fetch_add(count.into_inner(), Ordering::Relaxed);
        }
        rounds += 1;
    }
    println!(
        "{:.1?}, {rounds} rounds: {} requests whole, {} left by their client, {} past their deadline, {} preemptions",
        start.elapsed(),
        total.whole.into_inner(),
        total.left.into_inner(),
        total.refused.into_inner(),
        world.metric("trireme_llm_preemptions_total"),
    );
}

#[test]
fn the_ledger_lists_resources_by_owner_and_is_hidden_by_default() {
    let args = vec!["--debug-endpoints=true".to_owned()];
    let mut world = TestWorld::start(Options { args, ..Options::default() });
    let body = json!({"text_input": "Once", "max_tokens": 1900, "stream": true, "end_id": 3071});
    let mut stream = world.stream_request(&body);
    stream.next().expect("it runs");
    let busy = ledger(&mut world);
    assert!(busy["idle"] == false && busy["rows"] == 1 && busy["kv_blocks"].as_u64() > Some(0), "{busy}");
    let sequence = &busy["sequences"][0];
    assert!(sequence["kv_blocks"] == busy["kv_blocks"] && sequence["row"].is_u64(), "{busy}");
    drop(stream);
    eventually("nothing is held", || ledger(&mut world)["idle"] == true);
    let mut hidden = TestWorld::of(1);
    assert_eq!(hidden.get_metrics("/debug/ledger").0, 404);
}
