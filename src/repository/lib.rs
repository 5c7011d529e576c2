//! Room `repository`.

/// Placeholder until the generated `inference.ModelConfig` replaces it.
#[derive(Debug, Clone, Default)]
pub struct ModelConfig {}
