//! Who guesses drafts, and how many: the parameters `prompt_lookup_num_tokens` and `mtp_num_tokens`.

use engine::ForcedAcceptance;
use ops::Target;
use repository::ModelConfig;
use serving::InferError;

use super::{LlmDefaults, invalid};
use crate::parameters;

/// Maximum number of draft tokens in one step. Longer drafts are seldom accepted.
const MAX_DRAFTS: usize = 64;

/// The source of drafts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Drafts {
    /// Maximum number of draft tokens of a sequence in one step; 0 if there are none.
    pub(super) max: usize,
    /// Whether the checkpoint's MTP head guesses them; otherwise prompt look-up does.
    pub(super) has_mtp: bool,
}

impl Drafts {
    /// # Errors
    /// When a number is out of range, both parameters are set, or the model cannot have such drafts on this device.
    pub(super) fn new(config: &ModelConfig, model: &models::Config, target: Target) -> Result<Self, InferError> {
        let [looked_up, by_head] =
            ["prompt_lookup_num_tokens", "mtp_num_tokens"].map(|key| (key, parameters::number(config, key)));
        let (looked_up, by_head) = ((looked_up.0, looked_up.1?.unwrap_or(0)), (by_head.0, by_head.1?.unwrap_or(0)));
        for (key, max) in [looked_up, by_head] {
            if max > MAX_DRAFTS {
                return Err(invalid(config, format!("`{key}` is {max}, expected 0 to {MAX_DRAFTS}")));
            }
        }
        let refused = |(key, max): (&str, usize), reason: &str| {
            Err(invalid(config, format!("`{key}` is {max}, expected 0 for {reason}")))
        };
        match (looked_up.1, by_head.1) {
            (1.., 1..) => {
                let message = "`prompt_lookup_num_tokens` and `mtp_num_tokens` are both set; remove one of them";
                Err(invalid(config, message.to_owned()))
            }
            (1.., 0) if model.has_recurrent_layers() && target == Target::Cuda => {
                let reason =
                    "a model with recurrent layers on GPUs, whose states cannot go back to the last accepted token";
                refused(looked_up, reason)
            }
            (0, 1..) if target == Target::Cuda => refused(by_head, "GPUs, where MTP heads do not run"),
            (0, 1..) if model.mtp.is_none() => {
                refused(by_head, &format!("`{}`, which has no MTP head that Trireme knows", model.architecture))
            }
            (max, 0) => Ok(Self { max, has_mtp: false }),
            (_, max) => Ok(Self { max, has_mtp: true }),
        }
    }

    /// The acceptance that a benchmark forces with `--benchmark-forced-acceptance`, which makes the output wrong.
    ///
    /// # Errors
    /// When the model has no drafts, or too few for that many tokens.
    pub(super) fn forced_acceptance(
        self,
        config: &ModelConfig,
        defaults: &LlmDefaults,
    ) -> Result<Option<ForcedAcceptance>, InferError> {
        let Some(tokens) = defaults.forced_tokens_per_step else { return Ok(None) };
        let found = format!("`--benchmark-forced-acceptance` is {tokens}");
        let most = 1 + self.max;
        if self.max == 0 {
            let message =
                format!("{found}, but the model has no drafts; set `prompt_lookup_num_tokens` or `mtp_num_tokens`");
            return Err(invalid(config, message));
        }
        if !(1.0..=most as f64).contains(&tokens) {
            let max = self.max;
            return Err(invalid(
                config,
                format!("{found}, expected 1 to {most}, a token and the {max} drafts of a step"),
            ));
        }
        tracing::warn!(
            model = %config.name,
            "{found}: drafts are accepted whatever the model says of them, so THE OUTPUT IS WRONG; for benchmarks only"
        );
        Ok(Some(ForcedAcceptance::of_tokens_per_step(tokens)))
    }
}

#[cfg(test)]
mod tests {
    use repository::proto::ModelParameter;

    use super::*;

    const CONFIG: &str = r#"{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5"#;

    fn drafts(architecture: &str, parameters: &[(&str, &str)], target: Target) -> Result<Drafts, String> {
        let mut config = ModelConfig::default();
        for (key, value) in parameters {
            config.parameters.insert((*key).to_owned(), ModelParameter { string_value: (*value).to_owned() });
        }
        let dir = tempfile::tempdir().expect("a folder");
        let own = match architecture {
            "Qwen3_5ForCausalLM" => r#", "layer_types": ["full_attention", "full_attention"]"#,
            _ => "",
        };
        let text = format!("{CONFIG}{own}, \"architectures\": [\"{architecture}\"]}}");
        std::fs::write(dir.path().join("config.json"), text).expect("a file");
        let model = models::Config::from_dir(dir.path()).expect("a model");
        Drafts::new(&config, &model, target).map_err(|error| error.to_string())
    }

    #[test]
    fn one_source_guesses_and_what_cannot_is_refused_by_name() {
        let (llama, qwen) = ("LlamaForCausalLM", "Qwen3_5ForCausalLM");
        let (lookup, mtp) = (("prompt_lookup_num_tokens", "4"), ("mtp_num_tokens", "3"));
        assert_eq!(drafts(llama, &[], Target::Cpu), Ok(Drafts { max: 0, has_mtp: false }));
        assert_eq!(drafts(llama, &[lookup], Target::Cuda), Ok(Drafts { max: 4, has_mtp: false }));
        assert_eq!(drafts(qwen, &[mtp], Target::Cpu), Ok(Drafts { max: 3, has_mtp: true }));
        assert_eq!(drafts(qwen, &[lookup, ("mtp_num_tokens", "0")], Target::Cpu).unwrap().max, 4);
        let refused = [
            (drafts(qwen, &[lookup, mtp], Target::Cpu), "are both set; remove one"),
            (drafts(qwen, &[mtp], Target::Cuda), "`mtp_num_tokens` is 3, expected 0 for GPUs"),
            (drafts(llama, &[mtp], Target::Cpu), "`LlamaForCausalLM`, which has no MTP head"),
            (drafts(qwen, &[("mtp_num_tokens", "65")], Target::Cpu), "`mtp_num_tokens` is 65, expected 0 to 64"),
        ];
        for (found, expected) in refused {
            let error = found.unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}
