//! Paths of the HTTP protocol.

use http::Method;

use crate::api::request_effect::Effect;
use crate::api::triton::shared_memory::MemoryKind;

/// A model in a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelPath<'a> {
    /// The name, without percent-decoding.
    pub name: &'a str,
    /// The version; empty for the latest.
    pub version: &'a str,
}

/// The route of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)] // Named like the paths of the protocol.
pub enum Route<'a> {
    Live,
    Ready,
    ServerMetadata,
    ModelMetadata(ModelPath<'a>),
    ModelReady(ModelPath<'a>),
    ModelConfig(ModelPath<'a>),
    ModelStatistics(ModelPath<'a>),
    Infer(ModelPath<'a>),
    Generate(ModelPath<'a>),
    GenerateStream(ModelPath<'a>),
    RepositoryIndex,
    LoadModel(&'a str),
    UnloadModel(&'a str),
    /// Load or unload in a named repository, which is not supported.
    NamedRepository,
    MemoryStatus {
        kind: MemoryKind,
        region: &'a str,
    },
    MemoryRegister {
        kind: MemoryKind,
        region: &'a str,
    },
    MemoryUnregister {
        kind: MemoryKind,
        region: &'a str,
    },
    TraceSetting {
        model: &'a str,
    },
    Logging,
}

impl<'a> Route<'a> {
    /// The route of a path without its query; `None` when there is none.
    pub fn of(path: &'a str) -> Option<Self> {
        let mut segments = [""; 8];
        let mut count = 0;
        for segment in path.strip_prefix("/v2")?.split('/').skip(1) {
            *segments.get_mut(count)? = segment;
            count += 1;
        }
        if !path[3..].is_empty() && !path[3..].starts_with('/') || segments[..count].contains(&"") {
            return None;
        }
        match &segments[..count] {
            [] => Some(Route::ServerMetadata),
            ["health", "live"] => Some(Route::Live),
            ["health", "ready"] => Some(Route::Ready),
            ["models", "stats"] => Some(Route::ModelStatistics(ModelPath { name: "", version: "" })),
            ["models", name, rest @ ..] => Self::of_model(name, rest),
            ["repository", "index"] | ["repository", _, "index"] => Some(Route::RepositoryIndex),
            ["repository", "models", name, "load"] => Some(Route::LoadModel(name)),
            ["repository", "models", name, "unload"] => Some(Route::UnloadModel(name)),
            ["repository", _, "models", _, "load" | "unload"] => Some(Route::NamedRepository),
            ["systemsharedmemory", rest @ ..] => Self::of_memory(MemoryKind::System, rest),
            ["cudasharedmemory", rest @ ..] => Self::of_memory(MemoryKind::Cuda, rest),
            ["trace", "setting"] => Some(Route::TraceSetting { model: "" }),
            ["logging"] => Some(Route::Logging),
            _ => None,
        }
    }

    fn of_model(name: &'a str, rest: &[&'a str]) -> Option<Self> {
        let (version, rest) = match rest {
            ["versions", version, rest @ ..] if version.bytes().all(|byte| byte.is_ascii_digit()) => (*version, rest),
            ["versions", ..] => return None,
            rest => ("", rest),
        };
        let model = ModelPath { name, version };
        match rest {
            [] => Some(Route::ModelMetadata(model)),
            ["ready"] => Some(Route::ModelReady(model)),
            ["config"] => Some(Route::ModelConfig(model)),
            ["stats"] => Some(Route::ModelStatistics(model)),
            ["infer"] => Some(Route::Infer(model)),
            ["generate"] => Some(Route::Generate(model)),
            ["generate_stream"] => Some(Route::GenerateStream(model)),
            ["trace", "setting"] if version.is_empty() => Some(Route::TraceSetting { model: name }),
            _ => None,
        }
    }

    fn of_memory(kind: MemoryKind, rest: &[&'a str]) -> Option<Self> {
        let (region, verb) = match rest {
            ["region", region, verb] => (*region, *verb),
            [verb] => ("", *verb),
            _ => return None,
        };
        match verb {
            "status" => Some(Route::MemoryStatus { kind, region }),
            "register" => Some(Route::MemoryRegister { kind, region }),
            "unregister" => Some(Route::MemoryUnregister { kind, region }),
            _ => None,
        }
    }

    /// Whether the content type of replies and errors is `application/json` instead of `text/plain`.
    pub fn answers_in_json(&self) -> bool {
        !matches!(self, Route::Live | Route::Ready | Route::ModelReady(_) | Route::Infer(_))
    }

    /// What its requests do to the server.
    pub(crate) fn effect(&self) -> Effect {
        match self {
            Route::Live | Route::Ready | Route::ModelReady(_) => Effect::Probe,
            Route::Infer(_) | Route::Generate(_) | Route::GenerateStream(_) => Effect::Generates,
            Route::ServerMetadata
            | Route::ModelMetadata(_)
            | Route::ModelConfig(_)
            | Route::ModelStatistics(_)
            | Route::RepositoryIndex
            | Route::MemoryStatus { .. } => Effect::Reads,
            Route::LoadModel(_)
            | Route::UnloadModel(_)
            | Route::NamedRepository
            | Route::MemoryRegister { .. }
            | Route::MemoryUnregister { .. }
            | Route::TraceSetting { .. }
            | Route::Logging => Effect::Changes,
        }
    }

    /// Whether the route supports `method`.
    pub fn allows(&self, method: &Method) -> bool {
        match self {
            Route::Infer(_)
            | Route::Generate(_)
            | Route::GenerateStream(_)
            | Route::RepositoryIndex
            | Route::LoadModel(_)
            | Route::UnloadModel(_)
            | Route::NamedRepository
            | Route::MemoryRegister { .. }
            | Route::MemoryUnregister { .. } => method == Method::POST,
            Route::TraceSetting { .. } | Route::Logging => method == Method::GET || method == Method::POST,
            _ => method == Method::GET,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_paths_of_the_protocol_have_routes() {
        let model = |version| ModelPath { name: "m", version };
        for (path, route) in [
            ("/v2", Route::ServerMetadata),
            ("/v2/health/live", Route::Live),
            ("/v2/models/m", Route::ModelMetadata(model(""))),
            ("/v2/models/m/versions/2/infer", Route::Infer(model("2"))),
            ("/v2/models/stats", Route::ModelStatistics(ModelPath { name: "", version: "" })),
            ("/v2/models/m/generate_stream", Route::GenerateStream(model(""))),
            ("/v2/repository/models/m/load", Route::LoadModel("m")),
            ("/v2/repository/r/index", Route::RepositoryIndex),
            ("/v2/systemsharedmemory/unregister", Route::MemoryUnregister { kind: MemoryKind::System, region: "" }),
            ("/v2/cudasharedmemory/region/r/status", Route::MemoryStatus { kind: MemoryKind::Cuda, region: "r" }),
            ("/v2/models/m/trace/setting", Route::TraceSetting { model: "m" }),
        ] {
            assert_eq!(Route::of(path), Some(route), "{path}");
        }
    }

    #[test]
    fn other_paths_have_no_route() {
        for path in [
            "/",
            "/v2/",
            "/v22",
            "/v2foo",
            "/v2/models/m/",
            "/v2/models/m/versions",
            "/v2/models/m/versions/abc",
            "/v2/models/m/versions/-1",
            "/v2/models/m/versions/1/trace/setting",
            "/v2/a/b/c/d/e/f/g/h/i",
            "/v2/models//infer",
        ] {
            assert_eq!(Route::of(path), None, "{path}");
        }
    }
}
