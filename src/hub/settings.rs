//! Where the hub and the cache are: the environment variables of `huggingface_hub`.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use crate::HubError;

/// The hub of names such as `ORG/NAME`.
const ENDPOINT: &str = "https://huggingface.co";

/// A token of an account. `Debug` does not show it.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Token(pub(crate) String);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// How the hub is reached, and where models are kept.
#[derive(Debug, Clone)]
pub struct Settings {
    /// `HF_ENDPOINT`: scheme, host and perhaps a path, without a slash at the end.
    pub(crate) endpoint: String,
    /// `HF_HUB_CACHE`, else `hub` in `HF_HOME`.
    pub(crate) cache: PathBuf,
    /// `HF_TOKEN`, else the content of the token file.
    pub(crate) token: Option<Token>,
    /// `HF_HUB_OFFLINE`: use no network.
    pub(crate) is_offline: bool,
    /// Pause before the first repeated attempt; it doubles with each.
    pub(crate) retry_pause: Duration,
}

impl Settings {
    /// Reads the environment of this process.
    ///
    /// # Errors
    /// When a variable has a value that cannot be used.
    pub fn from_env() -> Result<Self, HubError> {
        Self::of(|name| std::env::var(name).ok())
    }

    /// Reads variables from `variable`, of which empty ones count as unset.
    ///
    /// # Errors
    /// When a variable has a value that cannot be used.
    pub fn of(variable: impl Fn(&str) -> Option<String>) -> Result<Self, HubError> {
        let variable = |name: &str| variable(name).filter(|value| !value.trim().is_empty());
        let home = variable("HOME").map(PathBuf::from);
        let path = |name: &str| variable(name).map(|value| expanded(&value, &variable));
        let caches = || path("XDG_CACHE_HOME").or_else(|| Some(home.clone()?.join(".cache")));
        let hf_home = path("HF_HOME").or_else(|| Some(caches()?.join("huggingface")));
        let cache = path("HF_HUB_CACHE").or_else(|| path("HUGGINGFACE_HUB_CACHE"));
        let cache = cache.or_else(|| Some(hf_home.clone()?.join("hub"))).ok_or_else(|| HubError::Setting {
            variable: "HF_HOME",
            reason: "neither it nor HOME is set; set one to the directory of downloaded models".to_owned(),
        })?;
        let cache = std::path::absolute(&cache).map_err(HubError::io(format!("find {}", cache.display())))?;
        let token_file = path("HF_TOKEN_PATH").or_else(|| Some(hf_home?.join("token")));
        let token = variable("HF_TOKEN").or_else(|| variable("HUGGING_FACE_HUB_TOKEN"));
        let token = token.or_else(|| std::fs::read_to_string(token_file?).ok());
        let is_true = |name| variable(name).is_some_and(|value| is_true(&value));
        Ok(Self {
            endpoint: endpoint(variable("HF_ENDPOINT").as_deref().unwrap_or(ENDPOINT))?,
            cache,
            token: token_of(token.unwrap_or_default())?,
            is_offline: is_true("HF_HUB_OFFLINE") || is_true("TRANSFORMERS_OFFLINE"),
            retry_pause: Duration::from_secs(1),
        })
    }

    /// The same with a pause before the first repeated attempt, which doubles with each.
    pub fn with_retry_pause(self, retry_pause: Duration) -> Self {
        Self { retry_pause, ..self }
    }

    /// The same, but without use of the network.
    pub fn offline(self) -> Self {
        Self { is_offline: true, ..self }
    }

    /// The directory of downloaded models.
    pub fn cache(&self) -> &std::path::Path {
        &self.cache
    }
}

/// The spellings that `huggingface_hub` takes.
fn is_true(value: &str) -> bool {
    ["1", "on", "yes", "true"].contains(&value.trim().to_ascii_lowercase().as_str())
}

/// A path that may begin with `~/`.
fn expanded(value: &str, variable: &impl Fn(&str) -> Option<String>) -> PathBuf {
    match (value.strip_prefix("~/"), variable("HOME")) {
        (Some(rest), Some(home)) => PathBuf::from(home).join(rest),
        _ => PathBuf::from(value),
    }
}

fn endpoint(value: &str) -> Result<String, HubError> {
    let endpoint = value.trim().trim_end_matches('/');
    let rest = endpoint.strip_prefix("https://").or_else(|| endpoint.strip_prefix("http://"));
    match rest {
        Some(rest) if !rest.is_empty() && !rest.contains(['?', '#', '@', ' ']) => Ok(endpoint.to_owned()),
        _ => Err(HubError::Setting {
            variable: "HF_ENDPOINT",
            reason: format!("`{value}` is no address of a hub; expected one such as {ENDPOINT}"),
        }),
    }
}

/// A token becomes a header, so it must not have a line break inside.
fn token_of(text: String) -> Result<Option<Token>, HubError> {
    let token = text.trim();
    if !token.bytes().all(|byte| byte.is_ascii_graphic()) {
        let reason = "the token has spaces or other characters that no token has; copy it again".to_owned();
        return Err(HubError::Setting { variable: "HF_TOKEN", reason });
    }
    Ok((!token.is_empty()).then(|| Token(token.to_owned())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(variables: &[(&str, &str)]) -> Result<Settings, HubError> {
        Settings::of(|name| variables.iter().find(|(its, _)| *its == name).map(|(_, value)| (*value).to_owned()))
    }

    #[test]
    fn the_cache_is_where_python_has_it() {
        let cache = |variables: &[(&str, &str)]| of(variables).unwrap().cache.display().to_string();
        assert_eq!(cache(&[("HOME", "/h")]), "/h/.cache/huggingface/hub");
        assert_eq!(cache(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")]), "/x/huggingface/hub");
        assert_eq!(cache(&[("HOME", "/h"), ("HF_HOME", "~/hf")]), "/h/hf/hub");
        assert_eq!(cache(&[("HF_HOME", "/hf"), ("HF_HUB_CACHE", "/c")]), "/c");
        assert!(of(&[]).unwrap_err().to_string().starts_with("HF_HOME: "));
    }

    #[test]
    fn the_token_comes_from_the_variable_or_the_file_and_is_not_shown() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("token"), "hf_file\n").unwrap();
        let home = ("HF_HOME", dir.path().to_str().unwrap());
        assert_eq!(of(&[home]).unwrap().token, Some(Token("hf_file".into())));
        let settings = of(&[home, ("HF_TOKEN", "hf_variable")]).unwrap();
        assert_eq!(settings.token, Some(Token("hf_variable".into())));
        assert!(!format!("{settings:?}").contains("hf_variable"));
        assert!(of(&[home, ("HF_TOKEN", "a\nb")]).is_err());
        assert_eq!(of(&[("HF_HOME", "/none")]).unwrap().token, None);
    }

    #[test]
    fn endpoint_and_offline_are_read() {
        let home = ("HF_HOME", "/hf");
        assert_eq!(of(&[home]).unwrap().endpoint, "https://huggingface.co");
        assert_eq!(of(&[home, ("HF_ENDPOINT", "http://mirror:8/x/")]).unwrap().endpoint, "http://mirror:8/x");
        for wrong in ["mirror", "ftp://mirror", "https://", "http://user@mirror"] {
            assert!(of(&[home, ("HF_ENDPOINT", wrong)]).is_err(), "{wrong}");
        }
        assert!(of(&[home, ("HF_HUB_OFFLINE", "ON")]).unwrap().is_offline);
        assert!(!of(&[home, ("HF_HUB_OFFLINE", "0")]).unwrap().is_offline);
    }
}
