//! What a model's configuration says about its processes.

use std::path::PathBuf;
use std::time::Duration;

use repository::ModelConfig;
use repository::proto::model_instance_group::Kind;
use serving::{InferError, LoadRequest};

use super::Host;
use super::message::ToProcess;
use super::wire::Writer;
use crate::parameters;

/// What the configuration says.
pub(super) struct Settings {
    pub model: String,
    pub config_json: String,
    pub version: i64,
    pub model_dir: PathBuf,
    pub version_dir: PathBuf,
    pub file: String,
    pub is_decoupled: bool,
    /// Requests without a response are given to the next process when theirs is lost.
    pub retries: bool,
    /// An `execute` that takes longer is taken for hung.
    pub execute_timeout: Option<Duration>,
    pub interpreter: PathBuf,
    /// Each instance has a process on every rank.
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
            file: match config.default_model_filename.as_str() {
                "" => "model.py".to_owned(),
                file => file.to_owned(),
            },
            is_decoupled: config.is_decoupled(),
            retries: parameters::flag(config, "retry_lost_requests")?.unwrap_or(false),
            execute_timeout: parameters::number(config, "execute_timeout_seconds")?.map(Duration::from_secs),
            interpreter: interpreter(host, load)?,
            is_mpi: host.config.hosts.len() > 1
                && parameters::flag(config, "mpi_world")?
                    .unwrap_or_else(|| host.config.mpi_models.contains(&config.name)),
            places: places(config),
        })
    }

    /// What a process must know to load the model, or only to complete its configuration.
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

/// The interpreter that the model brings, else the server's.
fn interpreter(host: &Host, load: &LoadRequest) -> Result<PathBuf, InferError> {
    let Some(path) = load.config.parameter("EXECUTION_ENV_PATH") else { return Ok(host.config.interpreter.clone()) };
    let dir = load.model_dir.to_string_lossy();
    let path = path.replace("$$TRITON_MODEL_DIRECTORY", &dir);
    host.files.interpreter(&load.model_dir.join(path))
}

/// The instances of all groups.
fn places(config: &ModelConfig) -> Vec<Place> {
    let mut places = Vec::new();
    for group in &config.instance_group {
        let kind = match group.kind() {
            Kind::Gpu => "GPU",
            Kind::Model => "MODEL",
            Kind::Cpu | Kind::Auto => "CPU",
        };
        let devices = if group.kind() == Kind::Gpu && !group.gpus.is_empty() { &group.gpus[..] } else { &[0] };
        for &device in devices {
            for _ in 0..group.count.max(1) {
                places.push(Place { name: format!("{}_{}", group.name, places.len()), kind, device });
            }
        }
    }
    places
}
