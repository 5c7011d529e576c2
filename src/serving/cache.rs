//! The response cache: responses that are returned again for equal requests.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher as _, Hash, Hasher, RandomState};
use std::mem::size_of;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::{InferRequest, InferResponse, Name, Parameter, Tensor};

/// Estimated size of an entry without its tensors and parameters.
const ENTRY_BYTES: usize = 256;

/// The responses of one server, bounded by their bytes. The least recently used one is evicted first.
pub(crate) struct ResponseCache {
    max_bytes: usize,
    /// Two independent 64-bit hashes with random keys of this process: clients cannot construct colliding requests.
    hashers: [RandomState; 2],
    entries: Mutex<Entries>,
}

/// Contents and counters of a response cache.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct CacheStatistics {
    /// Used share of its bytes, 0 to 1.
    pub utilization: f64,
    /// Responses in the cache.
    pub num_entries: u64,
    /// Requests answered from it.
    pub num_hits: u64,
    /// Requests that were not found in it.
    pub num_misses: u64,
    /// Responses that were removed to make room for others.
    pub num_evictions: u64,
    /// Total time of look-ups.
    pub lookup: Duration,
    /// Total time of insertions.
    pub insertion: Duration,
}

/// Hash of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct CacheKey([u64; 2]);

#[derive(Default)]
struct Entries {
    by_key: HashMap<CacheKey, Entry>,
    /// Keys by their last use, the least recent first.
    by_use: BTreeMap<u64, CacheKey>,
    /// Number of uses so far; orders uses.
    clock: u64,
    num_bytes: usize,
    /// Counters and times. `utilization` and `num_entries` are not kept here.
    counters: CacheStatistics,
}

struct Entry {
    response: InferResponse,
    num_bytes: usize,
    last_used: u64,
}

impl ResponseCache {
    pub fn new(max_bytes: usize) -> Self {
        let hashers = [RandomState::new(), RandomState::new()];
        Self { max_bytes, hashers, entries: Mutex::default() }
    }

    /// The key of a request to the model with this load id.
    pub fn key(&self, load_id: u64, request: &InferRequest) -> CacheKey {
        CacheKey(self.hashers.each_ref().map(|state| {
            let mut hasher = state.build_hasher();
            load_id.hash(&mut hasher);
            hash_request(request, &mut hasher);
            hasher.finish()
        }))
    }

    /// The cached response of this key.
    pub fn get(&self, key: CacheKey) -> Option<InferResponse> {
        let started = Instant::now();
        let mut entries = self.entries();
        let found = entries.get(key);
        let counter = if found.is_some() { &mut entries.counters.num_hits } else { &mut entries.counters.num_misses };
        *counter += 1;
        entries.counters.lookup += started.elapsed();
        found
    }

    /// A snapshot.
    pub fn statistics(&self) -> CacheStatistics {
        let entries = self.entries();
        CacheStatistics {
            utilization: entries.num_bytes as f64 / self.max_bytes as f64,
            num_entries: entries.by_key.len() as u64,
            ..entries.counters
        }
    }

    /// Stores a response, unless it is larger than the whole cache.
    pub fn insert(&self, key: CacheKey, response: &InferResponse) {
        let started = Instant::now();
        let num_bytes = size_of_response(response);
        if num_bytes > self.max_bytes {
            return;
        }
        // The data is copied, because a tensor may be a slice that keeps a large buffer alive.
        let copy = |tensor: &Tensor| Tensor { data: Bytes::copy_from_slice(&tensor.data), ..tensor.clone() };
        let outputs = response.outputs.iter().map(copy).collect();
        let response = InferResponse { outputs, ..response.clone() };
        let mut entries = self.entries();
        entries.remove(key);
        while entries.num_bytes + num_bytes > self.max_bytes {
            let Some((_, &oldest)) = entries.by_use.first_key_value() else { break };
            entries.remove(oldest);
            entries.counters.num_evictions += 1;
        }
        entries.insert(key, response, num_bytes);
        entries.counters.insertion += started.elapsed();
    }

    fn entries(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entries {
    /// The response of this key, which becomes the most recently used.
    fn get(&mut self, key: CacheKey) -> Option<InferResponse> {
        self.clock += 1;
        let entry = self.by_key.get_mut(&key)?;
        self.by_use.remove(&entry.last_used);
        self.by_use.insert(self.clock, key);
        entry.last_used = self.clock;
        Some(entry.response.clone())
    }

    fn insert(&mut self, key: CacheKey, response: InferResponse, num_bytes: usize) {
        self.clock += 1;
        self.num_bytes += num_bytes;
        self.by_use.insert(self.clock, key);
        self.by_key.insert(key, Entry { response, num_bytes, last_used: self.clock });
    }

    fn remove(&mut self, key: CacheKey) {
        if let Some(entry) = self.by_key.remove(&key) {
            self.num_bytes -= entry.num_bytes;
            self.by_use.remove(&entry.last_used);
        }
    }
}

/// Hashes every part of a request that its response may depend on, with inputs in the order of their names.
fn hash_request(request: &InferRequest, hasher: &mut impl Hasher) {
    let mut inputs: Vec<&Tensor> = request.inputs.iter().collect();
    inputs.sort_unstable_by(|left, right| left.name.cmp(&right.name));
    inputs.len().hash(hasher);
    for Tensor { name, datatype, shape, data } in inputs {
        (name, datatype, shape, data).hash(hasher);
    }
    request.requested_outputs.hash(hasher);
    request.parameters.len().hash(hasher);
    for (name, parameter) in &request.parameters {
        (name, std::mem::discriminant(parameter)).hash(hasher);
        match parameter {
            Parameter::Bool(value) => value.hash(hasher),
            Parameter::Int(value) => value.hash(hasher),
            Parameter::Double(value) => value.to_bits().hash(hasher),
            Parameter::String(value) => value.hash(hasher),
        }
    }
}

fn size_of_response(response: &InferResponse) -> usize {
    let tensor = |tensor: &Tensor| {
        size_of::<Tensor>() + tensor.name.len() + tensor.shape.len() * size_of::<i64>() + tensor.data.len()
    };
    let parameter = |(name, value): &(Name, Parameter)| {
        let text = if let Parameter::String(text) = value { text.len() } else { 0 };
        size_of::<(String, Parameter)>() + name.len() + text
    };
    ENTRY_BYTES
        + response.outputs.iter().map(tensor).sum::<usize>()
        + response.parameters.iter().map(parameter).sum::<usize>()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Shape;

    fn response(size: usize) -> InferResponse {
        let data = vec![1; size].into();
        let tensor = Tensor { name: "y".into(), datatype: crate::DataType::Uint8, shape: Shape::new(), data };
        InferResponse { outputs: vec![tensor], ..InferResponse::default() }
    }

    fn key(number: u64) -> CacheKey {
        CacheKey([number, 0])
    }

    #[test]
    fn the_least_recently_used_response_is_evicted() {
        let cache = ResponseCache::new(3 * size_of_response(&response(1000)));
        (1..=3).for_each(|number| cache.insert(key(number), &response(1000)));
        assert!(cache.get(key(1)).is_some());
        cache.insert(key(4), &response(1000));
        let kept = (1..=4).filter(|&number| cache.get(key(number)).is_some()).collect::<Vec<_>>();
        assert_eq!(kept, [1, 3, 4]);
        let CacheStatistics { num_entries, num_hits, num_misses, num_evictions, utilization, .. } = cache.statistics();
        assert_eq!((num_entries, num_hits, num_misses, num_evictions, utilization), (3, 4, 1, 1, 1.0));
        cache.insert(key(5), &response(10_000));
        assert!(
            cache.get(key(5)).is_none() && cache.get(key(4)).is_some(),
            "a response that is too large changes nothing"
        );
        cache.insert(key(4), &response(10));
        assert_eq!(cache.get(key(4)).unwrap().outputs[0].data.len(), 10);
    }

    #[test]
    fn the_key_depends_on_everything_that_the_response_may_depend_on() {
        let cache = ResponseCache::new(1);
        let request = |name: &str, values: &[i32], outputs: &[&str], parameter: i64| InferRequest {
            inputs: vec![Tensor::from_i32(name, &[i64::try_from(values.len()).unwrap()], values)],
            requested_outputs: outputs.iter().map(|&name| name.into()).collect(),
            parameters: BTreeMap::from([("p".to_owned(), Parameter::Int(parameter))]),
            ..InferRequest::default()
        };
        let first = request("x", &[1, 2], &[], 0);
        let same = InferRequest { id: "other".into(), priority: 3, timeout_us: 5, ..first.clone() };
        assert_eq!(cache.key(1, &first), cache.key(1, &same));
        assert_ne!(cache.key(1, &first), cache.key(2, &first));
        for other in [
            request("x", &[1, 3], &[], 0),
            request("y", &[1, 2], &[], 0),
            request("x", &[1, 2], &["y"], 0),
            request("x", &[1, 2], &[], 1),
        ] {
            assert_ne!(cache.key(1, &first), cache.key(1, &other));
        }
    }
}
