//! Heads that predict the token behind the next one.

use crate::config::Config;
use crate::config::{MtpForm, MtpHead};
use crate::fields::Fields;

/// Reads the head that `names`, which count its layers, say is there; without them the checkpoint decides when it is loaded.
/// Its layer is like the last one with attention.
pub(super) fn put_mtp(fields: &Fields, config: &mut Config, form: MtpForm, names: &[&str]) {
    fields.ignore(names);
    let has_none = names.iter().any(|name| fields.get(name).is_some_and(|count| count.as_u64() == Some(0)));
    // A table of embeddings for the head alone.
    let has_embedding = fields.get("mtp_use_dedicated_embeddings").is_some_and(|flag| flag.as_bool() == Some(true));
    let layer = config.layers.iter().rev().find(|layer| layer.recurrent.is_none());
    config.mtp = layer.filter(|_| !has_none && !has_embedding).map(|layer| MtpHead { layer: layer.clone(), form });
}
