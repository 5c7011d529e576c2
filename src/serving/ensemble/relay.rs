//! The straight way through a graph: one decoupled step, and behind it one that answers at once, as a language model and
//! its detokenizer.
//!
//! Each response of the first is a call of the second and a response of the ensemble. Which tensor goes where is worked
//! out once, so a token passes no slots.

use std::sync::Arc;

use smallvec::SmallVec;

use super::graph::{Graph, Wire};
use super::{Pass, Run};
use crate::finder::Finder;
use crate::{InferError, InferResponse, ResponseStream, Tensor};

/// What goes where between two steps.
pub(super) struct Relay {
    graph: Arc<Graph>,
    /// The step that answers many times.
    maker: usize,
    /// The step that is called.
    called: usize,
    made: Routes,
    answered: Routes,
    /// Outputs of the ensemble that were there before, by their places.
    standing: SmallVec<[usize; 4]>,
    /// Inputs of the called step that were there before, by their places.
    given: SmallVec<[usize; 4]>,
}

/// The readers of a step's outputs.
#[derive(Default)]
struct Routes {
    /// By the step's outputs.
    readers: Vec<SmallVec<[Reader; 2]>>,
    finder: Finder,
}

#[derive(Debug, Clone, Copy)]
enum Reader {
    /// An input of the called step.
    Input(usize),
    /// An output of the ensemble.
    Output(usize),
}

/// The outputs of one response of the ensemble, in the order of its configuration.
#[derive(Default)]
struct Answer {
    places: SmallVec<[usize; 8]>,
    tensors: Vec<Tensor>,
}

impl Answer {
    fn put(&mut self, place: usize, tensor: Tensor) {
        let at = self.places.iter().position(|&other| other > place).unwrap_or(self.places.len());
        self.places.insert(at, place);
        self.tensors.insert(at, tensor);
    }
}

impl Relay {
    /// The relay from `maker` to the only step behind it; `None` where the graph has another form there.
    pub(super) fn of(run: &Run, maker: usize, behind: &[usize], pass: Pass) -> Option<Self> {
        let &[called] = behind else { return None };
        let steps = &run.graph.steps;
        let is_made_now = |wire: &Wire| steps[maker].makes(wire) || steps[called].makes(wire);
        let made_twice = |wire: &Wire| steps.iter().filter(|step| step.makes(wire)).count() > 1;
        let mut all_made = steps[maker].outputs.iter().chain(&steps[called].outputs);
        if !pass.answers || run.places[called].caller.is_none() || all_made.any(made_twice) {
            return None;
        }
        let outputs = run.graph.outputs.iter().enumerate().filter(|(_, output)| run.is_asked(output));
        let standing = outputs.filter(|(_, output)| !is_made_now(output)).map(|(place, _)| place).collect();
        let inputs = steps[called].inputs.iter().enumerate();
        let given = inputs.filter(|(_, input)| !is_made_now(input)).map(|(place, _)| place).collect();
        let (made, answered) = (Routes::of(run, maker, Some(called)), Routes::of(run, called, None));
        Some(Self { graph: run.graph.clone(), maker, called, made, answered, standing, given })
    }
}

impl Routes {
    /// Where the outputs of `step` go: into `called`, and out of the ensemble.
    fn of(run: &Run, step: usize, called: Option<usize>) -> Self {
        let graph = &run.graph;
        let readers = |made: &Wire| {
            let inputs = called.map_or(&[][..], |called| &graph.steps[called].inputs);
            let inputs = inputs.iter().enumerate().filter(|(_, input)| input.slot == made.slot);
            let outputs = graph.outputs.iter().enumerate().filter(|(_, output)| output.slot == made.slot);
            let outputs = outputs.filter(|(_, output)| run.is_asked(output));
            inputs
                .map(|(place, _)| Reader::Input(place))
                .chain(outputs.map(|(place, _)| Reader::Output(place)))
                .collect()
        };
        Self { readers: graph.steps[step].outputs.iter().map(readers).collect(), finder: Finder::default() }
    }

    /// Gives each tensor that a wire leads from to its readers; whether there were any.
    fn hand_on(&mut self, wires: &[Wire], tensors: Vec<Tensor>, mut give: impl FnMut(Reader, Tensor)) -> bool {
        let mut is_any = false;
        for (index, tensor) in tensors.into_iter().enumerate() {
            let Some(found) = self.finder.find(index, wires, |wire| wire.name == tensor.name) else { continue };
            is_any = true;
            if let Some((&last, others)) = self.readers[found].split_last() {
                others.iter().for_each(|&reader| give(reader, tensor.clone()));
                give(last, tensor);
            }
        }
        is_any
    }
}

impl Run {
    /// Sends a response for each of `stream`.
    pub(super) async fn relay(&mut self, mut relay: Relay, mut stream: ResponseStream, pass: Pass) {
        while let Some(item) = stream.next_response().await {
            let response = match item {
                Ok(response) => response,
                Err(error) => {
                    self.send_error(self.graph.within(error)).await;
                    continue;
                }
            };
            let (is_over, is_last) = (response.is_final, pass.is_last && response.is_final);
            match self.pass_on(&mut relay, response, is_last) {
                Ok(Some(outputs)) => self.send(outputs, is_last).await,
                Ok(None) if is_last => self.send(Vec::new(), true).await,
                Ok(None) => {}
                Err(error) => self.send_error(error).await,
            }
            if is_over {
                return;
            }
        }
    }

    /// What a response comes to; `None` when it had nothing for the graph.
    fn pass_on(
        &mut self,
        relay: &mut Relay,
        response: InferResponse,
        is_last: bool,
    ) -> Result<Option<Vec<Tensor>>, InferError> {
        let Relay { graph, maker, called, made, answered, standing, given } = relay;
        let (maker, called) = (&graph.steps[*maker], *called);
        let mut answer = Answer { tensors: Vec::with_capacity(standing.len() + 4), ..Answer::default() };
        let mut request = self.places[called].request.take().unwrap_or_else(|| Box::new(self.step_request(called)));
        let is_any = made.hand_on(&maker.outputs, response.outputs, |reader, mut tensor| match reader {
            Reader::Input(place) => {
                tensor.name = graph.steps[called].inputs[place].name.clone();
                request.inputs.push(tensor);
            }
            Reader::Output(place) => {
                tensor.name = graph.outputs[place].name.clone();
                answer.put(place, tensor);
            }
        });
        if !is_any {
            self.places[called].request = Some(request);
            return Ok(None);
        }
        request.inputs.extend(given.iter().filter_map(|&place| self.tensors.of(&graph.steps[called].inputs[place])));
        let response = self.ask(called, request, is_last).map_err(|error| graph.within(error))?;
        answered.hand_on(&graph.steps[called].outputs, response.outputs, |reader, mut tensor| {
            if let Reader::Output(place) = reader {
                tensor.name = graph.outputs[place].name.clone();
                answer.put(place, tensor);
            }
        });
        for &place in standing.iter() {
            if let Some(tensor) = self.tensors.of(&graph.outputs[place]) {
                answer.put(place, tensor);
            }
        }
        Ok(Some(answer.tensors))
    }
}
