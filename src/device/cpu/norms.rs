//! Norms of q and k, and norms of a branch before it is added to the hidden state.

use std::ops::Range;

use kernels::cpu::{self as k, Buffer};
use ops::{Device, DeviceError, HeadNormSpan, HeadNorms};

use super::{CpuDevice, CpuTensor, CpuWeight};

impl CpuDevice {
    pub(super) fn norm_heads(
        &mut self,
        qkv: &mut CpuTensor,
        layer: usize,
        norms: &HeadNorms<'_, CpuWeight>,
        eps: f32,
    ) -> Result<(), DeviceError> {
        let spec = &self.cache().spec.layers[layer];
        let heads = k::Heads { stride: qkv.cols, counts: [spec.num_heads, spec.num_kv_heads], dim: spec.head_dim };
        let tokens = self.num_tokens();
        match norms.span {
            HeadNormSpan::Head | HeadNormSpan::EachHead => {
                let norms: Vec<_> = [Some(norms.q), norms.k, norms.v].into_iter().map_while(|norm| norm).collect();
                let norms: Vec<_> = norms.into_iter().map(CpuWeight::norm).collect();
                k::head_norm(&mut self.pool, qkv.rows_mut(tokens), heads, &norms, eps);
            }
            HeadNormSpan::AllHeads => {
                let means = self.head_means(qkv.rows(tokens), heads)?;
                let k = norms.k.expect("norms over all heads are of layers with k of their own");
                let gains = [norms.q.gain(), k.gain()];
                k::scale_heads(&mut self.pool, qkv.rows_mut(tokens), heads, &means, gains, eps);
            }
        }
        Ok(())
    }

    pub(super) fn add_normed_branch(
        &mut self,
        residual: &mut CpuTensor,
        partial: &CpuTensor,
        branch: &CpuWeight,
        next: Option<(&mut CpuTensor, &CpuWeight)>,
        eps: f32,
    ) -> Result<(), DeviceError> {
        let (tokens, width) = (self.num_tokens(), residual.cols);
        if self.branch.len() < tokens * width {
            self.branch = Buffer::new(self.config.limits.max_tokens * width);
        }
        let (residual, partial) = (residual.rows_mut(tokens), partial.rows(tokens));
        let (pool, scratch) = (&mut self.pool, &mut self.branch[..tokens * width]);
        let mut next = next.map(|(out, weight)| (out.rows_mut(tokens), weight.norm()));
        let mut add = |rows: Range<usize>, parts: &[&[f32]]| {
            let range = rows.start * width..rows.end * width;
            let next = next.as_mut().map(|(out, norm)| (&mut out[range.clone()], *norm));
            k::add_normed(pool, &mut residual[range.clone()], &mut scratch[range], parts, branch.norm(), next, eps);
        };
        match &mut self.group {
            Some(group) => group.exchange_rows("summing partial products", partial, width, add),
            None => {
                add(0..tokens, &[partial]);
                Ok(())
            }
        }
    }

    /// `out = norm(sum of partial over the group)`.
    pub(super) fn norm_sum(
        &mut self,
        out: &mut CpuTensor,
        partial: &CpuTensor,
        weight: &CpuWeight,
        eps: f32,
    ) -> Result<(), DeviceError> {
        let (tokens, width) = (self.num_tokens(), out.cols);
        let (out, partial, pool) = (out.rows_mut(tokens), partial.rows(tokens), &mut self.pool);
        let mut sum = vec![0.0; out.len()];
        let mut add = |rows: Range<usize>, parts: &[&[f32]]| {
            let range = rows.start * width..rows.end * width;
            k::add_norm(pool, &mut out[range.clone()], &mut sum[range], parts, weight.norm(), eps);
        };
        match &mut self.group {
            Some(group) => group.exchange_rows("summing partial products", partial, width, add),
            None => {
                add(0..tokens, &[partial]);
                Ok(())
            }
        }
    }

    /// The mean squares of all query heads and of all key heads of the whole group, for each row: `[T, 2]`.
    fn head_means(&mut self, qkv: &[f32], heads: k::Heads) -> Result<Vec<f32>, DeviceError> {
        let own = k::head_squares(&mut self.pool, qkv, heads);
        let size = self.tensor_parallel().size as usize;
        // Workers that share a head all count it.
        let counted = heads.counts.map(|count| count * size * heads.dim);
        let mut means = vec![0.0; own.len()];
        let mean = |rows: Range<usize>, parts: &[&[f32]]| {
            for (index, mean) in means[2 * rows.start..2 * rows.end].iter_mut().enumerate() {
                *mean = parts.iter().map(|part| part[index]).sum::<f32>() / counted[index % 2] as f32;
            }
        };
        match &mut self.group {
            Some(group) => group.exchange_rows("summing squares", &own, 2, mean)?,
            None => {
                let mut mean = mean;
                mean(0..own.len() / 2, &[&own]);
            }
        }
        Ok(means)
    }
}
