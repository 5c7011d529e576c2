//! rotate: pairs (i, i + D / 2) of each head, rotated by the position's angles     (Su et al. 2021)
//!
//! x         [heads, D] f32 of one token
//! cos, sin  [D / 2] of its position
//! test      tests/cpu_ops.rs against reference::rotate

for_each_isa! {
    /// Rotates every head of one token.
    ///
    /// # Panics
    /// Panics if `x` is not whole heads.
    pub fn rotate(x: &mut [f32], cos: &[f32], sin: &[f32]) {
        let half = cos.len();
        assert!(sin.len() == half && x.len().is_multiple_of(2 * half), "heads have twice as many elements as angles");
        for head in x.chunks_exact_mut(2 * half) {
            let (low, high) = head.split_at_mut(half);
            for i in 0..half {
                let (a, b) = (low[i], high[i]);
                low[i] = a * cos[i] - b * sin[i];
                high[i] = b * cos[i] + a * sin[i];
            }
        }
    }
}
