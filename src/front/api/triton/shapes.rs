//! Shapes of inputs that clients omit.

/// A shape of `count` elements for an input with `dims`. The first variable dimension is derived from the others. With `is_batched`
/// the shape starts with a batch dimension.
pub fn fit_shape(dims: &[i64], is_batched: bool, count: usize) -> Vec<i64> {
    let fixed: i64 = dims.iter().filter(|&&size| size > 0).product();
    let mut rest = count as i64 / fixed.max(1);
    let mut shape: Vec<i64> = Vec::with_capacity(dims.len() + 1);
    shape.extend(is_batched.then_some(1));
    for &size in dims {
        shape.push(if size < 0 { std::mem::replace(&mut rest, 1) } else { size });
    }
    if is_batched && dims.iter().all(|&size| size >= 0) {
        shape[0] = rest.max(1);
    }
    shape
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_variable_dimension_is_derived_from_the_others() {
        assert_eq!(fit_shape(&[-1], true, 5), [1, 5]);
        assert_eq!(fit_shape(&[2, -1], false, 6), [2, 3]);
        assert_eq!(fit_shape(&[-1, -1], false, 6), [6, 1]);
        assert_eq!(fit_shape(&[1], true, 3), [3, 1]);
        assert_eq!(fit_shape(&[1], false, 1), [1]);
        assert_eq!(fit_shape(&[], true, 1), [1]);
    }
}
