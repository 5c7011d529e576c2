//! Host memory for what is evicted from the KV cache.

use std::sync::Arc;

use repository::ModelConfig;
use serving::InferError;

use super::super::host_share::HostShare;
use super::tiers::Tier;
use super::{LlmDefaults, invalid};

/// The host memory of each worker of a model.
#[derive(Debug, Clone)]
pub(super) struct HostMemory {
    /// Bytes of each worker; 0 if it has none.
    pub(super) bytes: u64,
    /// Set if `bytes` is the default: an upper limit, which depends on what other models use.
    pub(super) share: Option<Arc<HostShare>>,
}

/// That of a model: the parameter `kv_cache_host_memory_bytes`, else the flag of the world, else what is left of the shares of all ranks that
/// the model may use. Only the prefix cache uses it. `replaced` is as for [`Tier::own_bytes`].
///
/// # Errors
/// Those of [`Tier::own_bytes`], and if the model has no prefix cache.
pub(super) fn host_memory(
    config: &ModelConfig,
    replaced: Option<&ModelConfig>,
    has_prefix_cache: bool,
    defaults: &LlmDefaults,
) -> Result<HostMemory, InferError> {
    let of_world = defaults.worker.kv_host_memory_bytes;
    let tier = Tier { key: "kv_cache_host_memory_bytes", flag: "--kv-cache-host-memory", bytes: of_world };
    let chosen = |bytes| HostMemory { bytes, share: None };
    match tier.own_bytes(config, replaced)? {
        Some(bytes @ 1..) if !has_prefix_cache => {
            let message = format!(
                "`kv_cache_host_memory_bytes` is {bytes}, and `enable_kv_cache_reuse` is off: only the prefix cache uses \
                 host memory; remove one of them"
            );
            Err(invalid(config, message))
        }
        _ if !has_prefix_cache => Ok(chosen(0)),
        Some(bytes) => Ok(chosen(bytes)),
        None => Ok(match &defaults.host_share {
            // Each replica has what its own ranks have left.
            Some(share) => HostMemory { bytes: share.most(), share: Some(Arc::clone(share)) },
            None => chosen(of_world),
        }),
    }
}

#[cfg(test)]
mod tests {
    use repository::proto::ModelParameter;

    use super::super::tests::{llm_config, llm_defaults};
    use super::*;

    fn bytes(parameter: Option<&str>, has_prefix_cache: bool) -> Result<u64, String> {
        host_memory_of(parameter, has_prefix_cache, None).map(|(bytes, _)| bytes)
    }

    /// The bytes, and whether they are a share. `share` is that of the only rank.
    fn host_memory_of(parameter: Option<&str>, has_cache: bool, share: Option<u64>) -> Result<(u64, bool), String> {
        let mut config = ModelConfig::default();
        if let Some(value) = parameter {
            let parameter = ModelParameter { string_value: value.to_owned() };
            config.parameters.insert("kv_cache_host_memory_bytes".to_owned(), parameter);
        }
        let kv_host_memory_bytes = if share.is_some() { 0 } else { 7 };
        let worker = supervision::WorkerSettings { kv_host_memory_bytes, ..llm_config().worker };
        let host_share = share.map(|bytes| Arc::new(HostShare::new(4 * bytes, 1, 1)));
        let defaults = LlmDefaults { worker, host_share, ..llm_defaults() };
        let found = host_memory(&config, None, has_cache, &defaults).map_err(|error| error.to_string())?;
        Ok((found.bytes, found.share.is_some()))
    }

    #[test]
    fn the_parameter_replaces_that_of_the_world() {
        assert_eq!(bytes(None, true), Ok(7));
        assert_eq!(bytes(Some("4096"), true), Ok(4096));
        assert_eq!(bytes(Some("0"), true), Ok(0));
        assert!(bytes(Some("4G"), true).unwrap_err().contains("`kv_cache_host_memory_bytes` is `4G`"));
    }

    #[test]
    fn without_a_size_it_is_a_share_if_the_world_has_one() {
        assert_eq!(host_memory_of(None, true, Some(64)), Ok((64, true)));
        assert_eq!(host_memory_of(Some("4096"), true, Some(64)), Ok((4096, false)));
        assert_eq!(host_memory_of(Some("0"), true, Some(64)), Ok((0, false)));
        assert_eq!(host_memory_of(None, false, Some(64)), Ok((0, false)), "a model without a prefix cache");
        assert_eq!(host_memory_of(None, true, None), Ok((7, false)));
    }

    #[test]
    fn it_is_refused_without_a_prefix_cache() {
        assert_eq!([bytes(None, false), bytes(Some("0"), false)], [Ok(0), Ok(0)]);
        assert!(bytes(Some("4096"), false).unwrap_err().contains("`enable_kv_cache_reuse` is off"));
    }
}
