//! The order in which products of bf16 sum over K, so that kernels for few and for many rows give the same bits.

use super::skinny_gemm::Split;

/// Number of rows of a weight in a tile of the kernel for few rows.
const TILE: usize = 64;

/// How K is summed. It is divided into `parts` of slices of 64 columns, or of those of a format of quantized weights; the slices of a part go to `groups` in turn. Each of
/// these runs is summed in order. The groups of a part are added in order, then the parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SumOrder {
    /// Number of parts of K: 1, 2 or 4.
    pub parts: usize,
    /// Number of groups of a part: 1, 2 or 4.
    pub groups: usize,
}

impl SumOrder {
    /// The order of weights `[n, k]`: nearly that of the fastest division for up to 32 rows ([`Split::for_shape`]), with fewer groups,
    /// because the kernel for many rows is faster with few runs. Weights with many rows have one run.
    pub fn for_shape(n: usize, k: usize) -> Self {
        let Split { parts, groups, .. } = Split::for_shape(n, k, 1);
        match n.div_ceil(TILE) {
            440.. if parts == 1 => Self { parts, groups: 1 },
            _ if parts < 4 => Self { parts, groups: groups.min(2) },
            _ => Self { parts, groups },
        }
    }

    /// Number of runs.
    pub fn runs(self) -> usize {
        self.parts * self.groups
    }

    /// The division of the kernel for few rows that sums in this order, by measurement on an H200 (kernels/README.md).
    pub fn split(self) -> Split {
        let Self { parts, groups } = self;
        let ring_bytes = match (parts, groups) {
            (_, 4) | (1 | 2, 2) => 200 << 10,
            (_, 2) => 104 << 10,
            (1, _) => 48 << 10,
            _ => 64 << 10,
        };
        Split { parts, groups, ring_bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The four layers and the head of Llama 3 8B, and a narrow layer.
    #[test]
    fn weights_with_many_rows_are_summed_in_one_run() {
        let runs = |n, k| SumOrder::for_shape(n, k).runs();
        let layers = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128_256, 4096), (512, 4096)];
        assert_eq!(layers.map(|(n, k)| runs(n, k)), [2, 4, 1, 4, 1, 16]);
    }
}
