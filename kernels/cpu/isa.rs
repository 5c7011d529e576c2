//! Detects the instruction sets of this processor, once.

use std::sync::OnceLock;

/// Instruction sets that kernels support, in ascending order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// The instructions that the compiler assumes.
    Portable,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
    /// `Avx512` with bf16 dot products.
    Avx512Bf16,
}

impl Isa {
    /// The highest set that this processor has.
    pub fn detect() -> Self {
        static FOUND: OnceLock<Isa> = OnceLock::new();
        *FOUND.get_or_init(detect)
    }

    /// Every set that this processor has, for tests that compare all kernels with the reference.
    pub fn available() -> impl Iterator<Item = Isa> {
        [Isa::Portable, Isa::Avx2, Isa::Avx512, Isa::Avx512Bf16].into_iter().filter(|isa| *isa <= Isa::detect())
    }
}

#[cfg(target_arch = "x86_64")]
fn detect() -> Isa {
    let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
    let avx512 = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    match (avx2, avx512, is_x86_feature_detected!("avx512bf16")) {
        (true, true, true) => Isa::Avx512Bf16,
        (true, true, false) => Isa::Avx512,
        (true, false, _) => Isa::Avx2,
        (false, ..) => Isa::Portable,
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn detect() -> Isa {
    Isa::Portable
}

/// Compiles functions for wider registers too; a call uses the widest that the processor has. The operations and their
/// order are the same, so the results are.
macro_rules! for_each_isa {
    ($($(#[$attribute:meta])* $visible:vis fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)*) => {
        $(
            $(#[$attribute])*
            #[inline]
            $visible fn $name($($argument: $type),*) {
                #[inline(always)]
                fn body($($argument: $type),*) $body
                #[cfg(target_arch = "x86_64")]
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
                fn avx512($($argument: $type),*) { body($($argument),*) }
                #[cfg(target_arch = "x86_64")]
                #[target_feature(enable = "avx2")]
                fn avx2($($argument: $type),*) { body($($argument),*) }
                match $crate::cpu::Isa::detect() {
                    // SAFETY: the processor has the instructions.
                    #[cfg(target_arch = "x86_64")]
                    $crate::cpu::Isa::Avx512Bf16 | $crate::cpu::Isa::Avx512 => unsafe { avx512($($argument),*) },
                    // SAFETY: as above.
                    #[cfg(target_arch = "x86_64")]
                    $crate::cpu::Isa::Avx2 => unsafe { avx2($($argument),*) },
                    _ => body($($argument),*),
                }
            }
        )*
    };
}
