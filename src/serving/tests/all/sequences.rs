//! Sequences: requests of one sequence run on one instance, in order, with the state of earlier requests.

use std::sync::Arc;
use std::time::Duration;

use serving::{CorrelationId, ErrorKind, InferError, InferRequest, InferResponse, ResponseStream, Server, Tensor};

use crate::support::{TestRepository, eventually, one, request, responses};

const ROWS: &str = r#"backend: "rows" max_batch_size: 2
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 1 ] } ]
"#;

const CONTROLS: &str = r#"
control_input [
  { name: "START" control [ { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } ] },
  { name: "END" control [ { kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] } ] },
  { name: "READY" control [ { kind: CONTROL_SEQUENCE_READY bool_false_true: [ false, true ] } ] },
  { name: "ID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } ] }
]"#;

fn sequences(fields: &str) -> String {
    format!("{ROWS} sequence_batching {{ {fields} }}")
}

/// `part`: "start", "middle", "end" or "only".
fn part(id: &str, sequence: u64, part: &str) -> InferRequest {
    InferRequest {
        id: id.into(),
        correlation_id: CorrelationId::Number(sequence),
        sequence_start: ["start", "only"].contains(&part),
        sequence_end: ["end", "only"].contains(&part),
        ..request("rows", vec![Tensor::from_f32("INPUT0", &[1, 1], &[1.0])])
    }
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

    fn release_all(&self) {
        self.repository.script.gate.add_permits(1000);
    }

    fn batches(&self) -> Vec<String> {
        self.repository.script.batches.lock().unwrap().clone()
    }
}

#[tokio::test]
async fn control_inputs_describe_the_position_in_the_sequence() {
    let rows = RowsServer::start(&sequences(CONTROLS)).await;
    rows.release_all();
    for (id, place) in [("a", "start"), ("b", "middle"), ("c", "end")] {
        one(rows.infer(part(id, 42, place))).await;
    }
    one(rows.infer(InferRequest { correlation_id: CorrelationId::Text("abc".into()), ..part("d", 0, "only") })).await;
    let text_id = 0xe71f_a219_0541_574b_u64;
    assert_eq!(
        rows.batches(),
        [
            "0: a[START=1 END=0 READY=true ID=42]".to_owned(),
            "0: b[START=0 END=0 READY=true ID=42]".to_owned(),
            "0: c[START=0 END=1 READY=true ID=42]".to_owned(),
            format!("0: d[START=1 END=1 READY=true ID={text_id}]"),
        ]
    );
}

#[tokio::test]
async fn a_sequence_keeps_its_slot_in_the_batches_of_its_instance() {
    let rows = RowsServer::start(&sequences(CONTROLS).replace("max_batch_size: 2", "max_batch_size: 3")).await;
    rows.release_all();
    let null = "[START=0 END=0 READY=false ID=0]";
    for (id, sequence, place, batch) in [
        ("a", 1, "start", "0: a[START=1 END=0 READY=true ID=1]".to_owned()),
        ("b", 2, "start", format!("0: {null} b[START=1 END=0 READY=true ID=2]")),
        ("c", 3, "start", format!("0: {null} {null} c[START=1 END=0 READY=true ID=3]")),
        ("b", 2, "middle", format!("0: {null} b[START=0 END=0 READY=true ID=2] {null}")),
        ("a", 1, "end", format!("0: a[START=0 END=1 READY=true ID=1] {null} {null}")),
        // The first slot is free, and the next sequence gets it.
        ("d", 4, "start", format!("0: d[START=1 END=0 READY=true ID=4] {null} {null}")),
        ("c", 3, "end", format!("0: {null} {null} c[START=0 END=1 READY=true ID=3]")),
        ("b", 2, "end", format!("0: {null} b[START=0 END=1 READY=true ID=2]")),
    ] {
        one(rows.infer(part(id, sequence, place))).await;
        assert_eq!(rows.batches().pop().unwrap(), batch);
        eventually("the instance is free", || rows.server.num_in_flight() == 0).await;
    }
    let statistics = &rows.server.model_statistics("rows", "").unwrap()[0];
    assert_eq!((statistics.inference_count, statistics.batches.len()), (8, 1), "{:?}", statistics.batches);
}

#[tokio::test]
async fn a_rescheduled_request_is_a_sequence_of_its_own() {
    for strategy in ["direct { }", "oldest { max_candidate_sequences: 4 }"] {
        let rows = RowsServer::start(&sequences(&format!("iterative_sequence: true {strategy} {CONTROLS}"))).await;
        rows.release_all();
        for (id, batches) in [(1, ["START=1", "START=0"]), (2, ["START=1", "START=0"])] {
            one(rows.infer(InferRequest { sequence_start: false, ..part("again", 0, "middle") })).await;
            let expected = batches.map(|start| format!("0: again[{start} END=0 READY=true ID={id}]"));
            assert_eq!(rows.batches()[2 * (id - 1)..], expected, "{strategy}");
        }
    }
}

#[tokio::test]
async fn a_request_outside_a_sequence_gets_the_error_message_of_triton() {
    let rows = RowsServer::start(&sequences("max_sequence_idle_microseconds: 500000")).await;
    rows.release_all();
    let two_rows =
        InferRequest { inputs: vec![Tensor::from_f32("INPUT0", &[2, 1], &[1.0, 2.0])], ..part("two", 7, "start") };
    let start = "inference request for sequence 77 to model 'rows' must specify the START flag on the first request of the \
                 sequence";
    for (request, message) in [
        (
            part("none", 0, "start"),
            "inference request to model 'rows' must specify a non-zero or non-empty correlation ID",
        ),
        (part("unknown", 77, "middle"), start),
        (
            two_rows,
            "inference request to model 'rows' must specify batch-size 1 due to requirements of sequence batcher",
        ),
    ] {
        let refused = rows.server.infer(request).unwrap_err();
        assert_eq!((refused.kind, refused.message.as_str()), (ErrorKind::InvalidArgument, message));
    }
    one(rows.infer(part("a", 77, "start"))).await;
    one(rows.infer(part("b", 77, "end"))).await;
    assert_eq!(rows.server.infer(part("after its end", 77, "middle")).unwrap_err().message, start);
    one(rows.infer(part("a", 77, "start"))).await;
    tokio::time::sleep(Duration::from_millis(700)).await;
    assert_eq!(rows.server.infer(part("idle too long", 77, "middle")).unwrap_err().message, start);
    assert_eq!(rows.server.model_statistics("rows", "").unwrap()[0].failures.other, 5);
}

#[tokio::test]
async fn sequences_share_batches_and_preserve_their_order() {
    let rows = RowsServer::start(&sequences("oldest { max_candidate_sequences: 4 }")).await;
    let mut streams = vec![rows.infer(part("a1", 1, "start"))];
    eventually("a1 runs", || rows.batches().len() == 1).await;
    for (id, sequence, place) in
        [("a2", 1, "middle"), ("a3", 1, "end"), ("b1", 2, "start"), ("b2", 2, "end"), ("c1", 3, "only")]
    {
        streams.push(rows.infer(part(id, sequence, place)));
    }
    rows.release_all();
    for stream in streams {
        one(stream).await;
    }
    assert_eq!(rows.batches(), ["0: a1", "0: a2 b1", "0: a3 b2", "0: c1"]);
    let statistics = rows.server.model_statistics("rows", "").unwrap().remove(0);
    assert_eq!((statistics.inference_count, statistics.execution_count), (6, 4));
}

#[tokio::test]
async fn each_sequence_stays_on_its_instance() {
    let config = format!("{} instance_group [ {{ count: 2 kind: KIND_CPU }} ]", sequences("direct { }"));
    let rows = RowsServer::start(&config).await;
    rows.release_all();
    for round in 0..6 {
        let place = if round == 0 { "start" } else { "middle" };
        let streams = [1, 2, 3, 4].map(|sequence| rows.infer(part(&format!("s{sequence}"), sequence, place)));
        for stream in streams {
            one(stream).await;
        }
    }
    let instance_of = |sequence: &str| {
        let mut instances: Vec<char> = Vec::new();
        for batch in rows.batches().iter().filter(|batch| batch.contains(sequence)) {
            instances.extend(batch.chars().next());
        }
        assert_eq!(instances.len(), 6);
        assert!(instances.iter().all(|instance| *instance == instances[0]), "{sequence} moved: {instances:?}");
        instances[0]
    };
    let mut instances = ["s1", "s2", "s3", "s4"].map(instance_of);
    instances.sort_unstable();
    assert_eq!(instances, ['0', '0', '1', '1'], "the sequences are spread");
}

#[tokio::test]
async fn a_sequence_without_a_slot_waits_until_another_ends_or_times_out() {
    let config = sequences("direct { } max_sequence_idle_microseconds: 1000000")
        .replace("max_batch_size: 2", "max_batch_size: 1");
    let rows = RowsServer::start(&config).await;
    rows.release_all();
    one(rows.infer(part("a1", 1, "start"))).await;
    let second = rows.infer(part("b1", 2, "start"));
    tokio::time::sleep(Duration::from_millis(30)).await;
    assert_eq!(rows.batches(), ["0: a1"]);
    one(rows.infer(part("a2", 1, "end"))).await;
    one(second).await;
    let started = std::time::Instant::now();
    one(rows.infer(part("c1", 3, "only"))).await;
    assert!(started.elapsed() >= Duration::from_millis(500), "the second sequence ended by its idle timeout");
    assert_eq!(rows.batches(), ["0: a1", "0: a2", "0: b1", "0: c1"]);
}

#[tokio::test]
async fn a_start_flag_in_the_middle_restarts_the_sequence() {
    let rows = RowsServer::start(&sequences(CONTROLS)).await;
    rows.release_all();
    for (id, place) in [("a", "start"), ("b", "start"), ("c", "end")] {
        one(rows.infer(part(id, 1, place))).await;
    }
    let starts: Vec<bool> = rows.batches().iter().map(|batch| batch.contains("START=1")).collect();
    assert_eq!(starts, [true, true, false]);
}

#[tokio::test]
async fn a_state_is_passed_to_the_next_request_and_not_to_the_client() {
    let state = r#"state [ { input_name: "INPUT_SUM" output_name: "OUTPUT_SUM" data_type: TYPE_FP32 dims: [ 1 ]
                             initial_state { data_type: TYPE_FP32 dims: [ 1 ] zero_data: true name: "zero" } } ]"#;
    let rows = RowsServer::start(&sequences(state).replace("\"rows\"", "\"sum\"")).await;
    for (sequence, place, expected) in
        [(1, "start", 1.0), (1, "middle", 2.0), (2, "start", 1.0), (1, "end", 3.0), (1, "start", 1.0)]
    {
        let response = one(rows.infer(part("a", sequence, place))).await;
        assert_eq!(response.outputs, [Tensor::from_f32("OUTPUT0", &[1, 1], &[expected])]);
    }
}

#[tokio::test]
async fn the_initial_value_of_a_state_can_come_from_a_file() {
    let state = |file| {
        let initial =
            format!(r#"initial_state {{ data_type: TYPE_FP32 dims: [ 1 ] data_file: "{file}" name: "ten" }}"#);
        let state = r#"state [ { input_name: "INPUT_SUM" output_name: "OUTPUT_SUM" data_type: TYPE_FP32 dims: [ 1 ] "#;
        sequences(&format!("{state} {initial} }} ]")).replace("\"rows\"", "\"sum\"")
    };
    for (file, bytes, message) in [
        ("ten", &10f32.to_le_bytes()[..], ""),
        ("short", &[0u8; 3][..], "does not hold the 1 elements of state `INPUT_SUM`"),
        ("nosuch", &[][..], "cannot read"),
        ("../ten", &[][..], "is not a name below `initial_state/`"),
    ] {
        let repository = TestRepository::new(&[("rows", &state(file))]);
        let folder = repository.root.path().join("rows/initial_state");
        std::fs::create_dir(&folder).unwrap();
        if !bytes.is_empty() {
            std::fs::write(folder.join(file), bytes).unwrap();
        }
        let server = repository.server(serving::ControlMode::None);
        match server.load_all().await {
            Ok(()) => {
                for expected in [11.0, 11.0] {
                    let response = one(server.infer(part("a", 1, "only")).unwrap()).await;
                    assert_eq!(response.outputs, [Tensor::from_f32("OUTPUT0", &[1, 1], &[expected])]);
                }
                assert_eq!(message, "");
            }
            Err(failures) => {
                assert!(!message.is_empty() && failures[0].reason.contains(message), "{}", failures[0].reason)
            }
        }
    }
}

#[tokio::test]
async fn a_state_is_passed_to_a_rescheduled_request() {
    for strategy in ["direct { }", "oldest { max_candidate_sequences: 4 }"] {
        let state =
            r#"state [ { input_name: "INPUT_SUM" output_name: "OUTPUT_SUM" data_type: TYPE_FP32 dims: [ 1 ] } ]"#;
        let rows = RowsServer::start(
            &sequences(&format!("iterative_sequence: true {strategy} {state}")).replace("\"rows\"", "\"sum\""),
        )
        .await;
        let sum_of = |item: &Result<InferResponse, InferError>| {
            let response = item.as_ref().unwrap();
            assert!(response.outputs.iter().all(|output| output.name == "OUTPUT0"), "{response:?}");
            response.outputs[0].to_f32().unwrap()[0]
        };
        // Twice, to show that no state remains; two requests at a time, to show that each has its own state.
        for _ in 0..2 {
            let infer = |id| rows.infer(InferRequest { sequence_start: false, ..part(id, 0, "middle") });
            let (all, only_last) = tokio::join!(responses(infer("to three")), responses(infer("last sum to three")));
            assert_eq!(all.iter().map(sum_of).collect::<Vec<_>>(), [1.0, 2.0, 3.0], "{strategy}");
            assert_eq!(only_last.iter().map(sum_of).collect::<Vec<_>>(), [3.0], "{strategy}");
        }
    }
}

#[test]
fn invalid_configurations_are_refused_with_a_reason() {
    for (fields, message) in [
        (
            "control_input [ { name: \"S\" control [ { kind: CONTROL_SEQUENCE_START } ] } ]",
            "control input `S` needs two values",
        ),
        (
            "control_input [ { name: \"C\" control [ { kind: CONTROL_SEQUENCE_CORRID } ] } ]",
            "needs `data_type` TYPE_UINT64",
        ),
        (
            "state [ { input_name: \"I\" output_name: \"O\" data_type: TYPE_FP32 dims: [ 99999999999 ] } ]",
            "use smaller `dims`",
        ),
    ] {
        let repository = TestRepository::new(&[("rows", &sequences(fields))]);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let failures = runtime.block_on(repository.server(serving::ControlMode::None).load_all()).unwrap_err();
        assert!(failures[0].reason.contains(message), "{}", failures[0].reason);
    }
}
