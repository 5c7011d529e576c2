//! A constraint that allows only the tokens that a request generates when it runs alone.

use engine::{Constraint, TokenId};

use super::tokens::VOCAB_SIZE;

/// Allows the expected tokens in their order, and then any token if an end id may follow.
#[derive(Debug, Clone, Default)]
pub struct Expected {
    pub tokens: Vec<TokenId>,
    /// Number of tokens accepted.
    pub len: usize,
    /// Whether a token follows the expected ones.
    pub ends: bool,
}

impl Expected {
    fn allows(&self, token: TokenId) -> bool {
        self.tokens.get(self.len).map_or(self.ends, |&expected| expected == token)
    }
}

impl Constraint for Expected {
    fn mask(&mut self, words: &mut Vec<u32>) -> Result<(), String> {
        words.clear();
        words.push((0..VOCAB_SIZE).filter(|&id| self.allows(TokenId(id))).map(|id| 1 << id).sum());
        Ok(())
    }

    fn accept(&mut self, token: TokenId) -> Result<(), String> {
        assert!(self.allows(token), "token {} of {:?} at {}", token.0, self.tokens, self.len);
        self.len += 1;
        Ok(())
    }

    fn accept_valid(&mut self, tokens: &[TokenId]) -> usize {
        let valid = tokens.iter().take_while(|&&token| {
            let allowed = self.allows(token);
            self.len += usize::from(allowed);
            allowed
        });
        valid.count()
    }

    fn rollback(&mut self, count: usize) -> Result<(), String> {
        self.len -= count;
        Ok(())
    }

    fn is_complete(&self) -> bool {
        false
    }

    fn copy(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}
