//! Models that share devices and take turns on them: one is awake, and the others sleep with their weights in host memory.
//!
//! A turn ends when another model has requests, and the awake one has none or has had the devices for the longest turn. What has begun
//! ends first. The model whose requests have waited longest is next.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use serving::{SleepLevel, Sleeper};
use tokio::sync::{Mutex, MutexGuard, Notify};

use super::router::Router;
use super::sleeper::Replicas;

/// Time until a model that could not wake is tried again.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// The models that share the devices of a world.
pub(crate) struct Turns {
    /// Longest turn while another model has requests.
    longest: Duration,
    models: Mutex<Models>,
    /// Notified when a request arrives at a model, or ends.
    requests: Arc<Notify>,
}

#[derive(Default)]
struct Models {
    all: Vec<Member>,
    /// The router of the awake model, and the start of its turn.
    awake: Option<(Weak<Router>, Instant)>,
}

struct Member {
    name: String,
    router: Weak<Router>,
    /// Since when it sleeps and has requests.
    waits_since: Option<Instant>,
}

/// The devices are free for a model that is to be loaded.
pub(crate) struct Loading<'a>(MutexGuard<'a, Models>);

impl Loading<'_> {
    /// The model was loaded, and is awake.
    pub(crate) fn succeeded(mut self, name: &str, router: &Arc<Router>) {
        let router = Arc::downgrade(router);
        self.0.awake = Some((router.clone(), Instant::now()));
        self.0.all.push(Member { name: name.to_owned(), router, waits_since: None });
    }
}

impl Turns {
    /// With turns of at most `longest` while another model has requests.
    pub(crate) fn new(longest: Duration) -> Arc<Self> {
        Arc::new(Self { longest, models: Mutex::default(), requests: Arc::default() })
    }

    /// What the routers of models notify when a request arrives, or ends.
    pub(crate) fn requests(&self) -> Arc<Notify> {
        Arc::clone(&self.requests)
    }

    /// Waits until no model uses the devices. The next turn begins when the result is dropped.
    pub(crate) async fn load(&self) -> Loading<'_> {
        let mut models = self.models.lock().await;
        models.sleep().await;
        Loading(models)
    }

    /// Gives models their turns, for ever.
    pub(crate) async fn run(self: Arc<Self>) {
        loop {
            let next = self.models.lock().await.pass_on(self.longest).await;
            let requests = self.requests.notified();
            match next {
                Some(wait) => drop(tokio::time::timeout(wait, requests).await),
                None => requests.await,
            }
        }
    }
}

impl Models {
    /// Begins the next turn if it is time. Returns the time until the answer may be another although no request arrives or ends.
    async fn pass_on(&mut self, longest: Duration) -> Option<Duration> {
        self.all.retain(|member| member.router.strong_count() > 0);
        let awake = self.awake.as_ref().and_then(|(router, since)| Some((router.upgrade()?, *since)));
        for member in &mut self.all {
            let router = member.router.upgrade();
            let is_awake = awake.as_ref().is_some_and(|(awake, _)| member.router.as_ptr() == Arc::as_ptr(awake));
            let waits = !is_awake && router.is_some_and(|router| router.num_open() > 0);
            member.waits_since = waits.then(|| member.waits_since.unwrap_or_else(Instant::now));
        }
        let waiting = self.all.iter().enumerate().filter_map(|(index, member)| Some((member.waits_since?, index)));
        let (_, next) = waiting.min()?;
        if let Some((awake, since)) = awake
            && awake.num_open() > 0
            && let Some(left) = longest.checked_sub(since.elapsed()).filter(|left| !left.is_zero())
        {
            return Some(left);
        }
        self.sleep().await;
        let Member { name, router, .. } = &self.all[next];
        // Otherwise it was unloaded meanwhile, and another model may wait.
        let Some(router) = router.upgrade() else { return Some(Duration::ZERO) };
        match (Replicas { model: name.clone(), router: Arc::clone(&router) }).wake().await {
            Ok(()) => self.awake = Some((Arc::downgrade(&router), Instant::now())),
            Err(error) => {
                tracing::warn!(model = %name, "cannot have its turn: {error}");
                self.all[next].waits_since = None; // Others may come first.
                return Some(RETRY_INTERVAL);
            }
        }
        Some(Duration::ZERO)
    }

    /// Ends the turn of the awake model: its weights go to host memory, or are dropped where that does not suffice.
    async fn sleep(&mut self) {
        let Some(router) = self.awake.take().and_then(|(router, _)| router.upgrade()) else { return };
        let of_router = |member: &&Member| member.router.as_ptr() == Arc::as_ptr(&router);
        let Some(model) = self.all.iter().find(of_router).map(|member| member.name.clone()) else { return };
        let replicas = Replicas { model: model.clone(), router };
        if let Err(error) = replicas.sleep(SleepLevel::Keep).await {
            tracing::warn!(%model, "its weights are dropped: {error}");
            if let Err(error) = replicas.sleep(SleepLevel::Drop).await {
                tracing::warn!(%model, "does not end its turn: {error}");
            }
        }
    }
}
