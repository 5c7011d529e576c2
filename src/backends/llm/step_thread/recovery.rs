//! Recovery after a loss: another start of the workers, or the end of all requests.

use std::any::Any;
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use serving::InferError;
use tokio::sync::oneshot;

use super::super::inbox::Message;
use super::super::request_event::RequestEvent;
use super::super::worker_group::{LossKind, WorkerLoss};
use super::{MAX_LOSSES, Running, StepThread};

/// Delay before another start after too many losses. It doubles each time up to the longest.
const FIRST_RETRY: Duration = Duration::from_secs(5);
const LONGEST_RETRY: Duration = Duration::from_secs(60);

/// Delay before the second start in a row. It doubles before each further start.
const FIRST_BACK_OFF: Duration = Duration::from_millis(100);

/// The message of a panic.
fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let owned = panic.downcast_ref::<String>().map(String::as_str);
    owned.or(panic.downcast_ref::<&str>().copied()).unwrap_or("no message")
}

impl Running {
    /// Ends all sequences with an error after a panic, and replaces the engine by an empty one. The workers have ended with their group.
    pub(super) fn reset_after_panic(&mut self, panic: &(dyn Any + Send)) -> WorkerLoss {
        let StepThread { config, shared, inbox, dispatcher, .. } = &mut self.thread;
        shared.ready.store(false, Ordering::Release);
        inbox.set_doorbell(None);
        let message = format!("the step thread of model `{}` panicked: {}", config.name, panic_message(panic));
        tracing::error!(model = %config.name, "{message}; its requests end with an error, and its workers start again");
        self.engine = self.engine.take().map(|engine| engine.successor());
        self.timeouts.clear();
        self.events.clear();
        let error = InferError::internal(format!("{message}; the model starts again, so send the request again"));
        dispatcher.push_last_to_all(|| RequestEvent::Failed(error.clone()));
        dispatcher.flush();
        WorkerLoss::new(message)
    }

    /// Queues all sequences for another prefill. After too many losses in a row, ends all requests instead.
    ///
    /// Returns the reply channel of [`Message::Stop`] if the thread is to end.
    pub(super) fn recover(&mut self, lost: &WorkerLoss) -> Option<oneshot::Sender<()>> {
        self.losses += 1;
        let done = self.mask_jobs.close();
        self.finish_masks(done);
        let (name, reason) = (&self.thread.config.name, &lost.reason);
        self.step_kinds.clear();
        if let Some(engine) = &mut self.engine {
            engine.recover();
        }
        if lost.kind == LossKind::RankLost {
            tracing::error!(model = %name, "{reason}");
            return self.fail_all_requests(reason.clone());
        }
        if lost.kind == LossKind::ReplicaLost {
            return Some(self.give_up(reason.clone()));
        }
        if self.losses < MAX_LOSSES {
            tracing::warn!(model = %name, reason = %reason, losses = self.losses, "workers lost; starting them again");
            self.thread.shared.restarts.fetch_add(1, Ordering::Relaxed);
            std::thread::sleep(FIRST_BACK_OFF * (1 << self.losses.saturating_sub(1)) - FIRST_BACK_OFF);
            return None;
        }
        let message =
            format!("workers of model `{name}` were lost {} times without a step between: {reason}", self.losses);
        tracing::error!(model = %name, "{message}; requests are refused until a further start succeeds");
        self.fail_all_requests(message)
    }

    /// Ends all requests with this error, and refuses new ones until the next start or [`Message::Stop`].
    pub(super) fn fail_all_requests(&mut self, message: String) -> Option<oneshot::Sender<()>> {
        *ipc::lock(&self.thread.shared.failure) = Some(message.clone());
        self.thread.shared.sleeps.store(false, Ordering::Release);
        self.sleep.fail(&message);
        let error = InferError::unavailable(message);
        self.thread.dispatcher.push_last_to_all(|| RequestEvent::Failed(error.clone()));
        self.thread.dispatcher.flush();
        self.refuse_until_retry(&error)
    }

    /// Refuses requests until the next start or [`Message::Stop`]. A request to wake starts at once, and one to sleep ends the retries.
    pub(super) fn refuse_until_retry(&mut self, error: &InferError) -> Option<oneshot::Sender<()>> {
        let doublings = self.losses.saturating_sub(MAX_LOSSES).min(8);
        let end = Instant::now() + (FIRST_RETRY * (1 << doublings)).min(LONGEST_RETRY);
        loop {
            match self.thread.messages.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(Message::Submit { events, .. } | Message::Adopt { events, .. }) => {
                    events.send(RequestEvent::Failed(error.clone()))
                }
                Ok(Message::Sleep { level, done }) => {
                    self.sleep.ask_without_workers(level, done);
                    self.thread.shared.sleeps.store(true, Ordering::Release);
                    return None;
                }
                Ok(Message::Wake { done }) => {
                    self.sleep.ask_to_wake(done);
                    return None;
                }
                Ok(Message::WakeWith { done, .. }) => {
                    let _ = done.send(Err(error.message.clone()));
                }
                Ok(Message::Stop { done }) => return Some(done),
                Ok(Message::Masks(jobs)) => self.finish_masks(jobs),
                Ok(Message::Disk { event }) => self.note_disk(event),
                Ok(Message::ResetPrefixCache(reply)) => {
                    if let Some(engine) = &mut self.engine {
                        engine.reset_prefix_cache();
                    }
                    let _ = reply.send(());
                }
                Ok(
                    Message::Cancel(_)
                    | Message::Finish(_)
                    | Message::Abort(_)
                    | Message::Agent(_)
                    | Message::Ledger(_),
                ) => {}
                Err(mpsc::RecvTimeoutError::Timeout) => return None,
                // No senders are left, so no request can arrive.
                Err(mpsc::RecvTimeoutError::Disconnected) => return Some(oneshot::channel().0),
            }
        }
    }
}
