//! A smaller model with the same tokens that guesses drafts.
//!
//! Families pad the vocabulary of their models to different sizes. So the draft model works with the first tokens of both: those that
//! only one of them has are never guessed, and where the model chooses one that the draft model lacks, its embedding is zero.
//!
//! Its layers have KV blocks of their own in the block tables of the model: a block holds the keys and values of both for the same
//! positions. So whatever becomes of a block, the prefix cache included, is the same for both. The draft model lacks the keys and values
//! of steps behind which it did not run ([`ops::StepInputs::runs_drafter`]); it reads what their slots held before.
//!
//! At the end of another step it computes the tokens of the step, without rejected drafts, and behind them the new token of each row,
//! whose logits give the first guess. The keys and values of that position and of those of further guesses are written again by the
//! next step. They need KV blocks, so guesses end where those of the row do.

use std::path::Path;

use ops::{AttentionSpec, Device, DeviceError, LogitSpec, Target};
use settings::WeightPrecision;

use crate::config::DraftConfig;
use crate::decoder::Decoder;
use crate::mixer::Counts;
use crate::shard::Shard;
use crate::{Checkpoint, Config, ModelError};

impl Config {
    pub(crate) fn with_draft_model(
        mut self,
        dir: &Path,
        precision: WeightPrecision,
        target: Target,
    ) -> Result<Self, ModelError> {
        let of_draft = |source| ModelError::OfDraftModel { source: Box::new(source) };
        let config = Config::from_dir(dir).map_err(of_draft)?;
        if let Some(reason) = unfit(&self, &config) {
            return Err(ModelError::DraftModel { dir: dir.to_owned(), reason });
        }
        let precision = if config.stored_quantization.is_some() { WeightPrecision::Checkpoint } else { precision };
        let config = config.in_precision(precision, target).map_err(of_draft)?;
        let architecture = &config.architecture;
        self.notes.push(format!("`{architecture}` in {} guesses drafts", dir.display()));
        Ok(self.with_draft(DraftConfig { dir: dir.to_owned(), config, eagle3: None }))
    }

    /// The same model with what guesses its drafts, which fits.
    pub(crate) fn with_draft(mut self, draft: DraftConfig) -> Self {
        let num_groups = |config: &Self| config.kv_groups(config.max_position_embeddings).windows.len();
        let before = num_groups(&self);
        self.draft = Some(Box::new(draft));
        if before > 1 && num_groups(&self) == 1 {
            let note =
                "layers with a window keep all positions, because keys and values of the drafter have another shape";
            self.notes.push(note.to_owned());
        }
        self
    }
}

/// Why a model cannot guess for another one. Whoever has their tokenizers compares those.
fn unfit(model: &Config, draft: &Config) -> Option<String> {
    if draft.has_recurrent_layers() {
        return Some("has layers with a recurrent state, which cannot go back to the last accepted token".to_owned());
    }
    if draft.has_latents() {
        return Some("has attention over latent vectors (MLA), which draft models cannot have yet".to_owned());
    }
    let positions = model.max_position_embeddings;
    match draft.learned_positions {
        Some(found) if found < positions => {
            Some(format!("has a table of {found} positions, and the model takes sequences of {positions}"))
        }
        _ => None,
    }
}

/// A draft model with its weights and buffers.
pub(crate) struct DraftDecoder<D: Device> {
    decoder: Box<Decoder<D>>,
}

impl<D: Device> DraftDecoder<D> {
    /// Loads it behind the layers of a model with `vocab_size` tokens, which are those in `counts`.
    pub(crate) fn load(
        draft: &DraftConfig,
        vocab_size: usize,
        counts: &mut Counts,
        device: &mut D,
    ) -> Result<Self, ModelError> {
        let mut load = |device: &mut D| {
            let vocab_size = vocab_size.min(draft.config.vocab_size);
            let shard = Shard::new(&Config { vocab_size, ..draft.config.clone() }, device.tensor_parallel())?;
            let checkpoint = Checkpoint::open(&draft.dir)?;
            Decoder::load_behind(&draft.dir, &checkpoint, &draft.config, shard, counts, device)
        };
        let decoder = load(device).map_err(|source| ModelError::OfDraftModel { source: Box::new(source) })?;
        Ok(Self { decoder: Box::new(decoder) })
    }

    /// Guesses a token for each row of the step that needs one.
    pub(crate) fn guess(&mut self, device: &mut D) -> Result<(), DeviceError> {
        self.decoder.run_layers(device)?;
        let (x, head) = self.decoder.output().expect("a draft model is not divided into stages");
        device.guess(x, head, LogitSpec { cap: self.decoder.config().head.cap })
    }

    /// Adds its layers to those of the model. `groups` are the KV groups of its layers.
    pub(crate) fn add_layers(&self, groups: &[usize], num_buffers: &mut [usize], spec: &mut AttentionSpec) {
        self.decoder.add_layers(groups, num_buffers, spec);
    }
}
