//! Configuration of the Python backend.

use std::path::PathBuf;
use std::time::Duration;

use ipc::Prefix;

/// Configuration of the Python backend.
#[derive(Debug, Clone)]
pub struct PythonConfig {
    /// Prefix of the names of shared memory.
    pub prefix: Prefix,
    /// The interpreter for models without an environment of their own. A plain name is searched in `PATH`.
    pub interpreter: PathBuf,
    /// Size of the first region of shared memory of a process. It is made when a tensor first needs it.
    pub shm_default_bytes: usize,
    /// Smallest size of each further region.
    pub shm_growth_bytes: usize,
    /// How long a process may take to start, before it loads its model.
    pub start_timeout: Duration,
    /// How long `finalize` may take when a model is unloaded.
    pub stop_timeout: Duration,
    /// Whether models' verbose messages are logged.
    pub log_verbose: bool,
    /// Whether models may complete their configurations.
    pub auto_complete: bool,
    /// The host of each rank of the world, rank 0 first.
    pub hosts: Vec<String>,
    /// Counts the GPUs of this node. Called only for a model with an instance on each GPU.
    pub num_gpus: fn() -> Result<usize, String>,
    /// Models with a process on every rank, unless their configuration says otherwise.
    pub mpi_models: Vec<String>,
    /// Environment variables that models get although their names suggest secrets.
    pub pass_environment: Vec<String>,
}

impl PythonConfig {
    /// Triton's defaults, with shared memory named by `prefix`.
    pub fn new(prefix: Prefix) -> Self {
        Self {
            prefix,
            interpreter: "python3".into(),
            shm_default_bytes: 1 << 20,
            shm_growth_bytes: 1 << 20,
            start_timeout: Duration::from_secs(30),
            stop_timeout: Duration::from_secs(10),
            log_verbose: false,
            auto_complete: true,
            hosts: Vec::new(),
            num_gpus: || Ok(0),
            mpi_models: vec!["tensorrt_llm".to_owned()],
            pass_environment: Vec::new(),
        }
    }

    /// Applies one `KEY=VALUE` of `--backend-config=python,KEY=VALUE`. The prefix is set by [`PythonConfig::new`].
    ///
    /// # Errors
    /// When the key is unknown or the value is invalid.
    pub fn set(&mut self, key: &str, value: &str) -> Result<(), String> {
        let number = || {
            let found = value.parse::<usize>().ok().filter(|&number| number > 0);
            found.ok_or_else(|| format!("`{key}={value}` of the Python backend is not a number above 0"))
        };
        match key {
            "shm-default-byte-size" => self.shm_default_bytes = number()?,
            "shm-growth-byte-size" => self.shm_growth_bytes = number()?,
            "stub-timeout-seconds" => self.start_timeout = Duration::from_secs(number()? as u64),
            "stop-timeout-seconds" => self.stop_timeout = Duration::from_secs(number()? as u64),
            "interpreter" => self.interpreter = value.into(),
            "mpi-models" => self.mpi_models = value.split(',').map(str::to_owned).collect(),
            "pass-environment" => {
                let names = value.split(':').map(str::to_owned).collect::<Vec<_>>();
                if names.iter().any(|name| name.is_empty() || name.contains(['=', '*'])) {
                    return Err(format!(
                        "`{key}={value}` of the Python backend is not of the form NAME:NAME, with whole names of variables"
                    ));
                }
                self.pass_environment = names;
            }
            // Accepted so that command lines for Triton work. The rank sets the prefix; the others have no meaning here.
            "shm-region-prefix-name" | "stub-message-queue-size" | "default-max-batch-size" => {}
            _ => {
                return Err(format!(
                    "the Python backend has no setting `{key}`; it has shm-default-byte-size, shm-growth-byte-size, \
                     stub-timeout-seconds, stop-timeout-seconds, mpi-models, pass-environment and interpreter"
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_to_pass_are_whole_names() {
        let mut config = PythonConfig::new("python_config_test_".parse().unwrap());
        config.set("pass-environment", "HF_TOKEN:AWS_REGION").unwrap();
        assert_eq!(config.pass_environment, ["HF_TOKEN", "AWS_REGION"]);
        for refused in ["", "HF_TOKEN:", "AWS_*", "A=B"] {
            let why = config.set("pass-environment", refused).unwrap_err();
            assert!(why.starts_with(&format!("`pass-environment={refused}` ")), "{why}");
        }
    }
}
