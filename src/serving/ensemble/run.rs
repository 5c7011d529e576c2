//! The execution of one request to an ensemble.

use std::sync::Arc;

use futures::future::{BoxFuture, FutureExt as _};
use futures::stream::{FuturesUnordered, StreamExt as _};

use super::graph::{Graph, Steps, Wire};
use super::step_response::{StepResult, next_of_each, step_result};
use super::tensors::Tensors;
use super::text_plan::TextPlan;
use super::text_stream::TextStream;
use crate::index_memo::IndexMemo;
use crate::model::ServedModel;
use crate::{
    CallCounter, CorrelationId, DetokenizerModel, EnsembleStep, Generation, InferError, InferRequest, InferResponse,
    Name, Parameter, ResponseSender, ResponseSource, ResponseStream, Tensor, TextOutputs, Trace,
};

/// The execution of one request to an ensemble.
pub(super) struct Run {
    graph: Arc<Graph>,
    models: Vec<Arc<ServedModel>>,
    /// The ensemble's request, without its inputs.
    request: InferRequest,
    /// Parameters of each response.
    parameters: Arc<[(Name, Parameter)]>,
    tensors: Tensors,
    states: Vec<StepState>,
    /// Set where the wires are those of a text ensemble.
    plan: Option<TextPlan>,
    /// Set where the language model and its detokenizer are served together, until the language model starts.
    detokenizer: Option<DetokenizerModel>,
    /// Responses of the language model, once it has started together with its detokenizer.
    text: Option<ResponseStream>,
    sender: ResponseSender,
}

/// State of one step in a run.
#[derive(Default)]
struct StepState {
    /// State that the step's model keeps from one request of this run to the next.
    model: EnsembleStep,
    /// The wires of a response's tensors.
    memo: IndexMemo,
}

/// Steps of a pass that have started and not ended.
#[derive(Default)]
struct StartedSteps {
    /// All of them.
    open: Steps,
    /// Decoupled steps with their streams.
    decoupled: Vec<(usize, ResponseStream)>,
    /// The other steps.
    running: Option<FuturesUnordered<BoxFuture<'static, StepResult>>>,
}

/// One execution of a set of steps. The steps after a decoupled step have a pass for each of its responses.
#[derive(Debug, Clone, Copy)]
struct Pass {
    /// Whether no other pass follows.
    is_last: bool,
    /// Whether a response with the outputs is sent at the end of the pass.
    sends_response: bool,
}

impl Run {
    /// The execution of `request`, whose responses go to `sender`.
    pub(super) fn new(
        graph: Arc<Graph>,
        plan: Option<TextPlan>,
        models: Vec<Arc<ServedModel>>,
        mut request: InferRequest,
        sender: ResponseSender,
    ) -> Self {
        let mut tensors = Tensors::new(graph.num_tensors);
        tensors.put_all(&graph.inputs, std::mem::take(&mut request.inputs), &mut IndexMemo::default());
        let parameters = response_parameters(&request);
        let states = models.iter().map(|_| StepState::default()).collect();
        Self { graph, models, request, parameters, tensors, states, plan, detokenizer: None, text: None, sender }
    }

    /// Runs all steps. Where a language model and its detokenizer are served together, returns the stream of their responses.
    pub(super) async fn finish(mut self) -> Option<Box<dyn ResponseSource>> {
        let needed = self.graph.needed(&self.request.requested_outputs);
        self.detokenizer = self.plan.and_then(|plan| {
            // A traced request runs each step by itself, because a trace shows each request to each step.
            let needs_both = needed.contains(&plan.generator) && needed.contains(&plan.detokenizer);
            if needs_both && self.request.trace.is_none() {
                plan.detokenizer_of(&self.graph, &self.models)
            } else {
                None
            }
        });
        if let Err(error) = self.pass(needed, Pass { is_last: true, sends_response: true }).await {
            self.send_error(error).await;
            return None;
        }
        Some(Box::new(TextStream::new(self.graph, self.text?)))
    }

    /// Runs the steps `waiting`, and sends their outputs. A pass whose steps all respond at once needs no allocation.
    async fn pass(&mut self, mut waiting: Steps, pass: Pass) -> Result<(), InferError> {
        let mut started = StartedSteps::default();
        self.start_ready_steps(&mut waiting, &mut started, pass)?;
        if !started.open.is_empty() {
            return self.finish_pass(waiting, started, pass).await;
        }
        self.send_pass(pass).await;
        Ok(())
    }

    /// Starts every step of `waiting` whose inputs are available, and stores responses that are available at once.
    fn start_ready_steps(
        &mut self,
        waiting: &mut Steps,
        started: &mut StartedSteps,
        pass: Pass,
    ) -> Result<(), InferError> {
        while let Some(index) = waiting.iter().position(|step| self.is_ready(*step, waiting, &started.open)) {
            let step = waiting.remove(index);
            if self.start_text(step, waiting)? {
                continue;
            }
            let mut stream = self.start(step, pass.is_last)?;
            if self.models[step].is_decoupled {
                self.sender.report_progress_of(&stream);
                started.open.push(step);
                started.decoupled.push((step, stream));
            } else if let Some(response) = stream.take_ready() {
                self.store_result(step, response)?;
            } else {
                started.open.push(step);
                started.running.get_or_insert_default().push(step_result(step, stream).boxed());
            }
        }
        Ok(())
    }

    /// Starts the language model together with its detokenizer, if `step` is the language model and this is possible.
    fn start_text(&mut self, step: usize, waiting: &mut Steps) -> Result<bool, InferError> {
        let Some(plan) = self.plan.filter(|plan| plan.generator == step) else { return Ok(false) };
        let Some(model) = self.detokenizer.take() else { return Ok(false) };
        let request = self.filled_request(step);
        if self.models[step].num_rows(&request) > 1 {
            return Ok(false); // With several rows, one response holds several texts.
        }
        let outputs = self.text_outputs(plan, &model);
        let stream = self.models[step].infer_text(request, outputs).map_err(|error| self.graph.within(error))?;
        waiting.retain(|other| *other != plan.detokenizer);
        self.sender.report_progress_of(&stream);
        self.text = Some(stream);
        Ok(true)
    }

    /// The ensemble's outputs, for the language model that makes its responses.
    fn text_outputs(&self, plan: TextPlan, model: &DetokenizerModel) -> TextOutputs {
        let output = |wire: &Wire| Some((wire.name.clone(), plan.output(&self.graph, &self.tensors, wire, model)?));
        TextOutputs {
            outputs: self
                .graph
                .outputs
                .iter()
                .filter(|wire| self.request.wants_output(wire.name.as_str()))
                .filter_map(output)
                .collect(),
            decoder: model.decoder.clone(),
            is_nested: model.is_nested,
            calls: CallCounter::new(self.models[plan.detokenizer].statistics.clone()),
            parameters: self.parameters.clone(),
        }
    }

    /// Finishes a pass with steps that have not responded yet. Boxed, because it may run further passes.
    fn finish_pass(
        &mut self,
        mut waiting: Steps,
        mut started: StartedSteps,
        pass: Pass,
    ) -> BoxFuture<'_, Result<(), InferError>> {
        async move {
            while let Some(running) = &mut started.running {
                let Some((step, response, generation)) = running.next().await else { break };
                self.report(generation);
                self.store_result(step, response)?;
                started.open.retain(|other| *other != step);
                self.start_ready_steps(&mut waiting, &mut started, pass)?;
            }
            match started.decoupled.is_empty() {
                true => self.send_pass(pass).await,
                false => self.run_rounds(started.decoupled, waiting, pass).await,
            }
            Ok(())
        }
        .boxed()
    }

    /// Sends the response at the end of a pass.
    async fn send_pass(&mut self, pass: Pass) {
        if self.text.is_some() {
            // The language model's stream sends all responses.
        } else if pass.sends_response {
            self.respond(pass.is_last).await;
        } else if pass.is_last {
            self.send(Vec::new(), true).await;
        }
    }

    /// Whether all producers of the inputs of `step` have ended.
    fn is_ready(&self, step: usize, waiting: &[usize], open: &[usize]) -> bool {
        let is_pending = |producer: &usize| waiting.contains(producer) || open.contains(producer);
        !self.graph.steps[step].producers.iter().any(is_pending)
    }

    fn store_result(&mut self, step: usize, response: Result<InferResponse, InferError>) -> Result<(), InferError> {
        self.store(step, response.map_err(|error| self.graph.within(error))?);
        Ok(())
    }

    /// Runs the steps `downstream` with the first response of each stream, then with the second, and so on. When a stream
    /// has ended, later rounds omit the steps downstream of it.
    async fn run_rounds(&mut self, mut streams: Vec<(usize, ResponseStream)>, downstream: Steps, pass: Pass) {
        let producers: Steps = streams.iter().map(|(step, _)| *step).collect();
        while !streams.is_empty() {
            let items = next_of_each(&mut streams).await;
            self.clear_outputs(&producers);
            self.clear_outputs(&downstream);
            let (mut absent, mut error, mut has_final) = (producers.clone(), None, false);
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
                    has_final = true;
                    streams.remove(index);
                }
                if self.store(step, response) {
                    absent.retain(|other| *other != step);
                }
            }
            let is_last = pass.is_last && streams.is_empty();
            if let Some(error) = error {
                self.send_error(error).await;
            } else if absent.len() < producers.len() {
                let sends_response = pass.sends_response && !self.requests_output_of(&absent);
                let mut runnable = downstream.clone();
                runnable.retain(|step| !absent.iter().any(|&producer| self.graph.is_downstream(*step, producer)));
                if let Err(error) = self.pass(runnable, Pass { is_last, sends_response }).await {
                    // The error replaces this response. The next round continues.
                    self.send_error(error).await;
                }
            } else if is_last && has_final {
                self.send(Vec::new(), true).await;
            }
        }
    }

    /// Whether a requested output comes from one of `steps`, or from a step downstream of them.
    fn requests_output_of(&self, steps: &[usize]) -> bool {
        let depends = |other: usize| steps.iter().any(|&step| step == other || self.graph.is_downstream(other, step));
        let is_affected = |wire: &Wire| {
            (0..self.graph.steps.len()).any(|other| self.graph.steps[other].produces(wire) && depends(other))
        };
        !steps.is_empty()
            && self.graph.outputs.iter().filter(|wire| self.request.wants_output(wire.name.as_str())).any(is_affected)
    }

    /// Reports the text generation of a step as that of the ensemble.
    fn report(&self, generation: Option<Generation>) {
        generation.into_iter().for_each(|generation| self.sender.report(generation));
    }

    /// Sends the request of a step to its model.
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

    /// Stores the outputs that have a slot. Returns whether there was one.
    fn store(&mut self, step: usize, response: InferResponse) -> bool {
        self.tensors.put_all(&self.graph.steps[step].outputs, response.outputs, &mut self.states[step].memo)
    }

    /// Removes the outputs of these steps, which an earlier pass has stored.
    fn clear_outputs(&mut self, steps: &[usize]) {
        for wire in steps.iter().flat_map(|&step| &self.graph.steps[step].outputs) {
            self.tensors.remove(wire.slot);
        }
    }

    async fn respond(&mut self, is_final: bool) {
        self.send(self.outputs(), is_final).await;
    }

    /// The requested outputs that are available.
    fn outputs(&self) -> Vec<Tensor> {
        self.graph
            .outputs
            .iter()
            .filter(|wire| self.request.wants_output(wire.name.as_str()))
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

/// The parameters of each response: the sequence of the request, as in Triton.
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
