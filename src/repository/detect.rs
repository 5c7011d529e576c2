//! Which backend a model is for whose configuration does not say: told from its files, as Triton tells it.

use std::fs;
use std::path::Path;

use crate::proto::ModelConfig;

/// What a file of a version's directory says of a model.
struct Sign {
    file: &'static str,
    backend: &'static str,
    /// Empty where a model of this kind has none.
    platform: &'static str,
    entry: Entry,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Entry {
    File,
    Directory,
    Either,
}

const fn sign(file: &'static str, backend: &'static str, platform: &'static str, entry: Entry) -> Sign {
    Sign { file, backend, platform, entry }
}

/// In the order in which they are looked for.
const SIGNS: [Sign; 8] = [
    sign("model.savedmodel", "tensorflow", "tensorflow_savedmodel", Entry::Directory),
    sign("model.graphdef", "tensorflow", "tensorflow_graphdef", Entry::File),
    sign("model.plan", "tensorrt", "tensorrt_plan", Entry::File),
    sign("model.onnx", "onnxruntime", "onnxruntime_onnx", Entry::Either),
    sign("model.xml", "openvino", "", Entry::Either),
    sign("model.pt", "pytorch", "pytorch_libtorch", Entry::File),
    sign("model.pt2", "pytorch_aoti", "torch_aoti", Entry::File),
    sign("model.py", "python", "", Entry::Either),
];

/// Files of a language model's checkpoint, which only our own backend reads.
const CHECKPOINT: [&str; 2] = ["config.json", "weights"];

/// Fills `backend`, and what goes with it, in where `config` names neither a backend nor a platform: from
/// `default_model_filename`, else from the first version's files, else from a model name of the form `model.<backend>`.
/// Leaves `config` as it is where nothing tells.
pub(crate) fn fill(config: &mut ModelConfig, name: &str, first_version: Option<&Path>) {
    let is_told = !config.backend.is_empty() || !config.platform.is_empty() || config.is_ensemble();
    if is_told {
        return;
    }
    let given = config.default_model_filename.as_str();
    let found = SIGNS.iter().find(|sign| match given {
        "" => first_version.is_some_and(|dir| sign.is_in(dir)),
        given => sign.file == given,
    });
    if let Some(sign) = found {
        sign.backend.clone_into(&mut config.backend);
        sign.platform.clone_into(&mut config.platform);
        sign.file.clone_into(&mut config.default_model_filename);
    } else if given.is_empty() && first_version.is_some_and(|dir| CHECKPOINT.iter().any(|file| dir.join(file).exists()))
    {
        "trireme".clone_into(&mut config.backend);
    } else if let (true, Some((_, backend))) = (given.is_empty(), name.split_once('.')) {
        backend.clone_into(&mut config.backend);
        config.default_model_filename = format!("model.{backend}");
    }
}

impl Sign {
    fn is_in(&self, dir: &Path) -> bool {
        fs::metadata(dir.join(self.file)).is_ok_and(|found| match self.entry {
            Entry::File => found.is_file(),
            Entry::Directory => found.is_dir(),
            Entry::Either => true,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guessed(name: &str, file: &str, entries: &[&str]) -> (String, String, String) {
        let dir = tempfile::tempdir().unwrap();
        for entry in entries {
            match entry.strip_suffix('/') {
                Some(folder) => fs::create_dir(dir.path().join(folder)).unwrap(),
                None => fs::write(dir.path().join(entry), "").unwrap(),
            }
        }
        let mut config = ModelConfig { default_model_filename: file.to_owned(), ..ModelConfig::default() };
        fill(&mut config, name, Some(dir.path()));
        (config.backend, config.platform, config.default_model_filename)
    }

    fn told(backend: &str, platform: &str, file: &str) -> (String, String, String) {
        (backend.to_owned(), platform.to_owned(), file.to_owned())
    }

    #[test]
    fn files_tell_the_backend() {
        assert_eq!(guessed("m", "", &["model.py", "weights/"]), told("python", "", "model.py"));
        assert_eq!(guessed("m", "", &["model.onnx/"]), told("onnxruntime", "onnxruntime_onnx", "model.onnx"));
        assert_eq!(guessed("m", "", &["model.plan", "model.py"]), told("tensorrt", "tensorrt_plan", "model.plan"));
        // A plan is a file, and this is none.
        assert_eq!(guessed("m", "", &["model.plan/", "model.py"]), told("python", "", "model.py"));
        assert_eq!(guessed("m", "", &["config.json"]), told("trireme", "", ""));
    }

    #[test]
    fn a_file_name_or_the_models_name_tells_where_no_file_does() {
        assert_eq!(guessed("m", "model.pt", &["model.py"]), told("pytorch", "pytorch_libtorch", "model.pt"));
        assert_eq!(guessed("model.identity", "", &[]), told("identity", "", "model.identity"));
        assert_eq!(guessed("m", "", &["notes.txt"]), told("", "", ""));
        assert_eq!(guessed("model.identity", "my.bin", &[]), told("", "", "my.bin"));
    }
}
