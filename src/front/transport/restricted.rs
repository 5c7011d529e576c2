//! APIs that require a key.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::hint::black_box;

use http::HeaderMap;

use crate::api::triton::http::route::Route;

/// A group of calls that can be restricted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Api {
    /// Liveness and readiness.
    Health,
    /// Metadata of the server and of models.
    Metadata,
    /// Inference, generation and streams.
    Inference,
    /// Registration and status of shared memory.
    SharedMemory,
    /// Model configurations.
    ModelConfig,
    /// Index, load and unload of models.
    ModelRepository,
    /// Statistics.
    Statistics,
    /// Trace settings.
    Trace,
    /// Log settings.
    Logging,
    /// The metrics port; HTTP only.
    Metrics,
    /// Server reflection; gRPC only.
    Reflection,
}

/// Names on the command line.
const NAMES: [(&str, Api); 11] = [
    ("health", Api::Health),
    ("metadata", Api::Metadata),
    ("inference", Api::Inference),
    ("shared-memory", Api::SharedMemory),
    ("model-config", Api::ModelConfig),
    ("model-repository", Api::ModelRepository),
    ("statistics", Api::Statistics),
    ("trace", Api::Trace),
    ("logging", Api::Logging),
    ("metrics", Api::Metrics),
    ("reflection", Api::Reflection),
];

impl Api {
    fn of_name(name: &str) -> Result<Self, String> {
        NAMES.iter().find(|(known, _)| *known == name).map(|(_, api)| *api).ok_or_else(|| {
            let known: Vec<&str> = NAMES.iter().map(|(name, _)| *name).collect();
            format!("`{name}` is no API that can be restricted; these are: {}", known.join(", "))
        })
    }

    /// The API of an HTTP route.
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

    /// The API of an RPC path; `None` for an unknown path.
    pub(crate) fn of_rpc(path: &str) -> Option<Self> {
        if path.starts_with("/grpc.health.v1.Health/") {
            return Some(Api::Health);
        }
        if path.starts_with("/grpc.reflection.v1.") || path.starts_with("/grpc.reflection.v1alpha.") {
            return Some(Api::Reflection);
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
            _ => Api::Inference, // Unknown methods are restricted like inference.
        })
    }
}

/// A header that grants access to an API, and its accepted values.
#[derive(Clone, PartialEq, Eq)]
struct Rule {
    header: String,
    /// Whether the value may follow `Bearer`, as in `Authorization: Bearer VALUE`.
    is_bearer: bool,
    keys: Vec<String>,
}

/// Shows the number of keys, but no key.
impl fmt::Debug for Rule {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}: {} keys", self.header, self.keys.len())
    }
}

/// A refusal: the key that is missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Denied<'a> {
    /// The header that is missing or wrong.
    pub header: &'a str,
    /// Whether `Authorization: Bearer KEY` was expected.
    pub is_bearer: bool,
}

/// The headers that APIs require. By default no API is restricted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Restrictions {
    rules: BTreeMap<Api, Vec<Rule>>,
}

/// The headers in which clients usually send keys.
const AUTHORIZATION: &str = "authorization";
const API_KEY: &str = "x-api-key";

impl Restrictions {
    /// Restricts APIs, or adds keys to restricted ones. `rule` is `APIS:HEADER=VALUE` with comma-separated APIs; `keys_of` returns
    /// the keys for VALUE.
    ///
    /// # Errors
    /// When the rule has another form, an API is unknown, or there are no keys. The message contains no key.
    pub fn add(&mut self, rule: &str, keys_of: impl FnOnce(&str) -> Result<Vec<String>, String>) -> Result<(), String> {
        let form = || format!("`{}` is not of the form `APIS:HEADER=VALUE`", without_value(rule));
        let (apis, key) = rule.split_once(':').ok_or_else(form)?;
        let (header, value) = key.split_once('=').ok_or_else(form)?;
        if header.is_empty() || value.is_empty() {
            return Err(form());
        }
        let apis: Vec<Api> = apis.split(',').map(Api::of_name).collect::<Result<_, _>>()?;
        let keys = keys_of(value).map_err(|why| format!("`{}`: {why}", without_value(rule)))?;
        let header = header.to_ascii_lowercase();
        let is_bearer = header == AUTHORIZATION;
        apis.into_iter().for_each(|api| self.restrict(api, &header, is_bearer, &keys));
        Ok(())
    }

    /// Restricts an API to clients that send one of `keys` as `Authorization: Bearer KEY` or as `x-api-key: KEY`.
    pub fn add_keys(&mut self, api: Api, keys: &[String]) {
        self.restrict(api, AUTHORIZATION, true, keys);
        self.restrict(api, API_KEY, false, keys);
    }

    fn restrict(&mut self, api: Api, header: &str, is_bearer: bool, keys: &[String]) {
        let bare = |key: &String| if is_bearer { without_scheme(key.as_bytes()).len() } else { key.len() };
        let keys = keys.iter().map(|key| key[key.len() - bare(key)..].to_owned());
        let keys = keys.filter(|key| !key.is_empty()).collect(); // An empty key would match every client.
        self.rules.entry(api).or_default().push(Rule { header: header.to_owned(), is_bearer, keys });
    }

    /// Adds `prefix` to the names of all headers, for gRPC metadata.
    pub fn with_prefix(mut self, prefix: &str) -> Self {
        self.rules.values_mut().flatten().for_each(|rule| rule.header = format!("{prefix}{}", rule.header));
        self
    }

    /// The names of the headers in which clients send keys: the usual ones, and those of the rules.
    pub(crate) fn key_headers(&self) -> BTreeSet<&str> {
        let of_rules = self.rules.values().flatten().map(|rule| rule.header.as_str());
        of_rules.chain([AUTHORIZATION, API_KEY]).collect()
    }

    /// Whether `api` requires a key.
    pub fn restricts(&self, api: Api) -> bool {
        self.rules.contains_key(&api)
    }

    /// Checks that a request with these headers may use `api`.
    ///
    /// # Errors
    /// When the key is missing or wrong, with the expected header.
    pub(crate) fn check(&self, api: Api, headers: &HeaderMap) -> Result<(), Denied<'_>> {
        let Some(rules) = self.rules.get(&api) else { return Ok(()) };
        // All keys are compared, so that the duration reveals nothing about them.
        let matches = rules.iter().fold(false, |matches, rule| rule.matches(headers) | matches);
        let expected = rules.iter().find(|rule| rule.header == AUTHORIZATION).unwrap_or(&rules[0]);
        if matches {
            Ok(())
        } else {
            Err(Denied { header: &expected.header, is_bearer: expected.header == AUTHORIZATION })
        }
    }
}

impl Rule {
    fn matches(&self, headers: &HeaderMap) -> bool {
        let Some(given) = headers.get(&self.header) else { return false };
        let given = if self.is_bearer { without_scheme(given.as_bytes()) } else { given.as_bytes() };
        self.keys.iter().fold(false, |matches, key| constant_time_eq(given, key.as_bytes()) | matches)
    }
}

/// The token after `Bearer`, or the whole value.
fn without_scheme(value: &[u8]) -> &[u8] {
    match value.split_at_checked("Bearer ".len()) {
        Some((scheme, token)) if scheme.eq_ignore_ascii_case(b"Bearer ") => token.trim_ascii(),
        _ => value,
    }
}

/// A rule for messages, without its value, which may be a key.
fn without_value(rule: &str) -> String {
    match rule.split_once('=') {
        Some((apis, _)) => format!("{apis}=…"),
        None => rule.to_owned(),
    }
}

/// Equality in constant time with respect to the key. By hand, because `subtle` returns at once if the lengths differ, which
/// reveals the length of the key.
fn constant_time_eq(given: &[u8], key: &[u8]) -> bool {
    let differences = given.iter().zip(key.iter().cycle()).fold(0, |all, (left, right)| all | (left ^ right));
    black_box(differences) == 0 && given.len() == key.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(name: &'static str, value: &'static str) -> HeaderMap {
        HeaderMap::from_iter([(http::HeaderName::from_static(name), http::HeaderValue::from_static(value))])
    }

    fn parse(rules: &[&str]) -> Result<Restrictions, String> {
        let mut restrictions = Restrictions::default();
        let literally = |value: &str| Ok(vec![value.to_owned()]);
        rules.iter().try_for_each(|rule| restrictions.add(rule, literally)).map(|()| restrictions)
    }

    fn denied(header: &str) -> Result<(), Denied<'_>> {
        Err(Denied { header, is_bearer: header == AUTHORIZATION })
    }

    #[test]
    fn a_restricted_api_requires_its_key() {
        let rules = parse(&["model-repository,logging:Admin-Key=s3cret"]).unwrap();
        assert_eq!(rules.check(Api::Logging, &headers("admin-key", "s3cret")), Ok(()));
        for wrong in ["s3creT", "s3cre", "s3crets3cret", "", "x"] {
            assert_eq!(rules.check(Api::Logging, &headers("admin-key", wrong)), denied("admin-key"), "{wrong}");
        }
        assert_eq!(rules.check(Api::ModelRepository, &HeaderMap::new()), denied("admin-key"));
        assert_eq!(rules.check(Api::Inference, &HeaderMap::new()), Ok(()));
        let rules = rules.with_prefix("triton-grpc-protocol-");
        assert_eq!(rules.check(Api::Logging, &HeaderMap::new()), denied("triton-grpc-protocol-admin-key"));
    }

    #[test]
    fn each_of_several_keys_is_accepted() {
        let rules = parse(&["logging:a=one", "logging,trace:a=two", "logging:b=three"]).unwrap();
        for (header, key) in [("a", "one"), ("a", "two"), ("b", "three")] {
            assert_eq!(rules.check(Api::Logging, &headers(header, key)), Ok(()), "{header}: {key}");
        }
        assert_eq!(rules.check(Api::Logging, &headers("b", "one")), denied("a"));
        assert_eq!(rules.check(Api::Trace, &headers("a", "one")), denied("a"));
    }

    #[test]
    fn a_bearer_token_is_the_key() {
        let rules = parse(&["inference:Authorization=t0ken"]).unwrap();
        let with_scheme = parse(&["inference:authorization=Bearer t0ken"]).unwrap();
        for rules in [rules, with_scheme] {
            for given in ["Bearer t0ken", "bearer  t0ken", "t0ken"] {
                assert_eq!(rules.check(Api::Inference, &headers("authorization", given)), Ok(()), "{given}");
            }
            assert_eq!(rules.check(Api::Inference, &HeaderMap::new()), denied("authorization"));
            for given in ["Bearer t0kens", "Basic t0ken", "Bearer", "Bearer "] {
                let found = rules.check(Api::Inference, &headers("authorization", given));
                assert_eq!(found, denied("authorization"), "{given}");
            }
        }
        let closed = parse(&["inference:authorization=Bearer "]).unwrap();
        for given in ["Bearer ", "Bearer", ""] {
            assert!(closed.check(Api::Inference, &headers("authorization", given)).is_err(), "{given}");
        }
        let mut keys = parse(&["inference:k=1"]).unwrap();
        keys.add_keys(Api::Inference, &["one".to_owned(), "two".to_owned()]);
        for (header, given) in [("authorization", "Bearer two"), ("x-api-key", "one"), ("k", "1")] {
            assert_eq!(keys.check(Api::Inference, &headers(header, given)), Ok(()), "{header}");
        }
        assert_eq!(keys.check(Api::Inference, &headers("k", "one")), denied("authorization"));
    }

    #[test]
    fn invalid_rules_are_refused_and_no_key_is_shown() {
        for (rule, words) in [
            ("logging", "APIS:HEADER=VALUE"),
            ("logging:key", "APIS:HEADER=VALUE"),
            ("logging:key=", "APIS:HEADER=VALUE"),
            ("loging:key=s3cret", "these are: health, metadata"),
            ("logging:=s3cret", "APIS:HEADER=VALUE"),
        ] {
            let error = parse(&[rule]).unwrap_err();
            assert!(error.contains(words) && !error.contains("s3cret"), "{rule}: {error}");
        }
        let shown = format!("{:?}", parse(&["logging:key=s3cret"]).unwrap());
        assert!(shown.contains("key: 1 keys") && !shown.contains("s3cret"), "{shown}");
    }

    #[test]
    fn every_call_belongs_to_an_api() {
        let of = |method: &str| Api::of_rpc(&format!("/inference.GRPCInferenceService/{method}")).unwrap();
        assert_eq!(of("ModelStreamInfer"), Api::Inference);
        assert_eq!(of("RepositoryModelLoad"), Api::ModelRepository);
        assert_eq!(of("CudaSharedMemoryStatus"), Api::SharedMemory);
        assert_eq!(Api::of_rpc("/grpc.health.v1.Health/Check"), Some(Api::Health));
        assert_eq!(Api::of_rpc("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"), Some(Api::Reflection));
        assert_eq!(Api::of_rpc("/nosuch.Service/Method"), None);
    }
}
