//! What requests do to the server. The relay sends only those again that do not change it.

/// What a request does to the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Effect {
    /// It asks for health.
    Probe,
    /// It runs a model.
    Generates,
    /// Its answer depends on the request and on what the server has.
    Reads,
    /// It changes what the server has or does.
    Changes,
}
