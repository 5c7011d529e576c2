//! Fills template variables (`${KEY}`) from `KEY:VALUE,KEY:VALUE`.

use std::collections::BTreeMap;

/// Values of template variables, by name.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Values(BTreeMap<String, String>);

impl Values {
    /// Parses the syntax of TensorRT-LLM's `fill_template.py`, with its escapes: `\,` is a comma in a value.
    ///
    /// # Errors
    /// When a pair has no colon.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let pair = |pair: &String| match pair.split_once(':') {
            // The value may contain more colons, escaped (twice, for that script) or not.
            Some((key, value)) if !key.trim().is_empty() => {
                Ok((key.trim().to_owned(), value.trim().replace("\\:", ":")))
            }
            _ => Err(format!("`{pair}` is not KEY:VALUE")),
        };
        let pairs = split_at_commas(text);
        pairs.iter().filter(|pair| !pair.trim().is_empty()).map(pair).collect::<Result<_, _>>().map(Self)
    }

    /// Adds the values of `defaults` for names that have none.
    pub(crate) fn or(mut self, defaults: &[(&str, String)]) -> Self {
        for (key, value) in defaults {
            self.0.entry((*key).to_owned()).or_insert_with(|| value.clone());
        }
        self
    }

    /// Replaces every variable that has a value.
    pub(crate) fn fill(&self, text: &str) -> String {
        self.0.iter().fold(text.to_owned(), |text, (key, value)| text.replace(&format!("${{{key}}}"), value))
    }

    /// Number of values.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Names of values that occur as a variable in none of `texts`.
    pub(crate) fn unknown<'a>(&'a self, texts: &[String]) -> Vec<&'a str> {
        let is_known = |key: &str| texts.iter().any(|text| text.contains(&format!("${{{key}}}")));
        self.0.keys().map(String::as_str).filter(|key| !is_known(key)).collect()
    }
}

/// Splits at commas; a backslash escapes the next character.
fn split_at_commas(text: &str) -> Vec<String> {
    let (mut parts, mut characters) = (vec![String::new()], text.chars());
    while let Some(character) = characters.next() {
        match character {
            ',' => parts.push(String::new()),
            _ => parts.last_mut().expect("there is one").push(match character {
                '\\' => characters.next().unwrap_or('\\'),
                character => character,
            }),
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_fill_their_variables_and_no_others() {
        let values = Values::parse("a:1,path:/x:y, b : two ").unwrap();
        assert_eq!(values.fill("${a} \"${path}\" ${b} ${c}"), "1 \"/x:y\" two ${c}");
        assert_eq!(values.unknown(&["${a} ${b}".to_owned()]), ["path"]);
        assert!(Values::parse("a").is_err());
        let escaped = Values::parse(r"list:1\,2,path:C\\:x,").unwrap();
        assert_eq!(escaped.fill("${list} ${path}"), "1,2 C:x");
    }
}
