//! Overload: requests wait while the queue has room, even while workers restart; the others are refused with `Retry-After`.

mod support;

use std::fs;
use std::io::Read;
use std::thread;

use nix::sys::signal::Signal;
use serde_json::json;
use support::{Options, TIMEOUT, TestWorld, copied_repository, signal};

const MAX_TOKENS: u32 = 40;

/// Status, `Retry-After` and body of a request without streaming.
fn generate_at(url: &str) -> (u16, Option<String>, String) {
    let config = ureq::Agent::config_builder().http_status_as_error(false).timeout_global(Some(TIMEOUT));
    let agent: ureq::Agent = config.build().into();
    let body = json!({"text_input": "Once upon a time", "max_tokens": MAX_TOKENS, "stream": false});
    let mut response = agent.post(url).send(body.to_string()).expect("the server answers");
    let header = response.headers().get("retry-after").map(|value| value.to_str().unwrap().to_owned());
    let mut text = String::new();
    response.body_mut().as_reader().read_to_string(&mut text).expect("a whole body");
    (response.status().as_u16(), header, text)
}

#[test]
fn requests_queue_while_workers_restart_and_those_beyond_the_limit_get_retry_after() {
    let repository = copied_repository();
    let path = repository.path().join("tensorrt_llm/config.pbtxt");
    let config = fs::read_to_string(&path).unwrap();
    let config =
        config.replace("max_batch_size: 64", "max_batch_size: 1").replace("max_queue_size: 1024", "max_queue_size: 2");
    fs::write(&path, config).unwrap();
    let args = vec!["--step-timeout=3".to_owned()];
    let mut world = TestWorld::start(Options { repository: repository.path().to_owned(), args, ..Options::default() });
    let undisturbed = world.generate("Once upon a time", MAX_TOKENS);

    let mut running = world.stream("Once upon a time", MAX_TOKENS);
    let first = running.next().expect("a first piece");
    // No step runs until the watchdog replaces the worker.
    signal(world.workers()[0], Signal::SIGSTOP);
    let url = world.url("/v2/models/ensemble/generate");
    let clients: Vec<_> = (0..8)
        .map(|_| {
            let url = url.clone();
            thread::spawn(move || generate_at(&url))
        })
        .collect();
    let answers: Vec<_> = clients.into_iter().map(|client| client.join().unwrap()).collect();
    assert_eq!(first + &running.collect::<String>(), undisturbed);

    let (accepted, refused): (Vec<_>, Vec<_>) = answers.iter().partition(|(status, ..)| *status == 200);
    assert!(accepted.len() >= 2 && !refused.is_empty(), "{answers:?}");
    for (_, _, text) in accepted {
        let answer: serde_json::Value = serde_json::from_str(text).unwrap();
        assert_eq!(answer["text_output"], undisturbed.as_str());
    }
    for (status, retry_after, text) in refused {
        assert_eq!((*status, retry_after.as_deref()), (503, Some("1")), "{text}");
        assert!(text.contains("try again later") || text.contains("queue"), "{text}");
    }
    assert_eq!(world.metric("trireme_llm_worker_restarts_total"), 1.0);
    assert!(world.stop().success());
}
