//! Recognises text ensembles, whose language model and detokenizer are served together ([`crate::TextOutputs`]).

use std::sync::Arc;

use generation::Generator;

use super::graph::{Graph, Step, Wire};
use super::tensors::Tensors;
use super::text_stream::TextStream;
use crate::model::ServedModel;
use crate::{Adapters, CallCounter, DetokenizerModel, GenerateCall, InferError, ResponseStream, TextModel, TextOutput};

/// Pairs of a generator's output and the detokenizer's input that it must be connected to.
const TOKENS: (&str, &str) = ("output_ids", "TOKENS_BATCH");
const LENGTHS: (&str, &str) = ("sequence_length", "SEQUENCE_LENGTH");
const OPTIONAL: [(&str, &str); 2] = [("sequence_index", "SEQUENCE_INDEX"), ("sequence_end", "SEQUENCE_END")];
/// The detokenizer's output.
const TEXT: &str = "OUTPUT";

/// The two steps of a graph that are served together.
#[derive(Debug, Clone, Copy)]
pub(super) struct TextPlan {
    pub(super) generator: usize,
    pub(super) detokenizer: usize,
}

impl TextPlan {
    /// The plan of a graph whose wires allow it. [`TextPlan::detokenizer_of`] checks the models.
    pub(super) fn of(graph: &Graph) -> Option<Self> {
        let plan = |detokenizer: usize| {
            let &[generator] = &graph.steps[detokenizer].producers[..] else { return None };
            let (from, to) = (&graph.steps[generator], &graph.steps[detokenizer]);
            let plan = Self { generator, detokenizer };
            // Without lengths, the detokenizer would also decode the padding of shorter rows.
            let is_connected = connects(from, to, TOKENS) && connects(from, to, LENGTHS);
            (is_connected && plan.is_end_of(graph)).then_some(plan)
        };
        (0..graph.steps.len()).find_map(plan)
    }

    /// Whether no other step follows these two, and all other outputs are complete before the generator starts.
    fn is_end_of(&self, graph: &Graph) -> bool {
        let is_planned = |step: usize| step == self.generator || step == self.detokenizer;
        let reads_them = |step: usize| graph.steps[step].producers.iter().any(|&producer| is_planned(producer));
        let is_end = (0..graph.steps.len()).all(|step| step == self.detokenizer || !reads_them(step));
        let is_early = |wire: &Wire| {
            let mut producers = (0..graph.steps.len()).filter(|&step| graph.steps[step].produces(wire));
            match (producers.next(), producers.next()) {
                (None, _) => true,
                (Some(step), None) => is_planned(step) || graph.is_downstream(self.generator, step),
                (Some(_), Some(_)) => false,
            }
        };
        is_end && graph.outputs.iter().all(is_early)
    }

    /// The detokenizer's model; `None` where the two models cannot be served together.
    pub(super) fn detokenizer_of(&self, graph: &Graph, models: &[Arc<ServedModel>]) -> Option<DetokenizerModel> {
        let (Some(TextModel::Generator), Some(TextModel::Detokenizer(model))) =
            (models[self.generator].text_model(), models[self.detokenizer].text_model())
        else {
            return None;
        };
        let is_passthrough = |wire: &Wire| model.passthrough.iter().any(|(input, _)| *input == wire.name);
        let is_known = |wire: &Wire| {
            let known = OPTIONAL.iter().chain([&TOKENS, &LENGTHS]).find(|(_, input)| wire.name == *input);
            known.map_or_else(
                || is_passthrough(wire),
                |&(output, _)| is_output(&graph.steps[self.generator], wire, output),
            )
        };
        graph.steps[self.detokenizer].inputs.iter().all(is_known).then_some(model)
    }

    /// The step that encodes prompts, and whether it adds special tokens, in an ensemble of three steps: encode, generate,
    /// decode. Only such an ensemble takes a [`GenerateCall`], because other steps may change a request.
    fn tokenizer_of(&self, models: &[Arc<ServedModel>]) -> Option<(usize, bool)> {
        let mut others = (0..models.len()).filter(|&step| step != self.generator && step != self.detokenizer);
        let (Some(step), None) = (others.next(), others.next()) else { return None };
        match models[step].text_model()? {
            TextModel::Tokenizer { adds_special_tokens } => Some((step, adds_special_tokens)),
            _ => None,
        }
    }

    /// The generator of the ensemble; `None` where the steps do more than encode, generate and decode.
    pub(super) fn generator_of(&self, graph: &Graph, models: &[Arc<ServedModel>]) -> Option<Generator> {
        self.detokenizer_of(graph, models)?;
        let (_, adds_special_tokens) = self.tokenizer_of(models)?;
        Some(Generator { adds_special_tokens, ..models[self.generator].generator()? })
    }

    /// The adapters of the generator, where requests can name one: those of values.
    pub(super) fn adapters_of(&self, graph: &Graph, models: &[Arc<ServedModel>]) -> Option<Arc<dyn Adapters>> {
        self.generator_of(graph, models)?;
        models[self.generator].adapters()
    }

    /// Passes a call to the generator, and counts it for the other two models.
    pub(super) fn generate(
        &self,
        graph: &Arc<Graph>,
        models: &[Arc<ServedModel>],
        call: GenerateCall,
    ) -> Result<ResponseStream, InferError> {
        if let Some((tokenizer, _)) = self.tokenizer_of(models) {
            CallCounter::new(models[tokenizer].statistics.clone()).count(call.encode_time.as_nanos() as u64);
        }
        let decode_calls = Some(CallCounter::new(models[self.detokenizer].statistics.clone()));
        let call = GenerateCall { decode_calls, ..call };
        let stream = models[self.generator].generate(call).map_err(|error| graph.within(error))?;
        let progress = stream.progress().cloned();
        Ok(ResponseStream::of_inner(Box::new(TextStream::new(graph.clone(), stream)), progress))
    }

    /// How the generator makes an output of the ensemble; `None` for a missing output. `tensors` holds what earlier steps have
    /// returned.
    pub(super) fn output(
        &self,
        graph: &Graph,
        tensors: &Tensors,
        wire: &Wire,
        model: &DetokenizerModel,
    ) -> Option<TextOutput> {
        let (generator, detokenizer) = (&graph.steps[self.generator], &graph.steps[self.detokenizer]);
        let generated =
            |wire: &Wire| output_at(generator, wire).map(|output| TextOutput::Generated(output.name.clone()));
        let Some(output) = output_at(detokenizer, wire) else {
            return generated(wire).or_else(|| tensors.of(wire).map(TextOutput::Given));
        };
        if output.name == TEXT {
            return Some(TextOutput::Text);
        }
        let (input, _) = model.passthrough.iter().find(|(_, name)| *name == output.name)?;
        generated(detokenizer.inputs.iter().find(|wire| wire.name == *input)?)
    }
}

/// Whether an output of one step is connected to an input of another.
fn connects(from: &Step, to: &Step, (output, input): (&str, &str)) -> bool {
    to.inputs.iter().any(|wire| wire.name == input && is_output(from, wire, output))
}

/// The output of `step` in the wire's slot.
fn output_at<'a>(step: &'a Step, wire: &Wire) -> Option<&'a Wire> {
    step.outputs.iter().find(|output| output.slot == wire.slot)
}

/// Whether the output of `step` in the wire's slot is the one called `name`.
fn is_output(step: &Step, wire: &Wire, name: &str) -> bool {
    output_at(step, wire).is_some_and(|output| output.name == name)
}
