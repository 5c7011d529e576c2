//! What the forwarding of HTTP requests and of gRPC calls has in common.

use std::sync::Arc;
use std::time::Duration;

use http::header::{HeaderName, HeaderValue};

use crate::relay::demand::Demand;
use crate::relay::kept::KeptBytes;
use crate::relay::upstream::Upstream;

/// How often a request is sent again at most: it may be what kills rank 0.
pub(crate) const MAX_REPEATS: u32 = 3;

/// The header of answers to probes while the server is asleep.
pub(crate) const STATE: HeaderName = HeaderName::from_static("trireme-state");
pub(crate) const ASLEEP: HeaderValue = HeaderValue::from_static("asleep");

/// How long a probe waits for an answer: a rank 0 that hangs is not healthy.
pub(crate) const PROBE_TIMEOUT: Duration = Duration::from_secs(5);

/// What forwarding needs.
pub(crate) struct Forwarder {
    /// Where rank 0 is.
    pub(crate) upstream: Upstream,
    /// The bytes of requests that are kept, of all requests together.
    pub(crate) kept: Arc<KeptBytes>,
    /// Counts the requests.
    pub(crate) demand: Demand,
}
