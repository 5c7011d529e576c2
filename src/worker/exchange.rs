//! How the workers of a model tell each other what they need before their first collective: through rank 0, which hears
//! all of them on whatever node they are.

use device::DeviceError;
use device::cuda::Exchange;
use supervision::{FromWorker, ToWorker};

use crate::run::Rings;

/// Rounds of [`Exchange::gather`] over all workers of a model, of which a part is heard.
pub(crate) struct RankExchange {
    rings: Rings,
    /// Whose bytes `gather` returns.
    heard: Vec<usize>,
}

impl RankExchange {
    /// Every worker of the model takes part in each round, whichever it wants to hear.
    pub(crate) fn new(rings: &Rings, heard: impl IntoIterator<Item = usize>) -> Self {
        Self { rings: rings.clone(), heard: heard.into_iter().collect() }
    }
}

impl Exchange for RankExchange {
    fn gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, DeviceError> {
        let failed = |reason: String| DeviceError::Call { call: "exchange with the other workers".to_owned(), reason };
        let asked = self.rings.send(&FromWorker::Exchange { bytes: bytes.to_vec() });
        asked.map_err(|error| failed(error.to_string()))?;
        match self.rings.receive().map_err(|error| failed(error.to_string()))? {
            ToWorker::Exchanged { mut all } if self.heard.iter().all(|&worker| worker < all.len()) => {
                Ok(self.heard.iter().map(|&worker| std::mem::take(&mut all[worker])).collect())
            }
            _ => Err(failed("rank 0 answered something else: this start was given up".to_owned())),
        }
    }
}
