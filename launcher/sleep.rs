//! `launch sleep`, `wake` and `swap`: models of a world that runs give up the memory of the devices, and get it back.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

use crate::actions::{LiveWorld, SleepLevel};
use crate::state::RunDir;
use crate::{control, http};

/// Longest time for one answer. Requests that have begun end before a model sleeps.
const TIMEOUT: Duration = Duration::from_secs(600);

/// `launch sleep`: returns once the memory is free.
pub(crate) fn sleep(run_dir: &RunDir, world: &LiveWorld, model: Option<&str>, level: SleepLevel) -> Result<()> {
    let (server, start) = (Server::of(run_dir, world)?, Instant::now());
    server.sleep(model, level)?;
    println!("{} after {:.2} s", sentence(model, "sleeps", "sleep"), start.elapsed().as_secs_f64());
    Ok(())
}

/// `launch wake`: returns once requests are served.
pub(crate) fn wake(run_dir: &RunDir, world: &LiveWorld, model: Option<&str>) -> Result<()> {
    let (server, start) = (Server::of(run_dir, world)?, Instant::now());
    server.wake(model)?;
    println!("{} after {:.2} s", sentence(model, "is awake", "are awake"), start.elapsed().as_secs_f64());
    Ok(())
}

/// `launch swap`: returns once `to` serves.
pub(crate) fn swap(run_dir: &RunDir, world: &LiveWorld, from: &str, to: &str, level: SleepLevel) -> Result<()> {
    if from == to {
        bail!("`{from}` cannot take its own place; name the model that is to wake second");
    }
    let (server, start) = (Server::of(run_dir, world)?, Instant::now());
    if !server.sleeps(to)? {
        bail!("`{to}` does not sleep; begin with `launch sleep {to}`");
    }
    server.sleep(Some(from), level)?;
    if let Err(error) = server.wake(Some(to)) {
        // It is not to be tried again beside the first.
        let _ = server.sleep(Some(to), SleepLevel::Drop);
        let again = match server.wake(Some(from)) {
            Ok(()) => format!("`{from}` is awake again"),
            Err(second) => format!("`{from}` does not wake either: {second:#}"),
        };
        bail!("`{to}` does not wake: {error:#}; {again}");
    }
    println!("`{from}` sleeps and `{to}` is awake after {:.2} s", start.elapsed().as_secs_f64());
    Ok(())
}

fn sentence(model: Option<&str>, one: &str, all: &str) -> String {
    model.map_or_else(|| format!("all language models {all}"), |model| format!("`{model}` {one}"))
}

/// Rank 0 of a world.
struct Server {
    host: String,
    port: u16,
    /// The header with the key.
    key: Option<String>,
}

impl Server {
    fn of(run_dir: &RunDir, world: &LiveWorld) -> Result<Self> {
        let state = control::choose(run_dir, world.http_port)?;
        let key = world.key.as_deref().map(|key| key_header(key, |name| std::env::var(name).ok())).transpose()?;
        Ok(Self { host: state.http_host, port: state.http_port, key })
    }

    fn sleep(&self, model: Option<&str>, level: SleepLevel) -> Result<()> {
        let level = match level {
            SleepLevel::Keep => "level=1",
            SleepLevel::Drop => "level=2",
        };
        self.ask("POST", "/sleep", model, level).map(drop)
    }

    fn wake(&self, model: Option<&str>) -> Result<()> {
        self.ask("POST", "/wake_up", model, "").map(drop)
    }

    fn sleeps(&self, model: &str) -> Result<bool> {
        let body = self.ask("GET", "/is_sleeping", Some(model), "")?;
        let body: serde_json::Value = serde_json::from_str(&body).context("/is_sleeping answers no JSON")?;
        body["is_sleeping"].as_bool().context("/is_sleeping does not say whether the model sleeps")
    }

    /// The body of an answer with status 200. An error has the server's message.
    fn ask(&self, method: &str, path: &str, model: Option<&str>, query: &str) -> Result<String> {
        let model = model.map(|model| format!("model={}", utf8_percent_encode(model, NON_ALPHANUMERIC)));
        let query: Vec<&str> = model.as_deref().into_iter().chain([query]).filter(|part| !part.is_empty()).collect();
        let target = format!("{path}?{}", query.join("&"));
        let answer = http::send((&self.host, self.port), method, &target, self.key.as_deref(), TIMEOUT);
        let (status, body) = answer.with_context(|| {
            format!("no answer on http port {}; with TLS there, send {method} {path} by a client with TLS", self.port)
        })?;
        if status != 200 {
            bail!("{path} answers {status}: {}", message_of(&body));
        }
        Ok(body)
    }
}

/// The header with the key that `HEADER=VALUE` names.
fn key_header(text: &str, variable: impl Fn(&str) -> Option<String>) -> Result<String> {
    let (header, value) = text.split_once('=').context("--key is HEADER=VALUE")?;
    let read = |file: &str| fs::read_to_string(file).with_context(|| format!("--key: cannot read {file}"));
    let keys = match (value.strip_prefix('@'), value.strip_prefix("env:")) {
        (Some(file), _) => read(file)?,
        (_, Some(name)) => variable(name).with_context(|| format!("--key: the environment has no variable {name}"))?,
        _ => value.to_owned(),
    };
    let key = keys.split([',', '\n']).map(str::trim).find(|line| !line.is_empty() && !line.starts_with('#'));
    let key = key.with_context(|| format!("--key: {value} has no key"))?;
    let scheme = if header.eq_ignore_ascii_case("authorization") { "Bearer " } else { "" };
    Ok(format!("{header}: {scheme}{key}"))
}

/// The message of an error of OpenAI's form; otherwise the body.
fn message_of(body: &str) -> String {
    let json: Option<serde_json::Value> = serde_json::from_str(body).ok();
    let message = json.as_ref().and_then(|json| json["error"]["message"].as_str().or(json["error"].as_str()));
    message.unwrap_or(body.trim()).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_found() {
        assert_eq!(message_of(r#"{"error": {"message": "no such model"}}"#), "no such model");
        assert_eq!(message_of(r#"{"error": "no such model"}"#), "no such model");
        assert_eq!(message_of("busy\n"), "busy");
    }

    #[test]
    fn a_key_comes_from_a_file_a_variable_or_the_command_line() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("keys");
        let header = |key: &str| key_header(key, |name| (name == "KEYS").then(|| "third,fourth".to_owned()));
        fs::write(&file, "# admin\n\n secret \nother\n").unwrap();
        let of_file = format!("admin-key=@{}", file.display());
        assert_eq!(header(&of_file).unwrap(), "admin-key: secret");
        assert_eq!(header("authorization=env:KEYS").unwrap(), "authorization: Bearer third");
        assert_eq!(header("admin-key=literal").unwrap(), "admin-key: literal");
        fs::write(&file, "# none\n").unwrap();
        for (wrong, message) in [
            ("literal", "--key is HEADER=VALUE"),
            ("admin-key=env:NONE", "--key: the environment has no variable NONE"),
            (of_file.as_str(), "has no key"),
            ("admin-key=@/no/such/file", "--key: cannot read /no/such/file"),
        ] {
            let error = header(wrong).unwrap_err().to_string();
            assert!(error.ends_with(message), "{error}");
        }
    }
}
