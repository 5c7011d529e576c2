//! Gated DeltaNet and Kimi Delta Attention.

/// Sizes of a layer of [`gated_delta`]: key heads, value heads, the size of a key head, of a value head, and taps.
pub type DeltaSizes = [usize; 5];

/// Weights of a layer of [`gated_delta`] or [`kimi_delta`]: `conv [C, taps]`, `a_log [V]`, `dt_bias [V]`, `norm [DV]`.
pub type DeltaWeights<'a> = [&'a [f32]; 4];

/// Gated DeltaNet (Yang et al. 2024) behind its projections, for one sequence from its start. `qkvz [T, C + V DV]`, `ba [T, 2 V]`;
/// the result is `[T, V DV]`. Learning rates are up to `max_rate`.
pub fn gated_delta(
    sizes: DeltaSizes,
    [conv, a_log, dt_bias, norm]: DeltaWeights<'_>,
    qkvz: &[f32],
    ba: &[f32],
    (max_rate, eps): (f32, f32),
) -> Vec<f32> {
    let [keys, values, key_dim, value_dim, _] = sizes;
    let channels = 2 * keys * key_dim + values * value_dim;
    let stride = channels + values * value_dim;
    let rate = |token: usize, head: usize| f64::from(max_rate) * sigmoid(ba[token * 2 * values + head].into());
    let step = |token: usize, head: usize, _: usize| {
        let step = f64::from(ba[token * 2 * values + values + head]) + f64::from(dt_bias[head]);
        -f64::from(a_log[head]).exp() * softplus(step)
    };
    let gate = |token: usize, column: usize| {
        let z = f64::from(qkvz[token * stride + channels + column]);
        z * sigmoid(z)
    };
    delta_rule(sizes, [conv, norm], (qkvz, stride), rate, step, gate, eps)
}

/// Kimi Delta Attention (Kimi Linear, 2025) behind its projections, for one sequence from its start: `qkvb [T, C + V]`, `steps [T, V DK]`,
/// `gates [T, V DV]`. `dt_bias` is `[V DK]`. The result is `[T, V DV]`.
pub fn kimi_delta(
    sizes: DeltaSizes,
    [conv, a_log, dt_bias, norm]: DeltaWeights<'_>,
    [qkvb, steps, gates]: [&[f32]; 3],
    eps: f32,
) -> Vec<f32> {
    let [keys, values, key_dim, value_dim, _] = sizes;
    let channels = 2 * keys * key_dim + values * value_dim;
    let rate = |token: usize, head: usize| sigmoid(qkvb[token * (channels + values) + channels + head].into());
    let step = |token: usize, head: usize, row: usize| {
        let column = head * key_dim + row;
        let step = f64::from(steps[token * values * key_dim + column]) + f64::from(dt_bias[column]);
        -f64::from(a_log[head]).exp() * softplus(step)
    };
    let gate = |token: usize, column: usize| sigmoid(gates[token * values * value_dim + column].into());
    delta_rule(sizes, [conv, norm], (qkvb, channels + values), rate, step, gate, eps)
}

/// The delta rule, whose states have the decays `exp(step)` of each row. The inputs begin with q, k and v, and have `stride` columns.
fn delta_rule(
    [keys, values, key_dim, value_dim, taps]: DeltaSizes,
    [conv, norm]: [&[f32]; 2],
    (inputs, stride): (&[f32], usize),
    rate: impl Fn(usize, usize) -> f64,
    step: impl Fn(usize, usize, usize) -> f64,
    gate: impl Fn(usize, usize) -> f64,
    eps: f32,
) -> Vec<f32> {
    let num_tokens = inputs.len() / stride;
    let mixed = |token: usize, channel: usize| {
        let input = |token: usize| f64::from(inputs[token * stride + channel]);
        let tap =
            |tap: usize| Some(f64::from(conv[channel * taps + tap]) * input((token + tap + 1).checked_sub(taps)?));
        let sum: f64 = (0..taps).filter_map(tap).sum();
        sum * sigmoid(sum)
    };
    let unit = |token: usize, first: usize| -> Vec<f64> {
        let head: Vec<f64> = (first..first + key_dim).map(|channel| mixed(token, channel)).collect();
        let scale = (head.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
        head.into_iter().map(|x| x / scale).collect()
    };
    let mut out = vec![0.0; num_tokens * values * value_dim];
    for head in 0..values {
        let key_head = head / (values / keys);
        let mut state = vec![vec![0.0f64; value_dim]; key_dim];
        for token in 0..num_tokens {
            let (query, key) = (unit(token, key_head * key_dim), unit(token, (keys + key_head) * key_dim));
            let mut read = vec![0.0; value_dim];
            for (column, read) in read.iter_mut().enumerate() {
                state.iter_mut().enumerate().for_each(|(row, values)| values[column] *= step(token, head, row).exp());
                let value = mixed(token, 2 * keys * key_dim + head * value_dim + column);
                let known: f64 = state.iter().zip(&key).map(|(row, key)| row[column] * key).sum();
                let added = (value - known) * rate(token, head);
                state.iter_mut().zip(&key).for_each(|(row, key)| row[column] += key * added);
                *read = state.iter().zip(&query).map(|(row, query)| row[column] * query).sum::<f64>();
                *read /= (key_dim as f64).sqrt();
            }
            let scale = (read.iter().map(|x| x * x).sum::<f64>() / value_dim as f64 + f64::from(eps)).sqrt();
            for (column, read) in read.into_iter().enumerate() {
                let own = head * value_dim + column;
                out[token * values * value_dim + own] =
                    (read / scale * f64::from(norm[column]) * gate(token, own)) as f32;
            }
        }
    }
    out
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}
