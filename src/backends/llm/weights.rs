//! Replaces the weights of a model by those of another checkpoint with the same tensors.
//!
//! The other checkpoint is compared with the one that was loaded, by configuration and headers. Then all replicas sleep without
//! workers, and wake with workers that read the other checkpoint.

use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use futures::future::{BoxFuture, FutureExt as _};
use models::WeightsForm;
use serving::{InferError, NewWeights, SleepLevel};
use tokio::task::spawn_blocking;

use super::config::LlmConfig;
use super::inbox::Message;
use super::replicas::fingerprint;
use super::router::Router;
use super::sleeper::Replicas;

/// A checkpoint that workers read.
#[derive(Debug, Clone)]
pub(crate) struct Weights {
    pub(crate) checkpoint: PathBuf,
    /// What workers on other nodes compare theirs with. `None` on a single node.
    pub(crate) fingerprint: Option<Vec<u8>>,
}

/// The weights that a model has, and what others must have in common with them.
#[derive(Debug)]
pub(crate) struct ServedWeights {
    /// That of the first weights, or why no others can replace them.
    form: Result<WeightsForm, String>,
    current: Mutex<Current>,
}

#[derive(Debug, Clone)]
struct Current {
    /// Counts the weights of the model from 1.
    number: u64,
    version: String,
    weights: Weights,
}

impl ServedWeights {
    /// Those of a model that is loaded. It blocks.
    pub(crate) fn read(config: &LlmConfig) -> Self {
        let form = match () {
            () if config.weight_updates_dir.is_none() => Err("no directory is allowed for others".to_owned()),
            () if config.takes_turns => {
                Err("models that take turns on the devices (`--share-devices`) keep theirs".to_owned())
            }
            () => form(config, &config.checkpoint),
        };
        let weights =
            Weights { checkpoint: config.checkpoint.clone(), fingerprint: config.checkpoint_fingerprint.clone() };
        Self { form, current: Mutex::new(Current { number: 1, version: "1".to_owned(), weights }) }
    }

    /// The version that is served.
    pub(crate) fn version(&self) -> String {
        ipc::lock(&self.current).version.clone()
    }
}

/// The form of a checkpoint as a model of this configuration loads it.
fn form(config: &LlmConfig, checkpoint: &Path) -> Result<WeightsForm, String> {
    let config = LlmConfig { checkpoint: checkpoint.to_owned(), ..config.clone() };
    let model = config.model(config.target());
    model.and_then(|model| WeightsForm::read(checkpoint, model)).map_err(|error| error.to_string())
}

/// The checkpoint that `asked` names.
///
/// # Errors
/// When it is neither `first`, the checkpoint that the model was loaded from, nor in `allowed`. Whether it exists elsewhere is not said.
fn allowed_checkpoint(allowed: &Path, first: &Path, asked: &Path) -> Result<PathBuf, String> {
    let (allowed, first) = (std::path::absolute(allowed), std::path::absolute(first));
    let (allowed, first) = (allowed.map_err(|error| error.to_string())?, first.map_err(|error| error.to_string())?);
    let path = allowed.join(asked);
    let resolve = |path: &Path| path.canonicalize().map_err(|error| format!("{}: {error}", path.display()));
    if path == first {
        return resolve(&path);
    }
    let outside =
        || format!("{} is not in {}, the directory of `--weight-updates-dir`", asked.display(), allowed.display());
    let climbs = asked.components().any(|part| part == Component::ParentDir);
    let root = resolve(&allowed)?;
    if climbs || !path.starts_with(&allowed) && !path.starts_with(&root) {
        return Err(outside());
    }
    // A link may lead out of it.
    resolve(&path).and_then(|found| if found.starts_with(&root) { Ok(found) } else { Err(outside()) })
}

/// A model whose weights can be replaced.
#[derive(Clone)]
pub(crate) struct WeightUpdates {
    pub(crate) config: Arc<LlmConfig>,
    pub(crate) router: Arc<Router>,
    pub(crate) served: Arc<ServedWeights>,
}

impl serving::Weights for WeightUpdates {
    fn version(&self) -> String {
        self.served.version()
    }

    fn replace(&self, new: NewWeights) -> BoxFuture<'static, Result<String, InferError>> {
        // A client that leaves must not leave a model without workers.
        let task = tokio::spawn(self.clone().run(new));
        task.map(|done| done.unwrap_or_else(|_| Err(InferError::internal("replacing the weights failed")))).boxed()
    }
}

impl WeightUpdates {
    async fn run(self, new: NewWeights) -> Result<String, InferError> {
        let (name, started) = (&self.config.name, Instant::now());
        let _update = self.router.begin_update().ok_or_else(|| {
            InferError::unavailable(format!(
                "the weights of model `{name}` are being replaced already; try again later"
            ))
        })?;
        let weights = self.check(new.checkpoint).await?;
        let before = ipc::lock(&self.served.current).weights.clone();
        let replicas = Replicas { model: name.clone(), router: Arc::clone(&self.router) };
        let checkpoint = weights.checkpoint.display().to_string();
        if let Err(error) = replicas.replace_weights(&weights, &before, new.aborts_requests).await {
            tracing::error!(model = %name, checkpoint, "the weights were not replaced: {error}");
            return Err(error);
        }
        let mut current = ipc::lock(&self.served.current);
        let number = current.number + 1;
        let version = new.version.unwrap_or_else(|| number.to_string());
        *current = Current { number, version: version.clone(), weights };
        tracing::info!(model = %name, checkpoint, version, "the weights were replaced after {:.1?}", started.elapsed());
        Ok(version)
    }

    /// Checks that a checkpoint can replace the weights.
    async fn check(&self, asked: PathBuf) -> Result<Weights, InferError> {
        let (config, served) = (Arc::clone(&self.config), Arc::clone(&self.served));
        let check = move || {
            let served = served.form.as_ref().map_err(Clone::clone)?;
            let allowed = config.weight_updates_dir.as_deref().unwrap_or(Path::new(""));
            let checkpoint = allowed_checkpoint(allowed, &config.checkpoint, &asked)?;
            match served.difference(&form(&config, &checkpoint)?) {
                Some(reason) => Err(reason),
                None => Ok(checkpoint),
            }
        };
        let checked = spawn_blocking(check).await.unwrap_or_else(|_| Err("reading the checkpoint failed".to_owned()));
        let name = &self.config.name;
        let checkpoint = checked.map_err(|reason| {
            InferError::invalid(format!("the weights of model `{name}` are not replaced: {reason}"))
        })?;
        let fingerprint = match self.config.checkpoint_fingerprint {
            Some(_) => Some(fingerprint(name, checkpoint.clone()).await?),
            None => None,
        };
        Ok(Weights { checkpoint, fingerprint })
    }
}

impl Replicas {
    /// Lets all replicas sleep without workers, and wake with these weights. If one cannot wake with them, all wake with those `before`.
    async fn replace_weights(&self, weights: &Weights, before: &Weights, aborts: bool) -> Result<(), InferError> {
        if aborts {
            let error = InferError::unavailable(format!(
                "the weights of model `{}` are replaced, and the request for it aborts all others (`abort_all_requests`); send this one \
                 again",
                self.model
            ));
            self.send(|| Message::Abort(error.clone()));
        }
        let sleep = || self.ask(|done| Message::Sleep { level: SleepLevel::Drop, done });
        let wake = |weights: &Weights| self.ask(|done| Message::WakeWith { weights: weights.clone(), done });
        if let Err(error) = sleep().await {
            let _ = self.ask(|done| Message::Wake { done }).await;
            return Err(error);
        }
        let Err(error) = wake(weights).await else { return Ok(()) };
        // A replica that has failed loads the old weights by itself.
        if self.router.replicas().len() > 1 && sleep().await.is_ok() {
            let _ = wake(before).await;
        }
        Err(InferError { message: format!("{}; its old weights are loaded again", error.message), ..error })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_checkpoint_is_in_the_allowed_directory_or_the_first_one() {
        let scratch = tempfile::tempdir().unwrap();
        let root = scratch.path().canonicalize().unwrap();
        let (allowed, first) = (root.join("allowed"), root.join("first"));
        for dir in [allowed.join("a"), first.clone(), root.join("outside")] {
            fs::create_dir_all(dir).unwrap();
        }
        symlink(root.join("outside"), allowed.join("leads_out")).unwrap();
        symlink(allowed.join("a"), allowed.join("latest")).unwrap();
        let check = |asked: &Path| allowed_checkpoint(&allowed, &first, asked);
        let a = Ok(allowed.join("a"));
        assert_eq!(check(Path::new("a")), a);
        assert_eq!(check(&allowed.join("a")), a);
        assert_eq!(check(Path::new("latest")), a, "a link is resolved");
        assert_eq!(check(&first), Ok(first.clone()));
        for outside in ["leads_out", "../outside", "a/../../outside", "/etc", "/no/such/directory"] {
            let error = check(Path::new(outside)).unwrap_err();
            assert!(error.starts_with(outside) && error.contains("`--weight-updates-dir`"), "{error}");
        }
        assert!(check(Path::new("b")).unwrap_err().ends_with("No such file or directory (os error 2)"));
    }
}
