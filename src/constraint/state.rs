use llguidance::Matcher;

use crate::limits::Limits;
use crate::start::Start;
use crate::watch::Watch;
use crate::{ConstraintError, Mask, StartAfter, Vocabulary};

/// What `llguidance` says of a computation that was cancelled.
const CANCELLED: &str = "operation cancelled";

const TOO_SLOW: &str = "its next token takes too long to compute: make it simpler, or less ambiguous";

/// The state of one constrained text: which tokens it has, and which may come next.
///
/// It belongs to one sequence. A [`clone`](Clone::clone) shares no state with it, so another sequence may go on from the same place.
pub struct Constraint {
    matcher: Matcher,
    watch: Watch,
    vocabulary: Vocabulary,
    end_ids: Vec<u32>,
    start: Option<Start>,
    /// How many tokens were accepted before the constraint started; `None` while it has not.
    started_at: Option<usize>,
    tokens: Vec<u32>,
    /// An end id was accepted.
    ended: bool,
}

impl Clone for Constraint {
    fn clone(&self) -> Self {
        let matcher = self.matcher.deep_clone();
        Self {
            watch: self.watch.with_handle(matcher.cancellation_handle().unwrap_or_default()),
            matcher,
            vocabulary: self.vocabulary.clone(),
            end_ids: self.end_ids.clone(),
            start: self.start.clone(),
            started_at: self.started_at,
            tokens: self.tokens.clone(),
            ended: self.ended,
        }
    }
}

impl Constraint {
    pub(crate) fn new(matcher: Matcher, vocabulary: Vocabulary, limits: &Limits) -> Self {
        let matcher = matcher.into_cancellable();
        let handle = matcher.cancellation_handle().unwrap_or_default();
        let watch = Watch::new(handle, limits.mask_time, limits.total_time);
        let end_ids = vocabulary.end_ids.to_vec();
        Self { matcher, watch, vocabulary, end_ids, start: None, started_at: Some(0), tokens: Vec::new(), ended: false }
    }

    /// Starts the constraint only after a marker; what comes before it is free. Call it before the first token.
    ///
    /// # Errors
    /// When the marker is empty or too long.
    pub fn start_after(mut self, after: &StartAfter) -> Result<Self, ConstraintError> {
        self.start = Some(Start::new(after)?);
        self.started_at = None;
        Ok(self)
    }

    /// Ends the text at these ids in place of the vocabulary's. An id outside the vocabulary is never generated.
    pub fn with_end_ids(mut self, end_ids: &[u32]) -> Self {
        self.end_ids = end_ids.to_vec();
        self
    }

    /// Writes the tokens that may come next: those that continue the text, and the end ids where it may end.
    /// It is empty when nothing may follow and there is no end id.
    ///
    /// # Errors
    /// [`ConstraintError::Stuck`] when the grammar exceeds a limit. The constraint is then unusable.
    pub fn mask(&mut self, mask: &mut Mask) -> Result<(), ConstraintError> {
        if self.started_at.is_none() {
            let start = self.start.as_mut().expect("a constraint that has not started has a start");
            start.mask(&self.vocabulary, mask);
            self.end_ids.iter().for_each(|&id| mask.forbid(id));
            return Ok(());
        }
        if self.is_ended() {
            mask.assign(&[], self.vocabulary.size());
        } else {
            let set = self.watch.run(|| self.matcher.compute_mask()).map_err(stuck)?;
            mask.assign(set.as_slice(), self.vocabulary.size());
        }
        self.vocabulary.end_ids.iter().chain(&self.end_ids).for_each(|&id| mask.forbid(id));
        if self.may_end()? {
            self.end_ids.iter().for_each(|&id| mask.allow(id));
        }
        Ok(())
    }

    /// Adds a token to the text.
    ///
    /// # Errors
    /// [`ConstraintError::Forbidden`] when the token is not in the mask; the state is then as before. [`ConstraintError::Stuck`] when
    /// the grammar exceeds a limit.
    pub fn accept(&mut self, token: u32) -> Result<(), ConstraintError> {
        let forbidden = ConstraintError::Forbidden { token, position: self.tokens.len() };
        if self.started_at.is_none() {
            if self.end_ids.contains(&token) || token as usize >= self.vocabulary.size() {
                return Err(forbidden);
            }
            let start = self.start.as_mut().expect("a constraint that has not started has a start");
            if !start.allows(token, &self.vocabulary) {
                return Err(forbidden);
            }
            self.tokens.push(token);
            if start.accept(token, &self.vocabulary) {
                self.started_at = Some(self.tokens.len());
            }
            return Ok(());
        }
        if self.ended {
            return Err(forbidden);
        }
        if self.end_ids.contains(&token) {
            if !self.may_end()? {
                return Err(forbidden);
            }
            self.ended = true;
        } else {
            let outside = self.vocabulary.end_ids.contains(&token) || token as usize >= self.vocabulary.size();
            let consume = || self.matcher.try_consume_tokens(&[token]);
            if outside || self.watch.run(consume).map_err(stuck)? == 0 {
                return Err(forbidden);
            }
        }
        self.tokens.push(token);
        Ok(())
    }

    /// Takes back the last `count` tokens.
    ///
    /// # Errors
    /// When fewer were accepted, or the grammar is in an error.
    pub fn rollback(&mut self, count: usize) -> Result<(), ConstraintError> {
        let accepted = self.tokens.len();
        let Some(left) = accepted.checked_sub(count) else { return Err(ConstraintError::Rollback { count, accepted }) };
        if count == 0 {
            return Ok(());
        }
        if let Some(started_at) = self.started_at {
            let consumed = accepted - started_at - usize::from(self.ended);
            let keep = left.saturating_sub(started_at).min(consumed);
            self.matcher.rollback(consumed - keep).map_err(stuck)?;
        }
        self.ended = false;
        self.tokens.truncate(left);
        if let Some(start) = self.start.as_mut().filter(|_| self.started_at.is_none_or(|at| left < at)) {
            self.started_at = None;
            start.reset();
            for &token in &self.tokens {
                start.accept(token, &self.vocabulary);
            }
        }
        Ok(())
    }

    /// How many of `tokens` could follow in a row, from the first. The state does not change.
    ///
    /// # Errors
    /// [`ConstraintError::Stuck`] when the grammar exceeds a limit.
    pub fn validate(&mut self, tokens: &[u32]) -> Result<usize, ConstraintError> {
        let mut valid = 0;
        let mut error = None;
        for &token in tokens {
            match self.accept(token) {
                Ok(()) => valid += 1,
                Err(ConstraintError::Forbidden { .. }) => break,
                Err(other) => {
                    error = Some(other);
                    break;
                }
            }
        }
        match error {
            Some(error) => Err(error),
            None => self.rollback(valid).map(|()| valid),
        }
    }

    /// Whether the text may end here.
    ///
    /// # Errors
    /// [`ConstraintError::Stuck`] when the grammar exceeds a limit.
    pub fn may_end(&mut self) -> Result<bool, ConstraintError> {
        match (self.started_at, self.is_ended()) {
            (None, _) => Ok(false),
            (_, true) => Ok(true),
            _ => self.matcher.is_accepting().map_err(stuck),
        }
    }

    /// Whether the text is complete: an end id was accepted, or nothing may follow.
    pub fn is_ended(&self) -> bool {
        let is_stopped = || self.matcher.is_stopped() && !self.matcher.is_cancelled();
        self.ended || (self.started_at.is_some() && is_stopped() && self.matcher.stop_reason().is_ok())
    }

    /// Whether the constraint applies to the next token: always, unless it waits for its marker.
    pub fn is_started(&self) -> bool {
        self.started_at.is_some()
    }

    /// The tokens accepted so far.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }
}

/// The error of a computation that exceeded a limit.
fn stuck(error: impl std::fmt::Display) -> ConstraintError {
    match error.to_string() {
        reason if reason.contains(CANCELLED) => ConstraintError::Stuck(TOO_SLOW.to_owned()),
        reason => ConstraintError::Stuck(crate::error::readable(&reason)),
    }
}
