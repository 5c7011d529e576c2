//! Headers and trace context of a gRPC call, which apply to each of its requests.

use std::sync::Arc;

use serving::SpanContext;

/// What the requests of a call take along.
#[derive(Debug, Clone)]
pub struct Forwarded {
    /// Headers that models see.
    pub headers: Arc<[(String, String)]>,
    /// The client's span that they belong to.
    pub context: Option<SpanContext>,
}
