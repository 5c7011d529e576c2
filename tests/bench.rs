//! `trireme bench` measures a running world, and its counts equal the server's.

mod support;

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;
use support::{Options, TestWorld, copied_repository, set_parameters, shipped_repository};

fn bench(args: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_trireme")).arg("bench").args(args).output().expect("trireme runs");
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{args:?}: {stdout}{stderr}");
    stdout.into_owned()
}

fn json(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

fn grpc(world: &mut TestWorld) -> String {
    let line = world.await_log("Started GRPCInferenceService at ");
    format!("127.0.0.1:{}", line.trim_end_matches('"').rsplit(':').next().unwrap())
}

const SHARE_GPT: &str = r#"[
    {"conversations": [{"from": "human", "value": "Tell me a story about a brave cat."}, {"from": "gpt", "value": "Once there was a cat who sailed."}]},
    {"conversations": [{"from": "human", "value": "What is seven plus eight, my friend?"}, {"from": "gpt", "value": "It is fifteen, as far as I know."}]},
    {"conversations": [{"from": "human", "value": "Where do the captain and the crew go?"}, {"from": "gpt", "value": "They go to the harbour at night."}]}
]"#;

#[test]
fn serving_counts_the_tokens_that_the_server_generates_over_every_protocol() {
    let mut world = TestWorld::of(1);
    let (grpc, http) = (grpc(&mut world), world.url(""));
    let scratch = tempfile::tempdir().unwrap();
    let (dataset, figures, csv) =
        (scratch.path().join("share.json"), scratch.path().join("figures.json"), scratch.path().join("out.csv"));
    fs::write(&dataset, SHARE_GPT).unwrap();
    let tokenizer = shipped_repository().join("tensorrt_llm/1");
    let (tokenizer, dataset, figures_path) =
        (tokenizer.to_str().unwrap(), dataset.to_str().unwrap(), figures.to_str().unwrap());
    let common = ["--num_prompts=3", "--json", figures_path, "--csv", csv.to_str().unwrap()];
    for (protocol, address) in [("grpc", &grpc), ("http", &http), ("openai", &http)] {
        let before = world.metric("trireme_llm_output_tokens_total");
        let mut args = vec!["serving", address, tokenizer, dataset, "--protocol", protocol, "--concurrency=1,2"];
        args.extend(common);
        let text = bench(&args);
        assert!(
            text.contains("first_token latency(min, max, ave): ") && text.contains("RPM (request per minute): "),
            "{text}"
        );
        let runs = json(&figures)["runs"].clone();
        let counted: f64 = runs.as_array().unwrap().iter().map(|run| run["output_tokens"].as_f64().unwrap()).sum();
        assert_eq!(world.metric("trireme_llm_output_tokens_total") - before, counted, "{protocol}");
        for run in runs.as_array().unwrap() {
            assert_eq!(
                (&run["requests"], &run["errors"], &run["short_answers"]),
                (&3.into(), &0.into(), &0.into()),
                "{run}"
            );
            assert!(run["inter_token_latency_ms"]["p50"].as_f64() > Some(0.0), "{run}");
        }
    }
    let lines = fs::read_to_string(&csv).unwrap();
    assert_eq!(lines.lines().count(), 3);
    assert!(lines.starts_with("batch,num_prompts,RPS,RPM,FTL(ave)(s)"), "{lines}");
    assert!(lines.lines().nth(2).unwrap().starts_with("2,3,"), "{lines}");

    let page = scratch.path().join("report.html");
    bench(&["report", figures_path, "--baseline", figures_path, "-o", page.to_str().unwrap()]);
    let page = fs::read_to_string(page).unwrap();
    // The gaps of each run against its rate of prompts: a line of two points for the server, and one for the baseline.
    let (_, gaps) = page.split_once("Gap between tokens and rate of prompts").expect("a section of gaps");
    let (chart, _) = gaps.split_once("</svg>").expect("a chart of gaps");
    for label in ["prompt tokens/s", "inter-token latency, p99 ms", "baseline"] {
        assert!(chart.contains(label), "{label}: {chart}");
    }
    let points = ["<polyline", "<circle"].map(|shape| chart.matches(shape).count());
    assert_eq!(points, [2, 4], "{chart}");

    let summary = bench(&[
        "compare",
        &grpc,
        &format!("{grpc}/ensemble"),
        tokenizer,
        "generated:12:4",
        "--num-prompts=4",
        "--rounds=2",
        "--concurrency=2",
    ]);
    assert!(summary.contains("output tokens/s") && summary.contains("95 % confidence"), "{summary}");
}

#[test]
fn an_impossible_measurement_gives_one_error_with_advice() {
    let world = TestWorld::of(1);
    let (http, tokenizer) = (world.url(""), shipped_repository().join("tensorrt_llm/1"));
    let http = http.trim_start_matches("http://");
    let error = |args: &[&str]| {
        let output =
            Command::new(env!("CARGO_BIN_EXE_trireme")).arg("bench").args(args).output().expect("trireme runs");
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    let tokenizer = tokenizer.to_str().unwrap();
    let wrong_port = error(&["serving", http, tokenizer, "generated:8:4", "--num_prompts=1"]);
    assert!(wrong_port.contains("does not speak gRPC: give the gRPC port"), "{wrong_port}");
    let no_file = error(&["serving", http, tokenizer, "/nowhere.json"]);
    assert_eq!(no_file, "error: reading `/nowhere.json`: No such file or directory (os error 2)\n");
}

#[test]
fn core_and_identity_print_the_tables_of_tensorrt_llms_tools() {
    let mut world = TestWorld::of(1);
    let grpc = grpc(&mut world);
    let scratch = tempfile::tempdir().unwrap();
    let (workload, figures) = (scratch.path().join("work.jsonl"), scratch.path().join("figures.json"));
    let line = "{\"prompt_token_ids\": [20, 21, 22, 23], \"max_tokens\": 5}\n";
    fs::write(&workload, line.repeat(4)).unwrap();
    let figures_path = figures.to_str().unwrap();
    let text =
        bench(&["core", "-u", &grpc, "--json", figures_path, "--concurrency", "2", "file", workload.to_str().unwrap()]);
    assert!(text.contains("[INFO] Total Latency: ") && text.contains("| Avg. OP tokens per request |"), "{text}");
    let run = json(&figures);
    assert_eq!((&run["output_tokens"], &run["prompt_tokens"], &run["errors"]), (&20.into(), &16.into(), &0.into()));
    let text = bench(&[
        "core",
        "-u",
        &grpc,
        "--num-requests=3",
        "--streaming=false",
        "token-norm-dist",
        "--input-mean=8",
        "--input-stdev=0",
        "--output-mean=3",
        "--output-stdev=0",
    ]);
    assert!(text.contains("Start benchmarking on 3 prompts."), "{text}");
    let text = bench(&["identity", "-u", &grpc, "-b", "2", "-s", "6", "-o", "4", "-n", "2", "-topk", "1"]);
    assert!(text.contains("[INFO] Batch size: 2, Start len: 6, Output len: 4"), "{text}");
    assert!(text.contains(" sentences / sec"), "{text}");
}

#[test]
fn agents_find_what_they_repeat_on_the_device_or_on_the_host() {
    let repository = copied_repository();
    // Two conversations of 200 tokens do not fit on the device together.
    let parameters = [("max_tokens_in_paged_kv_cache", "288"), ("max_sequence_len", "256")];
    set_parameters(&repository, "tensorrt_llm", &parameters);
    let args = vec!["--kv-cache-host-memory=64MiB".to_owned()];
    let mut world = TestWorld::start(Options { repository: repository.path().to_owned(), args, ..Options::default() });
    let line = world.await_log("Started Metrics Service at ");
    let metrics = format!("127.0.0.1:{}", line.trim_end_matches('"').rsplit(':').next().unwrap());
    let (scratch, address) = (tempfile::tempdir().unwrap(), world.url(""));
    let figures = scratch.path().join("figures.json");
    let sizes =
        "--conversations 3 --turns 3 --tokens 180 --system-tokens 40 --output-tokens 8 --branches 1 --concurrency 1";
    let args = ["agents", &address, "--metrics", &metrics, "--json", figures.to_str().unwrap()];
    let text = bench(&[&args[..], &sizes.split(' ').collect::<Vec<_>>()].concat());
    assert!(text.contains("3 conversations of 3 turns up to 180 tokens") && text.contains("\nturn 3 "), "{text}");
    let found = json(&figures);
    let rounds = found["rounds"].as_array().unwrap();
    let column = |name: &str| rounds.iter().map(|round| round[name].as_f64().unwrap()).collect::<Vec<_>>();
    assert_eq!((column("requests"), column("errors")), (vec![3.0; 4], vec![0.0; 4]), "{found}");
    // Of the first turn, the system prompt of the second and the third conversation. The last token of an answer has no position yet.
    assert_eq!(column("repeated_tokens"), [2.0 * 40.0, 3.0 * 67.0, 3.0 * 127.0, 3.0 * 67.0], "{found}");
    assert_eq!(column("prompt_tokens"), [180.0, 360.0, 540.0, 3.0 * (67.0 + 60.0)], "{found}");
    // In blocks of 16 tokens.
    assert_eq!(column("cached_tokens"), [2.0 * 32.0, 3.0 * 64.0, 3.0 * 112.0, 3.0 * 64.0], "{found}");
    assert_eq!(
        (&found["full_block_hit_rate"], &found["first_turn"]["full_block_hit_rate"]),
        (&1.0.into(), &1.0.into())
    );
    assert_eq!(found["first_turn"]["hit_rate"], 0.8);
    assert!(text.contains("the cache had in the first turn 80.00 %, and 100.00 %"), "{text}");
    let of_host: f64 = column("host_tokens").iter().sum();
    assert_eq!(of_host, world.metric("trireme_llm_prefix_cache_host_tokens_total"));
    assert_eq!(column("cached_tokens").iter().sum::<f64>(), world.metric("trireme_llm_cached_prompt_tokens_total"));
    assert!(column("host_tokens")[2] > 0.0 && found["host_used_bytes"].as_f64() > Some(0.0), "{found}");
}
