//! How KV blocks hold keys and values, in the words of the kernels.

use kernels::kv_codes::KvCodes;
use ops::KvElements;

/// The codes of keys and values; `None` if they are numbers as the device computes with them.
pub(crate) fn kv_codes(elements: KvElements) -> Option<KvCodes> {
    match elements {
        KvElements::Plain => None,
        KvElements::Fp8 => Some(KvCodes::Fp8),
        KvElements::Int8 => Some(KvCodes::Int8),
    }
}
