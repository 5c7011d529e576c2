//! The inputs that constrain the generated text.

use generation::{ConstraintSpec, Guide};
use serving::{InferError, InferRequest};

use crate::tensor_values::text;

/// The constraint of `guided_decoding_guide_type` and `guided_decoding_guide`.
pub(super) fn guide(request: &InferRequest) -> Result<Guide, InferError> {
    const TYPE: &str = "guided_decoding_guide_type";
    const GUIDE: &str = "guided_decoding_guide";
    let (kind, guide) = (text(request, TYPE)?, text(request, GUIDE)?);
    let Some(kind) = kind.filter(|kind| !kind.is_empty()) else {
        return match guide.filter(|guide| !guide.is_empty()) {
            Some(_) => Err(InferError::invalid(format!(
                "`{GUIDE}` is set, but `{TYPE}` is missing: it says what the guide is"
            ))),
            None => Ok(Guide::default()),
        };
    };
    if kind == "json" {
        return Ok(Guide { spec: Some(ConstraintSpec::JsonSchema(true.into())), ..Guide::default() });
    }
    let guide = guide.filter(|guide| !guide.is_empty());
    let guide = guide.ok_or_else(|| InferError::invalid(format!("`{TYPE}` is `{kind}`, but `{GUIDE}` is missing")))?;
    let spec = match kind.as_str() {
        "json_schema" => ConstraintSpec::JsonSchema(guide.into()),
        "regex" => ConstraintSpec::Regex(guide),
        "ebnf_grammar" => ConstraintSpec::Grammar(guide),
        "structural_tag" => ConstraintSpec::StructuralTag(guide.into()),
        _ => {
            let kinds = "expected `json`, `json_schema`, `regex`, `ebnf_grammar` or `structural_tag`";
            return Err(InferError::invalid(format!("`{TYPE}` is `{kind}`, {kinds}")));
        }
    };
    Ok(Guide { spec: Some(spec), ..Guide::default() })
}
