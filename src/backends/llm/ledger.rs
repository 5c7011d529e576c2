//! What the requests of each model hold at one moment: for operators, and for tests that nothing leaks.

use engine::{Engine, Ledger};
use futures::FutureExt as _;
use futures::future::{BoxFuture, join_all};
use tokio::sync::oneshot;

use super::LlmFactory;
use super::inbox::{Inbox, Message};

/// What the scheduler of one replica of a model holds. All counts are zero when no request runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LlmLedger {
    /// Model name.
    pub name: String,
    /// Its version.
    pub version: String,
    /// Which replica; 0 for a model that has one.
    pub replica: u32,
    /// What sequences hold; `None` while its workers start for the first time, or after it was given up.
    pub scheduler: Option<Ledger>,
    /// Sequences that have not ended.
    pub num_listening: usize,
    /// The result of counting everything again, where it differs.
    pub wrong: Option<String>,
}

/// The step thread's part of a [`LlmLedger`].
#[derive(Debug, Default)]
pub(crate) struct Report {
    scheduler: Option<Ledger>,
    num_listening: usize,
    wrong: Option<String>,
}

impl Report {
    pub(crate) fn new(engine: Option<&Engine>, num_listening: usize) -> Self {
        let scheduler = engine.map(Engine::ledger);
        Self { scheduler, num_listening, wrong: engine.and_then(|engine| engine.audit().err()) }
    }
}

impl LlmFactory {
    /// The ledger of every replica of every loaded LLM, each taken between two of its steps.
    pub fn ledgers(&self) -> BoxFuture<'static, Vec<LlmLedger>> {
        let mut loaded = ipc::lock(&self.loaded);
        loaded.retain(|model| model.router.strong_count() > 0);
        let ledger = |model: &super::Loaded, replica: u32, inbox: Inbox| {
            let (name, version) = (model.name.clone(), model.version.clone());
            async move {
                let (reply, report) = oneshot::channel();
                inbox.send(Message::Ledger(reply));
                let Report { scheduler, num_listening, wrong } = report.await.unwrap_or_default();
                LlmLedger { name, version, replica, scheduler, num_listening, wrong }
            }
        };
        let ledgers = loaded.iter().flat_map(|model| {
            let router = model.router.upgrade();
            let inboxes: Vec<Inbox> =
                router.iter().flat_map(|router| router.replicas()).map(|replica| replica.inbox.clone()).collect();
            (0..).zip(inboxes).map(move |(replica, inbox)| ledger(model, replica, inbox))
        });
        join_all(ledgers.collect::<Vec<_>>()).boxed()
    }
}
