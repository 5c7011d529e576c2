//! Headers and trace context of a gRPC call, which apply to each of its requests.

use std::sync::Arc;

use serving::SpanContext;

/// Headers and trace context that apply to all requests of a call.
#[derive(Debug, Clone)]
pub struct CallContext {
    /// Headers that are passed to models as parameters.
    pub headers: Arc<[(String, String)]>,
    /// The client's trace context.
    pub span: Option<SpanContext>,
}
