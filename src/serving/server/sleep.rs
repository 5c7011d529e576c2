//! Models that sleep: their devices' memory is free until they wake.

use std::sync::Arc;

use futures::future::join_all;

use super::Server;
use crate::{ErrorKind, InferError, SleepLevel, Sleeper};

impl Server {
    /// Frees the memory of the devices of a model; without one, of every model that can sleep. Resolves when it is free.
    ///
    /// # Errors
    /// When there is no such model or it cannot sleep, or with the first failure of a model.
    pub async fn sleep(&self, model: Option<&str>, level: SleepLevel) -> Result<(), InferError> {
        let results = join_all(self.sleepers(model)?.iter().map(|sleeper| sleeper.sleep(level))).await;
        results.into_iter().collect()
    }

    /// Wakes a model; without one, every model that sleeps. Resolves when requests are served.
    ///
    /// # Errors
    /// When there is no such model or it cannot sleep, or with the first failure of a model.
    pub async fn wake(&self, model: Option<&str>) -> Result<(), InferError> {
        let results = join_all(self.sleepers(model)?.iter().map(|sleeper| sleeper.wake())).await;
        results.into_iter().collect()
    }

    /// Whether a model sleeps; without one, whether any does.
    ///
    /// # Errors
    /// When there is no such model, or it cannot sleep.
    pub fn is_sleeping(&self, model: Option<&str>) -> Result<bool, InferError> {
        Ok(self.sleepers(model)?.iter().any(|sleeper| sleeper.is_sleeping()))
    }

    /// A model as one that can sleep; `None` for one that cannot.
    pub fn sleeper_of(&self, model: &str) -> Option<Arc<dyn Sleeper>> {
        self.resolve(model, "").ok()?.sleeper()
    }

    /// The model, or all that can sleep. Ensembles stand for models that are among these.
    fn sleepers(&self, model: Option<&str>) -> Result<Vec<Arc<dyn Sleeper>>, InferError> {
        let unable = |message: String| Err(InferError::new(ErrorKind::Unsupported, message));
        let Some(name) = model else {
            let models = self.registry().all_ready();
            let models = models.iter().filter(|model| model.config.ensemble().is_none());
            let sleepers: Vec<_> = models.filter_map(|model| model.sleeper()).collect();
            return match sleepers.is_empty() {
                true => unable(
                    "no model can sleep by request: it needs `--enable-sleep-mode`, and a language model".to_owned(),
                ),
                false => Ok(sleepers),
            };
        };
        match self.resolve(name, "")?.sleeper() {
            Some(sleeper) => Ok(vec![sleeper]),
            None => unable(format!(
                "model `{name}` cannot sleep by request; language models can, of a server started with `--enable-sleep-mode`"
            )),
        }
    }
}
