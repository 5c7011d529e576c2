//! The straight way through a graph: one decoupled step, and behind it one that answers at once, as a language model and
//! its detokenizer.
//!
//! Each response of the first is a call of the second and a response of the ensemble. Which tensor goes where is worked
//! out once, so a token passes no slots; and where the first step says only what is new in a response, only that is passed
//! on.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use smallvec::SmallVec;

use super::graph::{Graph, Wire};
use super::{Pass, Run};
use crate::finder::Finder;
use crate::update::Sent;
use crate::{Changes, Elements, InferError, InferResponse, Respond, ResponseStream, Tensor, Update};

/// Of tensors in a list.
type Places = SmallVec<[usize; 4]>;

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
    /// The last answer, where the response that it came of may be repeated.
    last: Last,
}

/// An answer, and what it came of.
#[derive(Default)]
struct Last {
    answer: Answer,
    /// The inputs of the kept request to the called step, by their places.
    inputs: SmallVec<[usize; 8]>,
    /// How many outputs the called step gave.
    num_answered: usize,
    /// The response had something for the graph.
    is_any: bool,
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

impl Reader {
    fn place(self) -> usize {
        match self {
            Reader::Input(place) | Reader::Output(place) => place,
        }
    }
}

/// The outputs of one response of the ensemble, in the order of its configuration.
#[derive(Default, Clone)]
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

    /// Where the tensor of an output lies.
    fn at(&self, place: usize) -> Option<usize> {
        self.places.iter().position(|&other| other == place)
    }

    /// The same of one that differs from `other` in its elements alone.
    fn like(&self, place: usize, other: &Tensor) -> Option<usize> {
        let is_like = |known: &Tensor| known.datatype == other.datatype && known.shape == other.shape;
        self.at(place).filter(|&at| is_like(&self.tensors[at]))
    }

    /// The answer once more, but for these tensors of it.
    fn again(&self, changed: &[usize]) -> Update {
        let elements = |&output: &usize| Elements { output, data: self.tensors[output].data.clone() };
        Update::Again(changed.iter().map(elements).collect())
    }

    fn remove(&mut self, place: usize) {
        if let Some(at) = self.at(place) {
            self.places.remove(at);
            self.tensors.remove(at);
        }
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
        Some(Self { graph: run.graph.clone(), maker, called, made, answered, standing, given, last: Last::default() })
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

    /// The readers of the output at this place of the last response.
    fn readers_of(&self, output: usize) -> &[Reader] {
        self.finder.last(output).map_or(&[], |found| &self.readers[found])
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

impl Relay {
    /// Relays `stream` from here on.
    pub(super) fn begin(self, run: &Run, mut stream: ResponseStream, pass: Pass) -> Relaying {
        // What is asked again is to be as it was; where shapes change, it is not.
        if run.models[self.called].keeps_shapes {
            stream.take_updates();
        }
        Relaying { relay: self, stream, pass, is_over: false }
    }
}

/// A stream that is relayed.
pub(super) struct Relaying {
    relay: Relay,
    stream: ResponseStream,
    pass: Pass,
    is_over: bool,
}

/// The rest of a run: a stream that is relayed.
pub(super) struct Relayed {
    pub(super) run: Run,
    pub(super) relaying: Relaying,
}

impl Respond for Relayed {
    fn poll_respond(&mut self, takes_updates: bool, context: &mut Context<'_>) -> Poll<Option<Sent>> {
        self.run.poll_relay(&mut self.relaying, takes_updates, context)
    }
}

impl Run {
    /// Sends a response for each of what is relayed, if anything is.
    pub(super) async fn relay(&mut self, relaying: Option<Relaying>) {
        let Some(mut relaying) = relaying else { return };
        let takes_updates = self.sender.takes_updates();
        while let Some(sent) = poll_fn(|context| self.poll_relay(&mut relaying, takes_updates, context)).await {
            self.sender.send_update(sent).await;
        }
    }

    /// What the next response comes to, or what is new in it.
    fn poll_relay(
        &mut self,
        relaying: &mut Relaying,
        takes_updates: bool,
        context: &mut Context<'_>,
    ) -> Poll<Option<Sent>> {
        let Relaying { relay, stream, pass, is_over } = relaying;
        while !*is_over {
            let Some(item) = ready!(stream.poll_update(context)) else { break };
            let sent = match item {
                Ok(Update::Again(_)) if !relay.last.is_any => continue,
                Ok(Update::Again(changes)) => self.pass_on_again(relay, changes, takes_updates),
                Ok(Update::Response(response)) => {
                    *is_over = response.is_final;
                    let is_last = pass.is_last && response.is_final;
                    match self.pass_on(relay, *response, is_last) {
                        Ok(None) if !is_last => continue,
                        Ok(None) => Ok(self.response(Vec::new(), true).into()),
                        Ok(Some(response)) => Ok(response.into()),
                        Err(error) => Err(error),
                    }
                }
                Err(error) => Err(self.graph.within(error)),
            };
            return Poll::Ready(Some(sent));
        }
        Poll::Ready(None)
    }

    /// What a response comes to; `None` when it had nothing for the graph.
    fn pass_on(
        &mut self,
        relay: &mut Relay,
        response: InferResponse,
        is_last: bool,
    ) -> Result<Option<InferResponse>, InferError> {
        let Relay { graph, maker, called, made, answered, standing, given, last } = relay;
        let (maker, called, may_be_repeated) = (&graph.steps[*maker], *called, response.may_be_repeated);
        let mut answer = Answer { tensors: Vec::with_capacity(standing.len() + 4), ..Answer::default() };
        let mut request = self.places[called].request.take().unwrap_or_else(|| Box::new(self.step_request(called)));
        request.inputs.clear();
        last.inputs.clear();
        let is_any = made.hand_on(&maker.outputs, response.outputs, |reader, mut tensor| match reader {
            Reader::Input(place) => {
                tensor.name = graph.steps[called].inputs[place].name.clone();
                request.inputs.push(tensor);
                last.inputs.push(place);
            }
            Reader::Output(place) => {
                tensor.name = graph.outputs[place].name.clone();
                answer.put(place, tensor);
            }
        });
        last.is_any = is_any;
        if !is_any {
            self.places[called].request = Some(request);
            return Ok(None);
        }
        for &place in given.iter() {
            if let Some(tensor) = self.tensors.of(&graph.steps[called].inputs[place]) {
                request.inputs.push(tensor);
                last.inputs.push(place);
            }
        }
        let response = self.ask(called, request, is_last).map_err(|error| graph.within(error));
        for &place in standing.iter() {
            if let Some(tensor) = self.tensors.of(&graph.outputs[place]) {
                answer.put(place, tensor);
            }
        }
        // Of an answer that failed, the next one may still be made.
        let (outputs, error) = response.map_or_else(|error| (Vec::new(), Some(error)), |it| (it.outputs, None));
        last.num_answered = if error.is_none() { outputs.len() } else { usize::MAX };
        answered.hand_on(&graph.steps[called].outputs, outputs, |reader, mut tensor| {
            if let Reader::Output(place) = reader {
                tensor.name = graph.outputs[place].name.clone();
                answer.put(place, tensor);
            }
        });
        if may_be_repeated {
            last.answer = answer.clone();
        }
        match error {
            Some(error) => Err(error),
            None => Ok(Some(InferResponse { may_be_repeated, ..self.response(answer.tensors, is_last) })),
        }
    }

    /// What the last response comes to with what is new.
    fn pass_on_again(
        &mut self,
        relay: &mut Relay,
        changes: Changes,
        takes_updates: bool,
    ) -> Result<Update, InferError> {
        let Relay { graph, called, made, answered, last, .. } = relay;
        let (called, mut changed, mut fed) = (*called, Places::new(), Places::new());
        let mut request = self.places[called].request.take().expect("a response that may be repeated was passed on");
        for Elements { output, data } in changes {
            for reader in made.readers_of(output) {
                match *reader {
                    Reader::Input(place) => {
                        if let Some(at) = last.inputs.iter().position(|&other| other == place) {
                            request.inputs[at].data = data.clone();
                            fed.push(at);
                        }
                    }
                    Reader::Output(place) => {
                        if let Some(at) = last.answer.at(place) {
                            last.answer.tensors[at].data = data.clone();
                            changed.push(at);
                        }
                    }
                }
            }
        }
        let known = std::mem::replace(&mut last.num_answered, usize::MAX); // After an error nothing is known.
        if known != usize::MAX
            && takes_updates
            && let Some(changes) = self.ask_again(called, &request, &fed)
        {
            self.places[called].request = Some(request);
            for Elements { output, data } in changes.map_err(|error| graph.within(error))? {
                for place in answered.readers_of(output).iter().map(|reader| reader.place()) {
                    if let Some(at) = last.answer.at(place) {
                        last.answer.tensors[at].data = data.clone();
                        changed.push(at);
                    }
                }
            }
            last.num_answered = known;
            return Ok(last.answer.again(&changed));
        }
        let outputs = self.ask(called, request, false).map_err(|error| graph.within(error))?.outputs;
        last.num_answered = outputs.len();
        let mut is_alike = outputs.len() == known;
        if !is_alike {
            answered.readers.iter().flatten().for_each(|reader| last.answer.remove(reader.place()));
        }
        answered.hand_on(&graph.steps[called].outputs, outputs, |reader, tensor| {
            let place = reader.place();
            if let Some(at) = last.answer.like(place, &tensor) {
                last.answer.tensors[at].data = tensor.data;
                changed.push(at);
            } else {
                is_alike = false;
                last.answer.remove(place);
                last.answer.put(place, Tensor { name: graph.outputs[place].name.clone(), ..tensor });
            }
        });
        if !is_alike || !takes_updates {
            let outputs = last.answer.tensors.clone();
            return Ok(InferResponse { may_be_repeated: true, ..self.response(outputs, false) }.into());
        }
        Ok(last.answer.again(&changed))
    }
}
