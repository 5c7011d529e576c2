//! Scheduling as clients observe it: priorities, timeouts, queue limits, preemption.

mod support;

use std::sync::Mutex;
use std::thread;

use serde_json::{Value, json};
use support::{Options, TestWorld, TextStream, eventually, repository_with_queue};

/// A world whose language model has another `dynamic_batching` block and further parameters.
fn world(max_batch_size: u32, batching: &str, parameters: &[(&str, u32)]) -> TestWorld {
    // The repository may be removed: loaded models no longer read their configuration, and no worker restarts here.
    let repository = repository_with_queue(max_batch_size, batching, parameters);
    TestWorld::start(Options { repository: repository.path().to_owned(), ..Options::default() })
}

/// A request for 4 tokens with a prompt that depends on `seed`.
fn request(seed: i32, more: Value) -> Value {
    let mut body =
        json!({"input_ids": [300 + seed, 301, 302], "input_lengths": 3, "request_output_len": 4, "end_id": -1});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn generate(world: &TestWorld, body: &Value) -> (u16, String) {
    world.post("/v2/models/tensorrt_llm/generate", body)
}

/// A stream that occupies the only row until it is dropped.
fn occupy(world: &TestWorld) -> TextStream {
    let mut stream =
        world.stream_request(&json!({"text_input": "Once", "max_tokens": 1900, "stream": true, "end_id": 3071}));
    stream.next().expect("it runs");
    stream
}

/// Number of requests that wait in the model's queue. The front itself queues none.
fn num_waiting(world: &Mutex<TestWorld>) -> f64 {
    world.lock().unwrap().metric("trireme_llm_requests_waiting")
}

#[test]
fn the_time_of_steps_is_known_before_the_first_request() {
    let mut world = TestWorld::of(2);
    assert!(world.metric("trireme_llm_step_cost_seconds") > 0.0);
    // The steps at load are not counted.
    for name in ["steps_total", "step_seconds_count", "output_tokens_total", "kv_blocks_used", "kv_blocks_cached"] {
        assert_eq!(world.metric(&format!("trireme_llm_{name}")), 0.0, "{name}");
    }
    let prompts: Vec<i32> = (300..340).collect();
    let body = json!({"input_ids": prompts, "input_lengths": 40, "request_output_len": 30, "end_id": -1});
    assert_eq!(generate(&world, &body).0, 200);
    let [count, measured] = ["count", "sum"].map(|part| world.metric(&format!("trireme_llm_step_seconds_{part}")));
    let [known, predicted] =
        ["count", "sum"].map(|part| world.metric(&format!("trireme_llm_step_predicted_seconds_{part}")));
    assert_eq!(known, count, "every step was predicted");
    // Other tests run beside this one.
    assert!(predicted > measured / 5.0 && predicted < measured * 5.0, "{predicted} s predicted, {measured} s measured");
}

#[test]
fn requests_time_out_in_the_queue_and_a_full_queue_refuses_at_once() {
    let world = world(1, "default_queue_policy { max_queue_size: 2 allow_timeout_override: true }", &[]);
    let stream = occupy(&world);
    let (status, text) = generate(&world, &request(0, json!({"timeout": 50_000})));
    assert!(status == 503 && text.contains("Request timeout expired"), "{status} {text}");
    let url = world.url("/v2/models/tensorrt_llm/generate");
    let world = Mutex::new(world);
    thread::scope(|scope| {
        let waiting = [1, 2].map(|seed| {
            scope.spawn({
                let url = &url;
                move || support::post_to(url, &request(seed, json!({})))
            })
        });
        eventually("both wait", || num_waiting(&world) == 2.0);
        let (status, text) = support::post_to(&url, &request(3, json!({})));
        assert!(status == 503 && text.contains("try again later"), "{status} {text}");
        drop(stream);
        for task in waiting {
            let (status, text) = task.join().unwrap();
            assert_eq!(status, 200, "{text}");
        }
    });
    eventually("blocks are free", || world.lock().unwrap().metric("trireme_llm_kv_blocks_used") == 0.0);
}

#[test]
fn a_full_priority_level_refuses_and_others_have_room() {
    let own = "priority_queue_policy { key: 2 value { max_queue_size: 1 } }";
    let world = world(1, &format!("priority_levels: 2 default_priority_level: 1 {own}"), &[]);
    let stream = occupy(&world);
    let url = world.url("/v2/models/tensorrt_llm/generate");
    let world = Mutex::new(world);
    let post = |seed: i32, level: u32| support::post_to(&url, &request(seed, json!({"priority": level})));
    thread::scope(|scope| {
        let second = scope.spawn(|| post(1, 2));
        eventually("one of the second level waits", || num_waiting(&world) == 1.0);
        let (status, text) = post(2, 2);
        assert!(status == 503 && text.contains("1 requests of this priority wait"), "{status} {text}");
        let first = [3, 4].map(|seed| scope.spawn(move || post(seed, 1)));
        eventually("those of the first level wait, too", || num_waiting(&world) == 3.0);
        drop(stream);
        for task in first.into_iter().chain([second]) {
            let (status, text) = task.join().unwrap();
            assert_eq!(status, 200, "{text}");
        }
    });
}

#[test]
fn the_first_priority_level_is_served_before_earlier_requests() {
    let world = world(1, "priority_levels: 3 default_priority_level: 2", &[]);
    let stream = occupy(&world);
    let url = world.url("/v2/models/tensorrt_llm/generate");
    let (world, order) = (Mutex::new(world), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for (index, level) in [3, 0, 1].into_iter().enumerate() {
            let (url, order) = (&url, &order);
            scope.spawn(move || {
                let (status, text) =
                    support::post_to(url, &request(level, json!({"priority": level, "request_output_len": 300})));
                assert_eq!(status, 200, "{text}");
                order.lock().unwrap().push(level);
            });
            eventually("it waits", || num_waiting(&world) == (index + 1) as f64);
        }
        drop(stream);
    });
    // 0 selects the default level, which is 2.
    assert_eq!(*order.lock().unwrap(), [1, 0, 3]);
}

/// Six sequences of 200 tokens do not fit 40 blocks: some are preempted, and no client notices.
#[test]
fn preempted_streams_continue_with_the_same_text() {
    let parameters = [("max_tokens_in_paged_kv_cache", 640)];
    let mut world = world(16, "default_queue_policy { max_queue_size: 64 }", &parameters);
    let stream = |seed: i32| {
        let body =
            json!({"text_input": format!("Story {seed}. Once"), "max_tokens": 190, "stream": true, "end_id": 3071});
        world.stream_request(&body).collect::<String>()
    };
    let alone: Vec<String> = (0..6).map(stream).collect();
    let together = thread::scope(|scope| {
        let tasks: Vec<_> = (0..6).map(|seed| scope.spawn(move || stream(seed))).collect();
        tasks.into_iter().map(|task| task.join().unwrap()).collect::<Vec<_>>()
    });
    assert_eq!(together, alone);
    assert!(world.metric("trireme_llm_preemptions_total") > 0.0);
    assert!(world.metric("trireme_llm_prefix_cache_reused_blocks_total") > 0.0);
    eventually("blocks are free", || world.metric("trireme_llm_kv_blocks_used") == 0.0);
}
