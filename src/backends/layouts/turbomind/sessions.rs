//! The sessions of a model: their tokens, and their running requests.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use serving::{CorrelationId, InferError};
use tokio::sync::watch;

/// Maximum number of sessions. Beyond it, the session that has been idle for longest is dropped.
const MAX_SESSIONS: usize = 4096;

/// All sessions of a model. Clones share them.
#[derive(Clone, Default)]
pub(super) struct Sessions(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    sessions: HashMap<CorrelationId, Session>,
    /// Number of runs so far.
    num_runs: u64,
}

/// The state of a session between two requests.
struct Session {
    tokens: Vec<u32>,
    /// Incremented to cancel the running request.
    stop: watch::Sender<u64>,
    /// The number of the running request.
    run: Option<u64>,
    last_used: Instant,
}

/// The session inputs of a request.
pub(super) struct SessionRequest {
    pub id: CorrelationId,
    /// Whether the session begins with this request.
    pub starts: bool,
    /// Whether the session ends with this request.
    pub ends: bool,
    /// Number of tokens of the history to keep; `None` keeps all.
    pub step: Option<usize>,
    /// Maximum number of tokens of the session.
    pub session_len: Option<usize>,
}

/// The running request of a session. When it is dropped, its tokens become the history of the session.
pub(super) struct Run {
    sessions: Sessions,
    id: CorrelationId,
    ends: bool,
    number: u64,
    stopped: watch::Receiver<u64>,
    /// All tokens of the session.
    pub tokens: Vec<u32>,
}

impl Session {
    fn new() -> Self {
        Self { tokens: Vec::new(), stop: watch::Sender::new(0), run: None, last_used: Instant::now() }
    }

    /// Truncates the history to the `step` of a request.
    ///
    /// # Errors
    /// When another request is running, or the history is shorter.
    fn truncate(&mut self, request: &SessionRequest) -> Result<(), InferError> {
        let shown = display(&request.id);
        if self.run.is_some() {
            let message = format!("session {shown} still answers its last request; wait for it, or send STOP = 1");
            return Err(InferError::invalid(message));
        }
        let num_tokens = self.tokens.len();
        match request.step {
            Some(step) if step > num_tokens => {
                Err(InferError::invalid(format!("`step` is {step}, but session {shown} holds {num_tokens} tokens")))
            }
            step => {
                self.tokens.truncate(step.unwrap_or(num_tokens));
                Ok(())
            }
        }
    }
}

impl SessionRequest {
    /// Checks the length of the session after this request.
    fn check_len(&self, num_tokens: usize) -> Result<(), InferError> {
        match self.session_len {
            Some(session_len) if session_len > 0 && num_tokens > session_len => Err(InferError::invalid(format!(
                "session {} would come to {num_tokens} tokens, more than `session_len` ({session_len}); start a new one, \
                 or ask for fewer tokens",
                display(&self.id)
            ))),
            _ => Ok(()),
        }
    }
}

impl Sessions {
    /// Starts a request that adds the tokens `added` and generates up to `max_tokens`. The tokens of the run are its prompt.
    ///
    /// # Errors
    /// When the session is unknown or has a running request, or its length would be invalid.
    pub fn begin(&self, request: &SessionRequest, added: &[u32], max_tokens: usize) -> Result<Run, InferError> {
        let state = &mut *ipc::lock(&self.0);
        if request.starts {
            if let Some(old) = state.sessions.insert(request.id.clone(), Session::new()) {
                old.stop.send_modify(|count| *count += 1);
            }
            state.drop_oldest();
        }
        let session = state.sessions.get_mut(&request.id).ok_or_else(|| {
            let shown = display(&request.id);
            InferError::invalid(format!("session {shown} is not known; send its first request with START = 1"))
        })?;
        session.truncate(request)?;
        request.check_len(session.tokens.len() + added.len() + max_tokens)?;
        state.num_runs += 1;
        session.run = Some(state.num_runs);
        session.last_used = Instant::now();
        let mut tokens = session.tokens.clone();
        tokens.extend_from_slice(added);
        let (id, stopped) = (request.id.clone(), session.stop.subscribe());
        Ok(Run { sessions: self.clone(), id, ends: request.ends, number: state.num_runs, stopped, tokens })
    }

    /// Cancels the running request of a session, and ends the session if the request says so.
    pub fn stop(&self, request: &SessionRequest) {
        let mut state = ipc::lock(&self.0);
        if let Some(session) = state.sessions.get(&request.id) {
            session.stop.send_modify(|count| *count += 1);
        }
        if request.ends {
            state.sessions.remove(&request.id);
        }
    }

    /// Begins or ends a session, for a request of 0 tokens. Returns the number of its tokens.
    pub fn touch(&self, request: &SessionRequest) -> usize {
        let mut state = ipc::lock(&self.0);
        if request.starts {
            state.sessions.insert(request.id.clone(), Session::new());
            state.drop_oldest();
        }
        let num_tokens = state.sessions.get(&request.id).map_or(0, |session| session.tokens.len());
        if request.ends {
            state.sessions.remove(&request.id);
        }
        num_tokens
    }
}

impl State {
    /// Drops the sessions that have been idle for longest, beyond [`MAX_SESSIONS`].
    fn drop_oldest(&mut self) {
        while self.sessions.len() > MAX_SESSIONS {
            let idle = self.sessions.iter().filter(|(_, session)| session.run.is_none());
            let oldest = idle.min_by_key(|(_, session)| session.last_used).map(|(id, _)| id.clone());
            let Some(oldest) = oldest else { return };
            self.sessions.remove(&oldest);
        }
    }
}

impl Run {
    /// Resolves when the request is cancelled.
    pub async fn stopped(&mut self) {
        // The sender of a session that was replaced or ended is dropped.
        let _ = self.stopped.changed().await;
    }

    /// Makes the tokens the history of the session, or ends the session. Only the first call has an effect.
    pub fn finish(&mut self) {
        let mut state = ipc::lock(&self.sessions.0);
        // The session may have been replaced by another one with the same id.
        let Some(session) = state.sessions.get_mut(&self.id).filter(|session| session.run == Some(self.number)) else {
            return;
        };
        if self.ends {
            state.sessions.remove(&self.id);
            return;
        }
        session.tokens.clone_from(&self.tokens);
        session.run = None;
        session.last_used = Instant::now();
    }

    /// Ends the run, and keeps the history as it was.
    pub fn abort(self) {
        let mut state = ipc::lock(&self.sessions.0);
        if let Some(session) = state.sessions.get_mut(&self.id).filter(|session| session.run == Some(self.number)) {
            session.run = None;
        }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.finish();
    }
}

/// The id in messages.
fn display(id: &CorrelationId) -> String {
    match id {
        CorrelationId::Number(number) => number.to_string(),
        CorrelationId::Text(text) => format!("`{text}`"),
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    fn request(starts: bool, ends: bool, step: Option<usize>) -> SessionRequest {
        SessionRequest { id: CorrelationId::Number(7), starts, ends, step, session_len: Some(8) }
    }

    fn refusal(sessions: &Sessions, request: &SessionRequest, max_tokens: usize) -> String {
        sessions.begin(request, &[9], max_tokens).err().expect("it is refused").message
    }

    #[test]
    fn the_history_is_that_of_earlier_requests_and_can_be_truncated() {
        let sessions = Sessions::default();
        let mut run = sessions.begin(&request(true, false, None), &[1, 2], 2).unwrap();
        run.tokens.extend([3, 4]);
        assert!(refusal(&sessions, &request(false, false, None), 1).contains("still answers"));
        drop(run);
        let run = sessions.begin(&request(false, false, Some(3)), &[5], 1).unwrap();
        assert_eq!(run.tokens, [1, 2, 3, 5]);
        run.abort();
        assert_eq!(sessions.touch(&request(false, false, None)), 3, "an aborted run adds nothing");
        assert!(refusal(&sessions, &request(false, false, Some(4)), 1).contains("holds 3 tokens"));
        assert!(refusal(&sessions, &request(false, false, None), 5).contains("would come to 9 tokens"));
        drop(sessions.begin(&request(false, true, None), &[6], 1).unwrap());
        assert!(refusal(&sessions, &request(false, false, None), 1).contains("is not known"));
    }

    #[test]
    fn a_run_of_a_replaced_session_is_cancelled_and_leaves_the_new_one_alone() {
        let sessions = Sessions::default();
        let mut old = sessions.begin(&request(true, false, None), &[1], 1).unwrap();
        assert!(old.stopped().now_or_never().is_none());
        let new = sessions.begin(&request(true, false, None), &[2], 1).unwrap();
        assert!(old.stopped().now_or_never().is_some());
        drop(old);
        assert!(refusal(&sessions, &request(false, false, None), 1).contains("still answers"), "the new run goes on");
        drop(new);
        assert_eq!(sessions.begin(&request(false, false, None), &[3], 1).unwrap().tokens, [2, 3]);
    }
}
