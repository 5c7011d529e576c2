//! Errors of a simulation.

use crate::costs::CostsError;

/// Why a simulation cannot run.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // Fields are named by their messages.
pub enum SimulateError {
    #[error(transparent)]
    Costs(#[from] CostsError),
    #[error("{ranks} ranks are not a whole number of nodes of {per_node}; change --ranks or --ranks-per-node")]
    Ranks { ranks: u32, per_node: u32 },
    #[error(transparent)]
    Config(#[from] engine::ConfigError),
    #[error("a request of {prompt} + {output} tokens does not fit: {reason}")]
    Request { prompt: u32, output: u32, reason: String },
}
