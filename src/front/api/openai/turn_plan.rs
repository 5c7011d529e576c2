//! How the turn of a chat is read and constrained: by the form in which the model writes reasoning and tool calls.

use std::sync::Arc;

use chat_format::{ChatFormat, Choice, FormatError, ToolSchema, TurnParser, TurnStart};
use generation::{ConstraintSpec, Generator, Preface, ReasoningBudget, StartAfter, close_objects};
use serving::ProgressReporter;

use super::choices::Choices;
use super::error::ApiError;
use super::prompt::Prompt;
use super::request::CompletionRequest;
use super::respond::Pieces;
use super::tools::{ToolChoice, Tools};
use super::turn::{TurnOptions, divided};

/// Bytes at the end of a prompt that decide where the turn begins.
const TAIL_BYTES: usize = 512;

/// How the turn of a chat is read.
#[derive(Clone)]
pub(super) struct TurnPlan {
    /// `None`: all text is content.
    format: Option<Arc<ChatFormat>>,
    start: TurnStart,
    tools: Vec<ToolSchema>,
}

impl TurnPlan {
    /// For text without reasoning and tool calls.
    pub(super) fn plain() -> Self {
        Self { format: None, start: TurnStart::Content, tools: Vec::new() }
    }

    /// For a turn behind `prompt`. Where tools or the form of the answer demand it, the request's constraint is set.
    ///
    /// # Errors
    /// When the model has no form for tool calls, or the tools cannot be constrained as the request demands.
    pub(super) fn new(
        format: Option<Arc<ChatFormat>>,
        prompt: &Prompt,
        request: &mut CompletionRequest,
        generator: &Generator,
    ) -> Result<Self, ApiError> {
        let tools = schemas(&request.tools);
        let Some(format) = format else {
            if request.parameters.thinking_budget.is_some_and(|budget| budget.is_demanded) {
                return Err(no_reasoning());
            }
            if tools.is_empty() {
                return Ok(Self::plain());
            }
            return Err(no_tool_calls());
        };
        if !tools.is_empty() && !format.has_calls() {
            return Err(no_tool_calls());
        }
        let start = match prompt {
            Prompt::Text(text) => format.turn_start(tail(text)),
            Prompt::Tokens(_) => TurnStart::Content,
        };
        let plan = Self { format: Some(Arc::clone(&format)), start, tools };
        plan.limit_reasoning(&format, request, generator)?;
        plan.constrain(&format, request, generator)?;
        let tokenizer = &generator.tokenizer;
        let special = tokenizer.special_ids();
        let is_special =
            |name: &String| tokenizer.token_to_id(name).is_some_and(|id| special.binary_search(&id).is_ok());
        // The markers must reach the parser.
        if format.special_tokens().iter().any(is_special) {
            request.parameters.skip_special_tokens = false;
        }
        Ok(plan)
    }

    /// Sets the budget of the reasoning, where the request has one.
    fn limit_reasoning(
        &self,
        format: &ChatFormat,
        request: &mut CompletionRequest,
        generator: &Generator,
    ) -> Result<(), ApiError> {
        let Some(budget) = request.parameters.thinking_budget else { return Ok(()) };
        let Some((open, close)) = format.reasoning_markers() else {
            return if budget.is_demanded { Err(no_reasoning()) } else { Ok(()) };
        };
        let encode = |marker| generator.tokenizer.encode(marker, false).unwrap_or_default().into();
        let is_open = format.reasoning_end(self.start).is_some();
        let (open, close) = (encode(open), encode(close));
        request.parameters.reasoning = Some(ReasoningBudget { max_tokens: budget.tokens, is_open, open, close });
        Ok(())
    }

    /// Sets the constraint that tools demand, and the place from which a constraint applies.
    fn constrain(
        &self,
        format: &ChatFormat,
        request: &mut CompletionRequest,
        generator: &Generator,
    ) -> Result<(), ApiError> {
        let parameters = &mut request.parameters;
        let choice = match &request.tools.choice {
            ToolChoice::Required => Choice::Required,
            ToolChoice::Named(name) => Choice::Named(name.clone()),
            ToolChoice::Auto | ToolChoice::None => Choice::Auto,
        };
        // A call that is demanded leaves no text that could have another form.
        if parameters.constraint.is_some() && choice == Choice::Auto {
            parameters.constrained_after = format.reasoning_end(self.start).map(|end| start_after(end, generator));
            if self.start == TurnStart::Fresh && parameters.constrained_after.is_none() {
                parameters.preface = preface(format, generator);
            }
            return Ok(());
        }
        let tokenizer = &generator.tokenizer;
        let special = tokenizer.special_ids();
        let is_special = |name: &str| tokenizer.token_to_id(name).is_some_and(|id| special.binary_search(&id).is_ok());
        let grammar = format.tool_grammar(&self.tools, choice, request.tools.parallel, self.start, &is_special);
        let Some(grammar) = grammar.map_err(refusal)? else { return Ok(()) };
        parameters.constrained_after = grammar.starts_after.clone().map(|end| start_after(end, generator));
        let unknown = || ApiError::of_field("tools", "The tokenizer of this model lacks a token of its tool calls.");
        let grammar = grammar.with_ids(&|name| tokenizer.token_to_id(name)).ok_or_else(unknown)?;
        parameters.constraint = Some(("tools", ConstraintSpec::Lark(grammar.lark)));
        Ok(())
    }

    /// The pieces of a chat, with their deltas. `requests` has the request of each choice, where it counts reasoning.
    pub(super) fn divide(
        self,
        request: &CompletionRequest,
        choices: Choices,
        requests: Vec<Option<ProgressReporter>>,
    ) -> Pieces {
        let is_named = matches!(request.tools.choice, ToolChoice::Named(_));
        let options = TurnOptions {
            includes_reasoning: request.includes_reasoning,
            ends_with_tool_calls: !(is_named && request.ends_named_call_with_stop),
            markers: self.format.as_ref().map_or_else(Vec::new, |format| format.special_tokens().to_vec()),
        };
        Box::pin(divided(choices, requests, options, move || self.parser()))
    }

    /// The parser of one choice; `None` where all text is content.
    fn parser(&self) -> Option<TurnParser> {
        self.format.as_ref().map(|format| format.parser(self.start, &self.tools))
    }
}

fn schemas(tools: &Tools) -> Vec<ToolSchema> {
    let schema = |tool: &super::tools::Tool| ToolSchema {
        name: tool.name.clone(),
        parameters: close_objects(&tool.parameters),
        strict: tool.strict,
    };
    tools.offered().iter().map(schema).collect()
}

/// The start behind a marker: behind its token, where it is one.
fn start_after(marker: String, generator: &Generator) -> StartAfter {
    match generator.tokenizer.token_to_id(&marker) {
        Some(id) => StartAfter::Tokens(vec![id]),
        None => StartAfter::Text(marker),
    }
}

/// The reasoning with which an answer may begin, where one token opens it.
fn preface(format: &ChatFormat, generator: &Generator) -> Option<Preface> {
    let (open, close) = format.reasoning_markers()?;
    let open = generator.tokenizer.token_to_id(open)?;
    let close = generator.tokenizer.encode(close, false).ok()?;
    (!close.is_empty()).then(|| Preface { open, close: close.into() })
}

fn no_tool_calls() -> ApiError {
    let words = "The chat template of this model has no known form of tool calls; start the server with \
                 `--chat-format=NAME`, or leave out `tools`.";
    ApiError::of_field("tools", words)
}

fn no_reasoning() -> ApiError {
    let words = "This model has no reasoning that could be limited; leave out `thinking_token_budget`.";
    ApiError::of_field("thinking_token_budget", words)
}

fn refusal(error: FormatError) -> ApiError {
    let field = if matches!(error, FormatError::UnknownTool { .. }) { "tool_choice" } else { "tools" };
    ApiError::of_field(field, format!("{error}."))
}

fn tail(text: &str) -> &str {
    &text[text.ceil_char_boundary(text.len().saturating_sub(TAIL_BYTES))..]
}
