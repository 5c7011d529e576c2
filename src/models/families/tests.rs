//! Configurations of all families: defaults, refusals, and what fields change.

use std::path::Path;

use ops::{DType, KvElements, QueryScale};
use serde_json::{Value, json};
use settings::KvCacheType;

use crate::config::WeightFormat;
use crate::{Config, KvSource, ModelError, RopeScaling, from_python_json};

fn read_of(architecture: &str, change: impl FnOnce(&mut Value)) -> Result<Config, ModelError> {
    let mut config = json!({
        "architectures": [architecture], "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 501,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "eos_token_id": [2, 3], "torch_dtype": "float16",
    });
    change(&mut config);
    read_config(&config)
}

/// The configuration that is read from a file with this content.
pub(super) fn read_config(config: &Value) -> Result<Config, ModelError> {
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
fn a_broken_config_is_refused_with_its_line() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |text: &str| {
        std::fs::write(dir.path().join("config.json"), text).unwrap();
        Config::from_dir(dir.path()).unwrap_err().to_string()
    };
    let error = refused("{\n  \"hidden_size\": 64,\n  // of each layer\n  \"vocab_size\": 501\n}");
    assert!(error.contains("config.json is not valid JSON: ") && error.contains(" at line 3 column 3"), "{error}");
    // Numbers that Python writes keep the lines of what stands behind them.
    let error = refused("{\n  \"limit\": Infinity,\n  \"vocab_size\": 501,\n}");
    assert!(error.contains(" at line 4 column 1"), "{error}");
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
fn absurd_numbers_are_refused_before_they_size_anything() {
    for (name, most) in [("num_hidden_layers", 10_000), ("num_attention_heads", 65_536)] {
        for number in
            [json!(0), json!(-1), json!(1.5), json!("2"), json!(most + 1), json!(1_u64 << 31), json!(u64::MAX)]
        {
            let error = error(|c| c[name] = number.clone());
            assert!(error.contains(&format!("`{name}` must be ")) && error.contains(&number.to_string()), "{error}");
        }
    }
    // They would be 0 or infinite on the device, and all logits NaN.
    for number in [1e-320, 1e300] {
        let error = error(|c| c["rope_theta"] = json!(number));
        assert!(error.contains("`rope_theta` must be a number above 0, in the range of 32 bits"), "{error}");
    }
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
fn a_quantization_that_is_not_read_is_refused_by_name() {
    let refused = |quantization: Value| error(|c| c["quantization_config"] = quantization);
    let other = refused(json!({"quant_method": "bitsandbytes", "load_in_4bit": true}));
    assert!(other.contains("`quantization_config.quant_method` must be absent, `awq`"), "{other}");
    assert!(other.contains("\"bitsandbytes\"") && other.contains("use the original checkpoint"), "{other}");
    let other = refused(json!({"quant_method": "fp8", "fmt": "e5m2"}));
    assert!(other.contains("`quantization_config.fmt` must be `e4m3`"), "{other}");
    let flat = refused(json!({"quant_method": "fp8", "weight_block_size": [128, 0]}));
    assert!(flat.contains("`quantization_config.weight_block_size` must be a block of two"), "{flat}");
    // MiniMax M2 has torch's name of the format.
    assert!(read(|c| c["quantization_config"] = json!({"quant_method": "fp8", "fmt": "float8_e4m3fn"})).is_ok());
    let unknown = refused(json!({"quant_method": "fp8", "rotation": "hadamard"}));
    assert!(unknown.contains("`quantization_config.rotation`"), "{unknown}");
    let group = |weights: Value| {
        refused(json!({"quant_method": "compressed-tensors", "format": "float-quantized",
                       "config_groups": {"group_0": {"weights": weights}}}))
    };
    let wide = group(json!({"num_bits": 16, "type": "int", "strategy": "channel"}));
    assert!(wide.contains("must be groups of weights in fp8"), "{wide}");
    let token = group(json!({"num_bits": 8, "type": "float", "strategy": "token"}));
    assert!(token.contains("`strategy` `tensor`, `channel`, `group` or `block`"), "{token}");
    let dynamic = group(json!({"num_bits": 8, "type": "int", "strategy": "channel", "dynamic": true}));
    assert!(dynamic.contains("whose weights are not `dynamic`"), "{dynamic}");
    let sparse = refused(json!({"quant_method": "compressed-tensors", "format": "marlin-24"}));
    assert!(sparse.contains("`quantization_config.format` must be `float-quantized`"), "{sparse}");
    let rotated = refused(json!({"quant_method": "compressed-tensors", "format": "pack-quantized",
                                 "transform_config": {"config_groups": {"u": {"type": "hadamard"}}}}));
    assert!(rotated.contains("`quantization_config.transform_config` must be empty"), "{rotated}");
    let gemv = refused(json!({"quant_method": "awq", "bits": 4, "version": "gemv"}));
    assert!(gemv.contains("`quantization_config.version` must be `gemm`"), "{gemv}");
    let five = refused(json!({"quant_method": "gptq", "bits": 5}));
    assert!(five.contains("`quantization_config.bits` must be 2, 3, 4 or 8"), "{five}");
    let marlin = refused(json!({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}));
    assert!(marlin.contains("`quantization_config.checkpoint_format` must be `gptq` or `gptq_v2`"), "{marlin}");
    let smooth = refused(json!({"quant_method": "modelopt", "quant_algo": "W8A8_SQ_PER_CHANNEL"}));
    assert!(smooth.contains("`quantization_config.quant_algo` must be `FP8`"), "{smooth}");
    let mixed = refused(json!({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}));
    assert!(mixed.contains("`quantization_config.quantized_layers` must be an object of layers"), "{mixed}");
    let mixed = refused(json!({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {
        "a": {"quant_algo": "FP8"}, "b": {"quant_algo": "W4A8_AWQ"}}}));
    assert!(mixed.contains("quantized_layers.b.quant_algo` must be `FP8`, `FP8_PER"), "{mixed}");
}

#[test]
fn a_quantization_may_be_in_a_file_of_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens/llama3_gqa/config.json");
    std::fs::copy(config, dir.path().join("config.json")).unwrap();
    let format = |file: &str, text: &str| {
        std::fs::write(dir.path().join(file), text).unwrap();
        let config = Config::from_dir(dir.path()).unwrap();
        std::fs::remove_file(dir.path().join(file)).unwrap();
        (config.weight_format, config.notes.len())
    };
    let modelopt =
        r#"{"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}"#;
    assert_eq!(
        format("hf_quant_config.json", modelopt),
        (WeightFormat::ByTensors { block: None, has_fp8_inputs: true }, 1)
    );
    let of_modelopt = |quantization: Value| {
        let WeightFormat::ByTensors { block, has_fp8_inputs } =
            format("hf_quant_config.json", &json!({"quantization": quantization}).to_string()).0
        else {
            panic!("the types of tensors tell the form");
        };
        (block, has_fp8_inputs)
    };
    assert_eq!(of_modelopt(json!({"quant_algo": null, "kv_cache_quant_algo": "FP8"})), (None, false));
    assert_eq!(of_modelopt(json!({"quant_algo": "MXFP8", "group_size": 32})), (None, true));
    // ModelOpt writes this name in small letters, too.
    assert_eq!(of_modelopt(json!({"quant_algo": "fp8_pb_wo"})), (Some([128, 128]), false));
    let layers = json!({"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "NVFP4", "group_size": 16}});
    assert_eq!(of_modelopt(json!({"quant_algo": "MIXED_PRECISION", "quantized_layers": layers})), (None, true));
    let gptq = r#"{"bits": 4, "group_size": 128, "desc_act": false, "sym": true, "damp_percent": 0.01}"#;
    assert_eq!(format("quantize_config.json", gptq), (WeightFormat::Gptq { zero_offset: 1 }, 1));
    let awq = r#"{"zero_point": true, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}"#;
    assert_eq!(format("quant_config.json", awq), (WeightFormat::Awq, 1));
}

#[test]
fn the_cache_has_the_type_that_is_asked_for_else_that_of_the_checkpoint() {
    let kept = |change: Value, asked: KvCacheType| {
        let quantized = |config: &mut Value| {
            let mut all = json!({"quant_method": "modelopt", "quant_algo": "FP8"});
            all.as_object_mut().unwrap().append(&mut change.as_object().unwrap().clone());
            config["quantization_config"] = all;
        };
        let config = read_of("LlamaForCausalLM", quantized).unwrap().in_kv_cache(asked);
        (config.kv_elements, config.notes.last().unwrap().clone())
    };
    let float = json!({"kv_cache_scheme": {"type": "float", "num_bits": 8, "dynamic": false}});
    let (found, note) = kept(float.clone(), KvCacheType::Auto);
    assert!(found == KvElements::Fp8 && note.contains("fp8, as the checkpoint names it"), "{note}");
    assert_eq!(kept(json!({"kv_cache_quant_algo": "INT8"}), KvCacheType::Auto).0, KvElements::Int8);
    assert_eq!(kept(float.clone(), KvCacheType::Bf16).0, KvElements::Plain);
    assert_eq!(kept(float, KvCacheType::Int8).0, KvElements::Int8);
    let (found, note) = kept(json!({"kv_cache_quant_algo": "NVFP4"}), KvCacheType::Auto);
    assert!(found == KvElements::Plain && note.contains("NVFP4"), "{note}");
    assert_eq!(kept(json!({"kv_cache_quant_algo": null}), KvCacheType::Auto).0, KvElements::Plain);
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
fn the_text_model_beside_a_vision_model_is_the_one_that_its_model_type_names() {
    let read = |model_type: &str| {
        read_of("Mistral3ForConditionalGeneration", |c| {
            let text = std::mem::replace(c, json!({"architectures": ["Mistral3ForConditionalGeneration"]}));
            c["text_config"] = text;
            c["text_config"]["model_type"] = json!(model_type);
        })
    };
    let scale = QueryScale { beta: 0.1, period: 16_384, offset: 0 };
    let third = read("ministral3").unwrap();
    assert_eq!((windows(&third), third.layers[0].attention.query_scale), (vec![None; 2], Some(scale)));
    let small = read("mistral").unwrap();
    assert_eq!((windows(&small), small.layers[0].attention.query_scale), (vec![Some(4096); 2], None));
    let error = read("opus").unwrap_err().to_string();
    assert!(error.contains("`opus` is not supported"), "{error}");
}

/// A configuration as it is published, in which layers without a window are described by `global_` fields.
#[test]
fn layers_of_gemma_4_differ_in_heads_and_share_keys() {
    let config = read_of("Gemma4ForConditionalGeneration", |c| {
        *c = json!({
            "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "dtype": "bfloat16",
            "vision_config": null,
            "text_config": {"model_type": "gemma4_text", "hidden_size": 1536, "num_hidden_layers": 12,
                            "num_key_value_heads": 2, "global_head_dim": 512, "num_global_key_value_heads": 1,
                            "attention_k_eq_v": true, "num_kv_shared_layers": 6, "use_double_wide_mlp": true,
                            "use_bidirectional_attention": "vision"},
        });
    });
    let config = config.unwrap();
    let (local, full) = (&config.layers[0].attention, &config.layers[5].attention);
    assert_eq!(
        (local.window, local.head_dim, local.num_kv_heads, local.kv),
        (Some(512), 256, 2, KvSource::Projections)
    );
    assert_eq!((full.window, full.head_dim, full.num_kv_heads, full.kv), (None, 512, 1, KvSource::KeyProjection));
    assert_eq!((local.scale, full.rope, local.rope), (1.0, Some(0), Some(1)));
    let sources: Vec<_> = config.layers[6..].iter().map(|layer| layer.attention.kv).collect();
    assert_eq!(sources, [4, 4, 4, 4, 4, 5].map(KvSource::Layer));
    let widths: Vec<_> = config.layers.iter().map(|layer| layer.mlp.unwrap().intermediate_size).collect();
    assert_eq!((widths[5], widths[6]), (9216, 18_432));
    let frequencies = config.ropes[0].frequencies(8);
    assert_eq!((frequencies.len(), frequencies[0], frequencies[64]), (256, 1.0, 0.0));
    assert!(frequencies[63] == 1e6f64.powf(-126.0 / 512.0));
    assert_eq!((config.per_layer_input.unwrap().width, config.per_layer_input.unwrap().scale), (256, 16.0));
}

#[test]
fn what_gemma_4_may_have_and_trireme_lacks_is_refused_by_name() {
    let error = |name: &str, value: Value| {
        let config = read_of("Gemma4ForCausalLM", |c| {
            c["vocab_size_per_layer_input"] = json!(501);
            c[name] = value;
        });
        config.unwrap_err().to_string()
    };
    assert!(error("enable_moe_block", json!(true)).contains("`num_experts` must be a whole number"));
    assert!(
        error("use_bidirectional_attention", json!("all")).contains("`use_bidirectional_attention` must be absent")
    );
    assert!(error("vocab_size_per_layer_input", json!(500)).contains("must be at least `vocab_size` (501)"));
    assert!(error("num_kv_shared_layers", json!(3)).contains("`num_kv_shared_layers` must be at most the number"));
    assert!(
        error("num_kv_shared_layers", json!(1)).contains("must be so small that layers of each type have their own")
    );
    assert!(
        error("rope_scaling", json!({"rope_type": "linear", "factor": 2.0})).contains("`rope_scaling` must be absent")
    );
    let heads = json!({"1": {"head_dim": 512, "num_key_value_heads": 3}});
    assert!(error("per_layer_config", heads).contains("KV heads that divide 4, found \"3 KV heads of 512\""));
    assert!(
        error("per_layer_config", json!({"1": {"layer_scalar": 2.0}})).contains("`per_layer_config.1.layer_scalar`")
    );
}

/// A configuration as it is published: the empty list means the usual interval.
#[test]
fn layers_of_llama_4_see_chunks_or_all_and_have_experts_or_none() {
    let read = |name: &str, value: Value| {
        read_of("Llama4ForConditionalGeneration", |c| {
            *c = json!({
                "architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "dtype": "bfloat16",
                "text_config": {"model_type": "llama4_text", "num_hidden_layers": 8, "no_rope_layers": [],
                                "interleave_moe_layer_step": 2, "num_local_experts": 128, "use_qk_norm": false,
                                "for_llm_compression": false},
            });
            c["text_config"][name] = value;
        })
    };
    let config = read("attn_scale", json!(0.1)).unwrap();
    let chunks: Vec<_> = config.layers.iter().map(|layer| layer.attention.chunk).collect();
    let (some, none) = (Some(8192), None);
    assert_eq!(chunks, [some, some, some, none, some, some, some, none]);
    let [first, fourth] = [0, 3].map(|index| &config.layers[index]);
    let scale = QueryScale { beta: 0.1, period: 8192, offset: 1 };
    assert_eq!((first.attention.rope, first.attention.query_scale), (Some(0), None));
    assert_eq!((fourth.attention.rope, fourth.attention.query_scale), (None, Some(scale)));
    assert_eq!((first.mlp.unwrap().intermediate_size, first.experts.is_none()), (16_384, true));
    let experts = fourth.experts.unwrap();
    assert_eq!((experts.num_experts, experts.intermediate_size, experts.routing.scales_input), (128, 8192, true));
    let error = |name, value| read(name, value).unwrap_err().to_string();
    assert!(error("attention_chunk_size", Value::Null).contains("`text_config.attention_chunk_size` must be a whole"));
    assert!(error("layer_types", json!(["full_attention"])).contains("a list of 8 names"));
    assert!(error("num_experts_per_tok", json!(129)).contains("at most the number of experts"));
}

#[test]
fn what_older_architectures_may_have_and_trireme_lacks_is_refused_by_name() {
    let error = |architecture: &str, name: &str, value: Value| {
        let config = read_of(architecture, |c| {
            c.as_object_mut().unwrap().remove("rms_norm_eps");
            c.as_object_mut().unwrap().remove("num_key_value_heads");
            c[name] = value;
        });
        config.unwrap_err().to_string()
    };
    // OPT 350M has norms behind the sums, and narrower embeddings.
    assert!(error("OPTForCausalLM", "do_layer_norm_before", json!(false)).contains("`do_layer_norm_before` must be"));
    assert!(error("OPTForCausalLM", "word_embed_proj_dim", json!(32)).contains("must be `hidden_size` (64)"));
    assert!(error("GPTJForCausalLM", "rotary_dim", json!(24)).contains("at most the size of a head (16)"));
    let bloom = error("BloomForCausalLM", "apply_residual_connection_post_layernorm", json!(true));
    assert!(bloom.contains("`apply_residual_connection_post_layernorm` must be `false`"), "{bloom}");
    let scaled = json!({"rope_type": "linear", "factor": 2.0});
    let nanochat = read_of("NanoChatForCausalLM", |c| c["rope_parameters"] = scaled).unwrap_err().to_string();
    assert!(nanochat.contains("`rope_parameters` must be without scaling"), "{nanochat}");
}

#[test]
fn a_gpt2_with_another_scale_of_scores_is_refused() {
    let error = error(|c| {
        *c = json!({"architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_head": 4, "n_layer": 2,
                    "vocab_size": 100, "scale_attn_by_inverse_layer_idx": true});
    });
    assert!(error.contains("`scale_attn_by_inverse_layer_idx` must be `false`"), "{error}");
}

fn hybrid(architecture: &str, change: impl FnOnce(&mut Value)) -> Result<Config, ModelError> {
    read_of(architecture, |c| {
        c["num_hidden_layers"] = 8.into();
        change(c);
    })
}

#[test]
fn every_fourth_layer_of_a_hybrid_model_has_attention_unless_it_says_otherwise() {
    let full = |config: Config| -> Vec<usize> {
        let layers = config.layers.iter().enumerate();
        layers.filter(|(_, layer)| layer.recurrent.is_none()).map(|(index, _)| index).collect()
    };
    for architecture in ["Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"] {
        let config = hybrid(architecture, |_| ()).unwrap();
        let (shape, attention) = (config.layers[0].recurrent.unwrap().shape, &config.layers[3].attention);
        assert_eq!((shape.num_key_heads, shape.num_value_heads, shape.key_dim, shape.num_taps), (16, 32, 128, 4));
        assert!(attention.has_output_gate && attention.head_norm.is_some());
        assert_eq!((config.ropes[0].rotary_dim, config.norm.offset, attention.head_dim), (64, 1.0, 256));
        assert_eq!(full(config), [3, 7]);
        assert_eq!(full(hybrid(architecture, |c| c["full_attention_interval"] = 3.into()).unwrap()), [2, 5]);
        let listed = ["linear_attention", "full_attention"].repeat(4);
        let config = hybrid(architecture, |c| {
            c["layer_types"] = json!(listed);
            c["full_attention_interval"] = 3.into();
        });
        assert_eq!(full(config.unwrap()), [1, 3, 5, 7]);
    }
}

#[test]
fn what_a_hybrid_model_does_not_support_is_refused_by_its_name() {
    let changes: [(&str, Value, &str); 8] = [
        ("linear_num_value_heads", 24.into(), "a multiple of `linear_num_key_heads` (16), found 24"),
        ("hidden_act", "gelu".into(), "`silu`, found \"gelu\""),
        ("attn_output_gate", false.into(), "`true`, the only way that is supported"),
        ("mamba_ssm_dtype", "bfloat16".into(), "`float32`, the only way that is supported"),
        ("layer_types", vec!["full_attention"; 7].into(), "a list of 8 names"),
        ("layer_types", vec!["linear_attention"; 8].into(), "a list with `full_attention` at least once"),
        ("layer_types", vec!["sliding_attention"; 8].into(), "`full_attention` or `linear_attention`"),
        ("linear_conv_bias", true.into(), "is not understood"),
    ];
    for (field, value, words) in changes {
        let error = hybrid("Qwen3_5ForCausalLM", |c| c[field] = value).unwrap_err().to_string();
        assert!(error.contains(field) && error.contains(words), "{error}");
    }
    let error = hybrid("Qwen3_5MoeForCausalLM", |c| c["norm_topk_prob"] = false.into()).unwrap_err().to_string();
    assert!(error.contains("`norm_topk_prob` must be `true`"), "{error}");
}

#[test]
fn the_text_of_a_hybrid_model_that_sees_images_is_read_with_a_note() {
    let config = hybrid("Qwen3_5MoeForConditionalGeneration", |c| {
        let text = json!({
            "model_type": "qwen3_5_moe_text", "hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 501,
            "attn_output_gate": true, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": false, "partial_rotary_factor": 0.25,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "mrope_section": [11, 11, 10],
                                "mrope_interleaved": true, "partial_rotary_factor": 0.25},
        });
        *c = json!({"architectures": c["architectures"], "model_type": "qwen3_5_moe", "text_config": text,
                    "vision_config": {"depth": 27}, "image_token_id": 5});
    });
    let config = config.unwrap();
    assert_eq!((config.ropes[0].theta, config.num_layers()), (1e7, 4));
    let (mlp, experts) = (config.layers[0].mlp.unwrap(), config.layers[0].experts.unwrap());
    assert_eq!((mlp.intermediate_size, mlp.has_output_gate, experts.num_experts), (512, true, 256));
    assert!(experts.routing.is_normalized && experts.routing.top_k == 8);
    assert!(config.notes[0].contains("only the text model"), "{:?}", config.notes);
}

#[test]
fn the_fields_of_the_text_may_stand_beside_those_of_the_images_in_files_of_qwen2_5_vl() {
    let published = |c: &mut Value| {
        for (name, value) in [
            ("rope_scaling", json!({"type": "mrope", "mrope_section": [2, 3, 3]})),
            ("rope_theta", json!(1e6)),
            ("tie_word_embeddings", json!(true)),
            ("use_sliding_window", json!(false)),
            ("sliding_window", json!(32_768)),
            ("vision_config", json!({"depth": 32})),
            ("image_token_id", json!(5)),
        ] {
            c[name] = value;
        }
    };
    let config = read_of("Qwen2_5_VLForConditionalGeneration", published).unwrap();
    assert_eq!((config.ropes[0].theta, &config.ropes[0].scaling), (1e6, &RopeScaling::None));
    assert!(config.head.is_tied && config.layers[0].attention.qkv_bias && windows(&config) == [None; 2]);
    assert!(config.notes[0].contains("only the text model"), "{:?}", config.notes);
    let error = read_of("Qwen3VLForConditionalGeneration", published).unwrap_err().to_string();
    assert!(error.contains("`text_config` must be an object"), "{error}");
}

#[test]
fn the_whole_model_says_whether_the_head_is_the_embedding() {
    let read = |outer: Value| {
        read_of("Gemma3ForConditionalGeneration", |c| {
            let text = std::mem::replace(c, json!({"architectures": ["Gemma3ForConditionalGeneration"]}));
            c["text_config"] = text;
            c["text_config"]["tie_word_embeddings"] = json!(false);
            c["tie_word_embeddings"] = outer;
        })
    };
    assert!(read(json!(true)).unwrap().head.is_tied);
    assert!(!read(json!(false)).unwrap().head.is_tied);
    assert!(read(Value::Null).unwrap().head.is_tied, "as usual for this model");
}

#[test]
fn fields_that_say_what_an_architecture_always_has_are_accepted_with_that_value_alone() {
    // Published ERNIE 4.5 21B-A3B and Apertus 8B.
    let ernie = |change: (&str, Value)| {
        read_of("Ernie4_5_MoeForCausalLM", |c| {
            for (name, value) in [
                ("moe_capacity", json!([64, 64, 64])),
                ("moe_gate", json!("topk")),
                ("moe_use_aux_free", json!(true)),
                ("num_nextn_predict_layers", json!(1)),
                change,
            ] {
                c[name] = value;
            }
        })
    };
    let apertus = |change: (&str, Value)| {
        read_of("ApertusForCausalLM", |c| {
            for (name, value) in [("post_norm", json!(false)), ("qk_norm", json!(true)), change] {
                c[name] = value;
            }
        })
    };
    let error = |read: Result<Config, ModelError>| read.unwrap_err().to_string();
    assert_eq!(ernie(("use_cache", json!(true))).map(|config| config.num_layers()).unwrap(), 2);
    assert!(error(ernie(("moe_gate", json!("top2_fused")))).contains("`moe_gate` must be `topk`"));
    assert!(apertus(("use_cache", json!(true))).is_ok());
    assert!(error(apertus(("qk_norm", json!(false)))).contains("`qk_norm` must be `true`"));
    assert!(error(apertus(("post_norm", json!(true)))).contains("`post_norm` must be `false`"));
}

/// Fields of the published Granite 4.0 Micro and H-Tiny, smaller.
fn granite4(change: impl FnOnce(&mut Value)) -> Result<Config, ModelError> {
    read_of("GraniteMoeHybridForCausalLM", |c| {
        *c = json!({
            "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "attention_bias": false,
            "attention_dropout": 0.0, "attention_multiplier": 0.015625, "embedding_multiplier": 12, "hidden_act": "silu",
            "hidden_size": 128, "init_method": "mup", "initializer_range": 0.1, "intermediate_size": 96, "layer_types": ["attention", "attention"],
            "logits_scaling": 10, "mamba_chunk_size": 256, "mamba_conv_bias": true, "mamba_d_conv": 4, "mamba_d_head": 32,
            "mamba_d_state": 16, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 8, "mamba_proj_bias": false,
            "max_position_embeddings": 131072, "normalization_function": "rmsnorm", "num_attention_heads": 4,
            "num_experts_per_tok": 0, "num_hidden_layers": 2, "num_key_value_heads": 2, "num_local_experts": 0,
            "output_router_logits": false, "position_embedding_type": "rope", "residual_multiplier": 0.22,
            "rms_norm_eps": 1e-5, "rope_scaling": null, "rope_theta": 10000000, "router_aux_loss_coef": 0.01,
            "shared_intermediate_size": 80, "tie_word_embeddings": true, "use_cache": false, "vocab_size": 501
        });
        change(c);
    })
}

#[test]
fn granite_4_has_attention_in_all_layers_or_mamba_2_in_most() {
    let micro = granite4(|_| ()).unwrap();
    assert!(!micro.has_recurrent_layers() && micro.layers.iter().all(|layer| layer.experts.is_none()));
    assert_eq!((micro.layers[0].mlp.unwrap().intermediate_size, micro.layers[0].attention.rope), (80, Some(0)));
    assert!(!micro.features().contains(&ops::Feature::Mamba2), "GPUs can run it");
    let tiny = |field: &str, value: Value| {
        granite4(|c| {
            c["layer_types"] = json!(["mamba", "attention"]);
            c["position_embedding_type"] = json!("nope");
            (c["num_local_experts"], c["num_experts_per_tok"]) = (json!(8), json!(2));
            c[field] = value;
        })
    };
    let config = tiny("use_cache", json!(true)).unwrap();
    let recurrent = config.layers[0].recurrent.unwrap();
    assert_eq!((recurrent.shape.value_dim, recurrent.shape.key_dim, recurrent.has_conv_bias), (32, 16, true));
    let sizes = (config.layers[0].mlp.unwrap().intermediate_size, config.layers[0].experts.unwrap().intermediate_size);
    assert_eq!((sizes, config.layers[1].attention.rope), ((80, 96), None));
    assert!(config.features().contains(&ops::Feature::Mamba2));
    for (field, value, words) in [
        ("normalization_function", json!("layernorm"), "`rmsnorm`"),
        ("position_embedding_type", json!("alibi"), "`rope` or `nope`"),
        ("position_embedding_type", json!(5), "a string"),
        ("time_step_limit", json!([0.0, 0.1]), "from 0 to infinity"),
        ("mamba_d_head", json!(16), "32 or `auto`"),
    ] {
        let error = tiny(field, value).unwrap_err().to_string();
        assert!(error.contains(field) && error.contains(words), "{error}");
    }
}

/// Fields of the published Nemotron Nano 9B v2 and Nemotron 3 Nano, smaller.
fn nemotron_h(pattern: &str, change: impl FnOnce(&mut Value)) -> Result<Config, ModelError> {
    read_of("NemotronHForCausalLM", |c| {
        *c = from_python_json(
            br#"{
            "architectures": ["NemotronHForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
            "attention_head_dim": 32, "bos_token_id": 1,
            "chunk_size": 128, "conv_kernel": 4, "eos_token_id": 12, "expand": 2, "head_dim": 32, "hidden_dropout": 0.0,
            "hidden_size": 128, "initializer_range": 0.02, "intermediate_size": 96, "layer_norm_epsilon": 1e-5,
            "mamba_head_dim": 16, "mamba_hidden_act": "silu", "mamba_num_heads": 8, "mamba_proj_bias": false,
            "mamba_ssm_cache_dtype": "float32", "max_position_embeddings": 262144, "mlp_bias": false,
            "mlp_hidden_act": "relu2", "model_type": "nemotron_h", "moe_intermediate_size": 48,
            "moe_shared_expert_intermediate_size": 80, "n_group": 1, "n_groups": 4, "n_routed_experts": 8,
            "n_shared_experts": 1, "norm_eps": 1e-5, "norm_topk_prob": true, "num_attention_heads": 4,
            "num_experts_per_tok": 3, "num_hidden_layers": 4, "num_key_value_heads": 2, "num_logits_to_keep": 1,
            "pad_token_id": 0, "partial_rotary_factor": 1.0, "rescale_prenorm_residual": true, "residual_in_fp32": false,
            "rope_theta": 10000, "routed_scaling_factor": 2.5, "sliding_window": null, "ssm_state_size": 16,
            "tie_word_embeddings": false, "time_step_floor": 1e-4, "time_step_limit": [0.0, Infinity],
            "time_step_max": 0.1, "time_step_min": 0.001, "topk_group": 1, "torch_dtype": "bfloat16",
            "use_bias": false, "use_cache": true, "use_conv_bias": true, "use_mamba_kernels": true, "vocab_size": 501
        }"#,
        )
        .unwrap();
        c["hybrid_override_pattern"] = json!(pattern);
        change(c);
    })
}

#[test]
fn layers_of_one_part_are_joined_to_a_mixer_and_the_feed_forward_behind_it() {
    let config = nemotron_h("MEM*E*-", |_| ()).unwrap();
    let numbers: Vec<_> = config.layers.iter().map(|layer| layer.numbers.unwrap()).collect();
    assert_eq!(numbers, [[0, 1], [2, 2], [3, 4], [5, 6]]);
    let parts: Vec<_> = config
        .layers
        .iter()
        .map(|layer| (layer.recurrent.is_some(), layer.mlp.map(|mlp| mlp.intermediate_size), layer.experts.is_some()))
        .collect();
    assert_eq!(parts, [(true, Some(80), true), (true, None, false), (false, Some(80), true), (false, Some(96), false)]);
    assert!(config.features().contains(&ops::Feature::PlainExperts) && config.layers[2].attention.rope.is_none());
    assert!(!nemotron_h("M-*-", |_| ()).unwrap().features().contains(&ops::Feature::PlainExperts));

    let message = |pattern: &str, field: &str, value: Value| {
        let refused = nemotron_h(pattern, |c| c[field] = value).unwrap_err().to_string();
        assert!(refused.contains(field), "{refused}");
        refused
    };
    for pattern in ["-M*", "M--*", "ME", "M x*", ""] {
        message("*", "hybrid_override_pattern", json!(pattern));
    }
    message("*", "layers_block_type", json!(["full_attention", "conv"]));
    let latents = nemotron_h("*E", |c| c["moe_latent_size"] = json!(64)).unwrap();
    assert!(latents.features().contains(&ops::Feature::ExpertLatents));
    assert_eq!(latents.layers[0].experts.unwrap().latent_size, Some(64));
    message("M*", "time_step_limit", json!([0.0, 0.1]));
    message("M*", "mamba_num_heads", json!(6));
    message("M*", "attention_head_dim", json!(64));
    message("M*", "tie_word_embeddings", json!(true));
}

/// Fields of the published Falcon-H1 0.5B, smaller.
fn falcon_h1(change: impl FnOnce(&mut Value)) -> Result<Config, ModelError> {
    read_of("FalconH1ForCausalLM", |c| {
        *c = from_python_json(
            br#"{
            "architectures": ["FalconH1ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
            "attention_in_multiplier": 2.0, "attention_out_multiplier": 0.25, "bos_token_id": 1, "embedding_multiplier": 5.5,
            "eos_token_id": 11, "head_dim": 16, "hidden_act": "silu", "hidden_size": 128, "initializer_range": 0.02,
            "intermediate_size": 96, "key_multiplier": 0.5, "lm_head_multiplier": 0.125, "mamba_chunk_size": 128,
            "mamba_conv_bias": true, "mamba_d_conv": 4, "mamba_d_head": 16, "mamba_d_ssm": 192, "mamba_d_state": 16,
            "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 12, "mamba_norm_before_gate": false,
            "mamba_proj_bias": false, "mamba_rms_norm": false, "mamba_use_mlp": true, "max_position_embeddings": 16384,
            "mlp_bias": false, "mlp_expansion_factor": 8, "mlp_multipliers": [0.5, 0.25], "model_type": "falcon_h1",
            "num_attention_heads": 8, "num_hidden_layers": 2, "num_key_value_heads": 2, "num_logits_to_keep": 1,
            "pad_token_id": 0, "projectors_bias": false, "rms_norm_eps": 1e-5, "rope_scaling": null,
            "rope_theta": 100000000000.0, "ssm_in_multiplier": 2.0, "ssm_multipliers": [0.5, 0.25, 2.0, 4.0, 8.0],
            "ssm_out_multiplier": 0.75, "tie_word_embeddings": false, "time_step_floor": 0.0001,
            "time_step_limit": [0.0, Infinity], "time_step_max": 0.1, "time_step_min": 0.001,
            "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 501
        }"#,
        )
        .unwrap();
        change(c);
    })
}

#[test]
fn falcon_h1_has_mamba_2_beside_attention_and_its_multipliers_in_norms_and_factors() {
    let config = falcon_h1(|_| ()).unwrap();
    let layer = &config.layers[1];
    let beside = layer.beside.unwrap();
    assert_eq!((beside.recurrent.shape.widths(), layer.recurrent), ([16, 192], None));
    // Gates have the factor 2 * 0.5, and so has the norm that all projections read. Of x, B, C and steps these are 0.5, 4, 8 and 16.
    assert_eq!((layer.norm_scales, layer.mlp.unwrap().scale), ([1.0, 0.5], 0.5));
    assert_eq!((beside.conv_scales, beside.step_scale, beside.out_scales), ([8.0, 4.0, 0.5], 16.0, [0.5, 0.75]));
    // q and k have the factor 2 each, k also 0.5, and heads are of 16.
    assert_eq!((layer.attention.scale, config.embedding_scale, config.head.scale), (0.5, 5.5, 0.125));
    assert!(config.features().contains(&ops::Feature::UnnormedMamba2) && config.has_recurrent_layers());
    let normed = falcon_h1(|c| c["mamba_rms_norm"] = json!(true)).unwrap();
    assert!(!normed.features().contains(&ops::Feature::UnnormedMamba2));
    let expanded = falcon_h1(|c| {
        (c["mamba_d_ssm"], c["mamba_d_head"], c["mamba_n_heads"]) = (Value::Null, json!("auto"), json!(16));
    });
    assert_eq!(expanded.unwrap().layers[0].beside.unwrap().recurrent.shape.widths()[1], 256);
    let too_wide = falcon_h1(|c| (c["mamba_d_ssm"], c["mamba_expand"]) = (Value::Null, json!(1_u64 << 30)));
    assert!(too_wide.unwrap_err().to_string().contains("`mamba_expand`"));
    assert!(crate::shard::check(&config, 4).is_ok());
    let error = |config: &Config, size| crate::shard::check(config, size).unwrap_err().to_string();
    // 8 heads of attention, but 12 of the state.
    assert!(error(&config, 8).starts_with("recurrent layers of 12 value heads and 1 key heads cannot"));
    assert!(error(&config, 3).starts_with("8 heads and 2 KV heads cannot"));
    assert!(error(&normed, 2).contains("of which 12 are normed together"));
}

#[test]
fn what_falcon_h1_does_not_support_is_refused_by_its_name() {
    for (field, value) in [
        ("attention_bias", json!(true)),
        ("mlp_bias", json!(true)),
        ("mamba_proj_bias", json!(true)),
        ("projectors_bias", json!(true)),
        ("hidden_act", json!("gelu")),
        ("ssm_multipliers", json!([1.0, 1.0, 1.0, 1.0])),
        ("mlp_multipliers", json!([1.0, 0.0])),
        ("key_multiplier", json!(-1.0)),
        ("time_step_limit", json!([0.0, 0.1])),
        ("mamba_d_head", json!(32)),
    ] {
        let refused = falcon_h1(|c| c[field] = value).unwrap_err().to_string();
        assert!(refused.contains(&format!("`{field}`")), "{refused}");
    }
    let refused = falcon_h1(|c| (c["mamba_rms_norm"], c["mamba_norm_before_gate"]) = (json!(true), json!(true)));
    assert!(refused.unwrap_err().to_string().contains("mamba_norm_before_gate"));
}

/// Fields of the published LFM2 1.2B, smaller.
fn lfm2(change: impl FnOnce(&mut Value)) -> Result<Config, ModelError> {
    read_of("Lfm2ForCausalLM", |c| {
        *c = json!({
            "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "block_auto_adjust_ff_dim": true, "block_dim": 128,
            "block_ff_dim": 770, "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0, "block_multiple_of": 256,
            "block_norm_eps": 1e-5, "block_out_init_scale": 1.0, "block_use_swiglu": true, "block_use_xavier_init": true,
            "bos_token_id": 1, "conv_L_cache": 3, "conv_bias": false, "conv_dim": 128, "conv_dim_out": 128,
            "conv_use_xavier_init": true, "eos_token_id": 7, "full_attn_idxs": [2, 3], "hidden_size": 128,
            "initializer_range": 0.02, "max_position_embeddings": 128000, "norm_eps": 1e-5, "num_attention_heads": 8,
            "num_heads": 8, "num_hidden_layers": 4, "num_key_value_heads": 2, "pad_token_id": 0, "rope_theta": 1000000.0,
            "torch_dtype": "bfloat16", "use_cache": true, "use_pos_enc": true, "vocab_size": 501
        });
        change(c);
    })
}

#[test]
fn lfm2_has_short_convolutions_in_all_layers_but_those_named() {
    let config = lfm2(|_| ()).unwrap();
    let recurrent: Vec<_> = config.layers.iter().map(|layer| layer.recurrent).collect();
    assert_eq!(recurrent.iter().map(Option::is_some).collect::<Vec<_>>(), [true, true, false, false]);
    let shape = recurrent[0].unwrap().shape;
    assert_eq!((shape.channels(), shape.num_steps(), shape.state_len()), (128, 128, 2 * 128));
    // Two thirds of 770, rounded up to a multiple of 256.
    assert_eq!(config.layers[0].mlp.unwrap().intermediate_size, 768);
    assert!(config.head.is_tied && config.layers[2].attention.head_norm.is_some());
    assert!(config.features().contains(&ops::Feature::ShortConv));
    let inner = |field: &str, value: Value| {
        let config = lfm2(|c| c[field] = value).unwrap();
        config.layers[0].mlp.unwrap().intermediate_size
    };
    assert_eq!(inner("block_ffn_dim_multiplier", json!(0.99)), 512);
    assert_eq!(inner("block_ffn_dim_multiplier", Value::Null), 513);
    assert_eq!(inner("block_auto_adjust_ff_dim", json!(false)), 770);
    let untied = lfm2(|c| (c["tie_embedding"], c["tie_word_embeddings"]) = (json!(false), json!(true)));
    assert!(!untied.unwrap().head.is_tied);
    let listed = lfm2(|c| c["layer_types"] = json!(["full_attention", "conv", "conv", "conv"])).unwrap();
    assert!(listed.layers[0].recurrent.is_none() && listed.layers[3].recurrent.is_some());
}

#[test]
fn what_lfm2_does_not_support_is_refused_by_its_name() {
    for (field, value, words) in [
        ("block_use_swiglu", json!(false), "`true`, the only way that is supported"),
        ("use_pos_enc", json!(false), "`true`, the only way that is supported"),
        ("conv_dim", json!(64), "128, as another field says, found 64"),
        ("block_norm_eps", json!(1e-6), "as another field says"),
        ("theta", json!(10000.0), "1000000, as another field says"),
        ("num_heads", json!(4), "8, as another field says"),
        ("conv_L_cache", json!(1), "at least 2"),
        ("block_ffn_dim_multiplier", json!(1e30), "stays a size"),
        ("full_attn_idxs", json!([]), "`full_attention` at least once"),
        ("layer_types", json!(["conv", "conv", "conv", "mamba"]), "`full_attention` or `conv`"),
        ("hidden_act", json!("gelu"), "`silu`"),
        ("conv_groups", json!(2), "is not understood"),
    ] {
        let error = lfm2(|c| c[field] = value).unwrap_err().to_string();
        let named = if field == "full_attn_idxs" { "layer_types" } else { field };
        assert!(error.contains(named) && error.contains(words), "{error}");
    }
}

#[test]
fn the_whole_model_of_lfm2_vl_says_by_either_name_whether_the_head_is_the_embedding() {
    let read = |name: &str| {
        lfm2(|c| {
            c["tie_embedding"] = json!(true);
            *c = json!({"architectures": ["Lfm2VlForConditionalGeneration"], "text_config": c, name: false});
        })
    };
    for name in ["tie_embedding", "tie_word_embeddings"] {
        assert!(!read(name).unwrap().head.is_tied, "{name}");
    }
    assert!(read("do_image_splitting").unwrap().head.is_tied);
}

/// Fields of the published OLMo Hybrid 7B, smaller.
fn olmo_hybrid(change: impl FnOnce(&mut Value)) -> Result<Config, ModelError> {
    read_of("OlmoHybridForCausalLM", |c| {
        *c = json!({
            "architectures": ["OlmoHybridForCausalLM"], "model_type": "olmo_hybrid", "attention_bias": false,
            "attention_dropout": 0.0, "bos_token_id": null, "dtype": "bfloat16", "eos_token_id": 257, "hidden_act": "silu",
            "hidden_size": 128, "initializer_range": 0.02, "intermediate_size": 96, "linear_allow_neg_eigval": true,
            "linear_conv_kernel_dim": 4, "linear_key_head_dim": 24, "linear_num_key_heads": 4, "linear_num_value_heads": 4,
            "linear_value_head_dim": 48, "max_position_embeddings": 65536, "num_attention_heads": 4, "num_hidden_layers": 8,
            "num_key_value_heads": 4, "pad_token_id": 277, "rms_norm_eps": 1e-6, "rope_parameters": {"rope_theta": null},
            "tie_word_embeddings": false, "use_cache": false, "vocab_size": 501
        });
        change(c);
    })
}

#[test]
fn olmo_hybrid_is_rotated_unless_a_field_of_the_rotation_is_null() {
    let config = olmo_hybrid(|_| ()).unwrap();
    let is_recurrent: Vec<_> = config.layers.iter().map(|layer| layer.recurrent.is_some()).collect();
    assert_eq!(is_recurrent, [true, true, true, false, true, true, true, false]);
    let recurrent = config.layers[0].recurrent.unwrap();
    assert_eq!((recurrent.shape.key_dim, recurrent.shape.value_dim, recurrent.eps), (24, 48, 1e-5));
    assert!(config.features().contains(&ops::Feature::DoubledRates));
    let single = olmo_hybrid(|c| c["linear_allow_neg_eigval"] = json!(false)).unwrap();
    assert!(!single.features().contains(&ops::Feature::DoubledRates));
    let theta = |parameters: Value, outer: Option<Value>| {
        let config = olmo_hybrid(|c| {
            c["rope_parameters"] = parameters;
            outer.into_iter().for_each(|outer| c["rope_theta"] = outer);
        });
        let config = config.unwrap();
        config.layers[3].attention.rope.map(|rope| config.ropes[rope].theta)
    };
    assert_eq!(theta(json!({"rope_theta": null}), None), None);
    assert_eq!(theta(json!({"rope_type": null}), None), None);
    assert_eq!(theta(Value::Null, Some(Value::Null)), None);
    assert_eq!(theta(Value::Null, None), Some(10_000.0));
    assert_eq!(theta(json!({}), Some(json!(500.0))), Some(500.0));
    assert_eq!(theta(json!({"rope_type": "default", "rope_theta": 700.0}), Some(Value::Null)), Some(700.0));
    let small = olmo_hybrid(|c| (c["num_hidden_layers"], c["linear_key_head_dim"]) = (json!(3), Value::Null)).unwrap();
    assert!(small.layers[2].recurrent.is_none());
    assert_eq!(small.layers[0].recurrent.unwrap().shape.key_dim, 24);
}

/// Architectures that are rows of other ones under another name, with a golden of such a row.
pub(super) const SAME_ROWS: [(&str, &str); 4] = [
    ("BaiChuanForCausalLM", "baichuan2_7b"),
    ("Gemma4UnifiedForCausalLM", "gemma4_unified_vision"),
    ("KimiK25ForConditionalGeneration", "kimi_k25_vision"),
    ("PhiMoEForCausalLM", "phimoe"),
];

#[test]
fn each_architecture_has_a_checkpoint_that_is_compared_with_transformers_or_is_the_row_of_one() {
    let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens");
    let config =
        |dir: &Path| -> Value { serde_json::from_slice(&std::fs::read(dir.join("config.json")).unwrap()).unwrap() };
    let dirs = std::fs::read_dir(&goldens).unwrap().map(|entry| entry.unwrap().path());
    let compared = dirs.filter(|dir| dir.join("golden.json").is_file() && dir.join("config.json").is_file());
    let tried: Vec<Value> = compared.map(|dir| config(&dir)["architectures"][0].clone()).collect();
    let without = super::architectures().into_iter().filter(|name| !tried.contains(&json!(name)));
    let mut without: Vec<&str> = without.collect();
    without.sort_unstable();
    assert_eq!(without, SAME_ROWS.map(|(name, _)| name));
    for (name, golden) in SAME_ROWS {
        let mut fields = config(&goldens.join(golden));
        let same = read_config(&fields).unwrap();
        // A text model of its own has its fields at the top, and no note that images are refused.
        if !super::find(name).unwrap().is_nested {
            fields = fields.get("text_config").cloned().unwrap_or(fields);
        }
        fields["architectures"] = json!([name]);
        let (architecture, notes) = (same.architecture.clone(), same.notes.clone());
        let other = Config { architecture, notes, dtype: same.dtype, ..read_config(&fields).unwrap() };
        assert_eq!(other, same, "{name}");
    }
}
