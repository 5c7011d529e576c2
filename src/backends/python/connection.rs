//! A model process with what it shares with the server: memory, metrics, and questions to other models.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use bytes::Bytes;
use ipc::lock;
use serving::{ClientSlice, InferError};
use tokio::sync::{Notify, mpsc, watch};

use super::Host;
use super::calls::Call;
use super::memory::{Arena, Block, Shared};
use super::message::ToProcess;
use super::metrics::Held;
use super::process::Process;
use super::wire::{WireError, Writer};

/// What happens while a process loads its model.
#[derive(Debug)]
pub(super) enum LoadEvent {
    /// It runs, and begins to load.
    Started,
    /// It has loaded: a completed configuration, if that was asked; or why not.
    Loaded(Result<Option<String>, InferError>),
    /// It has ended, and how.
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
    /// Wakes who looks after requests that take long.
    pub busy: Notify,
    pub is_watched: AtomicBool,
    pub is_stopped: AtomicBool,
    pub events: mpsc::Sender<LoadEvent>,
    inputs: Mutex<Arena>,
    outputs: Mutex<Vec<Shared>>,
    client_files: Mutex<ClientFiles>,
    probe: Mutex<Probe>,
}

/// Asking a model whether it is ready.
#[derive(Debug, Default)]
struct Probe {
    /// Whether it has a method that answers.
    is_there: bool,
    /// The question that is being answered; who asks meanwhile gets the same answer.
    asked: Option<watch::Sender<Option<bool>>>,
}

/// Time for a model to say whether it is ready.
const PROBE_PATIENCE: Duration = Duration::from_secs(5);

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

    /// The model has a method `is_ready`, which [`Connection::probe`] calls from now on.
    pub fn can_be_probed(&self) {
        lock(&self.probe).is_there = true;
    }

    /// What the model says of its readiness; true for one that cannot say, false when it does not in time.
    pub async fn probe(&self) -> bool {
        let mut answer = {
            let mut probe = lock(&self.probe);
            if !probe.is_there {
                return true;
            }
            match &probe.asked {
                Some(asked) => asked.subscribe(),
                None => {
                    let (asked, answer) = watch::channel(None);
                    probe.asked = Some(asked);
                    let mut message = Writer::begin(1);
                    message.int(ToProcess::Probe as u8);
                    self.process.send(&message.finish());
                    answer
                }
            }
        };
        let answered = tokio::time::timeout(PROBE_PATIENCE, answer.wait_for(Option::is_some)).await;
        answered.is_ok_and(|answer| answer.is_ok_and(|is_ready| *is_ready == Some(true)))
    }

    /// The model has answered.
    pub fn probed(&self, is_ready: bool) {
        if let Some(asked) = lock(&self.probe).asked.take() {
            asked.send_replace(Some(is_ready));
        }
    }

    /// The number of an object of a client's shared memory; the process opens it when it first hears of it. The caller
    /// holds the slice until the process has answered.
    pub fn client_file(&self, slice: &ClientSlice) -> u64 {
        let mut files = lock(&self.client_files);
        if let Some((number, _)) = files.open.iter().find(|(_, file)| file.as_ptr() == Arc::as_ptr(&slice.file)) {
            return *number;
        }
        files.last += 1;
        let number = files.last;
        files.open.push((number, Arc::downgrade(&slice.file)));
        // By this process's descriptor: the name may be gone, or another object's.
        let path = format!("/proc/{}/fd/{}", std::process::id(), slice.file.as_raw_fd());
        let mut message = Writer::begin(3);
        message.int(ToProcess::OpenFile as u8);
        message.int(number);
        message.text(&path);
        self.process.send(&message.finish());
        number
    }

    /// Has the process close what clients have unregistered. False when it has nothing open.
    pub fn close_client_files(&self) -> bool {
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
        !files.open.is_empty()
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
        Ok(block.expect("a new region has room for what it was made for"))
    }

    /// Gives a block back that was placed and not sent.
    pub fn release(&self, block: Block) {
        if let Some(region) = lock(&self.inputs).region(block.region) {
            region.release(block.offset);
        }
    }

    /// Copies a tensor out of shared memory, and gives its block back.
    pub fn take(&self, block: Block) -> Result<Bytes, WireError> {
        let outputs = lock(&self.outputs);
        let wrong = |found: String| WireError::Shape { expected: "a block of shared memory", found };
        let region = outputs.get(block.region).ok_or_else(|| wrong(format!("region {}", block.region)))?;
        region.take(block.offset, block.len).map_err(|error| wrong(error.to_string()))
    }

    /// Makes a region that the process fills; writes its number and where it is.
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

    /// The process has opened a region: its name may go.
    pub fn mapped(&self, is_input: bool, number: usize) {
        if is_input {
            lock(&self.inputs).region(number).map(Shared::unlink);
        } else {
            lock(&self.outputs).get(number).map(Shared::unlink);
        }
    }

    /// Has someone look after what runs.
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
