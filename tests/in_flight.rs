//! In-flight batching: concurrent requests do not change each other's tokens.

mod support;

use std::thread;

use serde_json::json;
use support::TestWorld;

#[test]
fn a_request_gets_the_same_greedy_text_alone_and_among_32() {
    let world = TestWorld::of(1);
    let prompts: Vec<String> =
        (0..32).map(|n| format!("Story {n}. Once upon a time there {}", "was a ".repeat(n % 7))).collect();
    let alone: Vec<String> = prompts.iter().map(|prompt| world.generate(prompt, 32)).collect();
    let together = thread::scope(|scope| {
        let tasks: Vec<_> = prompts.iter().map(|prompt| scope.spawn(|| world.generate(prompt, 32))).collect();
        tasks.into_iter().map(|task| task.join().unwrap()).collect::<Vec<_>>()
    });
    assert_eq!(together, alone);
}

#[test]
fn a_seed_gives_the_same_text_alone_and_among_others() {
    let world = TestWorld::of(1);
    let sampled = &|seed: u64| {
        let body = json!({"text_input": "Once upon a time", "max_tokens": 24, "stream": true,
                          "temperature": 1.0, "top_k": 50, "seed": seed});
        world.stream_request(&body).collect::<String>()
    };
    let alone: Vec<String> = (0..8).map(sampled).collect();
    assert!(alone.iter().any(|text| *text != alone[0]), "seeds make no difference: {alone:?}");
    let together = thread::scope(|scope| {
        let tasks: Vec<_> = (0..8).map(|seed| scope.spawn(move || sampled(seed))).collect();
        tasks.into_iter().map(|task| task.join().unwrap()).collect::<Vec<_>>()
    });
    assert_eq!(together, alone);
}

#[test]
fn a_stop_word_ends_the_text_before_it_and_never_leaks() {
    let world = TestWorld::of(1);
    let whole = world.generate("Once upon a time", 64);
    let stop = whole.split_whitespace().nth(9).expect("ten words").to_owned();
    let body = json!({"text_input": "Once upon a time", "max_tokens": 64, "stream": true, "stop_words": [stop]});
    let text: String = world.stream_request(&body).collect();
    let expected = &whole[..whole.find(&format!(" {stop}")).expect("the word is there")];
    assert_eq!(text.trim_end(), expected.trim_end());
}
