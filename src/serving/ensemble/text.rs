//! Recognises ensembles of a tokenizer, a language model and a detokenizer, which are served as one ([`crate::TextOutputs`]).

use std::sync::Arc;
use std::task::{Context, Poll, ready};

use super::Run;
use super::graph::{Graph, Step, Wire};
use crate::model::ServedModel;
use crate::request_metrics::Watch;
use crate::{
    CallCounter, DetokenizerModel, InferError, InferRequest, Name, OutputDelta, ResponseSource, ResponseStream,
    StreamItem, TextModel, TextOutput, TextOutputs,
};

/// The generator's outputs and the detokenizer's inputs that they are connected to.
const TOKENS: (&str, &str) = ("output_ids", "TOKENS_BATCH");
const LENGTHS: (&str, &str) = ("sequence_length", "SEQUENCE_LENGTH");
const OPTIONAL: [(&str, &str); 2] = [("sequence_index", "SEQUENCE_INDEX"), ("sequence_end", "SEQUENCE_END")];
/// The detokenizer's output.
const TEXT: &str = "OUTPUT";

/// The two steps of a graph that are served as one.
#[derive(Debug)]
pub(super) struct TextPlan {
    pub(super) generator: usize,
    pub(super) detokenizer: usize,
    has_lengths: bool,
}

impl TextPlan {
    /// The plan of a graph whose wires allow it: whether the models do, [`TextPlan::detokenizer_of`] says.
    pub(super) fn of(graph: &Graph) -> Option<Self> {
        let plan = |detokenizer: usize| {
            let &[generator] = &graph.steps[detokenizer].sources[..] else { return None };
            let (from, to) = (&graph.steps[generator], &graph.steps[detokenizer]);
            let plan = Self { generator, detokenizer, has_lengths: connects(from, to, LENGTHS) };
            (connects(from, to, TOKENS) && plan.is_alone(graph)).then_some(plan)
        };
        (0..graph.steps.len()).find_map(plan)
    }

    /// Whether the two steps are the end of the graph, and all other outputs are there before the generator begins.
    fn is_alone(&self, graph: &Graph) -> bool {
        let ends = |step: usize| step == self.generator || step == self.detokenizer;
        let reads_them = |step: usize| graph.steps[step].sources.iter().any(|&source| ends(source));
        let is_end = (0..graph.steps.len()).all(|step| step == self.detokenizer || !reads_them(step));
        let is_early = |wire: &Wire| {
            let mut makers = (0..graph.steps.len()).filter(|&step| graph.steps[step].makes(wire));
            match (makers.next(), makers.next()) {
                (None, _) => true,
                (Some(maker), None) => ends(maker) || graph.is_behind(self.generator, maker),
                (Some(_), Some(_)) => false,
            }
        };
        is_end && graph.outputs.iter().all(is_early)
    }

    /// The model of the detokenizer, where both models can be served as one.
    pub(super) fn detokenizer_of(&self, graph: &Graph, models: &[Arc<ServedModel>]) -> Option<DetokenizerModel> {
        let (Some(TextModel::Generator), Some(TextModel::Detokenizer(model))) =
            (models[self.generator].text_model(), models[self.detokenizer].text_model())
        else {
            return None;
        };
        let passed_on = |wire: &Wire| model.passed_on.iter().any(|(input, _)| *input == wire.name);
        let is_known = |wire: &Wire| {
            let known = OPTIONAL.iter().chain([&TOKENS, &LENGTHS]).find(|(_, input)| wire.name == *input);
            known.map_or_else(|| passed_on(wire), |&(output, _)| made_as(&graph.steps[self.generator], wire, output))
        };
        graph.steps[self.detokenizer].inputs.iter().all(is_known).then_some(model)
    }

    /// Begins the generator's step by `request`, which has one row, with the ensemble's outputs.
    pub(super) fn begin(
        &self,
        run: &Run,
        request: InferRequest,
        model: DetokenizerModel,
    ) -> Result<ResponseStream, InferError> {
        let graph = &run.graph;
        let output = |wire: &Wire| Some((wire.name.clone(), self.source_of(run, wire, &model)?));
        let outputs = TextOutputs {
            outputs: graph.outputs.iter().filter(|wire| run.is_requested(wire)).filter_map(output).collect(),
            decoder: model.decoder.clone(),
            is_nested: model.is_nested,
            has_lengths: self.has_lengths,
            calls: CallCounter::new(run.models[self.detokenizer].clone()),
            parameters: run.parameters.clone(),
        };
        run.models[self.generator].infer_text(request, outputs).map_err(|error| graph.within(error))
    }

    /// Where an output of the ensemble comes from; `None` for one that is not there.
    fn source_of(&self, run: &Run, wire: &Wire, model: &DetokenizerModel) -> Option<TextOutput> {
        let (generator, detokenizer) = (&run.graph.steps[self.generator], &run.graph.steps[self.detokenizer]);
        let generated = |wire: &Wire| made_by(generator, wire).map(|made| TextOutput::Generated(made.name.clone()));
        let Some(made) = made_by(detokenizer, wire) else {
            return generated(wire).or_else(|| run.tensors.of(wire).map(TextOutput::Given));
        };
        if made.name == TEXT {
            return Some(TextOutput::Text);
        }
        let (input, _) = model.passed_on.iter().find(|(_, output)| *output == made.name)?;
        generated(detokenizer.inputs.iter().find(|wire| wire.name == *input)?)
    }
}

/// Whether an output of one step is connected to an input of another.
fn connects(from: &Step, to: &Step, (output, input): (&str, &str)) -> bool {
    to.inputs.iter().any(|wire| wire.name == input && made_as(from, wire, output))
}

/// The output of `step` that a wire leads from.
fn made_by<'a>(step: &'a Step, wire: &Wire) -> Option<&'a Wire> {
    step.outputs.iter().find(|made| made.slot == wire.slot)
}

fn made_as(step: &Step, wire: &Wire, output: &str) -> bool {
    made_by(step, wire).is_some_and(|made| made.name == output)
}

/// The responses of a generator as those of its ensemble.
pub(crate) struct TextStream {
    source: Box<dyn ResponseSource>,
    /// The generator's.
    watch: Box<Watch>,
    graph: Arc<Graph>,
}

impl TextStream {
    /// What a generator answers in `graph`.
    pub(super) fn new(graph: Arc<Graph>, responses: ResponseStream) -> Self {
        let (source, watch) = responses.into_parts();
        Self { source, watch: watch.expect("a model's responses are watched"), graph }
    }

    /// As [`ResponseSource::poll_next`].
    pub(crate) fn poll_next(
        &mut self,
        accepts_deltas: bool,
        delta: &mut OutputDelta,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<StreamItem, InferError>>> {
        let item = ready!(self.source.poll_next(accepts_deltas, delta, context));
        let mut item = self.watch.see_item(item);
        match &mut item {
            Some(Ok(StreamItem::Delta(info))) => info.computed = info.observed, // Counted as the generator's.
            Some(Ok(StreamItem::Response(response))) => {
                // The ensemble's are filled in.
                (response.model_name, response.model_version) = (Name::default(), Name::default());
            }
            Some(Err(error)) => *error = self.graph.within(error.clone()),
            None => {}
        }
        Poll::Ready(item)
    }
}
