//! Detects the backend of a model from its files if the configuration names none, like Triton.

use std::fs;
use std::path::Path;

use crate::proto::ModelConfig;

/// A file or directory in a version directory that identifies a backend.
struct Marker {
    file: &'static str,
    backend: &'static str,
    /// Empty if the backend has no platform.
    platform: &'static str,
    entry: Entry,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Entry {
    File,
    Directory,
    Either,
}

const fn marker(file: &'static str, backend: &'static str, platform: &'static str, entry: Entry) -> Marker {
    Marker { file, backend, platform, entry }
}

/// In order of precedence.
const MARKERS: [Marker; 8] = [
    marker("model.savedmodel", "tensorflow", "tensorflow_savedmodel", Entry::Directory),
    marker("model.graphdef", "tensorflow", "tensorflow_graphdef", Entry::File),
    marker("model.plan", "tensorrt", "tensorrt_plan", Entry::File),
    marker("model.onnx", "onnxruntime", "onnxruntime_onnx", Entry::Either),
    marker("model.xml", "openvino", "", Entry::Either),
    marker("model.pt", "pytorch", "pytorch_libtorch", Entry::File),
    marker("model.pt2", "pytorch_aoti", "torch_aoti", Entry::File),
    marker("model.py", "python", "", Entry::Either),
];

/// Files of a language model's checkpoint, which only the backend `trireme` reads.
const CHECKPOINT: [&str; 2] = ["config.json", "weights"];

/// Sets `backend`, `platform` and `default_model_filename` if `config` names neither a backend nor a platform. The sources are
/// `default_model_filename`, else the files of the first version, else a model name of the form `model.<backend>`. Without any of
/// them `config` is unchanged.
pub(crate) fn fill(config: &mut ModelConfig, name: &str, first_version: Option<&Path>) {
    let is_known = !config.backend.is_empty() || !config.platform.is_empty() || config.is_ensemble();
    if is_known {
        return;
    }
    let given = config.default_model_filename.as_str();
    let found = MARKERS.iter().find(|marker| match given {
        "" => first_version.is_some_and(|dir| marker.is_in(dir)),
        given => marker.file == given,
    });
    if let Some(marker) = found {
        marker.backend.clone_into(&mut config.backend);
        marker.platform.clone_into(&mut config.platform);
        marker.file.clone_into(&mut config.default_model_filename);
    } else if given.is_empty() && first_version.is_some_and(|dir| CHECKPOINT.iter().any(|file| dir.join(file).exists()))
    {
        "trireme".clone_into(&mut config.backend);
    } else if let (true, Some((_, backend))) = (given.is_empty(), name.split_once('.')) {
        backend.clone_into(&mut config.backend);
        config.default_model_filename = format!("model.{backend}");
    }
}

impl Marker {
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

    fn detected(name: &str, file: &str, entries: &[&str]) -> (String, String, String) {
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

    fn expected(backend: &str, platform: &str, file: &str) -> (String, String, String) {
        (backend.to_owned(), platform.to_owned(), file.to_owned())
    }

    #[test]
    fn files_determine_the_backend() {
        assert_eq!(detected("m", "", &["model.py", "weights/"]), expected("python", "", "model.py"));
        assert_eq!(detected("m", "", &["model.onnx/"]), expected("onnxruntime", "onnxruntime_onnx", "model.onnx"));
        assert_eq!(detected("m", "", &["model.plan", "model.py"]), expected("tensorrt", "tensorrt_plan", "model.plan"));
        // `model.plan` must be a file.
        assert_eq!(detected("m", "", &["model.plan/", "model.py"]), expected("python", "", "model.py"));
        assert_eq!(detected("m", "", &["config.json"]), expected("trireme", "", ""));
    }

    #[test]
    fn without_a_known_file_the_file_name_or_the_models_name_determines_the_backend() {
        assert_eq!(detected("m", "model.pt", &["model.py"]), expected("pytorch", "pytorch_libtorch", "model.pt"));
        assert_eq!(detected("model.identity", "", &[]), expected("identity", "", "model.identity"));
        assert_eq!(detected("m", "", &["notes.txt"]), expected("", "", ""));
        assert_eq!(detected("model.identity", "my.bin", &[]), expected("", "", "my.bin"));
    }
}
