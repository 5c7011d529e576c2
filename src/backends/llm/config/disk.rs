//! Files for what leaves the host tier of the KV cache.

use std::path::PathBuf;

use repository::ModelConfig;
use serving::InferError;

use super::tiers::Tier;
use super::{LlmDefaults, invalid};

/// The file of each worker for KV blocks that leave host memory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KvDisk {
    /// Its size; 0 if there is none.
    pub bytes: u64,
    /// Where it is; only the operator of the world chooses this. `None` if none was named.
    pub directory: Option<PathBuf>,
}

impl KvDisk {
    /// That of a model: the parameter `kv_cache_disk_bytes`, else that of the world. `replaced` is as for [`Tier::own_bytes`].
    ///
    /// # Errors
    /// Those of [`Tier::own_bytes`], and if there is no prefix cache, no host memory or no directory for it.
    pub(super) fn new(
        config: &ModelConfig,
        replaced: Option<&ModelConfig>,
        has_prefix_cache: bool,
        host_bytes: u64,
        defaults: &LlmDefaults,
    ) -> Result<Self, InferError> {
        let tier = Tier { key: "kv_cache_disk_bytes", flag: "--kv-cache-disk", bytes: defaults.kv_disk.bytes };
        let own = tier.own_bytes(config, replaced)?;
        let directory = defaults.kv_disk.directory.clone();
        let bytes = match own {
            Some(bytes) => bytes,
            None if has_prefix_cache => defaults.kv_disk.bytes,
            None => 0,
        };
        let missing = match () {
            () if bytes == 0 => return Ok(Self { bytes, directory }),
            () if !has_prefix_cache => {
                "`enable_kv_cache_reuse` is off: only the prefix cache uses the disk; remove one of them"
            }
            () if host_bytes == 0 => {
                "the model has no host memory for KV blocks, from where they go to the disk: set `kv_cache_host_memory_bytes` or \
                 `--kv-cache-host-memory`"
            }
            () if directory.is_none() => "no directory is named for it: start the world with `--kv-cache-disk-dir=DIR`",
            () => return Ok(Self { bytes, directory }),
        };
        Err(invalid(config, format!("`kv_cache_disk_bytes` is {bytes}, and {missing}")))
    }
}

#[cfg(test)]
mod tests {
    use repository::proto::ModelParameter;

    use super::super::tests::llm_defaults;
    use super::*;

    fn disk(
        parameter: Option<&str>,
        has_cache: bool,
        host_bytes: u64,
        world: (u64, Option<&str>),
    ) -> Result<u64, String> {
        let mut config = ModelConfig::default();
        if let Some(value) = parameter {
            let parameter = ModelParameter { string_value: value.to_owned() };
            config.parameters.insert("kv_cache_disk_bytes".to_owned(), parameter);
        }
        let kv_disk = KvDisk { bytes: world.0, directory: world.1.map(PathBuf::from) };
        let defaults = LlmDefaults { kv_disk, ..llm_defaults() };
        let disk = KvDisk::new(&config, None, has_cache, host_bytes, &defaults);
        disk.map(|disk| disk.bytes).map_err(|error| error.to_string())
    }

    #[test]
    fn the_parameter_replaces_the_size_of_the_world() {
        let world = (7, Some("/disk"));
        assert_eq!(disk(None, true, 1, world), Ok(7));
        assert_eq!(disk(Some("4096"), true, 1, world), Ok(4096));
        assert_eq!(disk(Some("0"), true, 0, world), Ok(0));
        assert_eq!(disk(None, false, 0, world), Ok(0), "a model without a prefix cache");
        assert!(disk(Some("4G"), true, 1, world).unwrap_err().contains("`kv_cache_disk_bytes` is `4G`"));
    }

    #[test]
    fn what_is_missing_is_named() {
        let refused = |parameter, has_cache, host, world| disk(parameter, has_cache, host, world).unwrap_err();
        assert!(refused(Some("9"), false, 1, (0, Some("/disk"))).contains("`enable_kv_cache_reuse` is off"));
        assert!(refused(None, true, 0, (9, Some("/disk"))).contains("`kv_cache_host_memory_bytes`"));
        assert!(refused(Some("9"), true, 1, (0, None)).contains("`--kv-cache-disk-dir=DIR`"));
    }
}
