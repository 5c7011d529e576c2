//! Constrained generation: the tokens that a request allows, and the state of each of its sequences.

use std::fmt;
use std::sync::{Arc, OnceLock};

use constraint::{Compiler, ConstraintError, ConstraintSpec, Limits, Mask, StartAfter, Vocabulary};
use engine::{RequestConstraint, TokenId};
use text::Tokenizer;

/// Constraints of the generated text and its tokens.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Guide {
    /// The constraint of the text.
    pub spec: Option<ConstraintSpec>,
    /// The text after which `spec` applies, such as the end of the reasoning.
    pub starts_after: Option<StartAfter>,
    /// Optional reasoning at the begin of the text; `spec` applies after it.
    pub preface: Option<Preface>,
    /// The only allowed tokens; empty to allow all tokens.
    pub allowed_tokens: Vec<TokenId>,
    /// The maximum length of the reasoning.
    pub reasoning: Option<ReasoningBudget>,
}

/// Optional reasoning at the begin of a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Preface {
    /// The token that opens the reasoning, as the first token of the text.
    pub open: u32,
    /// The tokens that end the reasoning; at least one.
    pub close: Arc<[u32]>,
}

/// Limits the reasoning of a text to a number of tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReasoningBudget {
    /// Maximum number of reasoning tokens, without the tokens that open and end it.
    pub max_tokens: usize,
    /// Whether the text begins in reasoning.
    pub is_open: bool,
    /// The tokens that open the reasoning.
    pub open: Arc<[u32]>,
    /// The tokens that end the reasoning; at least one.
    pub close: Arc<[u32]>,
}

impl Guide {
    /// Whether every text is allowed.
    pub fn is_free(&self) -> bool {
        self.spec.is_none() && self.allowed_tokens.is_empty() && self.reasoning.is_none()
    }
}

/// Compiles the guides of requests to one model.
pub struct Constraints {
    tokenizer: Arc<Tokenizer>,
    vocab_size: usize,
    end_ids: Vec<u32>,
    /// Created by [`Constraints::prepare`] or for the first guide. This takes tenths of a second for a large vocabulary.
    compiler: OnceLock<Result<Compiler, ConstraintError>>,
}

impl fmt::Debug for Constraints {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Constraints").field("vocab_size", &self.vocab_size).finish_non_exhaustive()
    }
}

impl Constraints {
    /// A compiler for a model with `vocab_size` logits whose texts end with `end_ids`.
    pub fn new(tokenizer: Arc<Tokenizer>, vocab_size: usize, end_ids: &[TokenId]) -> Self {
        let end_ids = end_ids.iter().map(|id| id.0).filter(|&id| (id as usize) < vocab_size).collect();
        Self { tokenizer, vocab_size, end_ids, compiler: OnceLock::new() }
    }

    /// Prepares the vocabulary, so that the first guide does not wait for it. Blocks for tenths of a second.
    pub fn prepare(&self) {
        let _ = self.compiler(); // An error is told to the requests with guides.
    }

    /// The constraint of a sequence that `end_ids` end. Blocks for up to [`Limits::compile_time`], so it must not be called
    /// from a thread that serves other requests.
    ///
    /// # Errors
    /// When the guide is not valid, not supported or too expensive, or too many are being compiled.
    pub fn compile(&self, guide: &Guide, end_ids: &[TokenId]) -> Result<RequestConstraint, ConstraintError> {
        let inner = match &guide.spec {
            None => None,
            Some(spec) => {
                let end_ids: Vec<u32> = end_ids.iter().map(|id| id.0).collect();
                let constraint = self.compiler()?.compile(spec)?.with_end_ids(&end_ids);
                let constraint = match &guide.starts_after {
                    None => constraint,
                    Some(marker) => constraint.start_after(marker)?,
                };
                let preface = guide.preface.clone().filter(|preface| (preface.open as usize) < self.vocab_size);
                Some(Prefaced { constraint, preface, end_ids, tokens: Vec::new(), begins_at: None })
            }
        };
        let allowed = (!guide.allowed_tokens.is_empty()).then(|| {
            let mut words = vec![0u32; self.vocab_size.div_ceil(32)];
            let known = guide.allowed_tokens.iter().map(|id| id.0 as usize).filter(|&id| id < self.vocab_size);
            known.for_each(|id| words[id / 32] |= 1 << (id % 32));
            words.into()
        });
        let reasoning = guide.reasoning.clone().map(Reasoning::new);
        let vocab_size = self.vocab_size;
        Ok(RequestConstraint(Box::new(Guided { inner, allowed, reasoning, vocab_size, mask: Mask::default() })))
    }

    fn compiler(&self) -> Result<&Compiler, ConstraintError> {
        let make = || {
            let vocabulary = Vocabulary::of(&self.tokenizer, self.vocab_size, &self.end_ids)?;
            Compiler::new(vocabulary, Limits::default())
        };
        self.compiler.get_or_init(make).as_ref().map_err(Clone::clone)
    }
}

/// The state of one constrained sequence.
#[derive(Clone)]
struct Guided {
    inner: Option<Prefaced>,
    /// The only allowed tokens: bit `id % 32` of word `id / 32`.
    allowed: Option<Arc<[u32]>>,
    reasoning: Option<Reasoning>,
    vocab_size: usize,
    mask: Mask,
}

impl fmt::Debug for Guided {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let num_tokens = self.inner.as_ref().map(|inner| inner.tokens.len());
        formatter.debug_struct("Guided").field("num_tokens", &num_tokens).finish_non_exhaustive()
    }
}

impl engine::Constraint for Guided {
    fn mask(&mut self, words: &mut Vec<u32>) -> Result<(), String> {
        words.clear();
        if let Some(token) = self.reasoning.as_ref().and_then(Reasoning::forced) {
            words.resize(self.vocab_size.div_ceil(32), 0);
            let word = words.get_mut(token as usize / 32).ok_or("the end of the reasoning is no token of the model")?;
            *word |= 1 << (token % 32);
            return Ok(());
        }
        match (&mut self.inner, &self.allowed) {
            (Some(inner), _) => {
                inner.mask(self.vocab_size, &mut self.mask, words).map_err(|error| error.to_string())?;
                if let Some(allowed) = &self.allowed {
                    words.iter_mut().zip(allowed.iter()).for_each(|(word, allowed)| *word &= allowed);
                }
            }
            (None, Some(allowed)) => words.extend_from_slice(allowed),
            (None, None) => all_tokens(self.vocab_size, words),
        }
        match words.iter().any(|&word| word != 0) {
            true => Ok(()),
            false => Err("no token continues the text within the request's constraint".to_owned()),
        }
    }

    fn accept(&mut self, token: TokenId) -> Result<(), String> {
        let is_allowed = |allowed: &Arc<[u32]>| {
            allowed.get(token.0 as usize / 32).is_some_and(|word| word >> (token.0 % 32) & 1 == 1)
        };
        if !self.allowed.as_ref().is_none_or(is_allowed) {
            return Err(format!("token {} is not among `allowed_token_ids`", token.0));
        }
        if let Some(inner) = &mut self.inner {
            inner.accept(token.0).map_err(|error| error.to_string())?;
        }
        if let Some(reasoning) = &mut self.reasoning {
            reasoning.push(token.0);
        }
        Ok(())
    }

    fn accept_valid(&mut self, tokens: &[TokenId]) -> usize {
        tokens.iter().take_while(|&&token| self.accept(token).is_ok()).count()
    }

    fn rollback(&mut self, count: usize) -> Result<(), String> {
        if let Some(reasoning) = &mut self.reasoning {
            reasoning.rollback(count);
        }
        self.inner.as_mut().map_or(Ok(()), |inner| inner.rollback(count).map_err(|error| error.to_string()))
    }

    fn is_complete(&self) -> bool {
        self.inner.as_ref().is_some_and(Prefaced::is_ended)
    }

    fn copy(&self) -> Box<dyn engine::Constraint> {
        Box::new(self.clone())
    }
}

/// A constraint that applies after the optional reasoning.
#[derive(Clone)]
struct Prefaced {
    constraint: constraint::Constraint,
    preface: Option<Preface>,
    /// They do not end reasoning.
    end_ids: Vec<u32>,
    tokens: Vec<u32>,
    /// Number of tokens before the first one that the constraint has; `None` while the text may begin or is in reasoning.
    begins_at: Option<usize>,
}

impl Prefaced {
    /// The preface until its end, and whether it has started.
    fn open_preface(&self) -> Option<(&Preface, bool)> {
        self.preface.as_ref().filter(|_| self.begins_at.is_none()).map(|preface| (preface, !self.tokens.is_empty()))
    }

    fn mask(&mut self, vocab_size: usize, mask: &mut Mask, words: &mut Vec<u32>) -> Result<(), ConstraintError> {
        match self.open_preface() {
            Some((_, true)) => {
                all_tokens(vocab_size, words);
                for id in self.end_ids.iter().filter(|&&id| (id as usize) < vocab_size) {
                    words[*id as usize / 32] &= !(1 << (id % 32));
                }
                Ok(())
            }
            preface => {
                let open = preface.map(|(preface, _)| preface.open);
                self.constraint.mask(mask)?;
                words.extend_from_slice(mask.words());
                open.into_iter().for_each(|id| words[id as usize / 32] |= 1 << (id % 32));
                Ok(())
            }
        }
    }

    fn accept(&mut self, token: u32) -> Result<(), ConstraintError> {
        match self.open_preface() {
            Some((preface, false)) if token == preface.open => self.tokens.push(token),
            Some((preface, true)) => {
                let close = Arc::clone(&preface.close);
                self.tokens.push(token);
                if self.tokens.ends_with(&close) {
                    self.begins_at = Some(self.tokens.len());
                }
            }
            _ => {
                self.constraint.accept(token)?;
                self.begins_at.get_or_insert(self.tokens.len());
                self.tokens.push(token);
            }
        }
        Ok(())
    }

    fn rollback(&mut self, count: usize) -> Result<(), ConstraintError> {
        let left = self.tokens.len().saturating_sub(count);
        if let Some(begins_at) = self.begins_at {
            self.constraint.rollback(self.tokens.len() - left.max(begins_at))?;
            if left < begins_at || left == 0 {
                self.begins_at = None;
            }
        }
        self.tokens.truncate(left);
        Ok(())
    }

    fn is_ended(&self) -> bool {
        (self.begins_at.is_some() || self.preface.is_none()) && self.constraint.is_ended()
    }
}

/// Writes the set of all tokens.
fn all_tokens(vocab_size: usize, words: &mut Vec<u32>) {
    words.resize(vocab_size.div_ceil(32), u32::MAX);
    if let (Some(last), used @ 1..) = (words.last_mut(), vocab_size % 32) {
        *last = (1 << used) - 1;
    }
}

/// The part of the reasoning budget that a sequence has used.
#[derive(Clone)]
struct Reasoning {
    budget: ReasoningBudget,
    tokens: Vec<u32>,
    phase: Phase,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The reasoning has not started.
    Before,
    /// The reasoning started after this number of tokens.
    Open(usize),
    Closed,
}

impl Reasoning {
    fn new(budget: ReasoningBudget) -> Self {
        let phase = if budget.is_open { Phase::Open(0) } else { Phase::Before };
        Self { budget, tokens: Vec::new(), phase }
    }

    fn push(&mut self, token: u32) {
        self.tokens.push(token);
        let ends_with = |marker: &[u32]| !marker.is_empty() && self.tokens.ends_with(marker);
        self.phase = match self.phase {
            Phase::Before if ends_with(&self.budget.open) => Phase::Open(self.tokens.len()),
            Phase::Open(_) if ends_with(&self.budget.close) => Phase::Closed,
            phase => phase,
        };
    }

    fn rollback(&mut self, count: usize) {
        let left = self.tokens.len().saturating_sub(count);
        let tokens = std::mem::take(&mut self.tokens);
        *self = Self::new(self.budget.clone());
        tokens[..left].iter().for_each(|&token| self.push(token));
    }

    /// The only allowed next token when the budget is used: the next token of the end.
    fn forced(&self) -> Option<u32> {
        let Phase::Open(since) = self.phase else { return None };
        let over = (self.tokens.len() - since).checked_sub(self.budget.max_tokens)?;
        let close = &self.budget.close;
        // Only tokens after the budget count, because a text may contain the first tokens of the end.
        let matched = (0..close.len().min(over + 1)).rev().find(|&len| self.tokens.ends_with(&close[..len]));
        close.get(matched.unwrap_or(0)).copied()
    }
}

#[cfg(test)]
mod tests;
