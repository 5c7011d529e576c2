//! One instance of a model: its process, and the batches and requests that the process works on.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use ipc::lock;
use serving::{BatchedRequest, ClientSlice, ErrorKind, InferError, InferResponse, Trace};
use tokio::sync::oneshot;

use super::connection::Connection;
use super::memory::Block;
use super::message::{Places, ToProcess, read_error, read_response, write_request};
use super::running::Running;
use super::wire::{Value, WireError, Writer};

/// While an `execute` takes less than this, the next batch is sent before it ends, so that the process need not wait for it.
const QUICK: Duration = Duration::from_millis(1);

/// First and longest pause between restarts of a process that ends again and again.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// After a process that served for this long, the next one starts without a pause.
const HEALTHY_AFTER: Duration = Duration::from_secs(60);

/// An instance of a model.
#[derive(Default)]
pub(super) struct Instance {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The process that serves; none while it restarts.
    connection: Option<Arc<Connection>>,
    /// Batches that the process has, in order.
    batches: VecDeque<Batch>,
    /// Requests without their final response.
    running: HashMap<u64, Running>,
    /// Whether the last `execute` took less than [`QUICK`].
    is_quick: bool,
    last_number: u64,
    /// Why there is no process.
    lost: String,
    /// When the process began to serve.
    attached: Option<Instant>,
    /// The pause before the last restart.
    pause: Duration,
}

struct Batch {
    number: u64,
    requests: Vec<u64>,
    /// When the process began to execute it, at the earliest.
    since: Instant,
    /// Sent when the instance is free for the next batch.
    free: Option<oneshot::Sender<()>>,
}

impl Instance {
    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Gives the instance a process.
    pub fn attach(&self, connection: Arc<Connection>) {
        let mut state = self.lock();
        state.is_quick = false;
        state.attached = Some(Instant::now());
        state.connection = Some(connection);
    }

    /// The pause before the next process is started: none after a process that served for long, otherwise twice the last one.
    pub fn next_pause(&self) -> Duration {
        let mut state = self.lock();
        let served = state.attached.take().map_or(Duration::ZERO, |attached| attached.elapsed());
        let twice = (state.pause * 2).clamp(FIRST_PAUSE, LONGEST_PAUSE);
        state.pause = if served < HEALTHY_AFTER { twice } else { Duration::ZERO };
        state.pause
    }

    pub fn connection(&self) -> Option<Arc<Connection>> {
        self.lock().connection.clone()
    }

    /// Whether its process runs and is not stopped.
    pub fn is_ready(&self) -> bool {
        self.lock().connection.as_ref().is_some_and(|connection| !connection.is_stopped.load(Ordering::Relaxed))
    }

    pub fn num_running(&self) -> usize {
        self.lock().running.len()
    }

    /// Sends a batch to the process. The receiver, if any, resolves when the instance is free for the next batch; without one it
    /// is free now.
    ///
    /// # Errors
    /// When there is no process.
    pub fn execute(&self, batch: Vec<BatchedRequest>) -> Result<Option<oneshot::Receiver<()>>, InferError> {
        let mut state = self.lock();
        let Some(connection) = state.connection.clone() else {
            return Err(InferError::unavailable(state.lost.clone()));
        };
        let started = Instant::now();
        let placed: Vec<(BatchedRequest, Vec<Block>)> =
            batch.into_iter().filter_map(|request| place(&connection, request)).collect();
        if placed.is_empty() {
            return Ok(None);
        }
        let number = state.last_number + 1;
        let mut message = Writer::begin(3);
        message.int(ToProcess::Execute as u8);
        message.int(number);
        message.tuple(placed.len());
        let mut requests = Vec::with_capacity(placed.len());
        for (batched, blocks) in placed {
            state.last_number += 1;
            let number = state.last_number;
            write_request(&mut message, number, &batched.request, &mut Placed::new(&connection, blocks))?;
            state.running.insert(number, Running::new(batched));
            requests.push(number);
        }
        let is_ahead = !state.batches.is_empty();
        let (free, wait) = oneshot::channel();
        // Where executions are quick, one batch may wait in the process while it executes another.
        let (free, wait) = if state.is_quick && !is_ahead { (None, None) } else { (Some(free), Some(wait)) };
        connection.process.send(&message.finish());
        let since = Instant::now();
        for running in requests.iter().filter_map(|number| state.running.get(number)) {
            running.took_input(since - started);
        }
        state.batches.push_back(Batch { number, requests, since, free });
        drop(state);
        connection.watch();
        Ok(wait)
    }

    /// Handles the result of a batch: responses, or an exception.
    pub fn done(&self, connection: &Connection, parts: [Value; 3]) -> Result<(), WireError> {
        let [number, responses, error] = parts;
        let number: u64 = number.int()?;
        let mut state = self.lock();
        let Some(batch) = state.batches.pop_front_if(|batch| batch.number == number) else {
            return Err(WireError::Shape { expected: "the batch that is due", found: number.to_string() });
        };
        let now = Instant::now();
        state.is_quick = now - batch.since < QUICK;
        if let Some(next) = state.batches.front_mut() {
            next.since = now;
            next.free.take().map(|free| free.send(()));
        }
        batch.free.map(|free| free.send(()));
        if let Some(error) = error.optional() {
            let [code, words, trace] = error.parts()?;
            tracing::error!(instance = connection.name, "{}", trace.text()?.trim_end());
            let error = read_error(Value::Tuple(vec![code, words]))?;
            let error = InferError::new(
                error.kind,
                format!("Failed to process the request(s) for model '{}', message: {}", connection.name, error.message),
            );
            for number in batch.requests {
                state.finish(number, Err(error.clone()));
            }
            return Ok(());
        }
        for (number, response) in batch.requests.into_iter().zip(responses.tuple()?) {
            match response {
                // It is answered through its response sender.
                Value::None => {}
                Value::Bool(_) => state.reschedule(number),
                response => {
                    state.running.get(&number).iter().for_each(|running| running.computed_at(now));
                    let response = read_response(response, &mut |block| connection.take(block))?;
                    state.finish(number, response);
                }
            }
        }
        Ok(())
    }

    /// Handles a response that the model sent through a response sender.
    pub fn respond(&self, connection: &Connection, is_decoupled: bool, parts: [Value; 3]) -> Result<(), WireError> {
        let [number, response, flags] = parts;
        let (number, is_final) = (number.int::<u64>()?, flags.int::<u8>()? != 0);
        let received = Instant::now();
        let response = match response.optional() {
            Some(response) => Some(read_response(response, &mut |block| connection.take(block))?),
            None => None,
        };
        let mut state = self.lock();
        // The request may have been dropped, because its client does not read.
        let Some(running) = state.running.get_mut(&number) else { return Ok(()) };
        running.computed_at(received);
        if is_final || !is_decoupled {
            let none = || match running.num_responses {
                0 if !is_decoupled => Err(InferError::internal("the model ended the request without a response")),
                _ => Ok(InferResponse::default()),
            };
            let response = response.unwrap_or_else(none);
            state.finish(number, response);
        } else if let Some(response) = response
            && !running.respond(response)
        {
            tracing::warn!(
                instance = connection.name,
                "a request is dropped, because its client does not read the responses"
            );
            state.running.remove(&number);
            connection.process.send(&cancel(number));
        }
        Ok(())
    }

    /// Cancels the requests of clients that have left. Returns false when no request runs.
    pub fn cancel_abandoned(&self, connection: &Connection) -> bool {
        let mut state = self.lock();
        for (&number, running) in &mut state.running {
            if !running.is_cancelled && running.is_abandoned() {
                running.is_cancelled = true;
                connection.process.send(&cancel(number));
            }
        }
        if state.running.is_empty() {
            connection.is_watched.store(false, Ordering::Release);
        }
        !state.running.is_empty()
    }

    /// A trace for a request that the model makes while it serves request `number`; `None` if that is not traced or has ended.
    pub fn trace_of(&self, number: u64) -> Option<Trace> {
        Some(self.lock().running.get(&number)?.request.trace.as_ref()?.child())
    }

    /// When the current `execute` began; `None` while no batch runs.
    pub fn executing_since(&self) -> Option<Instant> {
        self.lock().batches.front().map(|batch| batch.since)
    }

    /// Removes a process that has ended. With `keeps_unanswered`, returns the requests without any response, for the next
    /// process. All others get the error `why`.
    pub fn detach(&self, why: &str, keeps_unanswered: bool) -> Vec<BatchedRequest> {
        let mut state = self.lock();
        state.connection = None;
        why.clone_into(&mut state.lost);
        // Dropping the senders ends the waits for a free instance.
        state.batches.clear();
        let mut unanswered = Vec::new();
        for (_, mut running) in state.running.drain() {
            if keeps_unanswered && running.num_responses == 0 && !running.is_abandoned() {
                unanswered.push(running.into_request());
            } else {
                running.respond(Err(InferError::new(ErrorKind::Unavailable, why)));
            }
        }
        unanswered
    }
}

impl State {
    /// Sends the last response of a request.
    fn finish(&mut self, number: u64, response: Result<InferResponse, InferError>) {
        if let Some(mut running) = self.running.remove(&number) {
            running.respond(response.map(|response| InferResponse { is_final: true, ..response }));
        }
    }

    /// Returns a request to its queue, or sends it to the process again, after the batches that it has.
    fn reschedule(&mut self, number: u64) {
        let (Some(connection), Some(running)) = (self.connection.clone(), self.running.remove(&number)) else { return };
        let BatchedRequest { request, responses } = running.into_request();
        let batched = match responses.reschedule(request) {
            Ok(()) => return,
            Err(back) => BatchedRequest { request: back.0, responses: back.1 },
        };
        let Some((batched, blocks)) = place(&connection, batched) else { return };
        self.last_number += 1;
        let number = self.last_number;
        let mut message = Writer::begin(3);
        message.int(ToProcess::Execute as u8);
        message.int(number);
        message.tuple(1);
        if write_request(&mut message, number, &batched.request, &mut Placed::new(&connection, blocks)).is_ok() {
            self.running.insert(number, Running::new(batched));
            self.batches.push_back(Batch { number, requests: vec![number], since: Instant::now(), free: None });
            connection.process.send(&message.finish());
        }
    }
}

/// The blocks of shared memory that hold the large tensors of one request.
struct Placed<'a> {
    connection: &'a Connection,
    blocks: std::vec::IntoIter<Block>,
}

impl<'a> Placed<'a> {
    fn new(connection: &'a Connection, blocks: Vec<Block>) -> Self {
        Self { connection, blocks: blocks.into_iter() }
    }
}

impl Places for Placed<'_> {
    fn place(&mut self, _: &[u8]) -> Result<Block, InferError> {
        Ok(self.blocks.next().expect("each large tensor was placed"))
    }

    fn file(&mut self, slice: &ClientSlice) -> u64 {
        self.connection.client_file(slice)
    }
}

/// Copies the large tensors of a request into shared memory. Without room, the request gets the error, and the result is `None`.
fn place(connection: &Connection, batched: BatchedRequest) -> Option<(BatchedRequest, Vec<Block>)> {
    let mut blocks = Vec::new();
    for tensor in batched.request.inputs.iter().filter(|tensor| super::message::is_large(&tensor.data)) {
        match connection.place(&tensor.data) {
            Ok(block) => blocks.push(block),
            Err(error) => {
                blocks.into_iter().for_each(|block| connection.release(block));
                Running::new(batched).respond(Err(error));
                return None;
            }
        }
    }
    Some((batched, blocks))
}

fn cancel(number: u64) -> Vec<u8> {
    let mut message = Writer::begin(2);
    message.int(ToProcess::Cancel as u8);
    message.int(number);
    message.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_between_restarts_grow() {
        let instance = Instance::default();
        let pauses: Vec<u128> = (0..10).map(|_| instance.next_pause().as_millis()).collect();
        assert_eq!(pauses, [100, 200, 400, 800, 1600, 3200, 6400, 12_800, 25_600, 30_000]);

        // A process that ended right after it had loaded counts like one that did not load.
        instance.lock().attached = Some(Instant::now());
        assert_eq!(instance.next_pause(), LONGEST_PAUSE);

        instance.lock().attached = Instant::now().checked_sub(HEALTHY_AFTER);
        assert_eq!(instance.next_pause(), Duration::ZERO);
        assert_eq!(instance.next_pause(), FIRST_PAUSE);
    }
}
