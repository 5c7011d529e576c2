//! Ensembles: a graph of models served as one.
//!
//! Each step is a request to a model of the same server. Steps run as soon as their tensors are there, side by side where
//! the graph allows. A decoupled step makes the steps behind it run once per response, in order; an error there stands for
//! that response, and the next ones follow. Decoupled steps side by side answer in rounds: the first response of each
//! belongs to the first of the others. Tensors are never copied.
//!
//! A language model and the detokenizer behind it are served as one, without the graph between them: see [`text`].

use std::sync::{Arc, Weak};

use futures::future::{BoxFuture, FutureExt as _, join_all};
use futures::stream::{FuturesUnordered, StreamExt as _};
use repository::ModelConfig;
use smallvec::{SmallVec, smallvec};

use crate::index_memo::Finder;
use crate::model::ServedModel;
use crate::registry::Registry;
use crate::{
    Backend, CorrelationId, DetokenizerModel, EnsembleStep, Generation, InferError, InferRequest, InferResponse, Name,
    Parameter, ResponseSender, ResponseStream, Tensor, Trace,
};

mod graph;
mod link;
mod tensors;
mod text;

use graph::{Graph, Step, Steps, Wire};
pub(crate) use link::link;
use tensors::Tensors;
pub(crate) use text::TextStream;

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
        let states = models.iter().map(|_| StepState::default()).collect();
        let graph = self.graph.clone();
        Ok(ResponseStream::from_future_then(|sender| {
            Run { graph, models, request, parameters, tensors, states, detokenizer: None, text: None, sender }.finish()
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
    states: Vec<StepState>,
    /// Set where the graph's language model and its detokenizer are served as one.
    detokenizer: Option<DetokenizerModel>,
    /// Their responses, once they have begun.
    text: Option<ResponseStream>,
    sender: ResponseSender,
}

/// What a run keeps for a step.
#[derive(Default)]
struct StepState {
    /// What the step's model keeps from one request of this run to the next.
    model: EnsembleStep,
    /// Which wire each tensor of a response takes.
    finder: Finder,
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
    /// Runs to the end, or to where the responses of a language model are all that is left.
    async fn finish(mut self) -> Option<TextStream> {
        let needed = self.graph.needed(&self.request.requested_outputs);
        self.detokenizer = self.graph.text.as_ref().and_then(|plan| {
            // A trace shows each request to each step.
            let is_whole = needed.contains(&plan.generator) && needed.contains(&plan.detokenizer);
            if is_whole && self.request.trace.is_none() { plan.detokenizer_of(&self.graph, &self.models) } else { None }
        });
        if let Err(error) = self.pass(needed, Pass { is_last: true, answers: true }).await {
            self.send_error(error).await;
            return None;
        }
        Some(TextStream::new(self.graph, self.text?))
    }

    /// Runs the steps `waiting`, then sends what came out of them. Behind a decoupled step each of its responses is a pass of
    /// its own; one whose steps answer at once waits for nothing and takes no memory of its own.
    async fn pass(&mut self, mut waiting: Steps, pass: Pass) -> Result<(), InferError> {
        let mut begun = Begun::default();
        self.begin(&mut waiting, &mut begun, pass)?;
        if !begun.open.is_empty() {
            return self.go_on(waiting, begun, pass).await;
        }
        self.answer(pass).await;
        Ok(())
    }

    /// Begins every step of `waiting` that has its inputs, and takes what answers at once.
    fn begin(&mut self, waiting: &mut Steps, begun: &mut Begun, pass: Pass) -> Result<(), InferError> {
        while let Some(at) = waiting.iter().position(|step| self.is_ready(*step, waiting, &begun.open)) {
            let step = waiting.remove(at);
            if self.begin_text(step, waiting)? {
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

    /// Begins the language model where it is served with its detokenizer; whether `step` is that.
    fn begin_text(&mut self, step: usize, waiting: &mut Steps) -> Result<bool, InferError> {
        let Some(plan) = self.graph.text.as_ref().filter(|plan| plan.generator == step) else { return Ok(false) };
        let Some(model) = self.detokenizer.take() else { return Ok(false) };
        let request = self.filled_request(step);
        if self.models[step].num_rows(&request) > 1 {
            return Ok(false); // Texts of several rows are in one response.
        }
        let stream = plan.begin(self, request, model)?;
        waiting.retain(|other| *other != plan.detokenizer);
        self.sender.follow(&stream);
        self.text = Some(stream);
        Ok(true)
    }

    /// Sees a pass through that has to wait. Boxed, for a pass may come of it.
    fn go_on(&mut self, mut waiting: Steps, mut begun: Begun, pass: Pass) -> BoxFuture<'_, Result<(), InferError>> {
        async move {
            while let Some(running) = &mut begun.running {
                let Some((step, response, generation)) = running.next().await else { break };
                self.report(generation);
                self.finished(step, response)?;
                begun.open.retain(|other| *other != step);
                self.begin(&mut waiting, &mut begun, pass)?;
            }
            match begun.decoupled.is_empty() {
                true => self.answer(pass).await,
                false => self.rounds(begun.decoupled, waiting, pass).await,
            }
            Ok(())
        }
        .boxed()
    }

    /// Sends what a pass has come to.
    async fn answer(&mut self, pass: Pass) {
        if self.text.is_some() {
            // The language model answers.
        } else if pass.answers {
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
                if let Err(error) = self.pass(fed, Pass { is_last, answers }).await {
                    self.send_error(error).await;
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
        !steps.is_empty() && self.graph.outputs.iter().filter(|wire| self.is_requested(wire)).any(late)
    }

    /// What a step tells of its text is told of the ensemble.
    fn report(&self, generation: Option<Generation>) {
        generation.into_iter().for_each(|generation| self.sender.report(generation));
    }

    fn start(&mut self, step: usize, is_last: bool) -> Result<ResponseStream, InferError> {
        let mut request = self.filled_request(step);
        request.trace = self.request.trace.as_ref().map(Trace::child);
        if let Some(state) = &mut request.step {
            state.is_last = is_last;
        }
        self.models[step].infer(request).map_err(|error| self.graph.within(error))
    }

    /// A request to a step, with its inputs.
    fn filled_request(&self, step: usize) -> InferRequest {
        let mut request = self.step_request(step);
        request.inputs.extend(self.graph.steps[step].inputs.iter().filter_map(|wire| self.tensors.of(wire)));
        request
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
            step: Some(self.states[step].model.clone()),
            trace: None,
        }
    }

    /// Keeps what the graph has a use for; whether there was anything.
    fn store(&mut self, step: usize, response: InferResponse) -> bool {
        self.tensors.put_all(&self.graph.steps[step].outputs, response.outputs, &mut self.states[step].finder)
    }

    /// Drops what an earlier pass left of these steps.
    fn forget(&mut self, steps: &[usize]) {
        for wire in steps.iter().flat_map(|&step| &self.graph.steps[step].outputs) {
            self.tensors.remove(wire.slot);
        }
    }

    fn is_requested(&self, output: &Wire) -> bool {
        let asked = &self.request.requested_outputs;
        asked.is_empty() || asked.contains(&output.name)
    }

    async fn respond(&mut self, is_final: bool) {
        self.send(self.outputs(), is_final).await;
    }

    /// The outputs that are requested and there.
    fn outputs(&self) -> Vec<Tensor> {
        self.graph
            .outputs
            .iter()
            .filter(|wire| self.is_requested(wire))
            .filter_map(|wire| self.tensors.of(wire))
            .collect()
    }

    async fn send_error(&mut self, error: InferError) {
        self.sender.send(Err(error)).await;
    }

    async fn send(&mut self, outputs: Vec<Tensor>, is_final: bool) {
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
