//! The instances of a model. Each has a process, which is replaced when it ends.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures::FutureExt as _;
use futures::future::{BoxFuture, join_all};
use ipc::lock;
use serving::{BatchedRequest, InferError, LoadRequest};
use tokio::sync::mpsc;

use super::calls;
use super::connection::{Connection, LoadEvent};
use super::files::STUB;
use super::host::Host;
use super::instance::Instance;
use super::message::{FromProcess, ToProcess, read_error};
use super::mpi::Launch;
use super::process::Process;
use super::settings::Settings;
use super::spawner::Program;
use super::wire::{LENGTH, Value, WireError, Writer};

/// Interval of the checks of running requests.
const CHECK_INTERVAL: Duration = Duration::from_millis(5);

/// Interval of the checks whether a busy process is stopped.
const HEALTH_INTERVAL: Duration = Duration::from_secs(1);

/// How long the last messages of a process are read after its end.
const LAST_MESSAGES_TIMEOUT: Duration = Duration::from_millis(200);

/// How long a request waits for a process that restarts.
const RESTART_TIMEOUT: Duration = Duration::from_secs(2);

/// The instances of one model, and what they share.
pub(super) struct Instances {
    host: Arc<Host>,
    pub settings: Settings,
    pub all: Vec<Instance>,
    is_ending: AtomicBool,
}

impl Instances {
    /// The instances that the configuration of a model names, without processes yet.
    pub async fn new(host: Arc<Host>, load: &LoadRequest) -> Result<Self, InferError> {
        let (task_host, task_load) = (host.clone(), load.clone());
        // Unpacking an environment blocks.
        let settings = tokio::task::spawn_blocking(move || Settings::new(&task_host, &task_load)).await;
        let settings = settings.map_err(|error| InferError::internal(error.to_string()))??;
        let all = settings.places.iter().map(|_| Instance::default()).collect();
        Ok(Self { host, settings, all, is_ending: AtomicBool::new(false) })
    }

    /// Runs a batch on an instance. Resolves when the instance is free for the next batch.
    pub async fn execute(&self, index: usize, batch: Vec<BatchedRequest>) {
        let instance = &self.all[index];
        self.wait_for_process(index).await;
        let senders: Vec<_> = batch.iter().map(|batched| batched.responses.clone()).collect();
        match instance.execute(batch) {
            // An error means that the process is lost, which also ends the wait.
            Ok(Some(free)) => drop(free.await),
            Ok(None) => {}
            Err(error) => {
                for sender in senders {
                    let _ = sender.try_send(Err(error.clone()));
                }
                self.wait_while_others_serve(index).await;
            }
        }
    }

    /// Waits for an instance whose process is being replaced, so that its requests need not fail.
    async fn wait_for_process(&self, index: usize) {
        let deadline = Instant::now() + RESTART_TIMEOUT;
        while self.all[index].connection().is_none()
            && !self.is_ending.load(Ordering::Acquire)
            && Instant::now() < deadline
        {
            tokio::time::sleep(CHECK_INTERVAL).await;
        }
    }

    /// Keeps a failed instance busy as long as other instances serve, so that they get the next requests.
    async fn wait_while_others_serve(&self, index: usize) {
        while !self.is_ending.load(Ordering::Acquire)
            && !self.all[index].is_ready()
            && self.all.iter().any(Instance::is_ready)
        {
            tokio::time::sleep(CHECK_INTERVAL).await;
        }
    }

    /// Starts a process for an instance, and waits until it has loaded the model. With `complete`, the process only completes
    /// that configuration, which is returned.
    pub fn connect(
        self: &Arc<Self>,
        index: usize,
        complete: Option<String>,
    ) -> BoxFuture<'static, Result<Option<String>, InferError>> {
        let shared = self.clone();
        // Boxed, because `start` leads to `connect` again when the process ends.
        async move { shared.start(index, complete).await }.boxed()
    }

    async fn start(self: Arc<Self>, index: usize, complete: Option<String>) -> Result<Option<String>, InferError> {
        let (settings, config, place) = (&self.settings, &self.host.config, &self.settings.places[index]);
        let load = settings.load_message(place, config.log_verbose, complete.as_deref());
        let module_dir = self.host.files.dir()?;
        let launch = match settings.is_mpi && complete.is_none() {
            true => {
                let (hosts, load) = (config.hosts.clone(), load[LENGTH..].to_vec());
                Some(Launch { hosts, scratch: self.host.new_scratch()?, load })
            }
            false => None,
        };
        let program = Program {
            interpreter: settings.interpreter.clone(),
            stub: module_dir.join(STUB),
            title: place.name.clone(),
            module_dir,
            pass_environment: config.pass_environment.clone(),
            launch,
            start_timeout: config.start_timeout,
        };
        let failed = |error: std::io::Error| {
            let program = program.interpreter.display();
            InferError::internal(format!("cannot start the Python interpreter `{program}`: {error}"))
        };
        let process = Process::start(&self.host.spawner, &program).await.map_err(failed)?;
        let (events, mut load_events) = mpsc::channel(4);
        let connection = Arc::new(Connection::new(self.host.clone(), process, place.name.clone(), events));
        tokio::spawn(self.clone().listen(index, connection.clone()));
        connection.process.send(&load);
        let loaded = self.wait_until_loaded(&connection, &mut load_events).await;
        if loaded.is_ok() && complete.is_none() {
            self.all[index].attach(connection.clone());
            tokio::spawn(self.clone().check_requests(index, connection));
        } else {
            // It ends by itself, unless threads of the model are still running.
            let timeout = config.stop_timeout;
            tokio::spawn(async move { connection.process.wait_or_kill(timeout).await });
        }
        loaded
    }

    /// Waits until a process has loaded the model, or completed its configuration.
    async fn wait_until_loaded(
        &self,
        connection: &Connection,
        events: &mut mpsc::Receiver<LoadEvent>,
    ) -> Result<Option<String>, InferError> {
        let start_timeout = self.host.config.start_timeout;
        let mut timeout = start_timeout;
        loop {
            match tokio::time::timeout(timeout, events.recv()).await {
                // Loading has no limit of its own: a model may be large.
                Ok(Some(LoadEvent::Started)) => timeout = Duration::from_secs(60 * 60 * 24),
                Ok(Some(LoadEvent::Loaded(loaded))) => return loaded,
                Ok(Some(LoadEvent::Ended(how))) => {
                    return Err(InferError::internal(format!("its Python process ended while loading: {how}")));
                }
                Ok(None) => return Err(InferError::internal("its Python process has ended")),
                Err(_) => {
                    connection.process.kill("it did not start in time");
                    let seconds = start_timeout.as_secs();
                    return Err(InferError::internal(format!(
                        "its Python process did not start within {seconds} s; see `stub-timeout-seconds`"
                    )));
                }
            }
        }
    }

    /// Handles the messages of a process until it ends, and then replaces it.
    async fn listen(self: Arc<Self>, index: usize, connection: Arc<Connection>) {
        let process = &connection.process;
        // After a panic at one of its messages, the process is killed and replaced.
        let read = AssertUnwindSafe(process.read(|message| self.handle(index, &connection, message))).catch_unwind();
        let panicked = || Err("handling one of its messages panicked".to_owned());
        let read = read.map(|read| read.map_or_else(|_| panicked(), |read| read.map_err(|why| why.to_string())));
        tokio::pin!(read);
        let broken = tokio::select! {
            result = &mut read => result,
            () = process.keep_sending() => Ok(()),
            () = process.exited() => tokio::time::timeout(LAST_MESSAGES_TIMEOUT, &mut read).await.unwrap_or(Ok(())),
        };
        if let Err(why) = broken {
            process.kill(&format!("it broke the protocol: {why}"));
        }
        process.wait_or_kill(self.host.config.stop_timeout).await;
        let how = process.ended().await;
        let _ = connection.events.try_send(LoadEvent::Ended(how.clone()));
        lock(&connection.calls).clear();
        let is_current = self.all[index].connection().is_some_and(|current| Arc::ptr_eq(&current, &connection));
        if is_current {
            self.replace(index, &how).await;
        }
    }

    fn handle(&self, index: usize, connection: &Arc<Connection>, mut message: Vec<Value>) -> Result<(), WireError> {
        let wrong = || WireError::Shape { expected: "a known kind of message", found: "another one".to_owned() };
        if message.is_empty() {
            return Err(wrong());
        }
        let kind = FromProcess::from_number(message.remove(0).int()?).ok_or_else(wrong)?;
        let instance = &self.all[index];
        let parts = Value::Tuple(message);
        match kind {
            FromProcess::Done => instance.done(connection, parts.parts()?)?,
            FromProcess::Response => instance.respond(connection, self.settings.is_decoupled, parts.parts()?)?,
            FromProcess::Call => {
                let [call, method, arguments] = parts.parts()?;
                calls::handle(connection, instance, call.int()?, &method.text()?, arguments.tuple()?)?;
            }
            FromProcess::Drop => {
                let [call] = parts.parts()?;
                calls::cancel(connection, call.int()?);
            }
            FromProcess::Log => {
                let [level, line, text] = parts.parts()?;
                self.log(level.int()?, &line.text()?, &text.text()?);
            }
            FromProcess::Metric => {
                let [operation, number, value] = parts.parts()?;
                let mut metrics = lock(&connection.metrics);
                metrics.change(&operation.text()?, number.int()?, value.float()?);
            }
            FromProcess::Mapped => {
                let [is_input, number] = parts.parts()?;
                connection.mapped(is_input.bool()?, number.int()?);
            }
            FromProcess::Started => drop(connection.events.try_send(LoadEvent::Started)),
            FromProcess::Loaded => {
                let [error, completed, has_probe] = parts.parts()?;
                if has_probe.bool()? {
                    connection.enable_probe();
                }
                let loaded = self.loaded(connection, error, completed)?;
                let _ = connection.events.try_send(LoadEvent::Loaded(loaded));
            }
            FromProcess::Probed => {
                let [is_ready] = parts.parts()?;
                connection.probed(is_ready.bool()?);
            }
            FromProcess::Finalized => connection.process.finalized(),
        }
        Ok(())
    }

    fn loaded(
        &self,
        connection: &Connection,
        error: Value,
        completed: Value,
    ) -> Result<Result<Option<String>, InferError>, WireError> {
        let Some(error) = error.optional() else {
            return Ok(Ok(completed.optional().map(Value::text).transpose()?));
        };
        let [code, words, trace] = error.parts()?;
        let trace = trace.text()?;
        if !trace.is_empty() {
            tracing::error!(instance = connection.name, "{}", trace.trim_end());
        }
        read_error(Value::Tuple(vec![code, words])).map(Err)
    }

    fn log(&self, level: u8, line: &str, text: &str) {
        let model = &self.settings.model;
        match level {
            0 => tracing::info!(model, line, "{text}"),
            1 => tracing::warn!(target: "relayed", model, line, "{text}"),
            2 => tracing::error!(target: "relayed", model, line, "{text}"),
            _ => tracing::debug!(model, line, "{text}"),
        }
    }

    /// Fails or keeps the requests of a process that has ended, and starts another one, with growing pauses while that fails.
    async fn replace(self: &Arc<Self>, index: usize, how: &str) {
        let (instance, name) = (&self.all[index], &self.settings.places[index].name);
        let is_ending = self.is_ending.load(Ordering::Acquire);
        let retries = self.settings.retries && !is_ending;
        let why = format!("the Python process of '{name}' ended ({how}); another one is started");
        let unanswered = instance.detach(&why, retries);
        if is_ending {
            return;
        }
        let mut pause = instance.next_pause();
        tracing::error!(instance = name, "its Python process ended ({how}); starting another one in {pause:?}");
        loop {
            tokio::time::sleep(pause).await;
            if self.is_ending.load(Ordering::Acquire) {
                break;
            }
            match self.connect(index, None).await {
                Ok(_) => {
                    tracing::info!(instance = name, "its Python process serves again");
                    break;
                }
                Err(error) => {
                    pause = instance.next_pause();
                    tracing::error!(instance = name, "its Python process did not load, next try in {pause:?}: {error}");
                }
            }
        }
        for batched in unanswered {
            // Each in a batch of its own.
            let sender = batched.responses.clone();
            if let Err(error) = instance.execute(vec![batched]) {
                let _ = sender.try_send(Err(error));
            }
        }
    }

    /// Checks the process: whether it is stopped, clients that have left, an `execute` that takes too long.
    async fn check_requests(self: Arc<Self>, index: usize, connection: Arc<Connection>) {
        let instance = &self.all[index];
        let mut next_health = Instant::now() + HEALTH_INTERVAL;
        loop {
            connection.close_client_files();
            connection.is_stopped.store(connection.process.is_stopped(), Ordering::Relaxed);
            tokio::select! {
                () = connection.busy.notified() => {}
                () = connection.process.exited() => return,
                () = tokio::time::sleep(HEALTH_INTERVAL) => continue,
            }
            loop {
                tokio::time::sleep(CHECK_INTERVAL).await;
                if !instance.cancel_abandoned(&connection) {
                    break;
                }
                let since = instance.executing_since();
                if let (Some(limit), Some(since)) = (self.settings.execute_timeout, since)
                    && since.elapsed() > limit
                {
                    connection.process.kill(&format!("`execute` took longer than {} s", limit.as_secs()));
                    return;
                }
                if Instant::now() >= next_health {
                    next_health = Instant::now() + HEALTH_INTERVAL;
                    connection.is_stopped.store(connection.process.is_stopped(), Ordering::Relaxed);
                }
            }
        }
    }

    /// Waits for requests in flight, lets each process finalize, and kills those that do not end in time.
    pub async fn drain(&self) {
        let timeout = self.host.config.stop_timeout;
        let idle = async {
            while self.all.iter().any(|instance| instance.num_running() > 0) {
                tokio::time::sleep(CHECK_INTERVAL).await;
            }
        };
        let _ = tokio::time::timeout(timeout, idle).await;
        self.is_ending.store(true, Ordering::Release);
        let connections: Vec<_> = self.all.iter().filter_map(Instance::connection).collect();
        let ends = connections.iter().map(|connection| async move {
            let mut message = Writer::begin(1);
            message.int(ToProcess::Finalize as u8);
            connection.process.send(&message.finish());
            if !connection.process.wait_or_kill(timeout).await {
                tracing::warn!(
                    instance = connection.name,
                    "it was still in `finalize` after {timeout:?} and was killed"
                );
            }
        });
        join_all(ends).await;
    }

    /// Kills every process.
    pub fn end(&self) {
        self.is_ending.store(true, Ordering::Release);
        for connection in self.all.iter().filter_map(Instance::connection) {
            connection.process.kill("its model was unloaded");
        }
    }
}
