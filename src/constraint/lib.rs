//! Constrains a generated text to a JSON schema, a regular expression, a list of choices or a grammar.
//!
//! - [`Vocabulary`] holds the bytes of every token of a tokenizer, in a trie.
//! - [`Compiler`] turns a [`ConstraintSpec`] into a [`Constraint`], within [`Limits`].
//! - [`Constraint`] is the state of one sequence: it gives the [`Mask`] of the tokens that may come next, and accepts the chosen token.
//!
//! The grammar engine is `llguidance`. A schema keyword that it does not implement is refused by name, never ignored.
//!
//! ```
//! use constraint::{Compiler, ConstraintSpec, Limits, Mask, Token, Vocabulary};
//!
//! // One token a byte, and token 256 ends a text.
//! let tokens = (0..=255).map(|byte| Token::Text(vec![byte])).chain([Token::Special("</s>".into())]).collect();
//! let compiler = Compiler::new(Vocabulary::new(tokens, &[256])?, Limits::default())?;
//! let mut constraint = compiler.compile(&ConstraintSpec::Choice(vec!["yes".into(), "no".into()]))?;
//! let mut mask = Mask::default();
//! constraint.mask(&mut mask)?;
//! assert_eq!(mask.allowed().collect::<Vec<_>>(), [u32::from(b'n'), u32::from(b'y')]);
//! for byte in *b"no" {
//!     constraint.accept(u32::from(byte))?;
//! }
//! assert!(constraint.is_ended());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod cache;
mod closed;
mod compiler;
mod error;
mod gbnf;
mod grammar;
mod lark;
mod limits;
mod mask;
mod reference;
mod schema;
mod spec;
mod start;
mod state;
mod structural;
mod subschemas;
mod vocabulary;
mod watch;

pub use closed::close_objects;
pub use compiler::Compiler;
pub use error::ConstraintError;
pub use limits::Limits;
pub use mask::Mask;
pub use spec::{ConstraintSpec, StartAfter};
pub use state::Constraint;
pub use vocabulary::{Token, Vocabulary};
