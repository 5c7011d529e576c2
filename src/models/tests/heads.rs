//! Compares the guesses of MTP and EAGLE-3 heads with forward passes in fp32 that are written out in
//! `scripts/goldens/make_mtp_goldens.py` and `make_eagle3_goldens.py`.

#[allow(dead_code)]
mod support;

use std::path::Path;

use device::cpu::WeightPrecision;
use engine::SamplingParams;
use models::Config;
use ops::Target;
use serde_json::Value;
use settings::DeviceDrafter;
use support::{Runner, Sequence, golden_dir, on_changed};

/// Models, and the folders of EAGLE-3 heads for them.
const CASES: [(&str, Option<&str>); 6] = [
    ("mtp_qwen3_5", None),
    ("mtp_deepseek_v3", None),
    ("eagle3", Some("eagle3/specforge")),
    ("eagle3", Some("eagle3/speculators")),
    ("eagle3", Some("eagle31/fc_norm")),
    ("eagle3", Some("eagle31/norm_before_fc")),
];
const NUM_GUESSES: usize = 3;

/// A choice between logits that are closer than this depends on rounding.
const CLEAR: f64 = 0.01;

#[derive(serde::Deserialize)]
struct Golden {
    prompt: Vec<u32>,
    tokens: Vec<u32>,
    margins: Vec<f64>,
    guesses: Vec<Vec<u32>>,
    guess_margins: Vec<Vec<f64>>,
}

fn goldens((case, head): (&str, Option<&str>)) -> Vec<Golden> {
    let head = head.map(|head| head.split_once('/').expect("a folder in a folder of goldens"));
    let text = std::fs::read(golden_dir(head.map_or(case, |(folder, _)| folder)).join("golden.json")).unwrap();
    let mut value: Value = serde_json::from_slice(&text).unwrap();
    for sequence in value["sequences"].as_array_mut().unwrap() {
        if let Some((_, head)) = head {
            let mut found = sequence["heads"][head].take();
            (sequence["guesses"], sequence["guess_margins"]) = (found["guesses"].take(), found["margins"].take());
        }
    }
    serde_json::from_value(value["sequences"].take()).unwrap()
}

fn with_head(config: Config, (_, head): (&str, Option<&str>)) -> Config {
    let drafter = head.map_or(DeviceDrafter::Mtp, |head| DeviceDrafter::Eagle3(golden_dir(head)));
    config.with_drafter(&drafter, WeightPrecision::Checkpoint, Target::Cpu).unwrap()
}

fn sequence(golden: &Golden, chunk: usize, start: usize) -> Sequence {
    let (prompt, num_tokens) = (golden.prompt.clone(), golden.tokens.len());
    Sequence { prompt, num_tokens, sampling: SamplingParams::default(), chunk, start, adapter: None }
}

/// Tokens and guesses of sequences, which run together with prompts in chunks of these sizes.
fn run(runner: &mut Runner, sequences: &[Sequence]) -> Vec<(Vec<u32>, Vec<Vec<u32>>)> {
    runner.num_guesses = NUM_GUESSES as u32;
    let outputs = runner.run(sequences);
    let tokens = outputs.iter().map(|output| output.iter().map(|sampled| sampled.token.0).collect());
    tokens.zip(runner.take_guesses()).collect()
}

/// Returns the number of guesses that were compared.
fn compare(case: (&str, Option<&str>), golden: &Golden, tokens: &[u32], guesses: &[Vec<u32>]) -> usize {
    let clear = |margins: &[f64]| margins.iter().take_while(|&&margin| margin > CLEAR).count();
    let num_clear = clear(&golden.margins);
    assert_eq!(tokens[..num_clear], golden.tokens[..num_clear], "{case:?}");
    let mut compared = 0;
    for (index, found) in guesses.iter().enumerate().take(num_clear) {
        assert_eq!(found.len(), NUM_GUESSES, "{case:?}, token {index}");
        let same = clear(&golden.guess_margins[index]).min(found.len());
        assert_eq!(found[..same], golden.guesses[index][..same], "{case:?}, guesses behind token {index}");
        compared += same;
    }
    compared
}

#[test]
fn guesses_agree_with_the_reference_for_any_chunks_and_for_world_sizes_1_and_2() {
    for case in CASES {
        let goldens = goldens(case);
        let mut compared = 0;
        for (size, chunk) in [(1, 256), (1, 5), (2, 16)] {
            let found = on_changed(
                case.0,
                size,
                |config| with_head(config, case),
                |runner| {
                    let sequences = goldens.iter().enumerate().map(|(index, golden)| sequence(golden, chunk, index));
                    run(runner, &sequences.collect::<Vec<_>>())
                },
            );
            let pairs = goldens.iter().zip(&found);
            compared += pairs.map(|(golden, (tokens, guesses))| compare(case, golden, tokens, guesses)).sum::<usize>();
        }
        assert!(compared > 500, "{case:?}: only {compared} guesses were compared");
    }
}

#[test]
fn a_head_changes_no_token_and_costs_no_other_guess_beside_other_rows() {
    for case in CASES {
        let golden = &goldens(case)[2];
        let config = || Config::from_dir(&golden_dir(case.0)).unwrap();
        let runner = |config| Runner::with(&golden_dir(case.0), config, 2, None, WeightPrecision::Checkpoint);
        let drawn = |seed| {
            let sampling =
                SamplingParams { temperature: 1.0, seed, num_logprobs: Some(3), ..SamplingParams::default() };
            Sequence { sampling, ..sequence(golden, 256, 0) }
        };
        let sequences: Vec<Sequence> = (0..4).map(drawn).collect();
        let without = runner(config()).run(&sequences);
        let mut with = runner(with_head(config(), case));
        with.num_guesses = NUM_GUESSES as u32;
        assert_eq!(with.run(&sequences), without, "{case:?}");
        let together = with.take_guesses();
        for (index, one) in sequences.iter().enumerate() {
            with.run(std::slice::from_ref(one));
            assert_eq!(with.take_guesses()[0], together[index], "{case:?}, seed {index}");
        }
        if case.1.is_some() {
            continue; // These heads are seldom right.
        }
        // A drawn token is guessed with the draw that will choose it.
        let guesses = together.iter().zip(&without).flat_map(|(guesses, output)| guesses.iter().zip(&output[1..]));
        let (right, all) = guesses
            .fold((0, 0), |(right, all), (guesses, next)| (right + usize::from(guesses[0] == next.token.0), all + 1));
        assert!(4 * right > all, "{case:?}: {right} of {all} first guesses are drawn");
    }
}

#[test]
fn a_head_that_does_not_run_behind_each_step_changes_no_token() {
    for case in CASES {
        let golden = &goldens(case)[2];
        let (vocab_size, num_tokens) = (Config::from_dir(&golden_dir(case.0)).unwrap().vocab_size as u32, 20);
        let runner = |config| Runner::with(&golden_dir(case.0), config, 2, None, WeightPrecision::Checkpoint);
        let sequences = [Sequence { num_tokens, ..sequence(golden, 5, 0) }];
        let without = runner(Config::from_dir(&golden_dir(case.0)).unwrap()).run(&sequences);
        let mut with = runner(with_head(Config::from_dir(&golden_dir(case.0)).unwrap(), case));
        with.num_guesses = NUM_GUESSES as u32;
        assert_eq!(with.run(&sequences), without, "{case:?}");
        let all = with.take_guesses().swap_remove(0);
        // A second sequence uses the same blocks, and the head has keys and values of the first one where it did not run.
        with.steps_between_guesses = 4;
        assert_eq!(with.run(&sequences), without, "{case:?}");
        let some = with.take_guesses().swap_remove(0);
        assert_eq!(some[0], all[0], "the head runs behind prompts");
        assert_eq!((all.len(), some.len()), (num_tokens, 1 + (num_tokens - 1) / 4), "{case:?}");
        assert!(some.iter().flatten().all(|&token| token < vocab_size), "{case:?}: {some:?}");
    }
}

#[test]
fn a_checkpoint_without_the_head_and_a_family_without_one_are_refused_by_name() {
    let dir = golden_dir("qwen3_5");
    let config = with_head(Config::from_dir(&dir).unwrap(), ("qwen3_5", None));
    let limits = ops::StepLimits { max_tokens: 8, max_rows: 1, max_sequence_len: 8, vocab_size: config.vocab_size };
    let mut estimator = device::Estimator::new(ops::Target::Cpu, ops::TensorParallel { rank: 0, size: 1 }, limits);
    let error = models::load(&dir, &config, &mut estimator).err().expect("weights are missing").to_string();
    assert!(error.contains("tensor `mtp."), "{error}");
    let error = Config::from_dir(&golden_dir("llama3_gqa")).unwrap();
    let error = error.with_drafter(&DeviceDrafter::Mtp, WeightPrecision::Checkpoint, Target::Cpu);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("`LlamaForCausalLM` has no MTP head"), "{error}");
    for case in [CASES[0], CASES[2], CASES[4], CASES[5]] {
        let mut gpu = device::Estimator::new(ops::Target::Cuda, ops::TensorParallel { rank: 0, size: 1 }, limits);
        let config = with_head(Config::from_dir(&golden_dir(case.0)).unwrap(), case);
        assert!(models::load(&golden_dir(case.0), &config, &mut gpu).is_ok(), "GPUs have {case:?}");
    }
}

/// The head in `folder` with a changed configuration and changed names of tensors.
fn changed_head(folder: &str, change: impl Fn(&mut Value), rename: impl Fn(&str) -> String) -> tempfile::TempDir {
    let (dir, source) = (tempfile::tempdir().unwrap(), golden_dir(folder));
    let mut config: Value = serde_json::from_slice(&std::fs::read(source.join("config.json")).unwrap()).unwrap();
    change(&mut config);
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let weights = std::fs::read(source.join("model.safetensors")).unwrap();
    let (length, rest) = weights.split_first_chunk().unwrap();
    let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
    let header: serde_json::Map<String, Value> = serde_json::from_slice(header).unwrap();
    let header: serde_json::Map<String, Value> =
        header.into_iter().map(|(name, value)| (rename(&name), value)).collect();
    let mut header = Value::from(header).to_string();
    header.extend(std::iter::repeat_n(' ', header.len().next_multiple_of(8) - header.len()));
    let written = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat();
    std::fs::write(dir.path().join("model.safetensors"), written).unwrap();
    dir
}

#[test]
fn names_of_tensors_may_begin_with_model_and_tensors_without_a_field_are_refused() {
    let case = CASES[4];
    let golden = &goldens(case)[1];
    let load = |head: &Path| {
        let config = Config::from_dir(&golden_dir(case.0)).unwrap();
        let drafter = DeviceDrafter::Eagle3(head.to_owned());
        config.with_drafter(&drafter, WeightPrecision::Checkpoint, Target::Cpu).unwrap()
    };
    let with_model = |name: &str| match name {
        "lm_head.weight" | "d2t" | "t2d" | "__metadata__" => name.to_owned(),
        name => format!("model.{}", name.replace("midlayer", "layers.0")),
    };
    let head = changed_head(case.1.unwrap(), |_| (), with_model);
    let mut runner = Runner::with(&golden_dir(case.0), load(head.path()), 2, None, WeightPrecision::Checkpoint);
    let (tokens, guesses) = run(&mut runner, &[sequence(golden, 256, 0)]).remove(0);
    assert!(compare(case, golden, &tokens, &guesses) > 50);

    let limits = ops::StepLimits { max_tokens: 8, max_rows: 1, max_sequence_len: 8, vocab_size: 200 };
    for (case, field, tensor) in
        [(CASES[4], "fc_norm", "fc_norm.0.weight"), (CASES[5], "norm_before_fc", "input_norm.weight")]
    {
        let head = changed_head(case.1.unwrap(), |config| config[field] = false.into(), str::to_owned);
        let mut device = device::Estimator::new(Target::Cpu, ops::TensorParallel { rank: 0, size: 1 }, limits);
        let error =
            models::load(&golden_dir(case.0), &load(head.path()), &mut device).err().expect("a norm is left over");
        assert!(error.to_string().contains(&format!("has a tensor `{tensor}`")), "{error}");
    }
}

/// The error of a head whose configuration is changed so, for the model `case`.
fn refusal(case: &str, head: &str, change: impl Fn(&mut Value)) -> String {
    let dir = changed_head(head, change, str::to_owned);
    let drafter = DeviceDrafter::Eagle3(dir.path().to_owned());
    let config = Config::from_dir(&golden_dir(case)).unwrap();
    config.with_drafter(&drafter, WeightPrecision::Checkpoint, Target::Cpu).unwrap_err().to_string()
}

#[test]
fn an_eagle3_head_that_does_not_fit_or_is_of_another_form_is_refused_by_name() {
    const SPECFORGE: &str = "eagle3/specforge";
    const SPECULATORS: &str = "eagle3/speculators";
    let refused = |case: &str, head: &str, expected: &str, change: &dyn Fn(&mut Value)| {
        let error = refusal(case, head, change);
        assert!(error.contains(expected), "{error}");
    };
    let same = |_: &mut Value| {};
    refused("llama3_gqa", SPECFORGE, "has a vocabulary of 200 tokens, and the model 501", &same);
    refused("helium", SPECULATORS, "takes the input of layer 4, and the model has 2", &same);
    let set = |key: &'static str, value: Value| move |config: &mut Value| config[key] = value.clone();
    refused("eagle3", SPECFORGE, "field `num_hidden_layers` must be 1", &set("num_hidden_layers", 2.into()));
    refused("eagle3", SPECFORGE, "has inputs of 96 numbers", &set("target_hidden_size", 96.into()));
    refused("eagle3", SPECFORGE, "`other_option`", &set("other_option", 1.into()));
    refused("eagle3", SPECFORGE, "must be `LlamaForCausalLMEagle3`", &set("architectures", Value::Null));
    refused("eagle3", "eagle31/fc_norm", "field `use_sliding_window`", &set("use_sliding_window", true.into()));
    refused(
        "eagle3",
        "eagle31/fc_norm",
        "field `norm_before_fc` must be `false` beside",
        &set("norm_before_fc", true.into()),
    );
    refused(
        "eagle3",
        "eagle31/fc_norm",
        "field `num_aux_hidden_states` must be 4",
        &set("num_aux_hidden_states", 3.into()),
    );
    let nested = |key: &str, value: Value| set("eagle_config", serde_json::json!({ key: value }));
    let expected = "field `eagle_config.use_last_layernorm` must be `true`";
    refused("eagle3", SPECFORGE, expected, &nested("use_last_layernorm", false.into()));
    refused(
        "eagle3",
        SPECFORGE,
        "`eagle_config.parallel_draft_step` must be 1",
        &nested("parallel_draft_step", 2.into()),
    );
    let ids = "eagle_aux_hidden_state_layer_ids";
    refused("eagle3", SPECFORGE, "takes the input of layer 6", &nested(ids, vec![1, 2, 5].into()));
    refused("eagle3", SPECFORGE, "takes the input of layer 7", &nested(ids, vec![2, 4, 7].into()));
    let both = |nested: Vec<usize>| {
        move |config: &mut Value| {
            config[ids] = vec![2, 3, 4].into();
            config["eagle_config"] = serde_json::json!({ ids: nested });
        }
    };
    let expected = "field `eagle_config.eagle_aux_hidden_state_layer_ids` must be a list of the same layers as outside of \
         `eagle_config`, the inputs of [2, 3, 4], found [1,2,4]";
    refused("eagle3", SPECFORGE, expected, &both(vec![1, 2, 4]));
    refused("eagle3", SPECFORGE, "must be `false`, as outside of `eagle_config`, found true", &|config| {
        config["norm_before_residual"] = false.into();
        config["eagle_config"] = serde_json::json!({"norm_before_residual": true});
    });
    // The outputs of 1, 2 and 3 are the inputs of 2, 3 and 4.
    for same in [vec![1, 2, 3], vec![2, 3, 4]] {
        let head = changed_head(SPECFORGE, both(same), str::to_owned);
        let drafter = DeviceDrafter::Eagle3(head.path().to_owned());
        let config = Config::from_dir(&golden_dir("eagle3")).unwrap();
        assert!(config.with_drafter(&drafter, WeightPrecision::Checkpoint, Target::Cpu).is_ok());
    }
    refused("eagle3", SPECULATORS, "must be a list of numbers of layers", &set(ids, vec!["1", "2"].into()));
    refused("eagle3", SPECULATORS, "field `speculators_model_type`", &set("speculators_model_type", "eagle".into()));
}
