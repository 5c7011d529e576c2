//! End-to-end tests of the crate: directories with `config.pbtxt` in, configurations or error messages out.

use std::fs;
use std::path::Path;

use repository::proto::DataType;
use repository::{Repository, RepositoryError, from_json, to_json};
use tempfile::TempDir;

fn config(name: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/configs/{name}.pbtxt"))).unwrap()
}

/// A repository of models, each with its configuration and its version directories.
fn repository(models: &[(&str, &str, &[&str])]) -> (TempDir, Repository) {
    let root = tempfile::tempdir().unwrap();
    for (name, config, versions) in models {
        let dir = root.path().join(name);
        fs::create_dir_all(&dir).unwrap();
        if !config.is_empty() {
            fs::write(dir.join("config.pbtxt"), config).unwrap();
        }
        versions.iter().for_each(|version| fs::create_dir_all(dir.join(version)).unwrap());
    }
    let repository = Repository::open(&[root.path().to_owned()]).unwrap();
    (root, repository)
}

const ECHO: &str = "backend: \"identity\"\n\
                    input [ { name: \"INPUT0\" data_type: TYPE_STRING dims: [ -1 ] } ]\n\
                    output [ { name: \"OUTPUT0\" data_type: TYPE_STRING dims: [ -1 ] } ]\n";

fn error_of(name: &str, config: &str) -> String {
    let (root, repository) = repository(&[(name, config, &["1"])]);
    let error = repository.model(name).expect_err("a wrong configuration").to_string();
    error.replace(&format!("{}/", root.path().display()), "")
}

#[test]
fn every_fixture_configuration_is_read() {
    for name in [
        "classifier",
        "ens_chain",
        "ens_stream",
        "fixed_shape",
        "identity_bytes",
        "identity_fp32",
        "multi_types",
        "seq_sum",
        "single_text",
        "slow",
        "stream_text",
        "versioned",
        "bad_template",
        "tensorrt_llm",
    ] {
        let text = config(name);
        let text = if name == "tensorrt_llm" { text.replace("${triton_backend}", "tensorrtllm") } else { text };
        let (_root, repository) = repository(&[(name, &text, &["1", "3"])]);
        let model = repository.model(name).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(model.config.name, name);
        assert!(!model.config.input.is_empty() && !model.config.output.is_empty());
    }
}

#[test]
fn json_shows_every_default_as_recorded() {
    for name in ["identity_fp32", "ens_chain", "slow", "fixed_shape", "single_text"] {
        let (_root, repository) = repository(&[(name, &config(name), &["1"])]);
        let model = repository.model(name).unwrap();
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/json/{name}.json"));
        let recorded: serde_json::Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
        let shown: serde_json::Value = serde_json::from_str(&to_json(&model.config)).unwrap();
        assert_eq!(shown, recorded, "{name}");
        assert_eq!(from_json(name, &to_json(&model.config)).unwrap(), model.config, "{name}");
    }
}

#[test]
fn unfilled_template_variables_mean_unset() {
    let text = config("tensorrt_llm").replace("${triton_backend}", "tensorrtllm");
    let (_root, repository) = repository(&[("tensorrt_llm", &text, &["1"])]);
    let config = repository.model("tensorrt_llm").unwrap().config;
    assert_eq!(config.max_batch_size, 64, "clients of a template send a batch dimension");
    assert!(!config.is_decoupled());
    assert!(config.batching().unwrap().preferred_batch_size.is_empty());
    assert_eq!(config.input[1].data_type(), DataType::TypeFp32);
    assert_eq!(config.output[1].data_type(), DataType::TypeFp32);
    assert_eq!(config.parameter("max_beam_width"), None);
    assert_eq!(config.parameter("gpt_model_path"), None);
    assert_eq!(config.parameter("FORCE_CPU_ONLY_INPUT_TENSORS"), Some("no"));
    assert_eq!(config.parameter("split"), Some("one two"));
    assert_eq!(config.parameters.len(), 2);
}

#[test]
fn an_unfilled_backend_of_a_model_of_token_ids_is_tensorrtllm() {
    let (_root, repository) = repository(&[("tensorrt_llm", &config("tensorrt_llm"), &["1"])]);
    assert_eq!(repository.model("tensorrt_llm").unwrap().config.backend, "tensorrtllm");
    let error = error_of("echo", "backend: \"${backend}\"");
    assert!(error.contains("neither `backend` nor `platform` is set"), "{error}");
}

#[test]
fn unfilled_list_elements_are_dropped_and_others_kept() {
    for list in ["${a}", "${a}, 2", "2, ${a}", "2, ${a}, ${b}", "${a}, 2, ${b}", "${a}${b}, 2"] {
        let text = format!("{ECHO}max_batch_size: 4\ndynamic_batching {{ preferred_batch_size [ {list} ] }}");
        let (_root, repository) = repository(&[("echo", &text, &["1"])]);
        let config = repository.model("echo").unwrap_or_else(|error| panic!("{list}: {error}")).config;
        let expected: &[i32] = if list.contains('2') { &[2] } else { &[] };
        assert_eq!(config.batching().unwrap().preferred_batch_size, expected, "{list}");
    }
}

#[test]
fn errors_point_at_the_place_and_say_what_to_do() {
    let cases = [
        ("max_batch_size: 1\ninput [ { nam: \"x\" } ]", "2:11: `ModelInput` has no field `nam`; did you mean `name`?"),
        (
            "input[{ data_type: TYPE_FLOAT32 }]",
            "1:20: `DataType` has no value `TYPE_FLOAT32`; did you mean `TYPE_FP32`?",
        ),
        ("max_batch_size: 1\nmax_batch_size: 2", "2:17: `max_batch_size` is set twice; keep one of them"),
        ("max_batch_size: 99999999999", "1:17: expected value to be"),
        ("max_batch_size: \"four\"", "1:17: expected"),
        ("input [\n  { name: \"x\"\n", "2:14: expected"),
        ("# é\n  name: é", "2:9: invalid token"),
        ("max_batch_size: ${open", "1:17: invalid token"),
        ("dynamic_batching { }\n sequence_batching { }", "2:20: a second choice for `scheduling_choice`; keep one of"),
    ];
    for (text, expected) in cases {
        let error = error_of("m", text);
        let expected = format!("m/config.pbtxt:{expected}");
        assert!(error.starts_with(&expected), "\n{text}\n  gives    {error}\n  expected {expected}");
    }
}

#[test]
fn inconsistent_configurations_are_refused_with_a_message() {
    let step = |maps: &str| {
        format!(
            "platform: \"ensemble\" input [ {{ name: \"A\" data_type: TYPE_FP32 dims: [ 1 ] }} ]\n\
             output [ {{ name: \"B\" data_type: TYPE_FP32 dims: [ 1 ] }} ]\n\
             ensemble_scheduling {{ step [ {maps} ] }}"
        )
    };
    let cases = [
        (config("wrong_name"), "`name: \"other_name\"` differs from its directory `m`"),
        (format!("{ECHO}max_batch_size: -1"), "`max_batch_size` is -1"),
        (ECHO.replace("[ -1 ]", "[ 0 ]"), "input `INPUT0` has 0 in `dims`"),
        (ECHO.replace("dims: [ -1 ]", ""), "input `INPUT0` has no `dims`"),
        (ECHO.replace("data_type: TYPE_STRING", ""), "input `INPUT0` has no `data_type`"),
        (ECHO.replace("name: \"OUTPUT0\"", ""), "an output has no `name`"),
        (
            ECHO.replace("dims: [ -1 ]", "dims: [ 2, 3 ] reshape { shape: [ 5 ] }"),
            "input `INPUT0` reshapes [2, 3] to [5], which holds another number of elements",
        ),
        (
            format!("{ECHO}max_batch_size: 2 dynamic_batching {{ preferred_batch_size: 4 }}"),
            "`preferred_batch_size` holds 4",
        ),
        ("platform: \"ensemble\"".to_owned(), "`platform: \"ensemble\"` needs `ensemble_scheduling"),
        (step(""), "`ensemble_scheduling` has no `step`"),
        (
            step("{ model_name: \"x\" input_map { key: \"I\" value: \"C\" } output_map { key: \"O\" value: \"B\" } }"),
            "input `I` of the step of `x` takes ensemble tensor `C`, which is neither",
        ),
        (
            step("{ model_name: \"x\" input_map { key: \"I\" value: \"A\" } output_map { key: \"O\" value: \"C\" } }"),
            "ensemble output `B` is produced by no step",
        ),
        (
            step("{ model_name: \"x\" input_map { key: \"I\" value: \"B\" } output_map { key: \"O\" value: \"B\" } }"),
            "the step of `x` depends on its own outputs",
        ),
        (
            step("{ model_name: \"m\" input_map { key: \"I\" value: \"A\" } output_map { key: \"O\" value: \"B\" } }"),
            "step 1 of the ensemble is the ensemble itself",
        ),
    ];
    for (text, expected) in cases {
        let error = error_of("m", &text);
        assert!(error.starts_with(&format!("m/config.pbtxt: {expected}")), "\n{text}\n  gives {error}");
    }
}

#[test]
fn the_version_policy_chooses_among_version_directories() {
    let found: &[&str] = &["1", "2", "10", "02", "0", "x1", ".3"];
    for (policy, expected) in [
        ("", vec![10]),
        ("version_policy { latest { num_versions: 2 } }", vec![2, 10]),
        ("version_policy { latest { num_versions: ${n} } }", vec![10]),
        ("version_policy { all { } }", vec![1, 2, 10]),
        ("version_policy: { specific: { versions: [ 1, 7 ] } }", vec![1]),
    ] {
        let (_root, repository) = repository(&[("echo", &format!("{ECHO}{policy}"), found)]);
        assert_eq!(repository.model("echo").unwrap().versions, expected, "{policy}");
    }
    let text = format!("{ECHO}version_policy: {{ specific: {{ versions: [ 7 ] }} }}");
    let (_root, repository) = repository(&[("echo", &text, found)]);
    assert!(matches!(repository.model("echo"), Err(RepositoryError::NoVersion { .. })));
}

#[test]
fn an_ensemble_needs_no_version_directory_but_other_models_do() {
    let (_root, repository) = repository(&[("ens_chain", &config("ens_chain"), &[]), ("echo", ECHO, &[])]);
    assert_eq!(repository.model("ens_chain").unwrap().versions, [1]);
    let error = repository.model("echo").unwrap_err().to_string();
    assert_eq!(error, "at least one version must be available under the version policy of model 'echo'");
}

#[test]
fn the_backend_of_a_directory_without_configuration_follows_from_its_files() {
    let (root, repository) = repository(&[("llama", "", &["1"]), ("script", "", &["1"]), ("empty", "", &["1"])]);
    fs::write(root.path().join("llama/1/config.json"), "{}").unwrap();
    fs::write(root.path().join("script/1/model.py"), "").unwrap();
    assert_eq!(repository.model("llama").unwrap().config.backend, "trireme");
    assert_eq!(repository.model("script").unwrap().config.default_model_filename, "model.py");
    assert!(repository.model("empty").unwrap_err().to_string().contains("write a config.pbtxt with `backend:`"));
    // The same with a configuration that has no `backend`.
    fs::write(root.path().join("script/config.pbtxt"), "max_batch_size: 2").unwrap();
    let config = repository.model("script").unwrap().config;
    assert_eq!((config.backend.as_str(), config.max_batch_size), ("python", 2));
    assert_eq!(repository.model_with_config("script", "{}").unwrap().config.backend, "python");
    let error = repository.model_with_config("empty", "{}").unwrap_err().to_string();
    assert!(error.contains("neither `backend` nor `platform` is set, and no file identifies the backend"), "{error}");
}

#[test]
fn names_that_leave_the_repository_are_unknown() {
    let (_root, repository) = repository(&[("echo", ECHO, &["1"])]);
    for name in ["", ".", "..", "../echo", "echo/1", "/tmp", "nosuch", "a\0b"] {
        assert!(matches!(repository.model(name), Err(RepositoryError::UnknownModel { .. })), "{name:?}");
    }
}

#[test]
fn a_model_in_two_directories_is_refused() {
    let (left, _) = repository(&[("echo", ECHO, &["1"]), ("a", ECHO, &["1"])]);
    let (right, _) = repository(&[("echo", ECHO, &["1"])]);
    let twice = Repository::open(&[left.path().to_owned(), left.path().join(".")]).unwrap();
    assert!(twice.model("echo").is_ok(), "one directory given twice counts once");
    let both = Repository::open(&[left.path().to_owned(), right.path().to_owned()]).unwrap();
    assert_eq!(both.model_names().unwrap(), ["a", "echo"]);
    assert!(matches!(both.model("echo"), Err(RepositoryError::Ambiguous { .. })));
}

#[test]
fn a_missing_repository_is_refused() {
    let error = Repository::open(&["/no/such/place".into()]).unwrap_err().to_string();
    assert!(error.starts_with("model repository /no/such/place is not a directory"), "{error}");
}

#[test]
fn json_given_at_load_replaces_the_file_and_is_checked() {
    let (_root, repository) = repository(&[("echo", ECHO, &["1"])]);
    let json = r#"{"backend": "identity", "max_batch_size": 2,
                   "input": [{"name": "INPUT0", "data_type": "TYPE_FP32", "dims": ["-1"]}]}"#;
    let config = repository.model_with_config("echo", json).unwrap().config;
    assert_eq!((config.max_batch_size, config.input[0].data_type()), (2, DataType::TypeFp32));
    for (json, expected) in [("{nope", "line 1, column 2"), (r#"{"nosuch": 1}"#, "nosuch"), ("{} x", "trailing")] {
        let error = repository.model_with_config("echo", json).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}
