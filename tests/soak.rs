//! A short soak on the real CPU device: random requests, priorities, timeouts, sizes and clients that leave; afterwards
//! nobody holds anything, and every book balances.

mod support;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

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

/// One request; true when it was read to its end.
fn one(world: &TestWorld, random: &mut Random) -> bool {
    let words = "there was a little dog ".repeat(random.below(30) as usize);
    let mut body = json!({"text_input": format!("Story {}. {words}", random.below(6)), "max_tokens": 1 + random.below(60),
        "stream": true, "seed": random.below(1000), "temperature": random.below(2) as f64, "top_p": 1.0, "priority": random.below(4),
        "end_id": if random.below(2) == 0 { 3071 } else { 2 }});
    if random.below(4) == 0 {
        body["timeout"] = 20_000.into();
        let (status, text) = world.post("/v2/models/ensemble/generate_stream", &body);
        let refused = status == 503 && text.contains("Request timeout expired");
        assert!(refused || status == 200, "{status} {text}");
        return !refused;
    }
    let leaves_after = if random.below(4) == 0 { random.below(10) as usize } else { usize::MAX };
    let mut stream = world.stream_request(&body);
    let events: Vec<Value> = std::iter::from_fn(|| stream.next_event()).take(leaves_after).collect();
    assert!(events.iter().all(|event| event.get("error").is_none()), "a stream breaks off: {events:?}");
    leaves_after == usize::MAX
}

#[test]
fn nothing_is_held_after_random_requests_with_deadlines_and_clients_that_leave() {
    let queue = "priority_levels: 3 default_priority_level: 2 \
                 default_queue_policy { max_queue_size: 200 allow_timeout_override: true }";
    let repository = support::repository_with_queue(6, queue, &[("max_tokens_in_paged_kv_cache", 512)]);
    let args = vec!["--debug-endpoints=true".to_owned()];
    let mut world = TestWorld::start(Options { repository: repository.path().to_owned(), args, ..Options::default() });
    let num_whole = AtomicUsize::new(0);
    thread::scope(|scope| {
        for client in 0..NUM_CLIENTS {
            let (world, num_whole) = (&world, &num_whole);
            scope.spawn(move || {
                let mut random = Random(client);
                let whole = (0..REQUESTS_EACH).filter(|_| one(world, &mut random)).count();
                num_whole.fetch_add(whole, Ordering::Relaxed);
            });
        }
    });
    assert!(num_whole.into_inner() > 0);
    eventually("nothing is held", || {
        let ledger = ledger(&mut world);
        assert_eq!(ledger["wrong"], Value::Null, "{ledger}");
        ledger["idle"] == true
    });
    let idle = ledger(&mut world);
    for book in ["queue_slots", "rows", "kv_blocks", "kv_blocks_reserved", "steps_in_flight", "sequences_listening"] {
        assert_eq!(idle[book], 0, "{idle}");
    }
    assert!(world.metric("trireme_llm_preemptions_total") > 0.0, "blocks were never short");
}

#[test]
fn the_ledger_names_who_holds_what_and_is_hidden_by_default() {
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
