//! Responses of the generate extension as flat JSON. Most responses of a stream differ in a few values only, so the other members
//! are encoded once.

use serving::{InferError, InferResponse, OutputDelta, Parameter, Tensor};

use crate::api::triton::http::json_writer::JsonWriter;

/// An encoded response.
#[derive(Debug, Default)]
pub struct Template {
    outputs: Vec<Tensor>,
    /// Sorted by key.
    members: Vec<EncodedMember>,
}

/// A member with its key, as JSON.
#[derive(Debug)]
struct EncodedMember {
    text: Vec<u8>,
    /// The index of the output that it holds.
    output: Option<usize>,
}

enum Member<'a> {
    Text(&'a str),
    Parameter(&'a Parameter),
    Output(usize, &'a Tensor),
}

impl Template {
    /// Encodes a response.
    ///
    /// # Errors
    /// When an output has no JSON form.
    pub fn of(response: InferResponse) -> Result<Self, InferError> {
        let members = encode(&response)?;
        Ok(Self { members, outputs: response.outputs })
    }

    /// Replaces values of outputs.
    ///
    /// # Errors
    /// When a value has no JSON form.
    pub fn apply(&mut self, delta: &OutputDelta) -> Result<(), InferError> {
        for (index, elements) in delta.iter() {
            let Some(tensor) = self.outputs.get_mut(index) else { continue };
            tensor.data = elements.to_data();
            let member = self.members.iter_mut().find(|member| member.output == Some(index));
            if let Some(member) = member {
                member.text = encode_member(&tensor.name, &Member::Output(index, tensor))?;
            }
        }
        Ok(())
    }

    /// Appends the response as a JSON object.
    pub fn write(&self, out: &mut Vec<u8>) {
        out.push(b'{');
        for (index, member) in self.members.iter().enumerate() {
            if index > 0 {
                out.push(b',');
            }
            out.extend_from_slice(&member.text);
        }
        out.push(b'}');
    }
}

/// The members of a response, sorted by key.
fn encode(response: &InferResponse) -> Result<Vec<EncodedMember>, InferError> {
    let id = Some(("id", Member::Text(&response.id))).filter(|_| !response.id.is_empty());
    let model =
        [("model_name", Member::Text(&response.model_name)), ("model_version", Member::Text(&response.model_version))];
    let parameters = response.parameters.iter().map(|(key, value)| (key.as_str(), Member::Parameter(value)));
    let outputs = response.outputs.iter().enumerate();
    let outputs = outputs.map(|(index, output)| (&*output.name, Member::Output(index, output)));
    let mut members: Vec<(&str, Member<'_>)> = id.into_iter().chain(model).chain(parameters).chain(outputs).collect();
    members.sort_by_key(|(key, _)| *key);
    let encoded = |(key, member): &(&str, Member<'_>)| {
        let output = if let Member::Output(index, _) = member { Some(*index) } else { None };
        Ok(EncodedMember { text: encode_member(key, member)?, output })
    };
    members.iter().map(encoded).collect()
}

fn encode_member(key: &str, member: &Member<'_>) -> Result<Vec<u8>, InferError> {
    let mut writer = JsonWriter::with_capacity(64);
    match member {
        Member::Text(text) => writer.member(key, text.as_bytes()),
        Member::Parameter(value) => writer.parameter(key, value),
        Member::Output(_, tensor) => {
            writer.key(key);
            writer.tensor_or_scalar(tensor)?;
        }
    }
    Ok(writer.finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(template: &Template) -> String {
        let mut text = Vec::new();
        template.write(&mut text);
        String::from_utf8(text).unwrap()
    }

    #[test]
    fn a_delta_replaces_values_and_keeps_the_other_members() {
        let outputs = vec![
            Tensor::from_byte_strings("text_output", &[1], &["a \"b\""]),
            Tensor::from_i32("count", &[1, 2], &[1, 2]),
        ];
        let response = InferResponse { model_name: "llm".into(), outputs, ..InferResponse::default() };
        let mut template = Template::of(response.clone()).unwrap();
        let first = r#"{"count":[1,2],"model_name":"llm","model_version":"","text_output":"a \"b\""}"#;
        assert_eq!(written(&template), first);
        let mut delta = OutputDelta::default();
        delta.set(0, serving::Elements::text("c"));
        template.apply(&delta).unwrap();
        assert_eq!(written(&template), first.replace(r#"a \"b\""#, "c"));
        delta.set(1, bytes::Bytes::copy_from_slice(&[3, 0, 0, 0, 4, 0, 0, 0]));
        template.apply(&delta).unwrap();
        assert_eq!(written(&template), r#"{"count":[3,4],"model_name":"llm","model_version":"","text_output":"c"}"#);
    }
}
