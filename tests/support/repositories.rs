//! Model repositories for tests: the shipped one, and changed copies of it.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

/// The shipped repository.
pub fn shipped_repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("model_repository")
}

/// A copy of the shipped repository that a test may change.
pub fn copied_repository() -> tempfile::TempDir {
    let scratch = tempfile::tempdir().expect("a scratch directory");
    copy(&shipped_repository(), scratch.path());
    scratch
}

/// A copy of the shipped repository whose language model has another `dynamic_batching` block and further parameters.
pub fn repository_with_queue(max_batch_size: u32, batching: &str, parameters: &[(&str, u32)]) -> tempfile::TempDir {
    let repository = copied_repository();
    let path = repository.path().join("tensorrt_llm/config.pbtxt");
    let config = fs::read_to_string(&path).unwrap();
    let (before, rest) = config.split_once("dynamic_batching {").expect("the shipped model has a queue");
    let (_, after) = rest.split_once("\n}\n").expect("its queue ends");
    let mut config = format!("{before}dynamic_batching {{ {batching} }}\n{after}")
        .replace("max_batch_size: 64", &format!("max_batch_size: {max_batch_size}"));
    for (key, value) in parameters {
        let others: Vec<&str> = config.lines().filter(|line| !line.contains(&format!("\"{key}\""))).collect();
        let parameter = format!("parameters {{ key: \"{key}\" value: {{ string_value: \"{value}\" }} }}");
        config = others.join("\n") + "\n" + &parameter + "\n";
    }
    fs::write(&path, config).unwrap();
    repository
}

/// Converts every tensor of a bf16 safetensors file to f32.
pub fn widen(path: &Path) {
    let bytes = std::fs::read(path).unwrap();
    let header_len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut header: Value = serde_json::from_slice(&bytes[8..8 + header_len]).unwrap();
    for (name, tensor) in header.as_object_mut().unwrap() {
        if name == "__metadata__" {
            continue;
        }
        assert_eq!(tensor["dtype"], "BF16", "{name}");
        tensor["dtype"] = "F32".into();
        let offsets = tensor["data_offsets"].as_array_mut().unwrap();
        offsets.iter_mut().for_each(|offset| *offset = (2 * offset.as_u64().unwrap()).into());
    }
    let header = header.to_string();
    let mut widened = (header.len() as u64).to_le_bytes().to_vec();
    widened.extend_from_slice(header.as_bytes());
    widened.extend(bytes[8 + header_len..].chunks_exact(2).flat_map(|bf16| [0, 0, bf16[0], bf16[1]]));
    std::fs::write(path, widened).unwrap();
}

/// Adds parameters to a model of a copied repository.
pub fn set_parameters(repository: &tempfile::TempDir, model: &str, parameters: &[(&str, &str)]) {
    let file = repository.path().join(model).join("config.pbtxt");
    let mut text = fs::read_to_string(&file).expect("the model has a configuration");
    for (key, value) in parameters {
        text += &format!("parameters {{ key: \"{key}\" value: {{ string_value: \"{value}\" }} }}\n");
    }
    fs::write(&file, text).expect("a copy can be written");
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap().flatten() {
        let target = to.join(entry.file_name());
        match entry.path().is_dir() {
            true => copy(&entry.path(), &target),
            false => drop(fs::copy(entry.path(), target).unwrap()),
        }
    }
}

/// A checkpoint of `tests/goldens`.
pub fn golden_dir(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens").join(case)
}

/// A repository with the language model alone, for a checkpoint of `tests/goldens`.
pub fn golden_repository(case: &str, parameters: &[(&str, &str)]) -> tempfile::TempDir {
    let repository = copied_repository();
    for model in ["ensemble", "preprocessing", "postprocessing"] {
        fs::remove_dir_all(repository.path().join(model)).unwrap();
    }
    let model = repository.path().join("tensorrt_llm");
    let version = model.join("1");
    fs::remove_dir_all(&version).unwrap();
    fs::create_dir(&version).unwrap();
    for file in ["config.json", "model.safetensors"] {
        fs::copy(golden_dir(case).join(file), version.join(file)).unwrap();
    }
    let config = model.join("config.pbtxt");
    let text = fs::read_to_string(&config).unwrap();
    let replaced = |line: &&str| !parameters.iter().any(|(key, _)| line.contains(&format!("\"{key}\"")));
    fs::write(&config, text.lines().filter(replaced).map(|line| format!("{line}\n")).collect::<String>()).unwrap();
    set_parameters(&repository, "tensorrt_llm", parameters);
    repository
}
