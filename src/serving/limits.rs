//! Limits on what one request may contain. They are compared before the request is given any memory or time.
//!
//! [`Limit`] lists every limit. Its table is the only place that holds a limit's name, default and description: the
//! command line, the metric `trireme_refused_requests_total` and the tests are all made from it.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::InferError;

/// One limit. The first argument of an error is what the client sent too much of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Limit {
    /// Input tensors of a request.
    Inputs,
    /// Outputs that a request names.
    Outputs,
    /// Parameters of a request, of one of its inputs or of one of its outputs.
    Parameters,
    /// Bytes of a request id.
    IdBytes,
    /// Bytes of a name: of a model, a version, a tensor, a parameter or a shared-memory region.
    NameBytes,
    /// Sizes in the shape of one tensor.
    Dimensions,
    /// Prompts times choices of one OpenAI request.
    Sequences,
    /// Messages of one conversation.
    Messages,
    /// Stop words, bad words or biased words of one sequence, each list by itself.
    Words,
    /// Bytes of one stop word, bad word or biased word.
    WordBytes,
    /// Bytes of one prompt.
    PromptBytes,
}

/// What the table knows of a limit.
struct Row {
    limit: Limit,
    /// Name of the flag and label of the metric.
    name: &'static str,
    default: u64,
    /// Help text of the flag.
    help: &'static str,
    /// What is counted, as it stands in an error behind a number.
    unit: &'static str,
}

const ROWS: [Row; 11] = [
    row(Limit::Inputs, "max-request-inputs", 1024, "Most input tensors of a request", "inputs"),
    row(Limit::Outputs, "max-request-outputs", 1024, "Most outputs that a request may name", "outputs"),
    row(
        Limit::Parameters,
        "max-request-parameters",
        1024,
        "Most parameters of a request, or of one of its tensors",
        "parameters",
    ),
    row(Limit::IdBytes, "max-request-id-bytes", 64 << 10, "Most bytes of a request id", "bytes of request id"),
    row(
        Limit::NameBytes,
        "max-name-bytes",
        4096,
        "Most bytes of the name of a model, tensor, parameter or region",
        "bytes of name",
    ),
    row(Limit::Dimensions, "max-tensor-dimensions", 64, "Most dimensions of a tensor", "dimensions"),
    row(
        Limit::Sequences,
        "max-request-sequences",
        1024,
        "Most sequences of a request: its prompts times `n`",
        "sequences",
    ),
    row(Limit::Messages, "max-request-messages", 16 << 10, "Most messages of a conversation", "messages"),
    row(
        Limit::Words,
        "max-request-words",
        1024,
        "Most stop words of a sequence; as many bad words and biased words",
        "words",
    ),
    row(
        Limit::WordBytes,
        "max-word-bytes",
        4096,
        "Most bytes of a stop word, bad word or biased word",
        "bytes of one word",
    ),
    row(
        Limit::PromptBytes,
        "max-prompt-bytes",
        0,
        "Most bytes of a prompt; 0: as many as the model's longest sequence can hold",
        "bytes of prompt",
    ),
];

const fn row(limit: Limit, name: &'static str, default: u64, help: &'static str, unit: &'static str) -> Row {
    Row { limit, name, default, help, unit }
}

/// Requests refused since the start, by limit.
static REFUSED: [AtomicU64; ROWS.len()] = [const { AtomicU64::new(0) }; ROWS.len()];

impl Limit {
    /// Every limit, in the order of the table.
    pub fn all() -> impl Iterator<Item = Limit> {
        ROWS.iter().map(|row| row.limit)
    }

    fn row(self) -> &'static Row {
        &ROWS[self as usize]
    }

    /// Name of its flag, without the dashes in front, and label of its metric.
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// What it is when no flag says otherwise.
    pub fn default_value(self) -> u64 {
        self.row().default
    }

    /// Help text of its flag.
    pub fn help(self) -> &'static str {
        self.row().help
    }

    /// Requests refused because of it since this process started.
    pub fn num_refused(self) -> u64 {
        REFUSED[self as usize].load(Relaxed)
    }

    /// Counts a refusal and returns its error: `found` is more than `allowed`.
    pub fn refuse(self, found: u64, allowed: u64) -> InferError {
        REFUSED[self as usize].fetch_add(1, Relaxed);
        let Row { name, unit, .. } = self.row();
        InferError::invalid(format!("request has {found} {unit}, at most {allowed} are allowed (--{name})"))
    }
}

/// The values of all limits; [`Limits::default`] has those of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits([u64; ROWS.len()]);

impl Default for Limits {
    fn default() -> Self {
        Self(std::array::from_fn(|index| ROWS[index].default))
    }
}

impl Limits {
    /// The value of `limit`.
    pub fn get(&self, limit: Limit) -> u64 {
        self.0[limit as usize]
    }

    /// Sets `limit` to `value`.
    pub fn set(&mut self, limit: Limit, value: u64) {
        self.0[limit as usize] = value;
    }

    /// Compares `found` with `limit`, in constant time and without memory of its own.
    ///
    /// # Errors
    /// `InvalidArgument`, with both numbers and the flag, where `found` is more than allowed; the refusal is counted.
    pub fn check(&self, limit: Limit, found: usize) -> Result<(), InferError> {
        let allowed = self.get(limit);
        if found as u64 > allowed { Err(limit.refuse(found as u64, allowed)) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_each_limit_at_its_place() {
        assert!(Limit::all().enumerate().all(|(index, limit)| limit as usize == index));
    }

    #[test]
    fn one_more_than_allowed_is_refused_and_counted() {
        let mut limits = Limits::default();
        limits.set(Limit::Messages, 3);
        let before = Limit::Messages.num_refused();
        assert_eq!(limits.check(Limit::Messages, 3), Ok(()));
        let error = limits.check(Limit::Messages, 4).unwrap_err();
        assert_eq!(error.message, "request has 4 messages, at most 3 are allowed (--max-request-messages)");
        assert_eq!(Limit::Messages.num_refused(), before + 1);
    }
}
