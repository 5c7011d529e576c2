//! ALiBi slopes (Press et al. 2022, section 3).

/// The slope of each head. For a power of two `n` it is the geometric series that starts at `2^(-8/n)` with the same
/// ratio. Otherwise it is the series of the next lower power, followed by every other element of the series of the next
/// higher power.
pub(crate) fn slopes(num_heads: usize) -> Vec<f32> {
    let below = 1 << num_heads.ilog2();
    let rest = series(2 * below).into_iter().step_by(2).take(num_heads - below);
    series(below).into_iter().chain(rest).collect()
}

fn series(n: usize) -> Vec<f32> {
    let ratio = 2f64.powf(-8.0 / n as f64);
    (1..=n).map(|head| ratio.powi(head as i32) as f32).collect()
}

#[cfg(test)]
mod tests {
    use super::slopes;

    #[test]
    fn slopes_are_those_of_the_paper() {
        assert_eq!(slopes(8), [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625]);
        let six = slopes(6);
        assert_eq!(&six[..4], [0.25, 0.0625, 0.015625, 0.00390625]);
        assert_eq!(&six[4..], [0.5, 0.125]);
    }
}
