//! Chooses scales of 4-bit weights by the inputs that a layer has seen (AWQ, Lin et al. 2023).
//!
//! The error of an output is the sum of the weights' errors times their inputs. So an error counts by the mean square of its column's input.
//! Two things make the important errors smaller: columns with large inputs are multiplied by factors, by which their inputs are divided, and
//! the range of a group is made smaller than its largest weight, if that helps the others.

use device::cpu::LayerInputs;
use models::rounding::{Affine, range};
use rayon::prelude::*;

use crate::matrix::Matrix;

/// Exponents that are tried: factors are the mean size of the inputs to this power.
const EXPONENTS: usize = 20;
/// Share of the error that factors must leave at most. Smaller gains are often those of the calibration text alone.
const CLEARLY_BETTER: f64 = 0.9;
/// Shares of a group's range that are tried.
const SHRINKS: [f32; 8] = [1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.75, 0.7];
/// Rows of a matrix by which factors are chosen.
const SAMPLED_ROWS: usize = 64;

/// The mean square of the inputs of each column.
pub(crate) fn mean_squares(inputs: &LayerInputs) -> Vec<f32> {
    inputs.squares.iter().map(|sum| (sum / inputs.count.max(1) as f64) as f32).collect()
}

/// The factors of the columns of matrices with the same inputs: 1 for all of them, unless others are clearly better.
pub(crate) fn column_factors(matrices: &[Matrix<'_>], inputs: &LayerInputs, group: usize) -> Vec<f32> {
    let sizes: Vec<f64> = inputs.sums.iter().map(|sum| sum / inputs.count.max(1) as f64).collect();
    let candidates: Vec<Vec<f32>> = (0..EXPONENTS).map(|step| powers(&sizes, step as f64 / EXPONENTS as f64)).collect();
    let errors: Vec<f64> =
        candidates.par_iter().map(|factors| error(matrices, factors, &inputs.samples, group)).collect();
    let best = errors.iter().enumerate().min_by(|(_, a), (_, b)| a.total_cmp(b)).map_or(0, |(index, _)| index);
    // The first has factors of 1.
    let chosen = if errors[best] < CLEARLY_BETTER * errors[0] { best } else { 0 };
    candidates.into_iter().nth(chosen).expect("there are candidates")
}

/// Sizes to a power, with their largest and smallest equally far from 1. Columns that were always 0 have factor 1.
fn powers(sizes: &[f64], exponent: f64) -> Vec<f32> {
    let powers: Vec<f64> =
        sizes.iter().map(|size| if *size > 0.0 { size.powf(exponent).max(1e-4) } else { 1.0 }).collect();
    let (low, high) = powers.iter().fold((f64::MAX, 0f64), |(low, high), value| (low.min(*value), high.max(*value)));
    let middle = (low * high).sqrt();
    powers.into_iter().zip(sizes).map(|(power, size)| if *size > 0.0 { (power / middle) as f32 } else { 1.0 }).collect()
}

/// The square error of some outputs of all matrices, for the inputs `samples`.
fn error(matrices: &[Matrix<'_>], factors: &[f32], samples: &[f32], group: usize) -> f64 {
    let of = |matrix: &Matrix<'_>| -> f64 {
        let distance = matrix.rows.div_ceil(SAMPLED_ROWS);
        let (mut values, mut codes, mut found) = (vec![0.0; matrix.cols], vec![0; group], vec![0.0; group]);
        let mut sum = 0.0;
        for row in (0..matrix.rows).step_by(distance) {
            matrix.read_row(row, &mut values);
            values.iter_mut().zip(factors).for_each(|(value, factor)| *value *= factor);
            for values in values.chunks_exact_mut(group) {
                let (low, high) = range(values);
                rounded(Affine::of_range(low, high, |scale| scale), values, &mut codes, &mut found);
                values.iter_mut().zip(&found).for_each(|(value, found)| *value -= found);
            }
            // From here on they are the errors of weights.
            values.iter_mut().zip(factors).for_each(|(error, factor)| *error /= factor);
            sum += samples.chunks_exact(matrix.cols).map(|x| f64::from(dot(x, &values)).powi(2)).sum::<f64>();
        }
        // Fewer rows of larger matrices are looked at.
        sum * distance as f64
    };
    matrices.iter().map(of).sum()
}

/// The sum of products, in eight parts that the compiler can keep in one register.
fn dot(x: &[f32], y: &[f32]) -> f32 {
    let (x, y) = (x.as_chunks::<8>(), y.as_chunks::<8>());
    let mut sums = [0.0; 8];
    for (x, y) in x.0.iter().zip(y.0) {
        sums.iter_mut().zip(x.iter().zip(y)).for_each(|(sum, (x, y))| *sum += x * y);
    }
    sums.iter().sum::<f32>() + x.1.iter().zip(y.1).map(|(x, y)| x * y).sum::<f32>()
}

/// Scale and zero point of a group: of its whole range, or with `importance` of the share of it with the smallest weighted error.
pub(crate) fn best_shrink(values: &[f32], importance: Option<&[f32]>, stored: impl Fn(f32) -> f32) -> Affine {
    let (low, high) = range(values);
    let whole = Affine::of_range(low, high, &stored);
    let Some(importance) = importance else { return whole };
    let (mut codes, mut found) = (vec![0; values.len()], vec![0.0; values.len()]);
    let mut best = (f32::INFINITY, whole);
    for shrink in SHRINKS {
        let affine = Affine::of_range(low * shrink, high * shrink, &stored);
        rounded(affine, values, &mut codes, &mut found);
        let errors = values.iter().zip(&found).zip(importance).map(|((a, b), weight)| (a - b).powi(2) * weight);
        let error: f32 = errors.sum();
        if error < best.0 {
            best = (error, affine);
        }
    }
    best.1
}

/// The values of a group after they were rounded.
fn rounded(affine: Affine, values: &[f32], codes: &mut [u8], out: &mut [f32]) {
    affine.codes(values, codes);
    out.iter_mut().zip(codes.iter()).for_each(|(out, code)| *out = affine.value(*code));
}

#[cfg(test)]
mod tests {
    use models::StoredTensor;

    use super::*;

    #[test]
    fn columns_with_large_inputs_get_large_factors() {
        let values: Vec<u8> =
            (0..64 * 32).flat_map(|index: usize| ((index * 7919 % 1009) as f32 / 504.0 - 1.0).to_le_bytes()).collect();
        let shape = [64, 32];
        let tensor = StoredTensor { name: "w", dtype: "F32", shape: &shape, data: values.leak() };
        let matrix = Matrix::new(tensor).unwrap();
        // Inputs without order, of which those of one column are a hundred times as large.
        let input = |row: usize, col: usize| {
            let size = if col == 5 { 10.0 } else { 0.1 };
            size * ((row * 31 + col) * 7927 % 1013) as f32 / 506.0 - size
        };
        let rows: Vec<Vec<f32>> = (0..64).map(|row| (0..32).map(|col| input(row, col)).collect()).collect();
        let inputs = LayerInputs::of_rows("w", &rows);
        let factors = column_factors(std::slice::from_ref(&matrix), &inputs, 32);
        assert!(factors[5] > 2.0 * factors[0], "{factors:?}");
        let error = |factors: &[f32]| error(std::slice::from_ref(&matrix), factors, &inputs.samples, 32);
        assert!(error(&factors) < 0.5 * error(&[1.0; 32]));
    }

    #[test]
    fn the_range_shrinks_where_the_largest_weight_does_not_count() {
        let mut values: Vec<f32> = (0..32).map(|index| (index as f32 - 16.0) / 16.0).collect();
        values[0] = -1.4;
        let mut importance = [1.0; 32];
        let whole = best_shrink(&values, None, |scale| scale);
        importance[0] = 0.0;
        assert!(best_shrink(&values, Some(&importance), |scale| scale).scale < whole.scale);
        importance[0] = 1e4;
        assert!(best_shrink(&values, Some(&importance), |scale| scale).scale >= 0.95 * whole.scale);
    }
}
