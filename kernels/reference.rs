//! Plain formulas, one for each op, with fp32 operands and fp64 sums. Tests compare kernels with them.

mod delta;

pub use delta::{DeltaSizes, DeltaWeights, gated_delta, kimi_delta};

/// `out[t, n] = sum over k of x[t, k] * w[n, k] + bias[n]`, with `x [rows, k]`, `w [n, k]`.
pub fn linear(x: &[f32], w: &[f32], bias: Option<&[f32]>, k: usize) -> Vec<f32> {
    let dot = |x: &[f32], w: &[f32]| x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum::<f64>();
    let bias = |n: usize| bias.map_or(0.0, |bias| f64::from(bias[n]));
    x.chunks_exact(k)
        .flat_map(|x| w.chunks_exact(k).enumerate().map(move |(n, w)| (dot(x, w) + bias(n)) as f32))
        .collect()
}

/// `y[t, :] = x[t, :] * rsqrt(mean(x[t, :]^2) + eps) * weight`.
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    let mut out = Vec::with_capacity(x.len());
    for row in x.chunks_exact(weight.len()) {
        let mean = row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / row.len() as f64;
        let scale = 1.0 / (mean + f64::from(eps)).sqrt();
        out.extend(row.iter().zip(weight).map(|(x, w)| (f64::from(*x) * scale * f64::from(*w)) as f32));
    }
    out
}

/// `y[t, :] = (x[t, :] - mean(x[t, :])) * rsqrt(variance(x[t, :]) + eps) * weight + bias`.
pub fn layer_norm(x: &[f32], weight: &[f32], bias: &[f32], eps: f32) -> Vec<f32> {
    let mut out = Vec::with_capacity(x.len());
    for row in x.chunks_exact(weight.len()) {
        let mean = row.iter().map(|x| f64::from(*x)).sum::<f64>() / row.len() as f64;
        let variance = row.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>() / row.len() as f64;
        let scale = 1.0 / (variance + f64::from(eps)).sqrt();
        let element =
            |((x, w), b): ((&f32, &f32), &f32)| ((f64::from(*x) - mean) * scale * f64::from(*w) + f64::from(*b)) as f32;
        out.extend(row.iter().zip(weight).zip(bias).map(element));
    }
    out
}

/// `x * sigmoid(x)`.
pub fn silu(x: f32) -> f32 {
    let x = f64::from(x);
    (x / (1.0 + (-x).exp())) as f32
}

/// `0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`.
pub fn gelu_tanh(x: f32) -> f32 {
    let x = f64::from(x);
    (0.5 * x * (1.0 + (std::f64::consts::FRAC_2_PI.sqrt() * (x + 0.044715 * x.powi(3))).tanh())) as f32
}

/// `0.5 x (1 + erf(x / sqrt(2)))`; the integral of erf by Simpson's rule.
pub fn gelu(x: f32) -> f32 {
    let x = f64::from(x);
    let (end, steps) = ((x.abs() / std::f64::consts::SQRT_2).min(6.0), 400);
    let width = end / f64::from(steps);
    let at = |step: i32| (-(f64::from(step) * width).powi(2)).exp();
    let inner: f64 = (1..steps).map(|step| at(step) * if step % 2 == 1 { 4.0 } else { 2.0 }).sum();
    let erf = std::f64::consts::FRAC_2_SQRT_PI * width / 3.0 * (at(0) + inner + at(steps));
    (0.5 * x * (1.0 + erf.copysign(x))) as f32
}

/// `0.75 x^2 + 0.5 x` above 0, else `1.5 (e^min(x, -1e-6) - 1 - x) + 0.5 x`.
pub fn xielu(x: f32) -> f32 {
    let x = f64::from(x);
    let curved = if x > 0.0 { 0.75 * x * x } else { 1.5 * (x.min(-1e-6).exp_m1() - x) };
    (curved + 0.5 * x) as f32
}

/// Rotates the pairs `(i, i + D / 2)` of one head by `angles [D / 2]`.
pub fn rotate(head: &[f32], angles: &[f64]) -> Vec<f32> {
    let half = angles.len();
    let turned = |i: usize| {
        let (a, b) = (f64::from(head[i % half]), f64::from(head[i % half + half]));
        let (sin, cos) = angles[i % half].sin_cos();
        (if i < half { a * cos - b * sin } else { b * cos + a * sin }) as f32
    };
    (0..2 * half).map(turned).collect()
}

/// Attention of one query over all of `k` and `v [positions, D]`.
pub fn attention(q: &[f32], k: &[f32], v: &[f32], scale: f32) -> Vec<f32> {
    alibi_attention(q, k, v, scale, 0.0)
}

/// Like [`attention`], with `slope` times the distance to the last position (the query's own) added to each score. The
/// distance is 0 or negative.
pub fn alibi_attention(q: &[f32], k: &[f32], v: &[f32], scale: f32, slope: f32) -> Vec<f32> {
    attention_with(q, k, v, Scores { scale, slope, cap: None, sink: None })
}

/// How the scores of [`attention_with`] follow from products.
#[derive(Debug, Clone, Copy)]
pub struct Scores {
    /// Multiplier of q·k.
    pub scale: f32,
    /// Multiplied with the distance to the last position, which is 0 or negative, and added.
    pub slope: f32,
    /// If set, the scaled product `x` becomes `cap * tanh(x / cap)` before the slope is applied.
    pub cap: Option<f32>,
    /// If set, a logit that takes part in the softmax without a value.
    pub sink: Option<f32>,
}

/// Like [`attention`], with scores as given.
pub fn attention_with(q: &[f32], k: &[f32], v: &[f32], scores: Scores) -> Vec<f32> {
    let Scores { scale, slope, cap, sink } = scores;
    let dim = q.len();
    let dot = |k: &[f32]| q.iter().zip(k).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum::<f64>();
    let last = (k.len() / dim).saturating_sub(1);
    let bias = |position: usize| f64::from(slope) * (position as f64 - last as f64);
    let capped = |score: f64| cap.map(f64::from).map_or(score, |cap| cap * (score / cap).tanh());
    let score = |(position, k): (usize, &[f32])| capped(dot(k) * f64::from(scale)) + bias(position);
    let scores: Vec<f64> = k.chunks_exact(dim).enumerate().map(score).collect();
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
    let total: f64 = weights.iter().sum::<f64>() + sink.map_or(0.0, |sink| (f64::from(sink) - max).exp());
    let column = |i: usize| weights.iter().zip(v.chunks_exact(dim)).map(|(w, v)| w * f64::from(v[i])).sum::<f64>();
    (0..dim).map(|i| (column(i) / total) as f32).collect()
}

/// Attention of one head whose keys and values are products with latent vectors: of a row `[c | k]` of `rows`, whose latent vector has
/// `rank` elements, the key is `[keys c | k]` and the value `values c`. `q` is rotated; `keys` `[key_dim, rank]`, `values`
/// `[value_dim, rank]`.
pub fn latent_attention(q: &[f32], rows: &[f32], rank: usize, [keys, values]: [&[f32]; 2], scale: f32) -> Vec<f32> {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    let (q_keys, q_rotated) = q.split_at(keys.len() / rank);
    let score = |row: &[f32]| {
        let products = keys.chunks_exact(rank).zip(q_keys).map(|(key, q)| f64::from(*q) * dot(key, &row[..rank]));
        (products.sum::<f64>() + dot(q_rotated, &row[rank..])) * f64::from(scale)
    };
    let rows: Vec<&[f32]> = rows.chunks_exact(rank + q_rotated.len()).collect();
    let scores: Vec<f64> = rows.iter().map(|row| score(row)).collect();
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
    let total: f64 = weights.iter().sum();
    let value =
        |value: &[f32]| weights.iter().zip(&rows).map(|(w, row)| w * dot(value, &row[..rank])).sum::<f64>() / total;
    values.chunks_exact(rank).map(|row| value(row) as f32).collect()
}

/// How [`choose_experts`] chooses.
#[derive(Debug, Clone, Copy)]
pub struct Choosing<'a> {
    /// Number of experts of a token.
    pub top_k: usize,
    /// Whether weights are the sigmoids of logits; otherwise their softmax.
    pub is_sigmoid: bool,
    /// If set, experts are chosen by their logits and weighted as in SparseMixer, with this tolerance.
    pub sparse_tolerance: Option<f32>,
    /// Added to the weights while experts are chosen; empty for none.
    pub selection_bias: &'a [f32],
    /// Number of groups, and of those that a token chooses: the ones with the largest scores.
    pub groups: Option<[usize; 2]>,
    /// Whether the score of a group is that of its best expert; otherwise the sum of those of its two best.
    pub is_best: bool,
    /// Whether the weights of the chosen experts are divided by their sum.
    pub is_normalized: bool,
    /// Multiplies the weights of the chosen experts.
    pub scale: f32,
    /// Multiply the weights of the experts at the end; empty for none.
    pub scales: &'a [f32],
}

impl Choosing<'static> {
    /// The softmax, without biases and factors.
    pub fn softmax(top_k: usize, is_normalized: bool) -> Self {
        let (is_sigmoid, groups, is_best, scale) = (false, None, false, 1.0);
        let (sparse_tolerance, selection_bias, scales) = (None, &[][..], &[][..]);
        Self { top_k, is_sigmoid, sparse_tolerance, selection_bias, groups, is_best, is_normalized, scale, scales }
    }
}

impl Choosing<'_> {
    fn weights(&self, logits: &[f32]) -> Vec<f64> {
        if self.sparse_tolerance.is_some() {
            return logits.iter().map(|x| f64::from(*x)).collect();
        }
        if self.is_sigmoid {
            return logits.iter().map(|x| 1.0 / (1.0 + (-f64::from(*x)).exp())).collect();
        }
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let exps: Vec<f64> = logits.iter().map(|x| (f64::from(*x) - f64::from(max)).exp()).collect();
        let total: f64 = exps.iter().sum();
        exps.iter().map(|x| x / total).collect()
    }

    /// What experts are chosen by: the sum of weight and selection bias of each.
    pub fn values(&self, logits: &[f32]) -> Vec<f64> {
        let bias = |expert: usize| self.selection_bias.get(expert).copied().unwrap_or(0.0);
        self.weights(logits).iter().enumerate().map(|(expert, weight)| weight + f64::from(bias(expert))).collect()
    }

    /// What groups are chosen by; empty if there are none.
    pub fn group_scores(&self, values: &[f64]) -> Vec<f64> {
        let Some([count, _]) = self.groups else { return Vec::new() };
        let score = |group: &[f64]| {
            let mut sorted = group.to_vec();
            sorted.sort_by(|a, b| b.total_cmp(a));
            if self.is_best { sorted[0] } else { sorted[0] + sorted[1] }
        };
        values.chunks_exact(values.len() / count).map(score).collect()
    }
}

/// The indices of the `count` largest values, the lower one of equals, in ascending order.
fn largest(values: &[f64], count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| values[b].total_cmp(&values[a]).then(a.cmp(&b)));
    order.truncate(count);
    order.sort_unstable();
    order
}

/// The experts that a token with these router products chooses, in ascending order, and their weights.
pub fn choose_experts(logits: &[f32], choosing: &Choosing<'_>) -> Vec<(u32, f32)> {
    let (mut weights, mut values) = (choosing.weights(logits), choosing.values(logits));
    if let Some([count, chosen]) = choosing.groups {
        let (kept, size) = (largest(&choosing.group_scores(&values), chosen), values.len() / count);
        let others = values.iter_mut().enumerate().filter(|(expert, _)| !kept.contains(&(expert / size)));
        others.for_each(|(_, value)| *value = f64::NEG_INFINITY);
    }
    let chosen = largest(&values, choosing.top_k);
    if let Some(tolerance) = choosing.sparse_tolerance {
        for _ in 0..choosing.top_k {
            let expert = largest(&values, 1)[0];
            let max = values[expert];
            let is_near = |value: &f64| max - value <= f64::from(tolerance) * value.abs().max(max);
            let near = values.iter().filter(|value| value.is_finite() && is_near(value));
            weights[expert] = 1.0 / near.map(|value| (value - max).exp()).sum::<f64>();
            values[expert] = f64::NEG_INFINITY;
        }
    }
    let sum = if choosing.is_normalized { chosen.iter().map(|&expert| weights[expert]).sum() } else { 1.0 };
    let factor = |expert: usize| f64::from(choosing.scale * choosing.scales.get(expert).copied().unwrap_or(1.0));
    chosen.iter().map(|&expert| (expert as u32, (weights[expert] / sum * factor(expert)) as f32)).collect()
}

/// Weights of a layer of [`mamba2`]: `conv [C, taps]`, `conv_bias [C]`, `a_log [V]`, `dt_bias [V]`, `skip [V]`, `norm [V DV]`.
pub type Mamba2Weights<'a> = [&'a [f32]; 6];

/// Mamba-2 (Dao and Gu 2024) behind its projections, for one sequence from its start. `inputs [T, C + V DV]` are C, B, x and the gates
/// of the output, `dt [T, V]`; the result is `[T, V DV]`, where `norm_heads` heads are normed together, unless the norm is empty.
pub fn mamba2(
    sizes: DeltaSizes,
    weights: Mamba2Weights<'_>,
    inputs: &[f32],
    dt: &[f32],
    (norm_heads, eps): (usize, f32),
) -> Vec<f32> {
    let [keys, values, key_dim, value_dim, taps] = sizes;
    let [conv, conv_bias, a_log, dt_bias, skip, norm] =
        weights.map(|weight| weight.iter().map(|x| f64::from(*x)).collect::<Vec<_>>());
    let (channels, width, num_tokens) =
        (2 * keys * key_dim + values * value_dim, values * value_dim, dt.len() / values);
    let silu = |x: f64| x / (1.0 + (-x).exp());
    let input = |token: usize, column: usize| f64::from(inputs[token * (channels + width) + column]);
    let mixed = |token: usize, channel: usize| {
        let tap = |tap: usize| Some(conv[channel * taps + tap] * input((token + tap + 1).checked_sub(taps)?, channel));
        silu(conv_bias[channel] + (0..taps).filter_map(tap).sum::<f64>())
    };
    let mut out = vec![0.0f64; num_tokens * width];
    for head in 0..values {
        let key_head = head / (values / keys);
        let mut state = vec![vec![0.0f64; value_dim]; key_dim];
        for token in 0..num_tokens {
            let step = f64::from(dt[token * values + head]) + dt_bias[head];
            let step = step.max(0.0) + (-step.abs()).exp().ln_1p();
            let decay = (-a_log[head].exp() * step).exp();
            for column in 0..value_dim {
                let x = mixed(token, 2 * keys * key_dim + head * value_dim + column);
                let mut read = skip[head] * x;
                for (row, state) in state.iter_mut().enumerate() {
                    let key = mixed(token, (keys + key_head) * key_dim + row);
                    state[column] = state[column] * decay + key * step * x;
                    read += state[column] * mixed(token, key_head * key_dim + row);
                }
                let place = head * value_dim + column;
                out[token * width + place] = read * silu(input(token, channels + place));
            }
        }
    }
    for (index, group) in out.chunks_exact_mut(norm_heads * value_dim).enumerate().filter(|_| !norm.is_empty()) {
        let first = index * group.len() % width;
        let mean = group.iter().map(|x| x * x).sum::<f64>() / group.len() as f64;
        let weights = norm[first..].iter();
        group.iter_mut().zip(weights).for_each(|(x, weight)| *x *= weight / (mean + f64::from(eps)).sqrt());
    }
    out.into_iter().map(|x| x as f32).collect()
}

/// A short convolution of LFM2 behind its projections, for one sequence from its start: `conv [C, taps]`, `conv_bias [C]`; `inputs
/// [T, 2 C]` are x and the gates of the input, `gates [T, C]` those of the output; the result is `[T, C]`.
pub fn short_conv(conv: &[f32], conv_bias: &[f32], inputs: &[f32], gates: &[f32]) -> Vec<f32> {
    let (channels, taps) = (conv_bias.len(), conv.len() / conv_bias.len());
    let gated = |token: usize, channel: usize| {
        let [x, gate] = [0, channels].map(|first| f64::from(inputs[token * 2 * channels + first + channel]));
        x * gate
    };
    let out = |(index, gate): (usize, &f32)| {
        let (token, channel) = (index / channels, index % channels);
        let weight = |tap: usize| f64::from(conv[channel * taps + tap]);
        let tap = |tap: usize| Some(weight(tap) * gated((token + tap + 1).checked_sub(taps)?, channel));
        let sum = f64::from(conv_bias[channel]) + (0..taps).filter_map(tap).sum::<f64>();
        (sum * f64::from(*gate)) as f32
    };
    gates.iter().enumerate().map(out).collect()
}
