//! The sizes of the tiers of the KV cache below the device: host memory and files.

use repository::ModelConfig;
use serving::InferError;

use super::invalid;
use crate::parameters;

/// A tier: the parameter of a model with its size, and the flag for all models.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tier {
    pub(super) key: &'static str,
    pub(super) flag: &'static str,
    /// The flag's value, in bytes.
    pub(super) bytes: u64,
}

impl Tier {
    /// The size in a model's configuration, in bytes; `None` if it names none. The operator's has priority over the flag. One that a
    /// client sent, which replaces the operator's configuration `replaced`, may take what the operator gives: the larger of the flag and
    /// what that configuration says.
    ///
    /// # Errors
    /// When the parameter is not a number, or larger than a client may choose.
    pub(super) fn own_bytes(
        self,
        config: &ModelConfig,
        replaced: Option<&ModelConfig>,
    ) -> Result<Option<u64>, InferError> {
        let Self { key, flag, bytes: of_world } = self;
        let own: Option<u64> = parameters::number(config, key)?;
        if let (Some(bytes), Some(replaced)) = (own, replaced) {
            let of_repository = parameters::number(replaced, key).ok().flatten().unwrap_or(0);
            let most = of_world.max(of_repository);
            if bytes > most {
                let message = format!(
                    "`{key}` is {bytes} in a configuration that a client sent, expected at most {most}, which the operator gives: lower \
                     it, or raise `{flag}` or the parameter in the model repository"
                );
                return Err(invalid(config, message));
            }
        }
        Ok(own)
    }
}

#[cfg(test)]
mod tests {
    use repository::proto::ModelParameter;

    use super::*;

    const KEY: &str = "kv_cache_disk_bytes";

    fn config(bytes: Option<u64>) -> ModelConfig {
        let mut config = ModelConfig::default();
        let parameter = bytes.map(|bytes| ModelParameter { string_value: bytes.to_string() });
        config.parameters.extend(parameter.map(|parameter| (KEY.to_owned(), parameter)));
        config
    }

    #[test]
    fn a_client_chooses_at_most_what_the_operator_gives() {
        let tier = Tier { key: KEY, flag: "--kv-cache-disk", bytes: 7 };
        let own = |own, replaced: Option<Option<u64>>| {
            let replaced = replaced.map(config);
            tier.own_bytes(&config(own), replaced.as_ref()).map_err(|error| error.to_string())
        };
        assert_eq!(own(Some(9000), None), Ok(Some(9000)), "the operator's configuration");
        assert_eq!([own(None, Some(None)), own(Some(7), Some(None))], [Ok(None), Ok(Some(7))]);
        assert_eq!(own(Some(9), Some(Some(9))), Ok(Some(9)), "as in the repository");
        assert_eq!(own(Some(0), Some(Some(9))), Ok(Some(0)));
        for (bytes, replaced, most) in [(8, None, 7), (10, Some(9), 9), (u64::MAX, Some(3), 7)] {
            let error = own(Some(bytes), Some(replaced)).unwrap_err();
            let expected =
                format!("`{KEY}` is {bytes} in a configuration that a client sent, expected at most {most}, which");
            assert!(error.contains(&expected) && error.contains("`--kv-cache-disk`"), "{error}");
        }
    }
}
