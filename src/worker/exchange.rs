//! Exchange of bytes between the workers of a model before their first collective operation, through rank 0, which all of them
//! can reach.

use device::Exchange;
use ops::DeviceError;
use supervision::{FromWorker, ToWorker};

use crate::run::Rings;

/// [`Exchange::gather`] over all workers of a model, which returns the bytes of some of them.
pub(crate) struct RankExchange {
    rings: Rings,
    /// Indices of the workers whose bytes `gather` returns.
    members: Vec<usize>,
}

impl RankExchange {
    /// An exchange that returns the bytes of `members`. Every worker of the model must take part in each round.
    pub(crate) fn new(rings: &Rings, members: impl IntoIterator<Item = usize>) -> Self {
        Self { rings: rings.clone(), members: members.into_iter().collect() }
    }
}

impl Exchange for RankExchange {
    fn gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, DeviceError> {
        let failed = |reason: String| DeviceError::Call { call: "exchange with the other workers".to_owned(), reason };
        let sent = self.rings.send(&FromWorker::Exchange { bytes: bytes.to_vec() });
        sent.map_err(|error| failed(error.to_string()))?;
        match self.rings.receive().map_err(|error| failed(error.to_string()))? {
            ToWorker::Exchanged { mut all } if self.members.iter().all(|&worker| worker < all.len()) => {
                Ok(self.members.iter().map(|&worker| std::mem::take(&mut all[worker])).collect())
            }
            _ => Err(failed("rank 0 answered something else: this start was given up".to_owned())),
        }
    }
}
