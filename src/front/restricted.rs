//! APIs that only clients with a key may use.

use std::collections::BTreeMap;
use std::str::FromStr;

use http::HeaderMap;

use crate::http_route::Route;

/// A group of calls that is restricted together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Api {
    /// Live and ready.
    Health,
    /// Metadata of the server and of models.
    Metadata,
    /// Infer, generate and streams.
    Inference,
    /// Status, registration and the end of shared memory.
    SharedMemory,
    /// Configurations of models.
    ModelConfig,
    /// Index, load and unload.
    ModelRepository,
    /// Statistics.
    Statistics,
    /// Trace settings.
    Trace,
    /// Log settings.
    Logging,
}

/// Names on the command line.
const NAMES: [(&str, Api); 9] = [
    ("health", Api::Health),
    ("metadata", Api::Metadata),
    ("inference", Api::Inference),
    ("shared-memory", Api::SharedMemory),
    ("model-config", Api::ModelConfig),
    ("model-repository", Api::ModelRepository),
    ("statistics", Api::Statistics),
    ("trace", Api::Trace),
    ("logging", Api::Logging),
];

impl Api {
    /// Where an HTTP path belongs.
    pub(crate) fn of_route(route: &Route<'_>) -> Self {
        match route {
            Route::Live | Route::Ready | Route::ModelReady(_) => Api::Health,
            Route::ServerMetadata | Route::ModelMetadata(_) => Api::Metadata,
            Route::Infer(_) | Route::Generate(_) | Route::GenerateStream(_) => Api::Inference,
            Route::MemoryStatus { .. } | Route::MemoryRegister { .. } | Route::MemoryUnregister { .. } => {
                Api::SharedMemory
            }
            Route::ModelConfig(_) => Api::ModelConfig,
            Route::RepositoryIndex | Route::LoadModel(_) | Route::UnloadModel(_) | Route::NamedRepository => {
                Api::ModelRepository
            }
            Route::ModelStatistics(_) => Api::Statistics,
            Route::TraceSetting { .. } => Api::Trace,
            Route::Logging => Api::Logging,
        }
    }

    /// Where the path of an RPC belongs; `None` for one that is never restricted.
    pub(crate) fn of_rpc(path: &str) -> Option<Self> {
        if path.starts_with("/grpc.health.v1.Health/") {
            return Some(Api::Health);
        }
        Some(match path.strip_prefix("/inference.GRPCInferenceService/")? {
            "ServerLive" | "ServerReady" | "ModelReady" => Api::Health,
            "ServerMetadata" | "ModelMetadata" => Api::Metadata,
            "ModelConfig" => Api::ModelConfig,
            "ModelStatistics" => Api::Statistics,
            "TraceSetting" => Api::Trace,
            "LogSettings" => Api::Logging,
            method if method.contains("SharedMemory") => Api::SharedMemory,
            method if method.starts_with("Repository") => Api::ModelRepository,
            _ => Api::Inference, // A method that comes later is restricted with what matters most.
        })
    }
}

/// The header that opens an API, and its value.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Key {
    header: String,
    value: String,
}

/// Which APIs need which header. Empty: all are open.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Restrictions {
    keys: BTreeMap<Api, Key>,
}

impl Restrictions {
    /// Restricts further APIs; `rule` is `APIS:HEADER=VALUE`, the APIs separated by commas.
    ///
    /// # Errors
    /// When it is not of that form, an API is unknown, or it is restricted already.
    pub fn add(&mut self, rule: &str) -> Result<(), String> {
        let form = || format!("`{rule}` is not of the form `APIS:HEADER=VALUE`");
        let (apis, key) = rule.split_once(':').ok_or_else(form)?;
        let (header, value) = key.split_once('=').ok_or_else(form)?;
        if header.is_empty() || value.is_empty() {
            return Err(form());
        }
        for name in apis.split(',') {
            let api = NAMES.iter().find(|(known, _)| *known == name).map(|(_, api)| *api).ok_or_else(|| {
                let known: Vec<&str> = NAMES.iter().map(|(name, _)| *name).collect();
                format!("`{name}` is no API that can be restricted; these are: {}", known.join(", "))
            })?;
            let key = Key { header: header.to_ascii_lowercase(), value: value.to_owned() };
            if self.keys.insert(api, key).is_some() {
                return Err(format!("`{name}` is restricted twice; give it one key"));
            }
        }
        Ok(())
    }

    /// The same with `prefix` before every header's name, as gRPC's metadata has it.
    pub fn with_prefix(mut self, prefix: &str) -> Self {
        self.keys.values_mut().for_each(|key| key.header = format!("{prefix}{}", key.header));
        self
    }

    /// Whether a request with these headers may use `api`.
    ///
    /// # Errors
    /// With the name of the header that is missing or wrong.
    pub(crate) fn check(&self, api: Api, headers: &HeaderMap) -> Result<(), &str> {
        let Some(key) = self.keys.get(&api) else { return Ok(()) };
        let given = headers.get(&key.header).map(|value| value.as_bytes());
        if given.is_some_and(|given| same(given, key.value.as_bytes())) { Ok(()) } else { Err(&key.header) }
    }
}

/// Equality in a time that does not tell how much of a secret was right.
fn same(left: &[u8], right: &[u8]) -> bool {
    left.len() == right.len() && left.iter().zip(right).fold(0, |all, (left, right)| all | (left ^ right)) == 0
}

impl FromStr for Restrictions {
    type Err = String;

    fn from_str(rule: &str) -> Result<Self, String> {
        let mut restrictions = Self::default();
        restrictions.add(rule).map(|()| restrictions)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(name: &'static str, value: &'static str) -> HeaderMap {
        HeaderMap::from_iter([(http::HeaderName::from_static(name), http::HeaderValue::from_static(value))])
    }

    #[test]
    fn a_restricted_api_opens_with_its_key_alone() {
        let rules: Restrictions = "model-repository,logging:Admin-Key=s3cret".parse().unwrap();
        assert_eq!(rules.check(Api::Logging, &headers("admin-key", "s3cret")), Ok(()));
        assert_eq!(rules.check(Api::Logging, &headers("admin-key", "s3creT")), Err("admin-key"));
        assert_eq!(rules.check(Api::ModelRepository, &HeaderMap::new()), Err("admin-key"));
        assert_eq!(rules.check(Api::Inference, &HeaderMap::new()), Ok(()));
        let rules = rules.with_prefix("triton-grpc-protocol-");
        assert_eq!(rules.check(Api::Logging, &HeaderMap::new()), Err("triton-grpc-protocol-admin-key"));
    }

    #[test]
    fn rules_that_cannot_be_are_refused() {
        for (rule, words) in [
            ("logging", "APIS:HEADER=VALUE"),
            ("logging:key", "APIS:HEADER=VALUE"),
            ("logging:key=", "APIS:HEADER=VALUE"),
            ("loging:key=1", "these are: health, metadata"),
            ("logging,logging:key=1", "restricted twice"),
        ] {
            let error = rule.parse::<Restrictions>().unwrap_err();
            assert!(error.contains(words), "{rule}: {error}");
        }
    }

    #[test]
    fn every_call_belongs_to_an_api() {
        let of = |method: &str| Api::of_rpc(&format!("/inference.GRPCInferenceService/{method}")).unwrap();
        assert_eq!(of("ModelStreamInfer"), Api::Inference);
        assert_eq!(of("RepositoryModelLoad"), Api::ModelRepository);
        assert_eq!(of("CudaSharedMemoryStatus"), Api::SharedMemory);
        assert_eq!(Api::of_rpc("/grpc.health.v1.Health/Check"), Some(Api::Health));
        assert_eq!(Api::of_rpc("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"), None);
    }
}
