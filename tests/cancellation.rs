//! A client that disconnects frees its resources.

mod support;

use support::{TestWorld, eventually};

#[test]
fn a_client_that_disconnects_mid_stream_frees_its_kv_blocks_before_its_text_is_complete() {
    let mut world = TestWorld::of(1);
    let max_tokens = 1900;
    let mut stream = world.stream_request(&serde_json::json!({
        "text_input": "Once upon a time", "max_tokens": max_tokens, "stream": true, "end_id": -1
    }));
    stream.next().expect("a first piece");
    assert!(world.metric("trireme_llm_kv_blocks_used") > 0.0);

    drop(stream);
    eventually("blocks are free", || world.metric("trireme_llm_kv_blocks_used") == 0.0);
    let generated = world.metric("trireme_llm_output_tokens_total");
    assert!(generated < f64::from(max_tokens), "all {generated} tokens were generated after the client had left");
    assert_eq!(world.metric("trireme_llm_requests_running"), 0.0);
    assert!(!world.generate("The captain", 8).is_empty(), "the next request is served");
}
