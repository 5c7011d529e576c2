//! Settings of a model's processes, from its configuration.

use std::path::PathBuf;
use std::time::Duration;

use repository::ModelConfig;
use repository::proto::model_instance_group::Kind;
use serving::{InferError, LoadRequest};

use super::host::Host;
use super::message::ToProcess;
use super::wire::Writer;
use crate::parameters;

/// Settings of a model's processes.
pub(super) struct Settings {
    pub model: String,
    pub config_json: String,
    pub version: i64,
    pub model_dir: PathBuf,
    pub version_dir: PathBuf,
    pub file: String,
    pub is_decoupled: bool,
    /// Whether requests without a response are sent to the next process when theirs ends.
    pub retries: bool,
    /// The process is killed when an `execute` takes longer.
    pub execute_timeout: Option<Duration>,
    pub interpreter: PathBuf,
    /// Whether each instance has a process on every rank.
    pub is_mpi: bool,
    pub places: Vec<Place>,
}

/// Name and device of an instance.
pub(super) struct Place {
    pub name: String,
    pub kind: &'static str,
    pub device: i32,
}

impl Settings {
    pub fn new(host: &Host, load: &LoadRequest) -> Result<Self, InferError> {
        let config = &load.config;
        let absolute = |path: &PathBuf| std::path::absolute(path).unwrap_or_else(|_| path.clone());
        Ok(Self {
            model: config.name.clone(),
            config_json: repository::to_json(config),
            version: load.version,
            model_dir: absolute(&load.model_dir),
            version_dir: absolute(&load.version_dir),
            file: code(load)?,
            is_decoupled: config.is_decoupled(),
            retries: parameters::flag(config, "retry_lost_requests")?.unwrap_or(false),
            execute_timeout: parameters::number(config, "execute_timeout_seconds")?.map(Duration::from_secs),
            interpreter: interpreter(host, load)?,
            is_mpi: host.config.hosts.len() > 1
                && parameters::flag(config, "mpi_world")?
                    .unwrap_or_else(|| host.config.mpi_models.contains(&config.name)),
            places: places(config, host.config.num_gpus),
        })
    }

    /// The message that makes a process load the model, or only complete the configuration `complete`.
    pub fn load_message(&self, place: &Place, log_verbose: bool, complete: Option<&str>) -> Vec<u8> {
        let mut message = Writer::begin(2);
        message.int(ToProcess::Load as u8);
        message.begin_dict();
        for (key, value) in [
            ("model_dir", self.model_dir.to_string_lossy().as_ref()),
            ("version_dir", self.version_dir.to_string_lossy().as_ref()),
            ("file", &self.file),
        ] {
            message.text(key);
            message.text(value);
        }
        for (key, value) in [("is_decoupled", self.is_decoupled), ("log_verbose", log_verbose)] {
            message.text(key);
            message.bool(value);
        }
        message.text("complete");
        match complete {
            Some(config) => message.text(config),
            None => message.none(),
        }
        message.text("args");
        message.begin_dict();
        for (key, value) in [
            ("model_config", self.config_json.as_str()),
            ("model_instance_kind", place.kind),
            ("model_instance_name", &place.name),
            ("model_instance_device_id", &place.device.to_string()),
            ("model_repository", &self.model_dir.to_string_lossy()),
            ("model_version", &self.version.to_string()),
            ("model_name", &self.model),
        ] {
            message.text(key);
            message.text(value);
        }
        message.end_dict();
        message.end_dict();
        message.finish()
    }
}

/// The name of the file with a model's code.
///
/// # Errors
/// When the file does not exist.
pub(crate) fn code(load: &LoadRequest) -> Result<String, InferError> {
    let file = file_name(&load.config);
    let path = load.version_dir.join(file);
    match path.is_file() {
        true => Ok(file.to_owned()),
        false => Err(InferError::invalid(format!(
            "model `{}` has no {}; put the model's code there",
            load.config.name,
            path.display()
        ))),
    }
}

/// The name of the file with a model's code, in its version directory.
pub(crate) fn file_name(config: &ModelConfig) -> &str {
    match config.default_model_filename.as_str() {
        "" => "model.py",
        file => file,
    }
}

/// The interpreter of the model's own environment, or else the server's.
fn interpreter(host: &Host, load: &LoadRequest) -> Result<PathBuf, InferError> {
    let Some(path) = load.config.parameter("EXECUTION_ENV_PATH") else { return Ok(host.config.interpreter.clone()) };
    let dir = load.model_dir.to_string_lossy();
    let path = path.replace("$$TRITON_MODEL_DIRECTORY", &dir);
    host.files.interpreter(&load.model_dir.join(path))
}

/// The instances of all groups. A group of kind GPU that names no GPU has instances on all GPUs.
fn places(config: &ModelConfig, num_gpus: fn() -> Result<usize, String>) -> Vec<Place> {
    let mut places = Vec::new();
    for group in &config.instance_group {
        let kind = match group.kind() {
            Kind::Gpu => "GPU",
            Kind::Model => "MODEL",
            Kind::Cpu | Kind::Auto => "CPU",
        };
        let devices = match group.kind() {
            Kind::Gpu if group.gpus.is_empty() => all_gpus(config, num_gpus()),
            Kind::Gpu => group.gpus.clone(),
            _ => vec![0],
        };
        for device in devices {
            for _ in 0..group.count.max(1) {
                places.push(Place { name: format!("{}_{}", group.name, places.len()), kind, device });
            }
        }
    }
    places
}

fn all_gpus(config: &ModelConfig, num_gpus: Result<usize, String>) -> Vec<i32> {
    let found =
        num_gpus.and_then(|found| if found == 0 { Err("there is no NVIDIA driver".to_owned()) } else { Ok(found) });
    let num_gpus = found.unwrap_or_else(|reason| {
        tracing::warn!(model = config.name, "KIND_GPU, but one instance is started with device id 0: {reason}");
        1
    });
    (0..num_gpus).filter_map(|device| i32::try_from(device).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn devices(group: &str, num_gpus: fn() -> Result<usize, String>) -> Vec<(&'static str, i32)> {
        let json = format!(r#"{{"name": "m", "backend": "python", "instance_group": [{{{group}}}]}}"#);
        let config = repository::from_json("m", &json).unwrap();
        places(&config, num_gpus).iter().map(|place| (place.kind, place.device)).collect()
    }

    #[test]
    fn instances_are_on_the_devices_of_their_groups() {
        let not_counted = || unreachable!("GPUs are counted only if a group names none");
        assert_eq!(devices(r#""kind": "KIND_CPU", "count": 2"#, not_counted), [("CPU", 0), ("CPU", 0)]);
        assert_eq!(devices(r#""kind": "KIND_MODEL""#, not_counted), [("MODEL", 0)]);
        let two = r#""kind": "KIND_GPU", "gpus": [1, 3]"#;
        assert_eq!(devices(two, not_counted), [("GPU", 1), ("GPU", 3)]);
        let all = r#""kind": "KIND_GPU", "count": 2"#;
        assert_eq!(devices(all, || Ok(2)), [("GPU", 0), ("GPU", 0), ("GPU", 1), ("GPU", 1)]);
        assert_eq!(devices(all, || Ok(0)), [("GPU", 0), ("GPU", 0)]);
    }
}
