//! Where a JSON schema has other schemas in it.

/// The name of a schema in messages.
pub(crate) const WHAT: &str = "the JSON schema";

/// Keywords whose value is a schema.
pub(crate) const ONE: [&str; 3] = ["items", "additionalProperties", "additionalItems"];
/// Keywords whose value is a list of schemas.
pub(crate) const LIST: [&str; 5] = ["anyOf", "oneOf", "allOf", "prefixItems", "items"];
/// Keywords whose value has schemas by name.
pub(crate) const NAMED: [&str; 4] = ["properties", "patternProperties", "$defs", "definitions"];

/// A JSON pointer, as the place of a message.
#[derive(Clone, Default)]
pub(crate) struct Place(Vec<String>);

impl Place {
    /// Runs `inner` one step further down.
    pub(crate) fn within<T>(&mut self, step: &str, inner: impl FnOnce(&mut Self) -> T) -> T {
        // A message needs no more of a name.
        self.0.push(step.chars().take(64).collect());
        let value = inner(self);
        self.0.pop();
        value
    }

    /// Runs `inner` several steps further down.
    pub(crate) fn within_all<T>(&mut self, steps: &[String], inner: impl FnOnce(&mut Self) -> T) -> T {
        match steps.split_first() {
            Some((first, rest)) => {
                self.0.push(first.chars().take(64).collect());
                let value = self.within_all(rest, inner);
                self.0.pop();
                value
            }
            None => inner(self),
        }
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("#")?;
        let cut = self.0.len().saturating_sub(12);
        if cut > 0 {
            formatter.write_str("/…")?;
        }
        self.0[cut..].iter().try_for_each(|step| write!(formatter, "/{}", step.replace('~', "~0").replace('/', "~1")))
    }
}
