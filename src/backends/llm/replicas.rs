//! Starts and stops the replicas of one model.

use std::path::PathBuf;
use std::sync::Arc;

use engine::EngineConfig;
use ipc::Prefix;
use record::Recorder;
use serving::InferError;
use supervision::Agents;
use tokio::runtime::Handle;
use tokio::sync::{Notify, oneshot};

use super::config::LlmConfig;
use super::dispatcher::Dispatcher;
use super::inbox::{Inbox, Message};
use super::router::{Replica, Router};
use super::step_log::StepLog;
use super::step_thread::StepThread;

/// Receives the result of a replica's first start.
pub(crate) type LoadResult = oneshot::Receiver<Result<(), String>>;

/// Starts the step thread of each replica; its events are delivered on `event_runtime`, and its steps are recorded. `requests` is notified
/// when a request arrives, or ends.
pub(crate) fn start_replicas(
    config: &LlmConfig,
    agents: &Arc<Agents>,
    prefix: &Prefix,
    event_runtime: &Handle,
    recorder: Option<&Arc<Recorder>>,
    requests: Option<Arc<Notify>>,
) -> Result<(Arc<Router>, Vec<LoadResult>), InferError> {
    let inboxes: Vec<_> = (0..config.num_replicas).map(|_| Inbox::new()).collect();
    let replicas = inboxes.iter().map(|(inbox, _)| Replica { inbox: inbox.clone(), shared: Arc::default() });
    let EngineConfig { max_rows, max_queue, block_size, .. } = config.engine;
    let router = Arc::new(Router::new(replicas.collect(), max_rows, max_queue, block_size).notifying(requests));
    let mut loads = Vec::new();
    for (replica, (inbox, messages)) in (0..).zip(inboxes) {
        let thread = StepThread {
            config: config.of_replica(replica),
            replica,
            router: Arc::clone(&router),
            agents: Arc::clone(agents),
            prefix: prefix.clone(),
            inbox,
            messages,
            dispatcher: Dispatcher::start(event_runtime),
            shared: Arc::clone(&router.replicas()[replica as usize].shared),
            log: recorder.map(|recorder| StepLog::new(Arc::clone(recorder), &config.name, replica)),
        };
        let (loaded, is_loaded) = oneshot::channel();
        let name = format!("steps-{}", config.name);
        let spawned = std::thread::Builder::new().name(name).spawn(move || thread.run(loaded));
        if let Err(error) = spawned {
            stop_all(&router);
            return Err(InferError::internal(format!("cannot start a thread: {error}")));
        }
        loads.push(is_loaded);
    }
    Ok((router, loads))
}

/// Stops every step thread and its workers, without waiting for their end.
pub(crate) fn stop_all(router: &Router) {
    for replica in router.replicas() {
        let (done, _) = oneshot::channel();
        replica.inbox.send(Message::Stop { done });
    }
}

/// The fingerprint that workers on other nodes compare their copy of a checkpoint with.
pub(crate) async fn fingerprint(model: &str, checkpoint: PathBuf) -> Result<Vec<u8>, InferError> {
    let dir = checkpoint.clone();
    let print = tokio::task::spawn_blocking(move || supervision::fingerprint(&dir)).await;
    let print = print.map_err(|_| std::io::Error::other("its reader ended")).flatten();
    print.map_err(|error| {
        let dir = checkpoint.display();
        InferError::internal(format!("model `{model}`: cannot read checkpoint {dir}: {error}"))
    })
}
