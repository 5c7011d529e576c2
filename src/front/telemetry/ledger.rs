//! The source of `GET /debug/ledger` on the metrics port.

use std::fmt;
use std::sync::Arc;

use futures::future::BoxFuture;

/// A function that returns the resources of each model's requests as JSON. It is called for each request.
#[derive(Clone)]
pub struct LedgerSource(Arc<dyn Fn() -> BoxFuture<'static, String> + Send + Sync>);

impl LedgerSource {
    /// A source that calls `ledger` for each request.
    pub fn new(ledger: impl Fn() -> BoxFuture<'static, String> + Send + Sync + 'static) -> Self {
        Self(Arc::new(ledger))
    }

    /// The current ledger.
    pub(crate) async fn read(&self) -> String {
        (self.0)().await
    }
}

impl fmt::Debug for LedgerSource {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("LedgerSource")
    }
}
