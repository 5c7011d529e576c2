//! Dynamic batching: batch sizes, delays, priorities, timeouts and the order of responses.

use std::sync::Arc;
use std::time::Duration;

use serving::{ErrorKind, InferRequest, ResponseStream, Server, Tensor};

use crate::support::{TestRepository, eventually, one, request, responses};

const ROWS: &str = r#"backend: "rows" max_batch_size: 4
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
"#;

fn batching(fields: &str) -> String {
    format!("{ROWS} dynamic_batching {{ {fields} }}")
}

fn rows(id: &str, num_rows: usize) -> InferRequest {
    wide(id, num_rows, 1)
}

fn wide(id: &str, num_rows: usize, width: usize) -> InferRequest {
    let shape = [num_rows, width].map(|size| i64::try_from(size).unwrap());
    let tensor = Tensor::from_f32("INPUT0", &shape, &vec![0.5; num_rows * width]);
    InferRequest { id: id.into(), ..request("rows", vec![tensor]) }
}

struct RowsServer {
    repository: TestRepository,
    server: Arc<Server>,
}

impl RowsServer {
    async fn start(config: &str) -> Self {
        let repository = TestRepository::new(&[("rows", config)]);
        let server = repository.started().await;
        Self { repository, server }
    }

    fn infer(&self, request: InferRequest) -> ResponseStream {
        self.server.infer(request).unwrap()
    }

    /// Lets one more execution end.
    fn release_one(&self) {
        self.repository.script.gate.add_permits(1);
    }

    fn batches(&self) -> Vec<String> {
        self.repository.script.batches.lock().unwrap().clone()
    }

    async fn expect_batches(&self, expected: &[&str]) {
        let what = format!("batches are {expected:?}");
        eventually(&what, || self.batches().len() >= expected.len()).await;
        assert_eq!(self.batches(), expected);
    }
}

#[tokio::test]
async fn waiting_requests_share_a_batch_up_to_the_largest_size() {
    let rows_model = RowsServer::start(&batching("")).await;
    let mut streams = vec![rows_model.infer(rows("first", 1))];
    rows_model.expect_batches(&["0: first"]).await;
    for (id, num_rows) in [("a", 1), ("b", 2), ("c", 1), ("d", 3), ("e", 2)] {
        streams.push(rows_model.infer(rows(id, num_rows)));
    }
    rows_model.repository.script.gate.add_permits(4);
    for stream in streams {
        one(stream).await;
    }
    assert_eq!(rows_model.batches(), ["0: first", "0: a b c", "0: d", "0: e"]);
    let statistics = rows_model.server.model_statistics("rows", "").unwrap().remove(0);
    assert_eq!((statistics.inference_count, statistics.execution_count), (10, 4));
    assert_eq!(statistics.inference.success.count, 6);
    let sizes: Vec<_> = statistics.batches.iter().map(|batch| (batch.batch_size, batch.compute_infer.count)).collect();
    assert_eq!(sizes, [(1, 1), (2, 1), (3, 1), (4, 1)]);
    assert!(statistics.inference.queue.ns > 0);
}

#[tokio::test]
async fn the_parts_of_a_requests_time_add_up_to_its_total() {
    let rows_model = RowsServer::start(&batching("")).await;
    rows_model.repository.script.gate.add_permits(2);
    for id in ["timed", "plain"] {
        one(rows_model.infer(rows(id, 1))).await;
    }
    let statistics = rows_model.server.model_statistics("rows", "").unwrap().remove(0);
    let (all, batch) = (statistics.inference, statistics.batches[0]);
    assert!(all.compute_input.ns >= 3_000_000 && all.compute_output.ns >= 2_000_000, "{all:?}");
    let parts = all.queue.ns + all.compute_input.ns + all.compute_infer.ns + all.compute_output.ns;
    assert_eq!(parts, all.success.ns);
    let batch_parts = [batch.compute_input, batch.compute_infer, batch.compute_output];
    assert_eq!(batch_parts, [all.compute_input, all.compute_infer, all.compute_output]);
}

#[tokio::test]
async fn without_batching_each_request_runs_alone_in_order() {
    let rows_model = RowsServer::start(ROWS).await;
    let streams = ["a", "b", "c"].map(|id| rows_model.infer(rows(id, 1)));
    rows_model.repository.script.gate.add_permits(3);
    for stream in streams {
        one(stream).await;
    }
    assert_eq!(rows_model.batches(), ["0: a", "0: b", "0: c"]);
}

#[tokio::test]
async fn requests_of_different_shapes_share_no_batch_unless_it_may_be_ragged() {
    for (config, expected) in [
        (batching(""), ["0: first", "0: a", "0: b"].as_slice()),
        (
            batching("").replace("dims: [ -1 ] } ]\noutput", "dims: [ -1 ] allow_ragged_batch: true } ]\noutput"),
            &["0: first", "0: a b"],
        ),
    ] {
        let rows_model = RowsServer::start(&config).await;
        let first = rows_model.infer(rows("first", 1));
        rows_model.expect_batches(&expected[..1]).await;
        let streams = [rows_model.infer(wide("a", 1, 2)), rows_model.infer(wide("b", 1, 3))];
        rows_model.repository.script.gate.add_permits(3);
        for stream in [first].into_iter().chain(streams) {
            one(stream).await;
        }
        assert_eq!(rows_model.batches(), expected);
    }
}

#[tokio::test]
async fn a_batch_of_preferred_size_runs_at_once_and_others_after_the_delay() {
    let delay = |microseconds: u64| {
        batching(&format!("preferred_batch_size: [ 2 ] max_queue_delay_microseconds: {microseconds}"))
    };
    let rows_model = RowsServer::start(&delay(3_600_000_000)).await;
    let first = rows_model.infer(rows("a", 1));
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert!(rows_model.batches().is_empty(), "a waits for another request");
    let second = rows_model.infer(rows("b", 1));
    rows_model.expect_batches(&["0: a b"]).await;
    rows_model.release_one();
    one(first).await;
    one(second).await;

    let rows_model = RowsServer::start(&delay(300_000)).await;
    let started = std::time::Instant::now();
    let alone = rows_model.infer(rows("c", 1));
    rows_model.release_one();
    one(alone).await;
    assert!(started.elapsed() >= Duration::from_millis(300));
    assert_eq!(rows_model.batches(), ["0: c"]);
}

#[tokio::test]
async fn a_full_queue_refuses_requests_and_counts_them() {
    let rows_model = RowsServer::start(&batching("default_queue_policy { max_queue_size: 2 }")).await;
    let first = rows_model.infer(rows("first", 1));
    rows_model.expect_batches(&["0: first"]).await;
    let second = rows_model.infer(rows("second", 1));
    let third = rows_model.infer(rows("third", 1));
    let refused = rows_model.server.infer(rows("fourth", 1)).unwrap_err();
    assert_eq!((refused.kind, refused.message.as_str()), (ErrorKind::Unavailable, "Exceeds maximum queue size"));
    drop(second);
    let fifth = rows_model.infer(rows("fifth", 1));
    rows_model.repository.script.gate.add_permits(2);
    for stream in [first, third, fifth] {
        one(stream).await;
    }
    assert_eq!(rows_model.batches(), ["0: first", "0: third fifth"]);
    let failures = rows_model.server.model_statistics("rows", "").unwrap()[0].failures;
    assert_eq!((failures.rejected, failures.canceled, failures.backend), (1, 1, 0));
}

#[tokio::test]
async fn a_request_that_waits_too_long_is_refused_while_the_model_is_busy() {
    let policy = "default_queue_policy { default_timeout_microseconds: 30000 allow_timeout_override: true }";
    let rows_model = RowsServer::start(&batching(policy)).await;
    let first = rows_model.infer(rows("first", 1));
    rows_model.expect_batches(&["0: first"]).await;
    let late = rows_model.infer(rows("late", 1));
    let hurried = rows_model.infer(InferRequest { timeout_us: 1000, ..rows("hurried", 1) });
    let patient = rows_model.infer(InferRequest { timeout_us: 60_000_000, ..rows("patient", 1) });
    for stream in [hurried, late, patient] {
        let refused = responses(stream).await.remove(0).unwrap_err();
        assert_eq!((refused.kind, refused.message.as_str()), (ErrorKind::Unavailable, "Request timeout expired"));
    }
    rows_model.release_one();
    one(first).await;
    assert_eq!(rows_model.batches(), ["0: first"]);
    assert_eq!(rows_model.server.model_statistics("rows", "").unwrap()[0].failures.rejected, 3);
}

#[tokio::test]
async fn with_action_delay_a_timed_out_request_runs_after_the_others() {
    let policy = "default_queue_policy { default_timeout_microseconds: 60000000 allow_timeout_override: true timeout_action: DELAY }";
    let rows_model =
        RowsServer::start(&format!("{} ", batching(&format!("preferred_batch_size: [ 1 ] {policy}")))).await;
    let first = rows_model.infer(rows("first", 1));
    rows_model.expect_batches(&["0: first"]).await;
    let hurried = rows_model.infer(InferRequest { timeout_us: 1000, ..rows("hurried", 1) });
    tokio::time::sleep(Duration::from_millis(20)).await;
    let later = rows_model.infer(rows("later", 1));
    rows_model.repository.script.gate.add_permits(3);
    for stream in [first, hurried, later] {
        one(stream).await;
    }
    assert_eq!(rows_model.batches(), ["0: first", "0: later", "0: hurried"]);
}

#[tokio::test]
async fn requests_of_higher_priority_run_first() {
    let levels = "preferred_batch_size: [ 1 ] priority_levels: 3 default_priority_level: 2 \
                  priority_queue_policy { key: 3 value { max_queue_size: 1 } }";
    let rows_model = RowsServer::start(&batching(levels)).await;
    let mut streams = vec![rows_model.infer(rows("first", 1))];
    rows_model.expect_batches(&["0: first"]).await;
    for (id, priority) in [("idle", 3), ("plain", 0), ("urgent", 1), ("unknown", 9)] {
        streams.push(rows_model.infer(InferRequest { priority, ..rows(id, 1) }));
    }
    let full = rows_model.server.infer(InferRequest { priority: 3, ..rows("too many", 1) }).unwrap_err();
    assert_eq!(full.message, "Exceeds maximum queue size");
    rows_model.repository.script.gate.add_permits(5);
    for stream in streams {
        one(stream).await;
    }
    assert_eq!(rows_model.batches(), ["0: first", "0: urgent", "0: plain", "0: unknown", "0: idle"]);
}

#[tokio::test]
async fn instances_run_in_parallel_and_can_preserve_the_order_of_responses() {
    let two = format!(
        "{} instance_group [ {{ count: 2 kind: KIND_CPU }} ]",
        batching("preferred_batch_size: [ 1 ] preserve_ordering: true")
    );
    let rows_model = RowsServer::start(&two).await;
    let gate = &rows_model.repository.script.gate;
    let first = rows_model.infer(rows("a", 1));
    eventually("a runs", || rows_model.batches().len() == 1).await;
    let mut second = rows_model.infer(rows("b", 1));
    eventually("both instances run", || rows_model.batches().len() == 2).await;
    let third = rows_model.infer(rows("c", 1));
    assert_eq!(rows_model.server.model_statistics("rows", "").unwrap()[0].pending, 1);
    // The second request gets no response before the first one, whichever execution ends first.
    let early = tokio::time::timeout(Duration::from_millis(20), second.next_response()).await;
    assert!(early.is_err());
    gate.add_permits(3);
    one(first).await;
    second.next_response().await.unwrap().unwrap();
    one(third).await;
}

#[tokio::test]
async fn an_execution_that_panics_fails_its_requests_and_no_others() {
    let rows_model = RowsServer::start(&batching("")).await;
    let broken = rows_model.infer(rows("panic", 1));
    rows_model.repository.script.gate.add_permits(2);
    let error = responses(broken).await.remove(0).unwrap_err();
    assert!(error.message.contains("stopped answering before its final response"), "{error}");
    one(rows_model.infer(rows("next", 1))).await;
}

#[tokio::test]
async fn an_unloaded_model_serves_its_queue_and_is_dropped() {
    let repository = TestRepository::new(&[("rows", &batching(""))]);
    let server = repository.explicit(&["rows"]).await;
    let streams = ["a", "b"].map(|id| server.infer(rows(id, 1)).unwrap());
    let unload = tokio::spawn({
        let server = server.clone();
        async move { server.unload_model("rows", false).await }
    });
    repository.script.gate.add_permits(2);
    for stream in streams {
        one(stream).await;
    }
    unload.await.unwrap().unwrap();
    eventually("the backend is dropped", || repository.script.dropped.load(std::sync::atomic::Ordering::SeqCst) == 1)
        .await;
}
