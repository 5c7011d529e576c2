//! Who guesses drafts, and how many: the parameters `prompt_lookup_num_tokens`, `mtp_num_tokens`, `draft_model_num_tokens` with
//! `draft_model_path`, and `eagle3_num_tokens` with `eagle3_path`.

use std::path::Path;

use engine::ForcedAcceptance;
use repository::ModelConfig;
use serving::{InferError, LoadRequest};
use supervision::DeviceDrafter;
use text::{Tokenizer, TokenizerType};

use super::{LlmDefaults, invalid};
use crate::{checkpoint, parameters};

/// Maximum number of draft tokens in one step. Longer drafts are seldom accepted.
const MAX_DRAFTS: usize = 64;

/// The source of drafts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Drafts {
    /// Maximum number of draft tokens of a sequence in one step; 0 if there are none.
    pub(super) max: usize,
    source: Source,
}

/// Who guesses them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    PromptLookup,
    Mtp,
    DraftModel,
    Eagle3,
}

impl Source {
    const ALL: [Self; 4] = [Self::PromptLookup, Self::Mtp, Self::DraftModel, Self::Eagle3];

    /// The parameter with the number of drafts.
    fn key(self) -> &'static str {
        match self {
            Source::PromptLookup => "prompt_lookup_num_tokens",
            Source::Mtp => "mtp_num_tokens",
            Source::DraftModel => "draft_model_num_tokens",
            Source::Eagle3 => "eagle3_num_tokens",
        }
    }

    /// The parameter that names its checkpoint, if it has one of its own.
    fn path_key(self) -> Option<&'static str> {
        match self {
            Source::PromptLookup | Source::Mtp => None,
            Source::DraftModel => Some("draft_model_path"),
            Source::Eagle3 => Some("eagle3_path"),
        }
    }

    /// The reason why the number must be 0 for this model; `None` if it may be more.
    fn refusal(self, model: &models::Config) -> Option<String> {
        match self {
            Source::Mtp if model.mtp.is_none() => {
                Some(format!("`{}`, which has no MTP head that Trireme knows", model.architecture))
            }
            _ => None,
        }
    }
}

impl Drafts {
    /// # Errors
    /// When a number is out of range, several sources are set, or the model cannot have such drafts.
    pub(super) fn new(config: &ModelConfig, model: &models::Config) -> Result<Self, InferError> {
        let mut found = Self { max: 0, source: Source::PromptLookup };
        for source in Source::ALL {
            let key = source.key();
            let max = parameters::number(config, key)?.unwrap_or(0);
            if max > MAX_DRAFTS {
                return Err(invalid(config, format!("`{key}` is {max}, expected 0 to {MAX_DRAFTS}")));
            }
            if max > 0 && found.max > 0 {
                let other = found.source.key();
                return Err(invalid(config, format!("`{other}` and `{key}` are both set; remove one of them")));
            }
            if max > 0 {
                found = Self { max, source };
            }
        }
        let key = found.source.key();
        if found.max > 0
            && let Some(reason) = found.source.refusal(model)
        {
            return Err(invalid(config, format!("`{key}` is {}, expected 0 for {reason}", found.max)));
        }
        for source in Source::ALL {
            let Some(path_key) = source.path_key() else { continue };
            let (key, is_named) = (source.key(), parameters::text(config, path_key).is_some());
            let is_wanted = found.max > 0 && found.source == source;
            if is_wanted && !is_named {
                let message = format!("`{key}` is {}, but `{path_key}` names no checkpoint", found.max);
                return Err(invalid(config, message));
            }
            if is_named && !is_wanted {
                return Err(invalid(config, format!("`{path_key}` is set, but `{key}` is not")));
            }
        }
        Ok(found)
    }

    /// Whether the devices guess, and not rank 0.
    pub(super) fn are_of_device(self) -> bool {
        self.max > 0 && self.source != Source::PromptLookup
    }

    /// What guesses on the devices for a model with `vocab_size` tokens. `checkpoint` is that of the model.
    ///
    /// # Errors
    /// When there is no checkpoint of a draft model, or it has other tokens.
    pub(super) fn drafter(
        self,
        load: &LoadRequest,
        checkpoint: &Path,
        vocab_size: usize,
    ) -> Result<Option<DeviceDrafter>, InferError> {
        let wrong = |message: String| invalid(&load.config, message);
        let named = self.source.path_key().filter(|_| self.max > 0);
        let dir = named.and_then(|key| checkpoint::named(key, &load.config, &load.model_dir, &load.version_dir));
        match (self.source, dir.transpose().map_err(wrong)?) {
            (Source::Mtp, _) if self.max > 0 => Ok(Some(DeviceDrafter::Mtp)),
            (Source::DraftModel, Some(dir)) => {
                let draft = models::Config::from_dir(&dir).map_err(|source| {
                    wrong(models::ModelError::OfDraftModel { source: Box::new(source) }.to_string())
                })?;
                check_tokens((checkpoint, vocab_size), (&dir, draft.vocab_size)).map_err(wrong)?;
                Ok(Some(DeviceDrafter::Model(dir)))
            }
            (Source::Eagle3, Some(dir)) => Ok(Some(DeviceDrafter::Eagle3(dir))),
            _ => Ok(None),
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
                format!("{found}, but the model has no drafts; set `prompt_lookup_num_tokens` or another source");
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

/// Compares the tokens of both checkpoints, each with the size of its vocabulary. The sizes may differ, because families pad them, if the
/// tokens that both have are the same. Where a checkpoint has no tokenizer, only the sizes can be compared.
fn check_tokens((model, model_size): (&Path, usize), (draft, draft_size): (&Path, usize)) -> Result<(), String> {
    let open = |dir: &Path| generation::open_tokenizer(dir, TokenizerType::Auto).ok();
    let (Some(of_model), Some(of_draft)) = (open(model), open(draft)) else {
        return match model_size == draft_size {
            true => Ok(()),
            false => Err(format!(
                "the draft model in {} has a vocabulary of {draft_size} tokens, and the model one of {model_size}; both must have the \
                 same tokens, which only a tokenizer in both directories tells",
                draft.display()
            )),
        };
    };
    let token = |tokenizer: &Tokenizer, id: u32| match tokenizer.id_to_token(id) {
        Some(token) => format!("`{token}`"),
        None => "not there".to_owned(),
    };
    let differs = |id: &u32| of_model.id_to_token(*id) != of_draft.id_to_token(*id);
    let num_named = of_model.vocab_size().max(of_draft.vocab_size());
    match (0..num_named.min(model_size).min(draft_size) as u32).find(differs) {
        None => Ok(()),
        Some(id) => Err(format!(
            "the draft model in {} has another tokenizer: token {id} is {}, and in {} it is {}",
            draft.display(),
            token(&of_draft, id),
            model.display(),
            token(&of_model, id)
        )),
    }
}

#[cfg(test)]
mod tests {
    use repository::proto::ModelParameter;

    use super::*;

    const CONFIG: &str = r#"{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5"#;

    fn drafts(architecture: &str, parameters: &[(&str, &str)]) -> Result<Drafts, String> {
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
        Drafts::new(&config, &model).map_err(|error| error.to_string())
    }

    #[test]
    fn one_source_guesses_and_what_cannot_is_refused_by_name() {
        let (llama, qwen) = ("LlamaForCausalLM", "Qwen3_5ForCausalLM");
        let (lookup, mtp) = (("prompt_lookup_num_tokens", "4"), ("mtp_num_tokens", "3"));
        let (model, path) = (("draft_model_num_tokens", "5"), ("draft_model_path", "draft"));
        let (head, head_path) = (("eagle3_num_tokens", "2"), ("eagle3_path", "head"));
        let found = |max, source| Ok(Drafts { max, source });
        assert_eq!(drafts(llama, &[]), found(0, Source::PromptLookup));
        assert_eq!(drafts(qwen, &[mtp]), found(3, Source::Mtp));
        assert_eq!(drafts(llama, &[model, path]), found(5, Source::DraftModel));
        assert_eq!(drafts(llama, &[head, head_path]), found(2, Source::Eagle3));
        assert_eq!(drafts(qwen, &[lookup, ("mtp_num_tokens", "0")]).unwrap().max, 4);
        let refused = [
            (drafts(qwen, &[lookup, mtp]), "are both set; remove one"),
            (drafts(llama, &[mtp]), "`LlamaForCausalLM`, which has no MTP head"),
            (drafts(qwen, &[mtp, model]), "`mtp_num_tokens` and `draft_model_num_tokens` are both set"),
            (drafts(llama, &[model]), "but `draft_model_path` names no checkpoint"),
            (drafts(llama, &[lookup, head_path]), "`eagle3_path` is set, but `eagle3_num_tokens` is not"),
            (drafts(llama, &[path]), "`draft_model_path` is set, but `draft_model_num_tokens` is not"),
            (drafts(qwen, &[("mtp_num_tokens", "65")]), "`mtp_num_tokens` is 65, expected 0 to 64"),
        ];
        for (found, expected) in refused {
            let error = found.unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}
