//! Where `GET /debug/ledger` of the metrics port gets its answer.

use std::fmt;
use std::sync::Arc;

use futures::future::BoxFuture;

/// Returns what each model's requests hold, as JSON; called for each request of that page.
#[derive(Clone)]
pub struct LedgerSource(Arc<dyn Fn() -> BoxFuture<'static, String> + Send + Sync>);

impl LedgerSource {
    /// A source that calls `ledger` for each request.
    pub fn new(ledger: impl Fn() -> BoxFuture<'static, String> + Send + Sync + 'static) -> Self {
        Self(Arc::new(ledger))
    }

    /// The ledger as of now.
    pub(crate) async fn read(&self) -> String {
        (self.0)().await
    }
}

impl fmt::Debug for LedgerSource {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("LedgerSource")
    }
}
