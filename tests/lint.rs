//! `trireme lint` reports the errors of a repository with the same messages as a launch.

mod support;

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};
use support::{Options, TestWorld, copied_repository, shipped_repository};

fn lint(repository: &Path, args: &[&str]) -> (bool, Value) {
    let repository = repository.to_str().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_trireme"))
        .args(["lint", repository, "--json"])
        .args(args)
        .output()
        .expect("trireme runs");
    let report = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
    (output.status.success(), report)
}

fn findings<'a>(report: &'a Value, model: &str, verdict: &str) -> Vec<&'a Value> {
    let all = report["findings"].as_array().expect("a list");
    all.iter().filter(|finding| finding["model"] == model && finding["verdict"] == verdict).collect()
}

fn llm(repository: &Path, name: &str, parameters: &[(&str, &str)], files: &[(&str, &str)]) {
    let dir = repository.join(name).join("1");
    fs::create_dir_all(&dir).unwrap();
    let parameter = |(key, value): &(&str, &str)| {
        format!("parameters {{ key: \"{key}\" value: {{ string_value: \"{value}\" }} }}\n")
    };
    let parameters: String = parameters.iter().map(parameter).collect();
    let tensors = "input [ { name: \"input_ids\" data_type: TYPE_INT32 dims: [ -1 ] } ]\n\
                   output [ { name: \"output_ids\" data_type: TYPE_INT32 dims: [ -1, -1 ] } ]\n";
    fs::write(dir.parent().unwrap().join("config.pbtxt"), format!("backend: \"tensorrtllm\"\n{tensors}{parameters}"))
        .unwrap();
    for (file, text) in files {
        fs::write(dir.join(file), text).unwrap();
    }
}

#[test]
fn the_shipped_repository_has_no_errors_and_every_key_is_explained() {
    let (sound, report) = lint(&shipped_repository(), &[]);
    assert!(sound, "{report}");
    assert_eq!(report["wrong"], 0);
    let used = findings(&report, "tensorrt_llm", "used");
    let parameter = used.iter().find(|finding| finding["key"] == "parameters.max_tokens_in_paged_kv_cache");
    assert!(parameter.expect("the parameter is explained")["line"].as_u64() > Some(10));
    assert!(used.iter().any(|finding| finding["file"].as_str().unwrap().ends_with("model.safetensors")));
}

#[test]
fn lint_and_launch_report_the_same_errors() {
    let repository = copied_repository();
    let root = repository.path();
    let checkpoint = shipped_repository().join("tensorrt_llm/1");
    let checkpoint = checkpoint.to_str().unwrap();
    llm(root, "engine", &[], &[("rank0.engine", ""), ("config.json", "{\"build_config\": {}}")]);
    llm(root, "too_wide", &[("gpt_model_path", checkpoint), ("tp", "2")], &[]);
    llm(root, "no_checkpoint", &[("gpt_model_path", "/nowhere")], &[]);
    llm(root, "no_number", &[("gpt_model_path", checkpoint), ("max_num_tokens", "many")], &[]);
    let preprocessing = fs::read_to_string(root.join("preprocessing/config.pbtxt")).unwrap();
    let no_tokenizer = preprocessing.replace("name: \"preprocessing\"", "name: \"no_tokenizer\"")
        + "parameters { key: \"tokenizer_dir\" value: { string_value: \"/nowhere\" } }\n";
    fs::create_dir_all(root.join("no_tokenizer/1")).unwrap();
    fs::write(root.join("no_tokenizer/config.pbtxt"), no_tokenizer).unwrap();
    // An ensemble and a model of different releases: the input `seed` was `random_seed` before.
    let ensemble = fs::read_to_string(root.join("ensemble/config.pbtxt")).unwrap();
    let mixed =
        ensemble.replace("name: \"ensemble\"", "name: \"mixed\"").replace("key: \"seed\"", "key: \"random_seed\"");
    fs::create_dir_all(root.join("mixed/1")).unwrap();
    fs::write(root.join("mixed/config.pbtxt"), mixed).unwrap();
    fs::create_dir_all(root.join("syntax/1")).unwrap();
    fs::write(root.join("syntax/config.pbtxt"), "backend: \"identity\"\nmax_batch_sise: 4\n").unwrap();

    let (sound, report) = lint(root, &[]);
    assert!(!sound);
    let args = vec!["--exit-on-error=false".to_owned(), "--strict-readiness=false".to_owned()];
    let world = TestWorld::start(Options { repository: root.to_owned(), args, ..Options::default() });
    let (_, index) = world.post("/v2/repository/index", &json!({}));
    let index: Vec<Value> = serde_json::from_str(&index).unwrap();
    for (model, message) in [
        ("engine", "holds a TensorRT engine"),
        ("too_wide", "workers need as many ranks, and world_size is 1"),
        ("no_checkpoint", "`gpt_model_path` is `/nowhere`"),
        ("no_number", "max_num_tokens"),
        ("no_tokenizer", "`tokenizer_dir` is `/nowhere`"),
        ("mixed", "random_seed"),
        ("syntax", "did you mean `max_batch_size`?"),
    ] {
        let wrong = findings(&report, model, "wrong");
        let why = wrong.first().unwrap_or_else(|| panic!("`{model}` is wrong:\n{report:#}"))["why"].as_str().unwrap();
        assert!(why.contains(message), "{model}: {why}");
        let reason = index
            .iter()
            .find(|entry| entry["name"] == model)
            .map_or("", |entry| entry["reason"].as_str().unwrap_or(""));
        let log = world.log_text();
        assert!(
            reason.contains(message) || log.contains(message),
            "launch says the same of `{model}`: `{why}`, not `{reason}`"
        );
    }
    let line = |model: &str| findings(&report, model, "wrong")[0]["line"].clone();
    assert_eq!((line("syntax"), line("too_wide")), (json!(2), json!(5)));
    assert_eq!(findings(&report, "tensorrt_llm", "wrong").len(), 0, "other models have no errors");
}

#[test]
fn an_unsuitable_world_size_is_reported_with_the_suitable_ones() {
    let (sound, report) = lint(&shipped_repository(), &["--world-size=3"]);
    assert!(!sound);
    let wrong = findings(&report, "tensorrt_llm", "wrong");
    assert!(wrong[0]["why"].as_str().unwrap().contains("1, 2, 4"), "{wrong:?}");
}

#[test]
fn unfilled_variables_are_reported_with_their_lines_and_served_as_unset() {
    let repository = copied_repository();
    let config = repository.path().join("tensorrt_llm/config.pbtxt");
    let text = fs::read_to_string(&config).unwrap();
    let text =
        text.replace("max_batch_size: 64", "max_batch_size: ${batch}").replace("\"max_utilization\"", "\"${policy}\"");
    fs::write(&config, &text).unwrap();
    let (sound, report) = lint(repository.path(), &[]);
    assert!(sound, "{report:#}");
    let unset = findings(&report, "tensorrt_llm", "unset");
    let message = unset[0]["why"].as_str().unwrap();
    assert_eq!(message, "template variables taken as unset: batch, policy");
    let line = 1 + text.lines().position(|line| line.contains("${batch}")).unwrap();
    assert!(unset.iter().any(|finding| finding["key"] == "${batch}" && finding["line"] == line));
    let world = TestWorld::start(Options { repository: repository.path().to_owned(), ..Options::default() });
    assert!(world.log_text().contains(message), "{}", world.log_text());
}

#[test]
fn a_closed_pipe_ends_the_command_without_an_error_message() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = Command::new(env!("CARGO_BIN_EXE_trireme"))
        .args(["lint", shipped_repository().to_str().unwrap()])
        .stdout(writer)
        .output()
        .expect("trireme runs");
    assert_eq!((output.status.code(), String::from_utf8_lossy(&output.stderr).as_ref()), (Some(141), ""));
}

#[test]
fn tensors_without_effect_are_reported_with_the_reason_by_lint_and_in_the_log() {
    let repository = copied_repository();
    let add = |model: &str, tensors: &str| {
        let config = repository.path().join(model).join("config.pbtxt");
        let text = fs::read_to_string(&config).unwrap().replace("\"tokenize\"", "\"python\"");
        fs::write(&config, text + tensors).unwrap();
    };
    let images = "input { name: \"IMAGES\" data_type: TYPE_STRING dims: [ -1 ] optional: true }\n\
                  output { name: \"PIXEL_VALUES\" data_type: TYPE_FP16 dims: [ -1, -1, -1, -1 ] }\n";
    add("preprocessing", images);
    add("tensorrt_llm", "output { name: \"context_phase_params\" data_type: TYPE_UINT8 dims: [ -1 ] }\n");
    add("tensorrt_llm", "output { name: \"made_up\" data_type: TYPE_INT32 dims: [ 1 ] }\n");

    let (sound, report) = lint(repository.path(), &[]);
    assert!(sound, "{report:#}");
    let world = TestWorld::start(Options { repository: repository.path().to_owned(), ..Options::default() });
    for (model, key, verdict, message) in [
        ("preprocessing", "output.PIXEL_VALUES", "ignored", "`PIXEL_VALUES` (models read text only)"),
        ("preprocessing", "input.IMAGES", "refused", ""),
        ("tensorrt_llm", "output.context_phase_params", "ignored", "`context_phase_params` (prefill and decode run"),
        ("tensorrt_llm", "output.made_up", "ignored", "`made_up` (it is not known)"),
    ] {
        let found = findings(&report, model, verdict);
        assert!(found.iter().any(|finding| finding["key"] == key), "{key}: {found:#?}");
        assert!(world.log_text().contains(message), "{message}: {}", world.log_text());
    }
    let inputs = json!([{"name": "QUERY", "datatype": "BYTES", "shape": [1, 1], "data": ["a"]},
                        {"name": "REQUEST_OUTPUT_LEN", "datatype": "INT32", "shape": [1, 1], "data": [1]},
                        {"name": "IMAGES", "datatype": "BYTES", "shape": [1, 1], "data": ["data:"]}]);
    let (status, text) = world.post("/v2/models/preprocessing/infer", &json!({"inputs": inputs}));
    assert!(status == 501 && text.contains("`IMAGES` is not supported"), "{status}: {text}");
}

fn help(args: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_trireme")).args(args).output().expect("trireme runs");
    String::from_utf8(output.stdout).expect("help is text")
}

#[test]
fn the_documentation_lists_every_key_and_every_flag() {
    let documentation = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/configuration.md");
    let documentation = fs::read_to_string(documentation).unwrap();
    let keys = help(&["lint", "--keys"]);
    assert!(documentation.contains(&keys), "run scripts/configuration_doc");
    let flags = help(&["rank", "--help"]);
    let names = flags.lines().filter_map(|line| line.trim_start().strip_prefix("--"));
    for name in names.map(|rest| rest.split([' ', '=', '[']).next().unwrap_or(rest)) {
        assert!(
            documentation.contains(&format!("`--{name}`")),
            "docs/configuration.md lacks `--{name}`: run scripts/configuration_doc"
        );
    }
}
