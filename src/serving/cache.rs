//! Responses kept for requests that ask the same again.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher as _, Hash, Hasher, RandomState};
use std::mem::size_of;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::{InferRequest, InferResponse, Name, Parameter, Tensor};

/// What an entry takes beside its tensors' bytes.
const ENTRY_BYTES: usize = 256;

/// A bounded cache of one server's responses. The one unused for longest goes first.
pub(crate) struct ResponseCache {
    max_bytes: usize,
    /// Two independent 64-bit hashes with keys of this process: nobody outside can make two requests meet.
    hashers: [RandomState; 2],
    entries: Mutex<Entries>,
}

/// What a response cache holds and has done.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct CacheStatistics {
    /// Share of its bytes that is taken, 0 to 1.
    pub utilization: f64,
    /// Responses in it.
    pub num_entries: u64,
    /// Requests answered from it.
    pub num_hits: u64,
    /// Requests that were looked for in vain.
    pub num_misses: u64,
    /// Responses that made room for others.
    pub num_evictions: u64,
    /// Time that looking took.
    pub lookup: Duration,
    /// Time that putting in took.
    pub insertion: Duration,
}

/// A request, in short.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct CacheKey([u64; 2]);

#[derive(Default)]
struct Entries {
    by_key: HashMap<CacheKey, Entry>,
    /// Keys by when they were used last.
    by_use: BTreeMap<u64, CacheKey>,
    clock: u64,
    num_bytes: usize,
    /// Counts alone; the rest is known from the entries.
    done: CacheStatistics,
}

struct Entry {
    response: InferResponse,
    num_bytes: usize,
    used: u64,
}

impl ResponseCache {
    pub fn new(max_bytes: usize) -> Self {
        let hashers = [RandomState::new(), RandomState::new()];
        Self { max_bytes, hashers, entries: Mutex::default() }
    }

    /// The key of a request to the model that was loaded as number `load`.
    pub fn key(&self, load: u64, request: &InferRequest) -> CacheKey {
        CacheKey(self.hashers.each_ref().map(|state| {
            let mut hasher = state.build_hasher();
            load.hash(&mut hasher);
            write(request, &mut hasher);
            hasher.finish()
        }))
    }

    /// The response to a request like this one.
    pub fn get(&self, key: CacheKey) -> Option<InferResponse> {
        let started = Instant::now();
        let mut entries = self.entries();
        let found = entries.touch(key);
        let counted = if found.is_some() { &mut entries.done.num_hits } else { &mut entries.done.num_misses };
        *counted += 1;
        entries.done.lookup += started.elapsed();
        found
    }

    /// As of now.
    pub fn statistics(&self) -> CacheStatistics {
        let entries = self.entries();
        CacheStatistics {
            utilization: entries.num_bytes as f64 / self.max_bytes as f64,
            num_entries: entries.by_key.len() as u64,
            ..entries.done
        }
    }

    /// Keeps a response, unless it is larger than the whole cache.
    pub fn put(&self, key: CacheKey, response: &InferResponse) {
        let started = Instant::now();
        let num_bytes = size_of_response(response);
        if num_bytes > self.max_bytes {
            return;
        }
        // Bytes of its own: a tensor may be a small part of a large buffer.
        let copy = |tensor: &Tensor| Tensor { data: Bytes::copy_from_slice(&tensor.data), ..tensor.clone() };
        let outputs = response.outputs.iter().map(copy).collect();
        let response = InferResponse { outputs, ..response.clone() };
        let mut entries = self.entries();
        entries.remove(key);
        while entries.num_bytes + num_bytes > self.max_bytes {
            let Some((_, &oldest)) = entries.by_use.first_key_value() else { break };
            entries.remove(oldest);
            entries.done.num_evictions += 1;
        }
        entries.insert(key, response, num_bytes);
        entries.done.insertion += started.elapsed();
    }

    fn entries(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entries {
    fn touch(&mut self, key: CacheKey) -> Option<InferResponse> {
        self.clock += 1;
        let entry = self.by_key.get_mut(&key)?;
        self.by_use.remove(&entry.used);
        self.by_use.insert(self.clock, key);
        entry.used = self.clock;
        Some(entry.response.clone())
    }

    fn insert(&mut self, key: CacheKey, response: InferResponse, num_bytes: usize) {
        self.clock += 1;
        self.num_bytes += num_bytes;
        self.by_use.insert(self.clock, key);
        self.by_key.insert(key, Entry { response, num_bytes, used: self.clock });
    }

    fn remove(&mut self, key: CacheKey) {
        if let Some(entry) = self.by_key.remove(&key) {
            self.num_bytes -= entry.num_bytes;
            self.by_use.remove(&entry.used);
        }
    }
}

/// Everything of a request that its answer may depend on, inputs in the order of their names.
fn write(request: &InferRequest, hasher: &mut impl Hasher) {
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
    fn the_one_unused_for_longest_makes_room() {
        let cache = ResponseCache::new(3 * size_of_response(&response(1000)));
        (1..=3).for_each(|number| cache.put(key(number), &response(1000)));
        assert!(cache.get(key(1)).is_some());
        cache.put(key(4), &response(1000));
        let kept = (1..=4).filter(|&number| cache.get(key(number)).is_some()).collect::<Vec<_>>();
        assert_eq!(kept, [1, 3, 4]);
        let CacheStatistics { num_entries, num_hits, num_misses, num_evictions, utilization, .. } = cache.statistics();
        assert_eq!((num_entries, num_hits, num_misses, num_evictions, utilization), (3, 4, 1, 1, 1.0));
        cache.put(key(5), &response(10_000));
        assert!(cache.get(key(5)).is_none() && cache.get(key(4)).is_some(), "too large a response changes nothing");
        cache.put(key(4), &response(10));
        assert_eq!(cache.get(key(4)).unwrap().outputs[0].data.len(), 10);
    }

    #[test]
    fn requests_differ_by_all_that_an_answer_may_depend_on() {
        let cache = ResponseCache::new(1);
        let ask = |name: &str, values: &[i32], outputs: &[&str], parameter: i64| InferRequest {
            inputs: vec![Tensor::from_i32(name, &[i64::try_from(values.len()).unwrap()], values)],
            requested_outputs: outputs.iter().map(|&name| name.into()).collect(),
            parameters: BTreeMap::from([("p".to_owned(), Parameter::Int(parameter))]),
            ..InferRequest::default()
        };
        let first = ask("x", &[1, 2], &[], 0);
        let same = InferRequest { id: "other".into(), priority: 3, timeout_us: 5, ..first.clone() };
        assert_eq!(cache.key(1, &first), cache.key(1, &same));
        assert_ne!(cache.key(1, &first), cache.key(2, &first));
        for other in [
            ask("x", &[1, 3], &[], 0),
            ask("y", &[1, 2], &[], 0),
            ask("x", &[1, 2], &["y"], 0),
            ask("x", &[1, 2], &[], 1),
        ] {
            assert_ne!(cache.key(1, &first), cache.key(1, &other));
        }
    }
}
