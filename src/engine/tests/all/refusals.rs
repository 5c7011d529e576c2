//! Which requests an engine refuses, and the texts of the errors.

use engine::{BeamParams, Engine, EngineConfig, MAX_LOGPROBS, Request, TokenId};

fn request(len: usize, max_tokens: u32) -> Request {
    Request { prompt: vec![TokenId(1); len], max_tokens, ..Request::default() }
}

fn beams(width: u32) -> BeamParams {
    BeamParams { width, len_penalty: 0.0, early_stopping: true, diversity_rate: 0.0 }
}

#[test]
fn a_refused_request_gets_the_reason_and_leaves_no_state() {
    let config =
        EngineConfig { num_blocks: 4, max_sequence_len: 100, max_joined_tokens: 50, ..EngineConfig::default() };
    let mut engine = Engine::new(config).unwrap();
    let with = |change: &dyn Fn(&mut Request)| {
        let mut request = request(4, 4);
        change(&mut request);
        request
    };
    let cases = [
        (request(0, 1), "prompt is empty"),
        (request(100, 1), "prompt has 100 tokens; this model takes at most 99"),
        (request(4, 0), "max_tokens is 0"),
        (request(4, 90), "6 KV blocks are needed for prompt and output but there are 4"),
        (with(&|request| request.stop_words = vec![vec![TokenId(1)], vec![]]), "stop word 1 is empty"),
        (with(&|request| request.sampling.end_ids = vec![TokenId(1); 51]), "have 51 entries"),
        (with(&|request| request.beams = Some(beams(1))), "beam width is 1; it must be 2 to 64"),
        (with(&|request| request.beams = Some(beams(65))), "beam width is 65; it must be 2 to 64"),
        (
            with(&|request| {
                request.beams = Some(beams(64));
                request.stop_words = vec![vec![TokenId(1)]; 193];
            }),
            "257 continuations of each beam are needed",
        ),
        // Two beams of 33 positions that share no full block.
        (
            with(&|request| {
                request.beams = Some(beams(2));
                request.max_tokens = 30;
            }),
            "6 KV blocks are needed for prompt and output but there are 4",
        ),
        (with(&|request| request.sampling.num_logprobs = Some(MAX_LOGPROBS + 1)), "33 likeliest tokens are requested"),
    ];
    for (request, words) in cases {
        let refused = engine.submit(request).unwrap_err().to_string();
        assert!(refused.contains(words), "`{refused}` does not say `{words}`");
    }
    assert!(engine.is_idle());
    engine.submit(with(&|request| request.sampling.num_logprobs = Some(MAX_LOGPROBS))).unwrap();
}

#[test]
fn a_full_priority_refuses_while_others_have_room() {
    let bounds =
        EngineConfig { max_queue: 3, max_queue_each: 2, max_queue_of: [(7, 1)].into(), ..EngineConfig::default() };
    let mut engine = Engine::new(bounds).unwrap();
    let of = |priority| Request { priority, ..request(4, 4) };
    let first = engine.submit(of(7)).unwrap();
    let refused = engine.submit(of(7)).unwrap_err().to_string();
    assert!(refused.contains("queue is full: 1 requests of this priority wait"), "{refused}");
    let second = engine.submit(of(0)).unwrap();
    // Delayed requests still count.
    assert!(engine.delay(second));
    engine.submit(of(0)).unwrap();
    let refused = engine.submit(of(0)).unwrap_err().to_string();
    assert!(refused.contains("queue is full: 3 requests wait"), "{refused}");
    engine.cancel(first);
    let refused = engine.submit(of(0)).unwrap_err().to_string();
    assert!(refused.contains("2 requests of this priority wait"), "{refused}");
    engine.cancel(second);
    engine.submit(of(0)).unwrap();
    let error = Engine::new(EngineConfig { max_queue_of: [(1, 0)].into(), ..EngineConfig::default() }).unwrap_err();
    assert!(error.to_string().contains("`max_queue_of` is 0"), "{error}");
}

#[test]
fn a_full_queue_refuses_until_there_is_room() {
    let mut engine = Engine::new(EngineConfig { max_queue: 2, ..EngineConfig::default() }).unwrap();
    let first = engine.submit(request(4, 4)).unwrap();
    engine.submit(request(4, 4)).unwrap();
    let refused = engine.submit(request(4, 4)).unwrap_err().to_string();
    assert!(refused.contains("queue is full: 2 requests wait"), "{refused}");
    engine.cancel(first);
    engine.submit(request(4, 4)).unwrap();
}
