//! The tensors of a request to a language model. Input: for each tensor its name, type, shape and bytes. If the first byte is 128 or
//! more, the request also has a priority, a timeout and a parameter.
#![no_main]

use std::sync::{Arc, LazyLock};

use backends::fuzz::LlmInputs;
use fuzz::within;
use libfuzzer_sys::fuzz_target;
use repository::Repository;
use serving::{DataType, InferRequest, Limits, LoadRequest, Parameter, Tensor};

/// The language model of the shipped repository, with the smallest checkpoint.
static MODEL: LazyLock<(LlmInputs, Vec<String>)> = LazyLock::new(|| {
    let root = fuzz::scratch("llm");
    let dir = root.join("tensorrt_llm");
    std::fs::create_dir_all(dir.join("1")).expect("/dev/shm can be written");
    let pbtxt = include_str!("../../model_repository/tensorrt_llm/config.pbtxt");
    std::fs::write(dir.join("config.pbtxt"), pbtxt).expect("/dev/shm can be written");
    let config = include_str!("../../tests/goldens/mha_bias_f32/config.json");
    std::fs::write(dir.join("1/config.json"), config).expect("/dev/shm can be written");
    let source =
        Repository::open(&[root]).and_then(|repository| repository.model("tensorrt_llm")).expect("it is valid");
    let names = source.config.input.iter().map(|input| input.name.clone()).collect();
    let load = LoadRequest {
        model_dir: dir.clone(),
        version_dir: dir.join("1"),
        version: 1,
        config: Arc::new(source.config),
        replaced: None,
        limits: Limits::default(),
    };
    (LlmInputs::new(&load).expect("the model is valid"), names)
});

fuzz_target!(|input: &[u8]| {
    let (model, names) = &*MODEL;
    let mut request = InferRequest::default();
    let mut rest = input;
    // One tensor: name, type and rank, number of bytes, log2 of the repetitions, a byte for each dimension, the bytes.
    while let Some((&[name, kind, num_bytes, times], behind)) = rest.split_first_chunk::<4>() {
        let (rank, datatype) = (usize::from(kind >> 4) % 4, DataType::ALL[usize::from(kind) % DataType::ALL.len()]);
        let Some((sizes, behind)) = behind.split_at_checked(rank) else { break };
        let Some((data, behind)) = behind.split_at_checked(usize::from(num_bytes)) else { break };
        rest = behind;
        let data = data.repeat(1 << (times % 16));
        // A size of 255 stands for the size that matches the number of elements.
        let num_elements = datatype.size().map_or(1, |size| data.len() / size) as i64;
        let known: i64 = sizes.iter().filter(|&&size| size != 255).map(|&size| i64::from(size).max(1)).product();
        let shape: Vec<i64> =
            sizes.iter().map(|&size| if size == 255 { num_elements / known } else { i64::from(size) }).collect();
        let name = &names[usize::from(name) % names.len()];
        if request.input(name).is_none() {
            let tensor = Tensor { name: name.as_str().into(), datatype, shape: shape.into(), data: data.into() };
            request.inputs.push(tensor);
        }
    }
    let len: usize = request.inputs.iter().map(|tensor| tensor.data.len()).sum();
    if let [first @ 128..=255, second, ..] = input {
        request.priority = u64::from(first % 4);
        request.timeout_us = u64::from(*second) << (first % 64);
        request.parameters.insert("prompt_lookup_num_tokens".into(), Parameter::Int(i64::from(*second) - 8));
    }
    within(len, 4 << 20, 64, || drop(model.parse(&request)));
});
