//! Configurations of all families: defaults, refusals, and what fields change.

use ops::DType;
use serde_json::{Value, json};

use crate::{Config, ModelError, RopeScaling};

fn read_of(architecture: &str, change: impl FnOnce(&mut Value)) -> Result<Config, ModelError> {
    let mut config = json!({
        "architectures": [architecture], "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 501,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "eos_token_id": [2, 3], "torch_dtype": "float16",
    });
    change(&mut config);
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    Config::from_dir(dir.path())
}

fn read(change: impl FnOnce(&mut Value)) -> Result<Config, ModelError> {
    read_of("LlamaForCausalLM", change)
}

fn error(change: impl FnOnce(&mut Value)) -> String {
    read(change).unwrap_err().to_string()
}

fn windows(config: &Config) -> Vec<Option<usize>> {
    config.layers.iter().map(|layer| layer.attention.window).collect()
}

#[test]
fn a_llama_config_is_read_with_its_defaults() {
    let config = read(|_| ()).unwrap();
    let attention = &config.layers[0].attention;
    assert_eq!((attention.head_dim, attention.num_kv_heads, config.dtype), (16, 2, DType::F16));
    assert_eq!((&config.eos_ids[..], config.num_layers()), (&[2, 3][..], 2));
    let rope = &config.ropes[0];
    assert_eq!((rope.theta, rope.rotary_dim, &rope.scaling), (10_000.0, 16, &RopeScaling::None));
}

#[test]
fn theta_and_scaling_are_found_in_rope_parameters() {
    let config = read(|c| {
        c["rope_parameters"] = json!({"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5});
    });
    let rope = config.unwrap().ropes.remove(0);
    assert_eq!((rope.theta, rope.scaling), (5e5, RopeScaling::Linear { factor: 4.0 }));
}

#[test]
fn rope_scaling_replaces_rope_parameters_and_no_theta_is_lost() {
    let both = |theta: f64| {
        move |c: &mut Value| {
            c["rope_parameters"] = json!({"rope_type": "default", "rope_theta": theta});
            c["rope_scaling"] = json!({"rope_type": "linear", "factor": 4.0});
        }
    };
    let rope = read(both(1e4)).unwrap().ropes.remove(0);
    assert_eq!((rope.theta, rope.scaling), (1e4, RopeScaling::Linear { factor: 4.0 }));
    let error = error(both(5e5));
    assert!(error.contains("`rope_parameters.rope_theta` must be 10000, which `rope_scaling` implies"), "{error}");
}

#[test]
fn an_error_names_file_field_expected_and_found() {
    let many = error(|c| c["vocab_size"] = json!("many"));
    assert!(many.ends_with("config.json: field `vocab_size` must be a whole number of at least 1, found \"many\""));
    let magic = error(|c| c["rope_scaling"] = json!({"rope_type": "magic"}));
    assert!(magic.contains("field `rope_scaling.rope_type` must be `default`, `linear`"), "{magic}");
    let null = error(|c| c["hidden_size"] = Value::Null);
    assert!(null.contains("`hidden_size`") && null.ends_with("found nothing"), "{null}");
}

#[test]
fn an_unknown_architecture_lists_the_known() {
    let error = error(|c| c["architectures"] = json!(["OpusForCausalLM"]));
    assert!(error.contains("`OpusForCausalLM` is not supported; supported: LlamaForCausalLM"), "{error}");
}

#[test]
fn fields_that_could_change_the_model_are_refused_by_name() {
    let fields = [
        ("partial_rotary_factor", json!(0.5)),
        ("attn_logit_softcapping", json!(50.0)),
        ("embedding_multiplier", json!(12)),
        ("no_rope_layers", json!([1, 0])),
        ("sliding_window", json!(64)),
        ("use_qk_norm", json!(true)),
    ];
    for (name, value) in fields {
        let error = error(|c| c[name] = value);
        assert!(error.contains(&format!("`{name}` is not understood for `LlamaForCausalLM`")), "{error}");
    }
    let nested = error(|c| c["rope_parameters"] = json!({"rope_type": "default", "mrope_section": [16, 24, 24]}));
    assert!(nested.contains("`rope_parameters.mrope_section` is not understood"), "{nested}");
    let both_ways = error(|c| c["is_causal"] = json!(false));
    assert!(both_ways.contains("`is_causal` must be `true`"), "{both_ways}");
}

#[test]
fn fields_without_effect_are_accepted() {
    let harmless = [("_name_or_path", json!("x")), ("attention_dropout", json!(0.1)), ("use_cache", json!(true))];
    assert!(read(|c| harmless.into_iter().for_each(|(name, value)| c[name] = value)).is_ok());
    assert!(read(|c| c["partial_rotary_factor"] = Value::Null).is_ok());
    assert!(read(|c| c["use_mrope"] = json!(false)).is_ok());
    let two_names = read_of("Gemma2ForCausalLM", |c| {
        c["hidden_act"] = json!("gelu_pytorch_tanh");
        c["hidden_activation"] = json!("gelu_pytorch_tanh");
        c["sliding_window_size"] = json!(4096);
    });
    assert!(two_names.is_ok(), "{two_names:?}");
}

#[test]
fn a_quantized_checkpoint_is_refused_with_its_method() {
    let error = error(|c| c["quantization_config"] = json!({"quant_method": "awq", "bits": 4}));
    assert!(error.contains("`quantization_config.quant_method` must be absent: quantized"), "{error}");
    assert!(error.ends_with("found \"awq\""), "{error}");
}

#[test]
fn a_baichuan_config_tells_size_and_generation_apart() {
    let baichuan = |change: fn(&mut Value)| read_of("BaichuanForCausalLM", change).unwrap();
    let first_7b = baichuan(|_| ());
    assert!(first_7b.layers[0].attention.rope.is_some() && !first_7b.head.has_unit_rows);
    let second_13b = baichuan(|c| {
        c.as_object_mut().unwrap().remove("max_position_embeddings");
        c["model_max_length"] = json!(4096);
        c["z_loss_weight"] = json!(0);
    });
    assert!(second_13b.layers[0].attention.has_alibi && second_13b.head.has_unit_rows);
    assert_eq!(second_13b.max_position_embeddings, 4096);
}

#[test]
fn absent_windows_have_the_defaults_of_their_family() {
    assert_eq!(windows(&read_of("MistralForCausalLM", |_| ()).unwrap()), [Some(4096); 2]);
    let without = read_of("MistralForCausalLM", |c| c["sliding_window"] = Value::Null);
    assert_eq!(windows(&without.unwrap()), [None; 2]);
    let qwen = |first: Option<usize>, is_on: bool| {
        let config = read_of("Qwen2ForCausalLM", |c| {
            c["sliding_window"] = json!(32);
            c["use_sliding_window"] = json!(is_on);
            if let Some(first) = first {
                c["max_window_layers"] = json!(first);
            }
        });
        windows(&config.unwrap())
    };
    assert_eq!(qwen(Some(0), false), [None, None]);
    assert_eq!(qwen(Some(1), true), [None, Some(32)]);
    assert_eq!(qwen(None, true), [None, None], "windows begin at layer 28");
    let gemma = read_of("Gemma3ForCausalLM", |c| {
        c["num_hidden_layers"] = json!(7);
        c["sliding_window_pattern"] = json!(3);
    });
    let exaone = read_of("Exaone4ForCausalLM", |c| {
        c["sliding_window_pattern"] = json!("LLLG");
        c["layer_types"] = json!(["sliding_attention", "full_attention"]);
    });
    assert_eq!(windows(&exaone.unwrap()), [Some(4096), None]);
    let (window, none) = (Some(4096), None);
    assert_eq!(windows(&gemma.unwrap()), [window, window, none, window, window, none, window]);
}

#[test]
fn windows_that_contradict_each_other_are_refused() {
    let mixed = json!(["full_attention", "sliding_attention"]);
    let error = read_of("MistralForCausalLM", |c| c["layer_types"] = mixed.clone()).unwrap_err().to_string();
    assert!(error.contains("`layer_types` must be absent"), "{error}");
    let error = read_of("Qwen3ForCausalLM", |c| c["layer_types"] = mixed).unwrap_err().to_string();
    assert!(error.contains("since no window is set"), "{error}");
}

#[test]
fn a_text_model_is_found_beside_a_vision_model() {
    let config = read_of("Gemma3ForConditionalGeneration", |c| {
        *c = json!({
            "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "eos_token_id": [1, 106],
            "dtype": "bfloat16", "vision_config": {"hidden_size": 1152, "patch_size": 14}, "mm_tokens_per_image": 256,
            "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
                            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
        });
    });
    let config = config.unwrap();
    assert_eq!((config.hidden_size, config.vocab_size, &config.eos_ids[..]), (2560, 262_208, &[1, 106][..]));
    let windows = windows(&config);
    assert_eq!((windows[4], windows[5], windows[33]), (Some(1024), None, Some(1024)));
    let ropes: Vec<_> = config.ropes.iter().map(|rope| (rope.theta, rope.scaling.clone())).collect();
    assert_eq!(ropes, [(1e6, RopeScaling::Linear { factor: 8.0 }), (1e4, RopeScaling::None)]);
    assert!(config.notes[0].contains("only the text model"));
    assert_eq!(config.embedding_scale, 50.5, "the root of 2560 as a bf16 number");
}

#[test]
fn a_gpt2_with_another_scale_of_scores_is_refused() {
    let error = error(|c| {
        *c = json!({"architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_head": 4, "n_layer": 2,
                    "vocab_size": 100, "scale_attn_by_inverse_layer_idx": true});
    });
    assert!(error.contains("`scale_attn_by_inverse_layer_idx` must be `false`"), "{error}");
}
