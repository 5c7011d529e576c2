//! Host memory for what is evicted from the KV cache.

use repository::ModelConfig;
use serving::InferError;

use super::tiers::Tier;
use super::{LlmDefaults, invalid};

/// Bytes of each worker: the parameter `kv_cache_host_memory_bytes`, else that of the world. Only the prefix cache uses them. `replaced` is
/// as for [`Tier::own_bytes`].
///
/// # Errors
/// Those of [`Tier::own_bytes`], and if the model has no prefix cache.
pub(super) fn host_memory_bytes(
    config: &ModelConfig,
    replaced: Option<&ModelConfig>,
    has_prefix_cache: bool,
    defaults: &LlmDefaults,
) -> Result<u64, InferError> {
    let of_world = defaults.worker.kv_host_memory_bytes;
    let tier = Tier { key: "kv_cache_host_memory_bytes", flag: "--kv-cache-host-memory", bytes: of_world };
    match tier.own_bytes(config, replaced)? {
        Some(bytes @ 1..) if !has_prefix_cache => {
            let message = format!(
                "`kv_cache_host_memory_bytes` is {bytes}, and `enable_kv_cache_reuse` is off: only the prefix cache uses \
                 host memory; remove one of them"
            );
            Err(invalid(config, message))
        }
        _ if !has_prefix_cache => Ok(0),
        own => Ok(own.unwrap_or(of_world)),
    }
}

#[cfg(test)]
mod tests {
    use repository::proto::ModelParameter;

    use super::super::tests::{llm_config, llm_defaults};
    use super::*;

    fn bytes(parameter: Option<&str>, has_prefix_cache: bool) -> Result<u64, String> {
        let mut config = ModelConfig::default();
        if let Some(value) = parameter {
            let parameter = ModelParameter { string_value: value.to_owned() };
            config.parameters.insert("kv_cache_host_memory_bytes".to_owned(), parameter);
        }
        let worker = supervision::WorkerSettings { kv_host_memory_bytes: 7, ..llm_config().worker };
        let defaults = LlmDefaults { worker, ..llm_defaults() };
        host_memory_bytes(&config, None, has_prefix_cache, &defaults).map_err(|error| error.to_string())
    }

    #[test]
    fn the_parameter_replaces_that_of_the_world() {
        assert_eq!(bytes(None, true), Ok(7));
        assert_eq!(bytes(Some("4096"), true), Ok(4096));
        assert_eq!(bytes(Some("0"), true), Ok(0));
        assert!(bytes(Some("4G"), true).unwrap_err().contains("`kv_cache_host_memory_bytes` is `4G`"));
    }

    #[test]
    fn it_is_refused_without_a_prefix_cache() {
        assert_eq!([bytes(None, false), bytes(Some("0"), false)], [Ok(0), Ok(0)]);
        assert!(bytes(Some("4096"), false).unwrap_err().contains("`enable_kv_cache_reuse` is off"));
    }
}
