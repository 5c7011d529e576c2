//! Constrained generation: which tokens a request allows, and the state of each of its sequences.

use std::fmt;
use std::sync::{Arc, OnceLock};

use constraint::{Compiler, ConstraintError, ConstraintSpec, Limits, Mask, StartAfter, Vocabulary};
use engine::{RequestConstraint, TokenId};
use text::Tokenizer;

/// What the generated text must be, and which tokens it may consist of.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Guide {
    /// What the text must be.
    pub spec: Option<ConstraintSpec>,
    /// The part of the text after which `spec` applies, such as the end of the reasoning.
    pub starts_after: Option<StartAfter>,
    /// Only these tokens are generated; empty for no such limit.
    pub allowed_tokens: Vec<TokenId>,
}

impl Guide {
    /// Whether every text is allowed.
    pub fn is_free(&self) -> bool {
        self.spec.is_none() && self.allowed_tokens.is_empty()
    }
}

/// Compiles the guides of requests to one model.
pub struct Constraints {
    tokenizer: Arc<Tokenizer>,
    vocab_size: usize,
    end_ids: Vec<u32>,
    /// Made for the first guide: it takes tenths of a second for a large vocabulary.
    compiler: OnceLock<Result<Compiler, ConstraintError>>,
}

impl fmt::Debug for Constraints {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Constraints").field("vocab_size", &self.vocab_size).finish_non_exhaustive()
    }
}

impl Constraints {
    /// For a model with `vocab_size` logits; `end_ids` end its texts.
    pub fn new(tokenizer: Arc<Tokenizer>, vocab_size: usize, end_ids: &[TokenId]) -> Self {
        let end_ids = end_ids.iter().map(|id| id.0).filter(|&id| (id as usize) < vocab_size).collect();
        Self { tokenizer, vocab_size, end_ids, compiler: OnceLock::new() }
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
                Some(match &guide.starts_after {
                    None => constraint,
                    Some(marker) => constraint.start_after(marker)?,
                })
            }
        };
        let allowed = (!guide.allowed_tokens.is_empty()).then(|| {
            let mut words = vec![0u32; self.vocab_size.div_ceil(32)];
            let known = guide.allowed_tokens.iter().map(|id| id.0 as usize).filter(|&id| id < self.vocab_size);
            known.for_each(|id| words[id / 32] |= 1 << (id % 32));
            words.into()
        });
        Ok(RequestConstraint(Box::new(Guided { inner, allowed, mask: Mask::default() })))
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
    inner: Option<constraint::Constraint>,
    /// The only tokens that are allowed: bit `id % 32` of word `id / 32`.
    allowed: Option<Arc<[u32]>>,
    mask: Mask,
}

impl fmt::Debug for Guided {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let num_tokens = self.inner.as_ref().map(|inner| inner.tokens().len());
        formatter.debug_struct("Guided").field("num_tokens", &num_tokens).finish_non_exhaustive()
    }
}

impl engine::Constraint for Guided {
    fn mask(&mut self, words: &mut Vec<u32>) -> Result<(), String> {
        words.clear();
        match (&mut self.inner, &self.allowed) {
            (Some(inner), _) => {
                inner.mask(&mut self.mask).map_err(|error| error.to_string())?;
                words.extend_from_slice(self.mask.words());
                if let Some(allowed) = &self.allowed {
                    words.iter_mut().zip(allowed.iter()).for_each(|(word, allowed)| *word &= allowed);
                }
            }
            (None, Some(allowed)) => words.extend_from_slice(allowed),
            (None, None) => {}
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
        self.inner.as_mut().map_or(Ok(()), |inner| inner.accept(token.0).map_err(|error| error.to_string()))
    }

    fn accept_valid(&mut self, tokens: &[TokenId]) -> usize {
        tokens.iter().take_while(|&&token| self.accept(token).is_ok()).count()
    }

    fn rollback(&mut self, count: usize) -> Result<(), String> {
        self.inner.as_mut().map_or(Ok(()), |inner| inner.rollback(count).map_err(|error| error.to_string()))
    }

    fn is_complete(&self) -> bool {
        self.inner.as_ref().is_some_and(constraint::Constraint::is_ended)
    }

    fn copy(&self) -> Box<dyn engine::Constraint> {
        Box::new(self.clone())
    }
}
