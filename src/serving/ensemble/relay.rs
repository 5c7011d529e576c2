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
use crate::{Changes, InferError, InferResponse, Moment, Repeat, Respond, ResponseStream, Tensor, Update, near};

type Item = Result<Update, InferError>;

/// What goes where between two steps.
pub(super) struct Relay {
    /// Of the last answer, where the response that it came of may be repeated.
    again: Again,
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
    last: Last,
}

/// An answer, and what it came of.
#[derive(Default)]
struct Last {
    /// But for [`Again::newer`], as is the kept request to the called step.
    answer: Answer,
    /// The inputs of that request, by their places.
    inputs: SmallVec<[usize; 8]>,
    /// How many outputs the first step gave.
    num_made: usize,
}

/// All that a token has to know of the answer before it: this lies together, the rest rests.
#[derive(Default)]
struct Again {
    /// From outputs of the first step to inputs of the kept request.
    feeds: Ways,
    /// From outputs of the first step to those of the answer.
    tells: Ways,
    /// From outputs of the called step to those of the answer.
    answers: Ways,
    /// What the first step has told since the last response that was passed on in full.
    newer: Changes,
    /// How many outputs the called step gave; `None` behind an error.
    num_answered: Option<usize>,
    /// The response had something for the graph.
    is_any: bool,
    /// Each call of the called step is traced.
    is_traced: bool,
}

/// From places in one list of tensors to those in another.
#[derive(Default)]
struct Ways(SmallVec<[(u16, u16); 6]>);

impl Ways {
    /// Hands what is new on to where it goes.
    fn carry(&self, new: &Changes, to: &mut Changes) {
        for (from, elements) in new.iter() {
            self.from(from).for_each(|place| to.put(place, elements.clone()));
        }
    }

    fn from(&self, place: usize) -> impl Iterator<Item = usize> {
        self.0.iter().filter(move |(from, _)| *from as usize == place).map(|&(_, to)| to as usize)
    }

    fn put(&mut self, from: usize, to: Option<usize>) {
        self.0.extend(to.map(|to| (from as u16, to as u16)));
    }
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
        let all_wires = [&steps[maker].outputs, &steps[called].inputs, &steps[called].outputs, &run.graph.outputs];
        let has_room = all_wires.iter().all(|wires| wires.len() <= usize::from(u16::MAX)); // In `Ways`.
        if !has_room || !pass.answers || run.places[called].caller.is_none() || all_made.any(made_twice) {
            return None;
        }
        let outputs = run.graph.outputs.iter().enumerate().filter(|(_, output)| run.is_asked(output));
        let standing = outputs.filter(|(_, output)| !is_made_now(output)).map(|(place, _)| place).collect();
        let inputs = steps[called].inputs.iter().enumerate();
        let given = inputs.filter(|(_, input)| !is_made_now(input)).map(|(place, _)| place).collect();
        let (made, answered) = (Routes::of(run, maker, Some(called)), Routes::of(run, called, None));
        let again = Again { is_traced: run.request.trace.is_some(), ..Again::default() };
        let (graph, last) = (run.graph.clone(), Last::default());
        Some(Self { again, graph, maker, called, made, answered, standing, given, last })
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
    /// Works out where elements go that are new in the last response, or in the called step's answer to it.
    fn learn(&mut self) {
        let Self { again, made, answered, last, .. } = self;
        let (mut feeds, mut tells, mut answers) = <(Ways, Ways, Ways)>::default();
        for output in 0..last.num_made {
            for &reader in made.readers_of(output) {
                match reader {
                    Reader::Input(place) => feeds.put(output, last.inputs.iter().position(|&other| other == place)),
                    Reader::Output(place) => tells.put(output, last.answer.at(place)),
                }
            }
        }
        for output in 0..again.num_answered.unwrap_or(0) {
            answered.readers_of(output).iter().for_each(|reader| answers.put(output, last.answer.at(reader.place())));
        }
        (again.feeds, again.tells, again.answers) = (feeds, tells, answers);
    }

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
    fn poll_respond(
        &mut self,
        takes_updates: bool,
        told: &mut Changes,
        context: &mut Context<'_>,
    ) -> Poll<Option<Item>> {
        self.run.poll_relay(&mut self.relaying, takes_updates, told, context)
    }

    fn fetch(&self, depth: usize) {
        let Relaying { relay, stream, .. } = &self.relaying;
        let place = &self.run.places[relay.called];
        match depth {
            0 => near::fetch(place),
            _ => {
                place.caller.iter().filter(|_| depth == 1).for_each(|caller| near::fetch(&**caller));
                place.state.fetch(depth - 1);
            }
        }
        stream.fetch(depth);
    }
}

impl Run {
    /// Sends a response for each of what is relayed, if anything is.
    pub(super) async fn relay(&mut self, relaying: Option<Relaying>) {
        let Some(mut relaying) = relaying else { return };
        let takes_updates = self.sender.takes_updates();
        loop {
            let mut told = Changes::default();
            let item = poll_fn(|context| self.poll_relay(&mut relaying, takes_updates, &mut told, context)).await;
            match item {
                None => return,
                Some(Ok(Update::Response(response))) => self.sender.send(Ok(*response)).await,
                Some(Ok(Update::Again(_))) => self.sender.send_again(told).await,
                Some(Err(error)) => self.sender.send(Err(error)).await,
            };
        }
    }

    /// What the next response comes to, or what is new in it.
    fn poll_relay(
        &mut self,
        relaying: &mut Relaying,
        takes_updates: bool,
        told: &mut Changes,
        context: &mut Context<'_>,
    ) -> Poll<Option<Item>> {
        let Relaying { relay, stream, pass, is_over } = relaying;
        while !*is_over {
            let Some(item) = ready!(stream.poll_update(&mut relay.again.newer, context)) else { break };
            let sent = match item {
                Ok(Update::Again(_)) if !relay.again.is_any => continue,
                Ok(Update::Again(repeat)) => self.pass_on_again(relay, repeat, told, takes_updates),
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
        let Relay { again, graph, maker, called, made, answered, standing, given, last } = relay;
        let (maker, called, may_be_repeated) = (&graph.steps[*maker], *called, response.may_be_repeated);
        last.num_made = response.outputs.len();
        again.newer.clear();
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
        again.is_any = is_any;
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
        again.num_answered = error.is_none().then_some(outputs.len());
        answered.hand_on(&graph.steps[called].outputs, outputs, |reader, mut tensor| {
            if let Reader::Output(place) = reader {
                tensor.name = graph.outputs[place].name.clone();
                answer.put(place, tensor);
            }
        });
        if may_be_repeated {
            last.answer = answer.clone();
            relay.learn();
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
        repeat: Repeat,
        told: &mut Changes,
        takes_updates: bool,
    ) -> Result<Update, InferError> {
        let again = &mut relay.again;
        again.tells.carry(&again.newer, told);
        if again.num_answered.is_none() || again.is_traced || !takes_updates {
            return self.pass_on_in_full(relay, repeat, told, takes_updates);
        }
        let (mut fed, mut answered) = <(Changes, Changes)>::default();
        again.feeds.carry(&again.newer, &mut fed);
        let started = repeat.seen.unwrap_or_else(Moment::now);
        match self.ask_again(relay.called, started, &fed, &mut answered) {
            Some(Ok(ended)) => {
                again.answers.carry(&answered, told);
                Ok(Update::Again(Repeat { computed: None, seen: Some(ended), ..repeat }))
            }
            Some(Err(error)) => {
                again.num_answered = None;
                Err(relay.graph.within(error))
            }
            None => self.pass_on_in_full(relay, repeat, told, takes_updates),
        }
    }

    /// The same, by the called step's whole answer; `told` holds what is new in the ensemble's without that.
    fn pass_on_in_full(
        &mut self,
        relay: &mut Relay,
        repeat: Repeat,
        told: &mut Changes,
        takes_updates: bool,
    ) -> Result<Update, InferError> {
        let Relay { again, graph, called, answered, last, .. } = relay;
        let mut request = self.places[*called].request.take().expect("a response that may be repeated was passed on");
        for (place, elements) in again.newer.iter() {
            let data = elements.to_data();
            again.feeds.from(place).for_each(|input| request.inputs[input].data = data.clone());
            again.tells.from(place).for_each(|output| last.answer.tensors[output].data = data.clone());
        }
        let known = again.num_answered.take(); // After an error nothing is known.
        let outputs = self.ask(*called, request, false).map_err(|error| graph.within(error))?.outputs;
        again.num_answered = Some(outputs.len());
        again.newer.clear();
        let mut is_alike = again.num_answered == known;
        if !is_alike {
            answered.readers.iter().flatten().for_each(|reader| last.answer.remove(reader.place()));
        }
        answered.hand_on(&graph.steps[*called].outputs, outputs, |reader, tensor| {
            let place = reader.place();
            if let Some(at) = last.answer.like(place, &tensor) {
                told.put(at, tensor.data.clone());
                last.answer.tensors[at].data = tensor.data;
            } else {
                is_alike = false;
                last.answer.remove(place);
                last.answer.put(place, Tensor { name: graph.outputs[place].name.clone(), ..tensor });
            }
        });
        if is_alike && takes_updates {
            return Ok(Update::Again(Repeat { computed: None, seen: None, ..repeat }));
        }
        let outputs = last.answer.tensors.clone();
        relay.learn();
        Ok(InferResponse { may_be_repeated: true, ..self.response(outputs, false) }.into())
    }
}
