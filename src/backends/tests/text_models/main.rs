//! `tokenize` and `detokenize` around an LLM, and `identity`, served as users configure them.

mod support;

use std::fs;

use serving::{EnsembleStep, InferRequest, Tensor};

use support::{
    ECHO, ENSEMBLE, POSTPROCESSING, PREPROCESSING, World, all, ids, output, query, request, text, text_input,
    tokenizer_json,
};

#[tokio::test]
async fn streamed_pieces_join_to_the_text_whole_characters_and_all_blanks() {
    let server = World::llm().started().await;
    let prompt = " Grüße,  世界 🚣‍♀️ end ";
    let responses = all(server.infer(request("ensemble", text_input(prompt))).unwrap()).await;
    assert_eq!(responses.len(), prompt.len() + 1, "one for each token, `<s>` included");
    let pieces: Vec<String> = responses.iter().map(|response| text(output(response, "text_output"))).collect();
    assert_eq!(pieces.concat(), prompt);
    assert_eq!(pieces[0], "", "a special token is no text");
    assert_eq!(output(&responses[1], "text_output").shape[..], [1]);
    assert!(responses.last().unwrap().is_final);
}

/// As in releases 0.6 to 0.8 of TensorRT-LLM's repository, where both inputs are required.
#[tokio::test]
async fn log_probabilities_pass_through_postprocessing_and_are_optional() {
    let inputs = r#"input [ { name: "CUM_LOG_PROBS" data_type: TYPE_FP32 dims: [ -1 ] },
                            { name: "OUTPUT_LOG_PROBS" data_type: TYPE_FP32 dims: [ -1, -1 ] } ]"#;
    let outputs = r#"output [ { name: "OUT_CUM_LOG_PROBS" data_type: TYPE_FP32 dims: [ -1 ] },
                              { name: "OUT_OUTPUT_LOG_PROBS" data_type: TYPE_FP32 dims: [ -1, -1 ] } ]"#;
    let given = r#"output [ { name: "cum_log_probs" data_type: TYPE_FP32 dims: [ -1 ] },
                            { name: "output_log_probs" data_type: TYPE_FP32 dims: [ -1, -1 ] } ]"#;
    let wires = [("cum_log_probs", "CUM_LOG_PROBS"), ("output_log_probs", "OUTPUT_LOG_PROBS")];
    let wire = |map: &str, key: &str, value: &str| format!(r#"{map} {{ key: "{key}" value: "{value}" }} "#);
    let gives: String = wires.iter().map(|(name, _)| wire("output_map", name, &format!("_{name}"))).collect();
    let takes: String = wires
        .iter()
        .map(|(name, input)| {
            wire("input_map", input, &format!("_{name}")) + &wire("output_map", &format!("OUT_{input}"), name)
        })
        .collect();
    let ensemble = ENSEMBLE
        .replace(r#"output_map { key: "output_ids""#, &format!(r#"{gives} output_map {{ key: "output_ids""#))
        .replace(r#"output_map { key: "OUTPUT""#, &format!(r#"{takes} output_map {{ key: "OUTPUT""#));
    let world = World::new(&[
        ("preprocessing", PREPROCESSING),
        ("tensorrt_llm", &format!("{ECHO}{given}")),
        ("postprocessing", &format!("{POSTPROCESSING}{inputs}{outputs}")),
        ("ensemble", &format!("{ensemble}{given}")),
    ]);
    world.put("tensorrt_llm/1/tokenizer.json", &tokenizer_json());
    let server = world.started().await;

    let inputs =
        vec![Tensor::from_byte_strings("text_input", &[1, 1], &["ab"]), Tensor::from_i32("max_tokens", &[1, 1], &[9])];
    let responses = all(server.infer(request("ensemble", inputs)).unwrap()).await;
    let pieces: String = responses.iter().map(|response| text(output(response, "text_output"))).collect();
    assert_eq!(pieces, "ab", "the language model gives no log probabilities");

    let log_probs = Tensor::from_f32("CUM_LOG_PROBS", &[1, 1], &[-0.5]);
    let tokens = vec![
        Tensor::from_i32("TOKENS_BATCH", &[1, 1, 1], &ids("a")),
        Tensor::from_i32("SEQUENCE_LENGTH", &[1, 1], &[1]),
        log_probs.clone(),
    ];
    let response = all(server.infer(request("postprocessing", tokens)).unwrap()).await.remove(0);
    assert_eq!(output(&response, "OUT_CUM_LOG_PROBS").data, log_probs.data);
    assert_eq!(response.outputs.len(), 2, "{:?}", response.outputs);
}

#[tokio::test]
async fn an_incomplete_character_at_the_end_is_a_replacement_character() {
    let server = World::llm().started().await;
    let cut = ids("né")[..2].to_vec();
    let inputs =
        vec![Tensor::from_i32("TOKENS_BATCH", &[1, 1, 2], &cut), Tensor::from_i32("SEQUENCE_LENGTH", &[1, 1], &[2])];
    let responses = all(server.infer(request("postprocessing", inputs)).unwrap()).await;
    assert_eq!(text(output(&responses[0], "OUTPUT")), "n\u{fffd}");
}

#[tokio::test]
async fn sequences_of_one_run_keep_their_texts_apart_and_end_one_by_one() {
    let server = World::llm().started().await;
    let step = EnsembleStep::default();
    let mut texts = [String::new(), String::new()];
    let [first, second] = [ids("é!"), ids("世")];
    let tokens =
        [(0, first[0], false), (1, second[0], false), (0, first[1], false), (1, second[1], true), (0, first[2], true)];
    for (index, id, ends) in tokens {
        let inputs = vec![
            Tensor::from_i32("TOKENS_BATCH", &[1, 1, 1], &[id]),
            Tensor::from_i32("SEQUENCE_LENGTH", &[1, 1], &[1]),
            Tensor::from_i32("SEQUENCE_INDEX", &[1, 1], &[index]),
            Tensor::from_bool("SEQUENCE_END", &[1, 1], &[ends]),
        ];
        let request = InferRequest { step: Some(step.clone()), ..request("postprocessing", inputs) };
        texts[index as usize] += &text(output(&all(server.infer(request).unwrap()).await[0], "OUTPUT"));
    }
    // The second sequence ends within a character, while the request continues.
    assert_eq!(texts, ["é!", "\u{fffd}"]);
}

#[tokio::test]
async fn prompts_of_a_batch_are_padded_and_their_lengths_returned() {
    let server = World::llm().started().await;
    let mut inputs = query(&["ab", "c"]);
    inputs.push(Tensor::from_i32("PAD_ID", &[2, 1], &[7, 7]));
    let response = all(server.infer(request("preprocessing", inputs)).unwrap()).await.remove(0);
    assert_eq!(*output(&response, "INPUT_ID"), Tensor::from_i32("INPUT_ID", &[2, 3], &[256, 97, 98, 256, 99, 7]));
    assert_eq!(*output(&response, "REQUEST_INPUT_LEN"), Tensor::from_i32("REQUEST_INPUT_LEN", &[2, 1], &[3, 2]));
    assert_eq!(*output(&response, "OUT_PAD_ID"), Tensor::from_i32("OUT_PAD_ID", &[2, 1], &[7, 7]));
    assert!(response.outputs.iter().all(|tensor| tensor.name != "OUT_END_ID" && tensor.name != "STOP_WORDS_IDS"));
}

#[tokio::test]
async fn stop_words_have_all_spellings_in_the_layout_of_ids_and_ends() {
    let server = World::llm().started().await;
    let mut inputs = query(&["x"]);
    inputs.push(Tensor::from_byte_strings("STOP_WORDS_DICT", &[1, 2], &["ab", "\n"]));
    let response = all(server.infer(request("preprocessing", inputs)).unwrap()).await.remove(0);
    // "ab", " ab", "\n", " \n": without special tokens, once each.
    let words = [97, 98, 32, 97, 98, 10, 32, 10, 2, 5, 6, 8, -1, -1, -1, -1];
    assert_eq!(*output(&response, "STOP_WORDS_IDS"), Tensor::from_i32("STOP_WORDS_IDS", &[1, 2, 8], &words));
}

#[tokio::test]
async fn a_bias_applies_to_every_token_of_its_word() {
    let server = World::llm().started().await;
    let mut inputs = query(&["x"]);
    inputs.push(Tensor::from_byte_strings("EMBEDDING_BIAS_WORDS", &[1, 2], &["ab", "b"]));
    inputs.push(Tensor::from_f32("EMBEDDING_BIAS_WEIGHTS", &[1, 2], &[1.5, -1.0]));
    let response = all(server.infer(request("preprocessing", inputs)).unwrap()).await.remove(0);
    let bias = output(&response, "EMBEDDING_BIAS");
    assert_eq!(bias.shape[..], [1, 257]);
    let set: Vec<(usize, f32)> =
        bias.to_f32().unwrap().into_iter().enumerate().filter(|&(_, bias)| bias != 0.0).collect();
    assert_eq!(set, [(97, 1.5), (98, 0.5)]);
}

#[tokio::test]
async fn a_long_prompt_is_encoded_off_the_request_path() {
    let server = World::llm().started().await;
    let long = "word ".repeat(20_000);
    let response = all(server.infer(request("preprocessing", query(&[&long]))).unwrap()).await.remove(0);
    assert_eq!(output(&response, "REQUEST_INPUT_LEN").to_i32().unwrap(), [100_001]);
}

#[tokio::test]
async fn invalid_inputs_are_refused_with_a_message() {
    let server = World::llm().started().await;
    let with = |tensor: Tensor| [query(&["x"]), vec![tensor]].concat();
    let mut invalid = query(&["x"]);
    invalid[0] = Tensor::from_byte_strings("QUERY", &[1, 1], &[b"a\xff"]);
    let tokens = |ids: &[i32], lengths: &[i32]| {
        vec![
            Tensor::from_i32("TOKENS_BATCH", &[1, 1, ids.len() as i64], ids),
            Tensor::from_i32("SEQUENCE_LENGTH", &[1, lengths.len() as i64], lengths),
        ]
    };
    for (model, inputs, words) in [
        ("preprocessing", invalid, "input `QUERY` is not UTF-8: byte 1 is wrong"),
        (
            "preprocessing",
            with(Tensor::from_byte_strings("IMAGE_URL", &[1, 1], &["u"])),
            "input `IMAGE_URL` is not supported",
        ),
        (
            "preprocessing",
            with(Tensor::from_byte_strings("EMBEDDING_BIAS_WORDS", &[1, 1], &["u"])),
            "`EMBEDDING_BIAS_WORDS` holds 1 words and `EMBEDDING_BIAS_WEIGHTS` 0 weights",
        ),
        ("postprocessing", tokens(&[1, -2], &[2]), "input `TOKENS_BATCH` holds -2, expected 0 or more"),
        ("postprocessing", tokens(&[1], &[1, 1]), "`SEQUENCE_LENGTH` holds 2 lengths for the 1 rows"),
    ] {
        let error = server.infer(request(model, inputs)).expect_err(words);
        assert!(error.message.starts_with(words), "{error}");
    }
}

#[tokio::test]
async fn the_tokenizer_is_found_where_the_configuration_points() {
    let at = |dir: &str| PREPROCESSING.replace("${tokenizer_dir}", dir);
    for (dir, file) in [("tokens", "preprocessing/tokens"), ("shared", "shared"), ("../shared", "shared")] {
        let world = World::new(&[("preprocessing", &at(dir))]);
        world.put(&format!("{file}/tokenizer.json"), &tokenizer_json());
        let failures = world.server().load_all().await.err().unwrap_or_default();
        assert!(failures.iter().all(|failure| failure.model != "preprocessing"), "{dir}: {failures:?}");
    }
    for (config, words) in [
        (PREPROCESSING.to_owned(), "no model of its repository has a tokenizer; set parameter `tokenizer_dir`"),
        (at("nowhere"), "`tokenizer_dir` is `nowhere`, but neither "),
    ] {
        let failures = World::new(&[("preprocessing", &config)]).server().load_all().await.unwrap_err();
        assert!(failures[0].reason.contains(words), "{}", failures[0].reason);
    }
}

#[tokio::test]
async fn among_several_tokenizers_that_of_the_same_ensemble_is_used() {
    let world = World::llm();
    world.put("other/config.pbtxt", ECHO);
    world.put("other/1/tokenizer.json", "{}");
    world.started().await;

    fs::remove_dir_all(world.root.path().join("ensemble")).unwrap();
    world.put("ensemble/config.pbtxt", &ENSEMBLE.replace("preprocessing", "identity").replace("postprocessing", "x"));
    let failures = world.server().load_all().await.unwrap_err();
    let reason = &failures.iter().find(|failure| failure.model == "preprocessing").unwrap().reason;
    assert!(
        reason.contains("`other` and `tensorrt_llm` each have a tokenizer; set parameter `tokenizer_dir`"),
        "{reason}"
    );
}

#[tokio::test]
async fn identity_returns_every_input_by_the_name_of_its_output() {
    let echo = "backend: \"identity\" \
                input [ { name: \"a\" data_type: TYPE_STRING dims: [ -1 ] }, { name: \"b\" data_type: TYPE_FP16 dims: [ 2 ] optional: true } ] \
                output [ { name: \"c\" data_type: TYPE_STRING dims: [ -1 ] }, { name: \"d\" data_type: TYPE_FP16 dims: [ 2 ] } ]";
    let delayed = format!("{echo} parameters {{ key: \"execute_delay_ms\" value {{ string_value: \"30\" }} }}");
    let server = World::new(&[("echo", echo), ("delayed", &delayed)]).started().await;
    let sent = Tensor::from_byte_strings("a", &[2], &["x", "y"]);
    let started = std::time::Instant::now();
    for model in ["echo", "delayed"] {
        let response = all(server.infer(request(model, vec![sent.clone()])).unwrap()).await.remove(0);
        assert_eq!(response.outputs, [Tensor { name: "c".into(), ..sent.clone() }]);
    }
    assert!(started.elapsed().as_millis() >= 30);

    let odd = echo.replace(
        "{ name: \"d\" data_type: TYPE_FP16 dims: [ 2 ] }",
        "{ name: \"d\" data_type: TYPE_BF16 dims: [ 2 ] }",
    );
    let failures = World::new(&[("odd", &odd)]).server().load_all().await.unwrap_err();
    assert!(failures[0].reason.contains("output `d` has another `data_type` than input `b`"), "{}", failures[0].reason);
}

/// A checkpoint whose longest sequence has 20000 tokens, each of them 4 bytes of a text at most.
const SHORT: &str = r#"{ "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "hidden_size": 256, "intermediate_size": 512,
    "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "vocab_size": 257,
    "max_position_embeddings": 20000 }"#;

#[tokio::test]
async fn a_text_that_no_sequence_can_hold_is_refused_before_it_is_encoded() {
    let world = World::llm();
    world.put("tensorrt_llm/1/config.json", SHORT);
    let server = world.started().await;
    let encode = async |text: &str| {
        let answer = server.infer(request("preprocessing", query(&[text])));
        match answer {
            Ok(mut stream) => stream
                .next_response()
                .await
                .expect("there is an answer")
                .map(|answer| output(&answer, "INPUT_ID").to_i32().unwrap().len()),
            Err(error) => Err(error),
        }
    };
    assert_eq!(
        encode(&"a".repeat(80_000)).await,
        Ok(80_001),
        "the model refuses it, and says how many tokens it takes"
    );
    for len in [80_001, 32 << 20] {
        let error = encode(&"a".repeat(len)).await.unwrap_err();
        let words = format!("request has {len} bytes of prompt, at most 80000 are allowed (--max-prompt-bytes)");
        assert_eq!((error.kind, error.message), (serving::ErrorKind::InvalidArgument, words));
    }
}

#[tokio::test]
async fn lists_of_words_are_bounded_before_they_are_encoded() {
    let server = World::llm().started().await;
    let refused = async |name: &'static str, words: &[String]| {
        let count = words.len() as i64;
        let mut inputs = query(&["a"]);
        inputs.push(Tensor::from_byte_strings(name, &[1, count], words));
        inputs.push(Tensor::from_f32("EMBEDDING_BIAS_WEIGHTS", &[1, count], &vec![1.0; words.len()]));
        match server.infer(request("preprocessing", inputs)) {
            Ok(mut stream) => {
                stream.next_response().await.expect("there is an answer").err().map(|error| error.message)
            }
            Err(error) => Some(error.message),
        }
    };
    let many = |count: usize| (0..count).map(|index| format!("w{index}")).collect::<Vec<_>>();
    for name in ["STOP_WORDS_DICT", "EMBEDDING_BIAS_WORDS"] {
        assert_eq!(refused(name, &many(1024)).await, None, "{name}");
        let words = "request has 80000 words, at most 1024 are allowed (--max-request-words)";
        assert_eq!(refused(name, &many(80_000)).await.as_deref(), Some(words), "{name}");
        let words = "request has 5000 bytes of one word, at most 4096 are allowed (--max-word-bytes)";
        assert_eq!(refused(name, &["a".repeat(5000)]).await.as_deref(), Some(words), "{name}");
    }
}
