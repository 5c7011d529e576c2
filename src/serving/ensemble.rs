//! Ensembles: a graph of models served as one.
//!
//! Each step is a request to a model of the same server. Steps run as soon as their tensors are there, side by side where
//! the graph allows. A decoupled step makes the steps behind it run once per response, in order; an error there stands for
//! that response, and the next ones follow. Decoupled steps side by side answer in rounds: the first response of each
//! belongs to the first of the others. Tensors are never copied.

use std::sync::{Arc, Weak};

use futures::future::{BoxFuture, FutureExt as _, join_all};
use futures::stream::{FuturesUnordered, StreamExt as _};
use repository::ModelConfig;
use smallvec::{SmallVec, smallvec};

use crate::caller::Caller;
use crate::finder::Finder;
use crate::model::ServedModel;
use crate::registry::Registry;
use crate::{
    Backend, Changes, CorrelationId, EnsembleStep, Generation, InferError, InferRequest, InferResponse, Moment, Name,
    Parameter, Respond, ResponseSender, ResponseStream, Tensor, Trace,
};

mod graph;
mod link;
mod relay;
mod tensors;

use graph::{Graph, Step, Steps, Wire};
pub(crate) use link::link;
use relay::{Relay, Relayed, Relaying};
use tensors::Tensors;

/// A loaded ensemble.
pub(crate) struct Ensemble {
    graph: Arc<Graph>,
    registry: Weak<Registry>,
}

impl Ensemble {
    /// The ensemble of a validated configuration.
    pub fn new(config: &ModelConfig, registry: &Arc<Registry>) -> Self {
        Self { graph: Arc::new(Graph::new(config)), registry: Arc::downgrade(registry) }
    }

    /// The models of all steps as they are loaded now.
    fn models(&self) -> Result<Vec<Arc<ServedModel>>, InferError> {
        let registry = self.registry.upgrade().ok_or_else(|| InferError::unavailable("the server has stopped"))?;
        let resolve = |step: &Step| registry.resolve_number(&step.model, step.version);
        self.graph.steps.iter().map(resolve).collect::<Result<_, _>>().map_err(|error| self.graph.within(error))
    }
}

impl Backend for Ensemble {
    fn infer(&self, mut request: InferRequest) -> Result<ResponseStream, InferError> {
        let models = self.models()?;
        let mut tensors = Tensors::new(self.graph.num_tensors);
        tensors.put_all(&self.graph.inputs, std::mem::take(&mut request.inputs), &mut Finder::default());
        let parameters = response_parameters(&request);
        let places = models.iter().map(Place::of).collect();
        let graph = self.graph.clone();
        let makes_anew = graph.makes_anew(&models);
        Ok(ResponseStream::begun_by(|sender| {
            Run { graph, models, request, parameters, tensors, places, makes_anew, sender }.finish()
        }))
    }

    fn keeps_to_requested_outputs(&self) -> bool {
        true
    }

    fn is_ready(&self) -> bool {
        self.models().is_ok_and(|models| models.iter().all(|model| model.is_ready()))
    }

    fn drain(&self) -> BoxFuture<'_, ()> {
        // Serving counts an ensemble's requests as it counts any model's.
        std::future::ready(()).boxed()
    }
}

/// One request on its way through the graph.
struct Run {
    graph: Arc<Graph>,
    models: Vec<Arc<ServedModel>>,
    /// The ensemble's request, without its inputs.
    request: InferRequest,
    /// Of each response.
    parameters: Arc<[(Name, Parameter)]>,
    tensors: Tensors,
    places: Vec<Place>,
    /// By step: what it makes is read in the pass that it is made in, and made again before the next.
    makes_anew: SmallVec<[bool; 8]>,
    sender: ResponseSender,
}

/// What a run keeps of a step.
#[derive(Default)]
struct Place {
    state: EnsembleStep,
    /// Calls a model that answers at once.
    caller: Option<Box<Caller>>,
    /// The last request to a model that answers at once, for the next one.
    request: Option<Box<InferRequest>>,
    /// Which wire each tensor of a response takes.
    finder: Finder,
}

impl Place {
    fn of(model: &Arc<ServedModel>) -> Self {
        let caller = model.answers_at_once().then(|| Box::new(Caller::new(model.clone())));
        Self { caller, ..Self::default() }
    }
}

/// What of a pass has begun and not ended.
#[derive(Default)]
struct Begun {
    /// All of it.
    open: Steps,
    decoupled: Vec<(usize, ResponseStream)>,
    running: Option<FuturesUnordered<BoxFuture<'static, Ended>>>,
}

type Item = Result<InferResponse, InferError>;

/// A step, what it answered, and what it told of its text.
type Ended = (usize, Item, Option<Generation>);

/// One way through some steps.
#[derive(Debug, Clone, Copy)]
struct Pass {
    /// Nothing follows it.
    is_last: bool,
    /// What comes out of it is sent.
    answers: bool,
}

impl Run {
    /// Runs to the end, or to where a relay is all that is left.
    async fn finish(mut self) -> Option<Box<dyn Respond>> {
        let needed = self.graph.needed(&self.request.requested_outputs);
        match self.pass(needed, Pass { is_last: true, answers: true }).await {
            Ok(relaying) => Some(Box::new(Relayed { relaying: relaying?, run: self })),
            Err(error) => {
                self.send_error(error).await;
                None
            }
        }
    }

    /// Runs the steps `waiting`, then sends what came out of them. Behind a decoupled step each of its responses is a pass of
    /// its own; one whose steps answer at once waits for nothing and takes no memory of its own. Ends with a relay where
    /// that does the rest.
    async fn pass(&mut self, mut waiting: Steps, pass: Pass) -> Result<Option<Relaying>, InferError> {
        let mut begun = Begun::default();
        self.begin(&mut waiting, &mut begun, pass)?;
        if !begun.open.is_empty() {
            return self.go_on(waiting, begun, pass).await;
        }
        self.answer(pass).await;
        Ok(None)
    }

    /// Begins every step of `waiting` that has its inputs, and takes what answers at once.
    fn begin(&mut self, waiting: &mut Steps, begun: &mut Begun, pass: Pass) -> Result<(), InferError> {
        while let Some(at) = waiting.iter().position(|step| self.is_ready(*step, waiting, &begun.open)) {
            let step = waiting.remove(at);
            if self.places[step].caller.is_some() {
                let response = self.call(step, pass.is_last);
                self.finished(step, response)?;
                continue;
            }
            let mut stream = self.start(step, pass.is_last)?;
            if self.models[step].is_decoupled {
                self.sender.follow(&stream);
                begun.open.push(step);
                begun.decoupled.push((step, stream));
            } else if let Some(response) = stream.take_ready() {
                self.finished(step, response)?;
            } else {
                begun.open.push(step);
                begun.running.get_or_insert_default().push(only_response(step, stream).boxed());
            }
        }
        Ok(())
    }

    /// Sees a pass through that has to wait. Boxed, for a pass may come of it.
    fn go_on(
        &mut self,
        mut waiting: Steps,
        mut begun: Begun,
        pass: Pass,
    ) -> BoxFuture<'_, Result<Option<Relaying>, InferError>> {
        async move {
            while let Some(running) = &mut begun.running {
                let Some((step, response, generation)) = running.next().await else { break };
                self.report(generation);
                self.finished(step, response)?;
                begun.open.retain(|other| *other != step);
                self.begin(&mut waiting, &mut begun, pass)?;
            }
            if let [(maker, _)] = begun.decoupled[..]
                && let Some(relay) = Relay::of(self, maker, &waiting, pass)
                && let Some((_, stream)) = begun.decoupled.pop()
            {
                return Ok(Some(relay.begin(self, stream, pass)));
            }
            match begun.decoupled.is_empty() {
                true => self.answer(pass).await,
                false => self.rounds(begun.decoupled, waiting, pass).await,
            }
            Ok(None)
        }
        .boxed()
    }

    /// Sends what a pass has come to.
    async fn answer(&mut self, pass: Pass) {
        if pass.answers {
            self.respond(pass.is_last).await;
        } else if pass.is_last {
            self.send(Vec::new(), true).await;
        }
    }

    /// Whether all that makes the inputs of `step` has ended.
    fn is_ready(&self, step: usize, waiting: &[usize], open: &[usize]) -> bool {
        let is_to_come = |source: &usize| waiting.contains(source) || open.contains(source);
        !self.graph.steps[step].sources.iter().any(is_to_come)
    }

    fn finished(&mut self, step: usize, response: Result<InferResponse, InferError>) -> Result<(), InferError> {
        self.store(step, response.map_err(|error| self.graph.within(error))?);
        Ok(())
    }

    /// Has the steps `behind` run with the first response of each stream, then with the second of each, and so on. A
    /// stream that ends before the others leaves what is behind it out of further rounds.
    async fn rounds(&mut self, mut streams: Vec<(usize, ResponseStream)>, behind: Steps, pass: Pass) {
        let makers: Steps = streams.iter().map(|(step, _)| *step).collect();
        while !streams.is_empty() {
            let items = next_of_each(&mut streams).await;
            self.forget(&makers);
            self.forget(&behind);
            let (mut absent, mut error, mut is_told) = (makers.clone(), None, false);
            for (index, item) in items.into_iter().enumerate().rev() {
                let step = streams[index].0;
                let Some(item) = item else {
                    streams.remove(index);
                    continue;
                };
                let response = match item {
                    Ok(response) => response,
                    Err(failed) => {
                        error = Some(self.graph.within(failed));
                        continue;
                    }
                };
                if response.is_final {
                    is_told = true;
                    streams.remove(index);
                }
                if self.store(step, response) {
                    absent.retain(|other| *other != step);
                }
            }
            let is_last = pass.is_last && streams.is_empty();
            if let Some(error) = error {
                self.send_error(error).await;
            } else if absent.len() < makers.len() {
                // What is behind may fail one response and answer the next.
                let answers = pass.answers && !self.awaits(&absent);
                let mut fed = behind.clone();
                fed.retain(|step| !absent.iter().any(|&maker| self.graph.is_behind(*step, maker)));
                match self.pass(fed, Pass { is_last, answers }).await {
                    Ok(relaying) => self.relay(relaying).await,
                    Err(error) => self.send_error(error).await,
                }
            } else if is_last && is_told {
                self.send(Vec::new(), true).await;
            }
        }
    }

    /// Whether an output that is asked for is made by one of `steps`, or behind it.
    fn awaits(&self, steps: &[usize]) -> bool {
        let is_behind = |maker: usize| steps.iter().any(|&step| step == maker || self.graph.is_behind(maker, step));
        let late = |wire: &Wire| {
            (0..self.graph.steps.len()).any(|maker| self.graph.steps[maker].makes(wire) && is_behind(maker))
        };
        !steps.is_empty() && self.graph.outputs.iter().filter(|wire| self.is_asked(wire)).any(late)
    }

    /// What a step tells of its text is told of the ensemble.
    fn report(&self, generation: Option<Generation>) {
        generation.into_iter().for_each(|generation| self.sender.report(generation));
    }

    fn start(&mut self, step: usize, is_last: bool) -> Result<ResponseStream, InferError> {
        let mut request = self.step_request(step);
        self.fill(&mut request, step);
        self.mark(&mut request, is_last);
        self.models[step].infer(request).map_err(|error| self.graph.within(error))
    }

    /// Asks a model that answers at once.
    fn call(&mut self, step: usize, is_last: bool) -> Item {
        let kept = self.places[step].request.take();
        let mut request = kept.unwrap_or_else(|| Box::new(self.step_request(step)));
        request.inputs.clear();
        self.fill(&mut request, step);
        self.ask(step, request, is_last)
    }

    /// The same, with its inputs; the request is kept with them for the next one.
    fn ask(&mut self, step: usize, mut request: Box<InferRequest>, is_last: bool) -> Item {
        self.mark(&mut request, is_last);
        let place = &mut self.places[step];
        let caller = place.caller.as_mut().expect("only models that answer at once are asked");
        let response = caller.call(&mut request);
        if is_last {
            caller.settle(); // Before the client can ask for the figures.
        }
        request.trace = None; // Complete, so it is written now.
        place.request = Some(request);
        response
    }

    /// Asks for what is new in the answer to the last request where that differs in `changes` alone, begun at `started`; then
    /// that is in `told`, and it says when it was. `None` where it is to be asked in full.
    fn ask_again(
        &mut self,
        step: usize,
        started: Moment,
        changes: &Changes,
        told: &mut Changes,
    ) -> Option<Result<Moment, InferError>> {
        let Place { caller, state, .. } = &mut self.places[step];
        caller.as_mut()?.call_again(state, started, changes, told)
    }

    /// The inputs of a step.
    fn fill(&mut self, request: &mut InferRequest, step: usize) {
        let Self { graph, tensors, makes_anew, .. } = self;
        for wire in &graph.steps[step].inputs {
            let is_taken = graph.lone_makers[wire.slot].is_some_and(|maker| makes_anew[maker]);
            request.inputs.extend(if is_taken { tensors.take(wire) } else { tensors.of(wire) });
        }
    }

    /// What else differs from one request to a step to the next.
    fn mark(&self, request: &mut InferRequest, is_last: bool) {
        request.trace = self.request.trace.as_ref().map(Trace::child);
        if let Some(place) = &mut request.step {
            place.is_last = is_last;
        }
    }

    /// A request to a step, without its inputs.
    fn step_request(&self, step: usize) -> InferRequest {
        InferRequest {
            model_name: self.graph.steps[step].model.clone(),
            model_version: self.models[step].version_text.clone(),
            id: self.request.id.clone(),
            parameters: self.request.parameters.clone(),
            inputs: Vec::with_capacity(self.graph.steps[step].inputs.len()),
            requested_outputs: self.graph.steps[step].outputs.iter().map(|wire| wire.name.clone()).collect(),
            priority: self.request.priority,
            timeout_us: self.request.timeout_us,
            correlation_id: self.request.correlation_id.clone(),
            sequence_start: self.request.sequence_start,
            sequence_end: self.request.sequence_end,
            client_memory: Default::default(),
            step: Some(self.places[step].state.clone()),
            trace: None,
        }
    }

    /// Keeps what the graph has a use for; whether there was anything.
    fn store(&mut self, step: usize, response: InferResponse) -> bool {
        self.tensors.put_all(&self.graph.steps[step].outputs, response.outputs, &mut self.places[step].finder)
    }

    /// Drops what an earlier pass left of these steps.
    fn forget(&mut self, steps: &[usize]) {
        for wire in steps.iter().flat_map(|&step| &self.graph.steps[step].outputs) {
            self.tensors.remove(wire.slot);
        }
    }

    fn is_asked(&self, output: &Wire) -> bool {
        let asked = &self.request.requested_outputs;
        asked.is_empty() || asked.contains(&output.name)
    }

    async fn respond(&mut self, is_final: bool) {
        let outputs = self.take_outputs();
        self.send(outputs, is_final).await;
    }

    /// The outputs that are asked for and there.
    fn take_outputs(&mut self) -> Vec<Tensor> {
        let Self { graph, tensors, makes_anew, request, .. } = self;
        let asked = &request.requested_outputs;
        let mut outputs = Vec::with_capacity(graph.outputs.iter().filter(|wire| tensors.has(wire.slot)).count());
        for wire in &graph.outputs {
            if tensors.has(wire.slot) && (asked.is_empty() || asked.contains(&wire.name)) {
                let is_taken = graph.lone_makers[wire.slot].is_some_and(|maker| makes_anew[maker]);
                outputs.extend(if is_taken { tensors.take(wire) } else { tensors.of(wire) });
            }
        }
        outputs
    }

    async fn send_error(&self, error: InferError) {
        self.sender.send(Err(error)).await;
    }

    async fn send(&self, outputs: Vec<Tensor>, is_final: bool) {
        self.sender.send(Ok(self.response(outputs, is_final))).await;
    }

    fn response(&self, outputs: Vec<Tensor>, is_final: bool) -> InferResponse {
        let parameters = self.parameters.clone();
        InferResponse { parameters, outputs, is_final, ..InferResponse::default() }
    }
}

/// What each response of an ensemble tells of its request.
fn response_parameters(request: &InferRequest) -> Arc<[(Name, Parameter)]> {
    let sequence_id = match &request.correlation_id {
        CorrelationId::Number(number) => Parameter::Int(number.cast_signed()),
        CorrelationId::Text(text) => Parameter::String(text.clone()),
    };
    Arc::new([
        (Name::new_static("sequence_id"), sequence_id),
        (Name::new_static("sequence_start"), Parameter::Bool(request.sequence_start)),
        (Name::new_static("sequence_end"), Parameter::Bool(request.sequence_end)),
    ])
}

/// The next response of each stream, once all have one or have ended.
async fn next_of_each(
    streams: &mut [(usize, ResponseStream)],
) -> SmallVec<[Option<Result<InferResponse, InferError>>; 1]> {
    match streams {
        [(_, stream)] => smallvec![stream.next_response().await],
        several => join_all(several.iter_mut().map(|(_, stream)| stream.next_response())).await.into(),
    }
}

/// The one response of a model that is not decoupled.
async fn only_response(step: usize, mut stream: ResponseStream) -> Ended {
    let response = only(&mut stream).await;
    (step, response, stream.generation())
}

async fn only(stream: &mut ResponseStream) -> Result<InferResponse, InferError> {
    let mut kept: Option<InferResponse> = None;
    while let Some(response) = stream.next_response().await {
        match response {
            Err(error) => return Err(error),
            Ok(response) if kept.is_none() => kept = Some(response),
            Ok(response) if response.outputs.is_empty() => {}
            Ok(response) => {
                let words = format!("model '{}' is not decoupled, but sent a second response", response.model_name);
                return Err(InferError::internal(words));
            }
        }
        if kept.as_ref().is_some_and(|response| response.is_final) {
            break;
        }
    }
    kept.ok_or_else(|| InferError::internal("a step ended without a response"))
}
