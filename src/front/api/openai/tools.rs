//! Tools that a client offers, and which of them the model may or must call.

use serde_json::{Map, Value, json};

use super::error::ApiError;
use super::fields::Fields;

/// Maximum number of tools of a request.
const MAX_TOOLS: usize = 512;
/// Longest name of a tool in bytes.
const MAX_NAME_BYTES: usize = 256;
/// Anthropic's name of the arguments' schema.
const INPUT_SCHEMA: &str = "input_schema";

/// A function that the model may call.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Tool {
    pub(super) name: String,
    /// JSON schema of the arguments.
    pub(super) parameters: Value,
    /// Whether the arguments must follow the schema.
    pub(super) strict: bool,
    /// The tool in the form of OpenAI's chats, which chat templates read, with the client's keys in their order. Null after
    /// [`Tools::take_for_template`].
    for_template: Value,
}

/// Which tools the model calls.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) enum ToolChoice {
    /// None: tools are not shown to the model.
    None,
    /// As the model decides.
    #[default]
    Auto,
    /// At least one.
    Required,
    /// This one.
    Named(String),
}

/// The tools of a request.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Tools {
    pub(super) list: Vec<Tool>,
    pub(super) choice: ToolChoice,
    /// Whether a turn may have several calls.
    pub(super) parallel: bool,
}

/// How an endpoint writes tools.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ToolForm {
    /// `{"type": "function", "function": {"name", "description", "parameters", "strict"}}`
    Chat,
    /// `{"type": "function", "name", "description", "parameters", "strict"}`
    Responses,
    /// `{"name", "description", "input_schema"}`
    Anthropic,
}

impl Tools {
    /// Reads `tools`, `tool_choice` and `parallel_tool_calls` of OpenAI's endpoints.
    ///
    /// # Errors
    /// When a field has an invalid value, or the choice names no tool of the list.
    pub(super) fn read(fields: &mut Fields, form: ToolForm) -> Result<Self, ApiError> {
        let list = fields.list("tools")?;
        let (has_list, list) = (list.is_some(), read_list(list.unwrap_or_default(), form)?);
        if has_list && list.is_empty() && form == ToolForm::Chat {
            return Err(ApiError::of_field("tools", "`tools` is empty; leave it out, or list at least one tool."));
        }
        let choice = match fields.take("tool_choice") {
            None => ToolChoice::Auto,
            Some(choice) => read_choice(&choice, form)?,
        };
        let parallel = fields.flag("parallel_tool_calls")?.unwrap_or(true);
        Self { list, choice, parallel }.checked()
    }

    /// Reads `tools` and `tool_choice` of Anthropic's endpoints.
    ///
    /// # Errors
    /// When a field has an invalid value, or the choice names no tool of the list.
    pub(super) fn read_anthropic(fields: &mut Fields) -> Result<Self, ApiError> {
        let list = read_list(fields.list("tools")?.unwrap_or_default(), ToolForm::Anthropic)?;
        let wrong = |words: String| ApiError::of_field("tool_choice", words);
        let (mut choice, mut parallel) = (ToolChoice::Auto, true);
        if let Some(given) = fields.object("tool_choice")? {
            choice = match (given.get("type").and_then(Value::as_str), given.get("name").and_then(Value::as_str)) {
                (Some("auto"), _) => ToolChoice::Auto,
                (Some("any"), _) => ToolChoice::Required,
                (Some("none"), _) => ToolChoice::None,
                (Some("tool"), Some(name)) => ToolChoice::Named(name.to_owned()),
                _ => {
                    return Err(wrong(
                        "`tool_choice` must have a `type` of auto, any, none, or tool with a `name`.".to_owned(),
                    ));
                }
            };
            parallel = match given.get("disable_parallel_tool_use") {
                None | Some(Value::Null) => true,
                Some(Value::Bool(disable)) => !disable,
                Some(_) => {
                    return Err(wrong("`tool_choice.disable_parallel_tool_use` must be true or false.".to_owned()));
                }
            };
        }
        Self { list, choice, parallel }.checked()
    }

    fn checked(self) -> Result<Self, ApiError> {
        let wrong = |words: String| Err(ApiError::of_field("tool_choice", words));
        match &self.choice {
            ToolChoice::Required | ToolChoice::Named(_) if self.list.is_empty() => {
                wrong("`tool_choice` demands a call, but `tools` lists no tool.".to_owned())
            }
            ToolChoice::Named(name) if !self.list.iter().any(|tool| tool.name == *name) => {
                wrong(format!("`tool_choice` names `{}`, which is not in `tools`.", crate::api::status::shown(name)))
            }
            _ => Ok(self),
        }
    }

    /// The tools that the model sees.
    pub(super) fn offered(&self) -> &[Tool] {
        if self.choice == ToolChoice::None { &[] } else { &self.list }
    }

    /// The tools that the model sees, as its template reads them. They are taken out of this list, because schemas may be large.
    pub(super) fn take_for_template(&mut self) -> Vec<Value> {
        let offered = if self.choice == ToolChoice::None { &mut [] } else { &mut self.list[..] };
        offered.iter_mut().map(|tool| tool.for_template.take()).collect()
    }
}

fn read_list(list: Vec<Value>, form: ToolForm) -> Result<Vec<Tool>, ApiError> {
    if list.len() > MAX_TOOLS {
        let words = format!("`tools` lists {} tools, at most {MAX_TOOLS} are allowed.", list.len());
        return Err(ApiError::of_field("tools", words));
    }
    let tools: Vec<Tool> =
        list.into_iter().enumerate().map(|(at, tool)| read_tool(at, tool, form)).collect::<Result<_, _>>()?;
    for (at, tool) in tools.iter().enumerate() {
        if tools[..at].iter().any(|other| other.name == tool.name) {
            let words = format!("`tools[{at}]` has the name `{}` of an earlier tool.", tool.name);
            return Err(ApiError::of_field("tools", words));
        }
    }
    Ok(tools)
}

fn read_tool(at: usize, tool: Value, form: ToolForm) -> Result<Tool, ApiError> {
    let wrong = |words: String| ApiError::of_field("tools", format!("`tools[{at}]` {words}."));
    let kind = tool.get("type").and_then(Value::as_str).map(str::to_owned);
    let is_function = match form {
        ToolForm::Anthropic => matches!(kind.as_deref(), None | Some("custom")),
        _ => kind.as_deref() == Some("function"),
    };
    if !is_function {
        let kind = kind.map_or("none".to_owned(), |kind| format!("`{}`", crate::api::status::shown(&kind)));
        return Err(wrong(format!("has the type {kind}; only functions of the client can be called")));
    }
    let place = if form == ToolForm::Chat { tool.get("function") } else { Some(&tool) };
    let Some(Value::Object(function)) = place else { return Err(wrong("has no object `function`".to_owned())) };
    let get = |name: &str| function.get(name).filter(|value| !value.is_null());
    let name = match get("name") {
        Some(Value::String(name)) if is_name(name) => name.clone(),
        Some(Value::String(_)) => {
            return Err(wrong(format!(
                "has an invalid `name`: letters, digits, `_`, `-`, `.`, `:` and `/`, at most {MAX_NAME_BYTES}"
            )));
        }
        _ => return Err(wrong("has no `name`".to_owned())),
    };
    let schema_name = if form == ToolForm::Anthropic { INPUT_SCHEMA } else { "parameters" };
    let parameters = match get(schema_name) {
        None => json!({"type": "object", "properties": {}}),
        Some(schema @ Value::Object(_)) => schema.clone(),
        Some(_) => return Err(wrong(format!("has a `{schema_name}` that is no JSON schema"))),
    };
    if get("description").is_some_and(|description| !description.is_string()) {
        return Err(wrong("has a `description` that is no text".to_owned()));
    }
    let strict = match get("strict") {
        None => false,
        Some(Value::Bool(strict)) => *strict,
        Some(_) => return Err(wrong("has a `strict` that is not true or false".to_owned())),
    };
    Ok(Tool { name, parameters, strict, for_template: in_chat_form(tool, form) })
}

/// A tool in the form of OpenAI's chats. Keys keep their order, and those that are not known stay: templates may read them.
fn in_chat_form(tool: Value, form: ToolForm) -> Value {
    let Value::Object(fields) = tool else { return tool };
    if form == ToolForm::Chat {
        return fields.into();
    }
    let is_of_api = |name: &str| name == "type" || form == ToolForm::Anthropic && name == "cache_control";
    let renamed = |(name, value)| match form {
        ToolForm::Anthropic if name == INPUT_SCHEMA => ("parameters".to_owned(), value),
        _ => (name, value),
    };
    let function: Value =
        fields.into_iter().filter(|(name, _)| !is_of_api(name)).map(renamed).collect::<Map<_, _>>().into();
    json!({"type": "function", "function": function})
}

fn is_name(name: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.:/".contains(&byte);
    (1..=MAX_NAME_BYTES).contains(&name.len()) && name.bytes().all(is_allowed)
}

fn read_choice(choice: &Value, form: ToolForm) -> Result<ToolChoice, ApiError> {
    let named = if form == ToolForm::Chat { &choice["function"]["name"] } else { &choice["name"] };
    match (choice.as_str(), choice["type"].as_str(), named.as_str()) {
        (Some("none"), ..) => Ok(ToolChoice::None),
        (Some("auto"), ..) => Ok(ToolChoice::Auto),
        (Some("required"), ..) => Ok(ToolChoice::Required),
        (None, Some("function"), Some(name)) => Ok(ToolChoice::Named(name.to_owned())),
        _ => {
            let words = "`tool_choice` must be none, auto, required or an object that names a function.";
            Err(ApiError::of_field("tool_choice", words))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: Value, form: ToolForm) -> Result<Tools, String> {
        let mut fields = Fields::read(body.to_string().as_bytes()).unwrap();
        let read = match form {
            ToolForm::Anthropic => Tools::read_anthropic(&mut fields),
            _ => Tools::read(&mut fields, form),
        };
        read.map_err(|error| error.message)
    }

    #[test]
    fn the_three_forms_of_a_tool_mean_the_same() {
        let schema = json!({"type": "object", "properties": {"city": {"type": "string"}}});
        let function = json!({"name": "weather", "description": "Weather", "parameters": schema});
        let chat = json!({"tools": [{"type": "function", "function": function}], "tool_choice": {"type": "function", "function": {"name": "weather"}}});
        let mut flat = function.clone();
        flat["type"] = json!("function");
        let responses = json!({"tools": [flat], "tool_choice": {"type": "function", "name": "weather"}});
        let anthropic = json!({"tools": [{"name": "weather", "description": "Weather", "input_schema": schema}], "tool_choice": {"type": "tool", "name": "weather"}});
        let mut found = read(chat, ToolForm::Chat).unwrap();
        assert_eq!(found.choice, ToolChoice::Named("weather".to_owned()));
        assert_eq!(read(responses, ToolForm::Responses).unwrap(), found);
        assert_eq!(read(anthropic, ToolForm::Anthropic).unwrap(), found);
        assert_eq!(found.take_for_template()[0]["function"], function);
    }

    #[test]
    fn templates_read_tools_as_the_client_wrote_them() {
        let shown = |body: &str, form: ToolForm| {
            let tools = read(serde_json::from_str(body).unwrap(), form).unwrap().take_for_template();
            serde_json::to_string(&tools).unwrap()
        };
        let chat = r#"[{"function":{"strict":false,"x":[1],"parameters":{"b":1,"a":2},"name":"f"},"type":"function"}]"#;
        assert_eq!(shown(&format!(r#"{{"tools":{chat}}}"#), ToolForm::Chat), chat);
        let bare = r#"[{"type":"function","function":{"description":null,"name":"f"}}]"#;
        assert_eq!(shown(&format!(r#"{{"tools":{bare}}}"#), ToolForm::Chat), bare);
        let flat = r#"{"tools":[{"x":1,"parameters":{},"type":"function","name":"f"}]}"#;
        let function = r#"[{"type":"function","function":{"x":1,"parameters":{},"name":"f"}}]"#;
        assert_eq!(shown(flat, ToolForm::Responses), function);
        let anthropic = r#"{"tools":[{"x":1,"input_schema":{},"cache_control":{},"name":"f"}]}"#;
        assert_eq!(shown(anthropic, ToolForm::Anthropic), function);
        let none = r#"{"tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":"none"}"#;
        assert_eq!(shown(none, ToolForm::Chat), "[]");
    }

    #[test]
    fn invalid_tools_and_choices_are_named() {
        let tool = |name: &str| json!({"type": "function", "function": {"name": name}});
        for (body, words) in [
            (json!({"tools": []}), "`tools` is empty"),
            (json!({"tools": [tool("f"), tool("f")]}), "name `f` of an earlier tool"),
            (json!({"tools": [{"type": "web_search"}]}), "`tools[0]` has the type `web_search`"),
            (json!({"tools": [{"type": "function"}]}), "has no object `function`"),
            (json!({"tools": [tool("a b")]}), "invalid `name`"),
            (json!({"tools": [tool("f")], "tool_choice": "maybe"}), "must be none, auto, required"),
            (json!({"tool_choice": "required"}), "lists no tool"),
            (
                json!({"tools": [tool("f")], "tool_choice": {"type": "function", "function": {"name": "g"}}}),
                "names `g`",
            ),
        ] {
            let error = read(body.clone(), ToolForm::Chat).unwrap_err();
            assert!(error.contains(words), "{body}: {error}");
        }
        let none = read(json!({"tools": [tool("f")], "tool_choice": "none"}), ToolForm::Chat).unwrap();
        assert!(none.offered().is_empty());
    }
}
