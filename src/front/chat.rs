//! Settings of the chat and completion APIs, and the interface that renders prompts for them.

use std::sync::Arc;

use chat_format::ChatFormat;
use serde_json::{Map, Value};
use serving::InferError;

/// Turns conversations into prompts. The caller of the front provides it, because it knows where chat templates are.
pub trait ChatPrompts: Send + Sync {
    /// The prompt of a conversation for `model`, special tokens spelled out.
    ///
    /// # Errors
    /// When the model has no chat template, or it refuses the conversation.
    fn prompt(&self, model: &str, conversation: &Conversation) -> Result<String, InferError>;

    /// How `model` writes reasoning and tool calls; `None` if that is not known.
    ///
    /// # Errors
    /// When the model's configuration names a form that does not exist.
    fn format(&self, model: &str, has_tools: bool) -> Result<Option<Arc<ChatFormat>>, InferError>;
}

/// An optional [`ChatPrompts`], as a setting of [`Config`](crate::Config).
#[derive(Clone, Default)]
pub struct Chat(pub Option<Arc<dyn ChatPrompts>>);

impl std::fmt::Debug for Chat {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_tuple("Chat").field(&self.0.is_some()).finish()
    }
}

/// A conversation, and how a template turns it into a prompt.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Conversation {
    /// Objects with `role` and `content`, in the form of OpenAI's chats.
    pub messages: Vec<Value>,
    /// Tools in the form of OpenAI's chats; empty for none.
    pub tools: Vec<Value>,
    /// Documents for the template; `None` for none.
    pub documents: Option<Vec<Value>>,
    /// Variables of the template.
    pub variables: Map<String, Value>,
    /// Replaces the model's template.
    pub template: Option<String>,
    /// Whether the prompt ends with the start of the model's turn.
    pub add_generation_prompt: bool,
    /// Whether the model continues the last message.
    pub continue_final_message: bool,
}

/// How unknown fields of a request are handled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum UnknownFields {
    /// The request is refused. The error names the field.
    #[default]
    Refuse,
    /// The fields are ignored, with a line in the log.
    Ignore,
}
