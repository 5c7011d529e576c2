//! A loaded model: its instances, kept alive.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures::FutureExt as _;
use futures::future::{BoxFuture, join_all};
use ipc::lock;
use repository::ModelConfig;
use serving::{Backend, BatchedRequest, InferError, InferRequest, LoadRequest, ResponseStream};
use tokio::sync::mpsc;

use super::Host;
use super::calls;
use super::connection::{Connection, LoadEvent};
use super::files::STUB;
use super::instance::Instance;
use super::message::{FromProcess, ToProcess, read_error};
use super::mpi::Launch;
use super::process::{Process, Program};
use super::settings::Settings;
use super::wire::{LENGTH, Value, WireError, Writer};

/// How often requests that take long are looked after.
const LOOK: Duration = Duration::from_millis(5);

/// How often a busy process is looked at.
const HEALTH_LOOK: Duration = Duration::from_secs(1);

/// Time for what a process sent last to be read once it has ended.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// How long a request waits for a process that restarts.
const RESTART_PATIENCE: Duration = Duration::from_secs(2);

/// A loaded `model.py`.
pub(super) struct Model {
    shared: Arc<Shared>,
}

struct Shared {
    host: Arc<Host>,
    settings: Settings,
    instances: Vec<Instance>,
    is_ending: AtomicBool,
}

impl Model {
    /// The configuration as the model's `auto_complete_config` makes it; `None` where it has none, so that no process is
    /// started for nothing.
    pub async fn complete(host: Arc<Host>, load: &LoadRequest) -> Result<Option<ModelConfig>, InferError> {
        let shared = Arc::new(Shared::new(host, load).await?);
        let (config, settings) = (&load.config, &shared.settings);
        let source = tokio::fs::read(settings.version_dir.join(&settings.file)).await.unwrap_or_default();
        let name = b"auto_complete_config";
        let is_bare = config.input.is_empty() || config.output.is_empty();
        if !is_bare && !source.windows(name.len()).any(|part| part == name) {
            return Ok(None);
        }
        let completed = shared.connect(0, Some(settings.config_json.clone())).await?;
        let read = |json: String| repository::from_json(&config.name, &json);
        completed.map(read).transpose().map_err(|error| InferError::invalid(error.to_string()))
    }

    /// Starts every instance, and returns when all have loaded the model.
    pub async fn load(host: Arc<Host>, load: &LoadRequest) -> Result<Self, InferError> {
        let model = Self { shared: Arc::new(Shared::new(host, load).await?) };
        let shared = &model.shared;
        let starts = (0..shared.instances.len()).map(|index| shared.connect(index, None));
        for result in join_all(starts).await {
            // What others have started ends with `model`.
            result?;
        }
        Ok(model)
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        self.shared.end();
    }
}

impl Backend for Model {
    fn infer(&self, _: InferRequest) -> Result<ResponseStream, InferError> {
        Err(InferError::internal("the Python backend is given batches"))
    }

    fn num_instances(&self) -> usize {
        self.shared.instances.len()
    }

    fn execute(&self, instance: usize, batch: Vec<BatchedRequest>) -> BoxFuture<'_, ()> {
        self.shared.execute(instance, batch).boxed()
    }

    fn reads_client_memory(&self) -> bool {
        true
    }

    fn is_ready(&self) -> bool {
        self.shared.instances.iter().any(Instance::is_ready)
    }

    fn probe(&self) -> BoxFuture<'_, bool> {
        let ready = self.shared.instances.iter().filter(|instance| instance.is_ready());
        let connections: Vec<_> = ready.filter_map(Instance::connection).collect();
        async move { join_all(connections.iter().map(|connection| connection.probe())).await.contains(&true) }.boxed()
    }

    fn drain(&self) -> BoxFuture<'_, ()> {
        self.shared.drain().boxed()
    }
}

impl Shared {
    async fn new(host: Arc<Host>, load: &LoadRequest) -> Result<Self, InferError> {
        let (task_host, task_load) = (host.clone(), load.clone());
        // Unpacking an environment blocks.
        let settings = tokio::task::spawn_blocking(move || Settings::new(&task_host, &task_load)).await;
        let settings = settings.map_err(|error| InferError::internal(error.to_string()))??;
        let instances = settings.places.iter().map(|_| Instance::default()).collect();
        Ok(Self { host, settings, instances, is_ending: AtomicBool::new(false) })
    }

    async fn execute(&self, index: usize, batch: Vec<BatchedRequest>) {
        let instance = &self.instances[index];
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
                self.leave_to_others(index).await;
            }
        }
    }

    /// What waited while a process was lost need not fail with it, if another one serves soon.
    async fn wait_for_process(&self, index: usize) {
        let deadline = Instant::now() + RESTART_PATIENCE;
        while self.instances[index].connection().is_none()
            && !self.is_ending.load(Ordering::Acquire)
            && Instant::now() < deadline
        {
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Requests go to instances that work, if there are any.
    async fn leave_to_others(&self, index: usize) {
        while !self.is_ending.load(Ordering::Acquire)
            && !self.instances[index].is_ready()
            && self.instances.iter().any(Instance::is_ready)
        {
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Starts a process for an instance and waits until it has loaded the model. With `complete`, it only completes
    /// that configuration, which is returned.
    fn connect(
        self: &Arc<Self>,
        index: usize,
        complete: Option<String>,
    ) -> BoxFuture<'static, Result<Option<String>, InferError>> {
        let shared = self.clone();
        // Boxed because a process that ends connects another one.
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
        let (events, mut heard) = mpsc::channel(4);
        let connection = Arc::new(Connection::new(self.host.clone(), process, place.name.clone(), events));
        tokio::spawn(self.clone().listen(index, connection.clone()));
        connection.process.send(&load);
        let loaded = self.loading(&connection, &mut heard).await;
        if loaded.is_ok() && complete.is_none() {
            self.instances[index].attach(connection.clone());
            tokio::spawn(self.clone().look_after(index, connection));
        } else {
            // It ends by itself, unless the model has left threads behind.
            let patience = config.stop_timeout;
            tokio::spawn(async move { connection.process.wait_or_kill(patience).await });
        }
        loaded
    }

    /// Waits until a process has loaded the model, or completed its configuration.
    async fn loading(
        &self,
        connection: &Connection,
        heard: &mut mpsc::Receiver<LoadEvent>,
    ) -> Result<Option<String>, InferError> {
        let start_timeout = self.host.config.start_timeout;
        let mut patience = start_timeout;
        loop {
            match tokio::time::timeout(patience, heard.recv()).await {
                // Loading a model takes as long as it takes.
                Ok(Some(LoadEvent::Started)) => patience = Duration::from_secs(60 * 60 * 24),
                Ok(Some(LoadEvent::Loaded(loaded))) => return loaded,
                Ok(Some(LoadEvent::Ended(how))) => {
                    return Err(InferError::internal(format!("its Python process ended while loading: {how}")));
                }
                Ok(None) => return Err(InferError::internal("its Python process is gone")),
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

    /// Reads what a process sends until it ends, and then replaces it.
    async fn listen(self: Arc<Self>, index: usize, connection: Arc<Connection>) {
        let process = &connection.process;
        // A panic at one of its messages costs this process, and leaves the instance to the next.
        let read = AssertUnwindSafe(process.read(|message| self.hear(index, &connection, message))).catch_unwind();
        let panicked = || Err("reading a message of it panicked".to_owned());
        let read = read.map(|read| read.map_or_else(|_| panicked(), |read| read.map_err(|why| why.to_string())));
        tokio::pin!(read);
        let broken = tokio::select! {
            result = &mut read => result,
            () = process.keep_sending() => Ok(()),
            () = process.exited() => tokio::time::timeout(LAST_WORDS, &mut read).await.unwrap_or(Ok(())),
        };
        if let Err(why) = broken {
            process.kill(&format!("it broke the protocol: {why}"));
        }
        process.wait_or_kill(self.host.config.stop_timeout).await;
        let how = process.ended().await;
        let _ = connection.events.try_send(LoadEvent::Ended(how.clone()));
        lock(&connection.calls).clear();
        let is_current = self.instances[index].connection().is_some_and(|current| Arc::ptr_eq(&current, &connection));
        if is_current {
            self.replace(index, &how).await;
        }
    }

    fn hear(&self, index: usize, connection: &Arc<Connection>, mut message: Vec<Value>) -> Result<(), WireError> {
        let wrong = || WireError::Shape { expected: "a known kind of message", found: "another one".to_owned() };
        if message.is_empty() {
            return Err(wrong());
        }
        let kind = FromProcess::from_number(message.remove(0).int()?).ok_or_else(wrong)?;
        let instance = &self.instances[index];
        let parts = Value::Tuple(message);
        match kind {
            FromProcess::Done => instance.done(connection, parts.parts()?)?,
            FromProcess::Response => instance.respond(connection, self.settings.is_decoupled, parts.parts()?)?,
            FromProcess::Call => {
                let [call, method, arguments] = parts.parts()?;
                calls::answer(connection, instance, call.int()?, &method.text()?, arguments.tuple()?)?;
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
                    connection.can_be_probed();
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

    /// Ends what a lost process had, and starts another one, with longer and longer pauses while that fails.
    async fn replace(self: &Arc<Self>, index: usize, how: &str) {
        let (instance, name) = (&self.instances[index], &self.settings.places[index].name);
        let is_ending = self.is_ending.load(Ordering::Acquire);
        let retries = self.settings.retries && !is_ending;
        let why = format!("the Python process of '{name}' ended ({how}); another one is started");
        let remains = instance.lose(&why, retries);
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
        for batched in remains.unanswered {
            // One by one: they may have been together because of each other only in time.
            let sender = batched.responses.clone();
            if let Err(error) = instance.execute(vec![batched]) {
                let _ = sender.try_send(Err(error));
            }
        }
    }

    /// Watches requests that take long: clients that leave, an `execute` or a process that hangs.
    async fn look_after(self: Arc<Self>, index: usize, connection: Arc<Connection>) {
        let instance = &self.instances[index];
        let mut next_health = Instant::now() + HEALTH_LOOK;
        loop {
            let has_files = connection.close_client_files();
            tokio::select! {
                () = connection.busy.notified() => {}
                () = connection.process.exited() => return,
                () = tokio::time::sleep(HEALTH_LOOK), if has_files => continue,
            }
            loop {
                tokio::time::sleep(LOOK).await;
                if !instance.look_after(&connection) {
                    connection.is_stopped.store(false, Ordering::Relaxed);
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
                    next_health = Instant::now() + HEALTH_LOOK;
                    connection.is_stopped.store(connection.process.is_stopped(), Ordering::Relaxed);
                }
            }
        }
    }

    /// Waits for requests in flight, has each process finalize, and ends those that do not.
    async fn drain(&self) {
        let patience = self.host.config.stop_timeout;
        let idle = async {
            while self.instances.iter().any(|instance| instance.num_running() > 0) {
                tokio::time::sleep(LOOK).await;
            }
        };
        let _ = tokio::time::timeout(patience, idle).await;
        self.is_ending.store(true, Ordering::Release);
        let connections: Vec<_> = self.instances.iter().filter_map(Instance::connection).collect();
        let ends = connections.iter().map(|connection| async move {
            let mut message = Writer::begin(1);
            message.int(ToProcess::Finalize as u8);
            connection.process.send(&message.finish());
            if !connection.process.wait_or_kill(patience).await {
                tracing::warn!(
                    instance = connection.name,
                    "it was still in `finalize` after {patience:?} and was ended"
                );
            }
        });
        join_all(ends).await;
    }

    /// Ends every process at once.
    fn end(&self) {
        self.is_ending.store(true, Ordering::Release);
        for connection in self.instances.iter().filter_map(Instance::connection) {
            connection.process.kill("its model was unloaded");
        }
    }
}
