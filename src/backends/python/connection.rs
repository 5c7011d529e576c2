//! A running model process, with its shared memory, its metrics and its calls to the server.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use bytes::Bytes;
use ipc::lock;
use serving::{ClientSlice, InferError};
use tokio::sync::{Notify, Semaphore, mpsc, watch};
use tokio::task::AbortHandle;

use super::host::Host;
use super::memory::{Arena, Block, Shared};
use super::message::ToProcess;
use super::metrics::Held;
use super::process::Process;
use super::wire::{WireError, Writer};

/// What happens while a process loads its model.
#[derive(Debug)]
pub(super) enum LoadEvent {
    /// The process runs and begins to load.
    Started,
    /// Loading has ended: with a completed configuration if one was requested, or with an error.
    Loaded(Result<Option<String>, InferError>),
    /// The process has ended; says how.
    Ended(String),
}

/// One running process.
pub(super) struct Connection {
    pub host: Arc<Host>,
    pub process: Process,
    /// The instance, as the log and errors name it.
    pub name: String,
    pub metrics: Mutex<Held>,
    pub calls: Mutex<HashMap<i64, Call>>,
    /// Wakes the task that checks running requests.
    pub busy: Notify,
    /// Whether that task checks requests now.
    pub is_watched: AtomicBool,
    /// Whether the process is stopped, for example by a debugger.
    pub is_stopped: AtomicBool,
    pub events: mpsc::Sender<LoadEvent>,
    inputs: Mutex<Arena>,
    outputs: Mutex<Vec<Shared>>,
    client_files: Mutex<ClientFiles>,
    probe: Mutex<Probe>,
}

/// A request to another model; dropping its task cancels it.
#[derive(Debug)]
pub(super) struct Call {
    pub credits: Arc<Semaphore>,
    pub task: AbortHandle,
}

impl Drop for Call {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// State of the model's readiness check.
#[derive(Debug, Default)]
struct Probe {
    /// Whether the model has a method `is_ready`.
    is_available: bool,
    /// Set while the method runs. All callers of that time get its result.
    running: Option<watch::Sender<Option<bool>>>,
}

/// Time limit of a readiness check.
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);

/// Clients' objects of shared memory that the process has open, by number.
#[derive(Debug, Default)]
struct ClientFiles {
    open: Vec<(u64, Weak<File>)>,
    last: u64,
}

impl Connection {
    pub fn new(host: Arc<Host>, process: Process, name: String, events: mpsc::Sender<LoadEvent>) -> Self {
        let metrics = Mutex::new(Held::new(host.metrics.clone()));
        let (calls, busy, is_watched, is_stopped, inputs, outputs, client_files, probe) = Default::default();
        Self {
            host,
            process,
            name,
            metrics,
            calls,
            busy,
            is_watched,
            is_stopped,
            events,
            inputs,
            outputs,
            client_files,
            probe,
        }
    }

    /// Lets [`Connection::probe`] call the model's method `is_ready` from now on.
    pub fn enable_probe(&self) {
        lock(&self.probe).is_available = true;
    }

    /// Whether the model is ready by its own check. True for a model without a check, false if the check takes too long.
    pub async fn probe(&self) -> bool {
        let mut answer = {
            let mut probe = lock(&self.probe);
            if !probe.is_available {
                return true;
            }
            match &probe.running {
                Some(running) => running.subscribe(),
                None => {
                    let (running, answer) = watch::channel(None);
                    probe.running = Some(running);
                    let mut message = Writer::begin(1);
                    message.int(ToProcess::Probe as u8);
                    self.process.send(&message.finish());
                    answer
                }
            }
        };
        let answered = tokio::time::timeout(PROBE_TIMEOUT, answer.wait_for(Option::is_some)).await;
        answered.is_ok_and(|answer| answer.is_ok_and(|is_ready| *is_ready == Some(true)))
    }

    /// Handles the result of a readiness check.
    pub fn probed(&self, is_ready: bool) {
        if let Some(running) = lock(&self.probe).running.take() {
            running.send_replace(Some(is_ready));
        }
    }

    /// The number of an object of a client's shared memory in the process, which opens it on first use. The caller must hold the
    /// slice until the process has responded.
    pub fn client_file(&self, slice: &ClientSlice) -> u64 {
        let mut files = lock(&self.client_files);
        if let Some((number, _)) = files.open.iter().find(|(_, file)| file.as_ptr() == Arc::as_ptr(&slice.file)) {
            return *number;
        }
        files.last += 1;
        let number = files.last;
        files.open.push((number, Arc::downgrade(&slice.file)));
        // Through this process's descriptor: the name may be removed, or name another object.
        let path = format!("/proc/{}/fd/{}", std::process::id(), slice.file.as_raw_fd());
        let mut message = Writer::begin(3);
        message.int(ToProcess::OpenFile as u8);
        message.int(number);
        message.text(&path);
        self.process.send(&message.finish());
        number
    }

    /// Lets the process close objects that clients have unregistered.
    pub fn close_client_files(&self) {
        let mut files = lock(&self.client_files);
        files.open.retain(|(number, file)| {
            let is_registered = file.strong_count() > 0;
            if !is_registered {
                let mut message = Writer::begin(2);
                message.int(ToProcess::CloseFile as u8);
                message.int(*number);
                self.process.send(&message.finish());
            }
            is_registered
        });
    }

    /// Copies the bytes of a tensor into shared memory.
    pub fn place(&self, bytes: &[u8]) -> Result<Block, InferError> {
        let failed = |error: ipc::IpcError| InferError::unavailable(format!("no shared memory for a tensor: {error}"));
        let mut inputs = lock(&self.inputs);
        if let Some(block) = inputs.put(bytes).map_err(failed)? {
            return Ok(block);
        }
        let held = (0..inputs.len()).filter_map(|number| inputs.region(number)).map(Shared::len).sum();
        let shared = self.host.new_region(Arena::needed(bytes.len()), held).map_err(failed)?;
        let mut message = Writer::begin(5);
        message.int(ToProcess::Map as u8);
        message.int(inputs.len() as u64);
        write_region(&mut message, &shared);
        inputs.add(shared);
        self.process.send(&message.finish());
        let block = inputs.put(bytes).map_err(failed)?;
        Ok(block.expect("a new region has room for the tensor that it was made for"))
    }

    /// Frees a block that was filled and not sent.
    pub fn release(&self, block: Block) {
        if let Some(region) = lock(&self.inputs).region(block.region) {
            region.release(block.offset);
        }
    }

    /// Copies a tensor out of shared memory, and frees its block.
    pub fn take(&self, block: Block) -> Result<Bytes, WireError> {
        let outputs = lock(&self.outputs);
        let wrong = |found: String| WireError::Shape { expected: "a block of shared memory", found };
        let region = outputs.get(block.region).ok_or_else(|| wrong(format!("region {}", block.region)))?;
        region.take(block.offset, block.len).map_err(|error| wrong(error.to_string()))
    }

    /// Makes a region that the process fills, and writes its number and location to `reply`.
    pub fn add_output_region(&self, bytes: usize, reply: &mut Writer) -> Result<(), InferError> {
        let failed = |error: ipc::IpcError| InferError::unavailable(format!("no shared memory for a tensor: {error}"));
        let mut outputs = lock(&self.outputs);
        let held = outputs.iter().map(Shared::len).sum();
        let shared = self.host.new_region(bytes, held).map_err(failed)?;
        reply.tuple(4);
        reply.int(outputs.len() as u64);
        write_region(reply, &shared);
        outputs.push(shared);
        Ok(())
    }

    /// Removes the name of a region that the process has opened.
    pub fn mapped(&self, is_input: bool, number: usize) {
        if is_input {
            lock(&self.inputs).region(number).map(Shared::unlink);
        } else {
            lock(&self.outputs).get(number).map(Shared::unlink);
        }
    }

    /// Starts the checks of running requests, unless they run already.
    pub fn watch(&self) {
        if !self.is_watched.swap(true, Ordering::AcqRel) {
            self.busy.notify_one();
        }
    }
}

fn write_region(writer: &mut Writer, shared: &Shared) {
    writer.text(&shared.path().to_string_lossy());
    writer.int(shared.start());
    writer.int(shared.len() as u64);
}
