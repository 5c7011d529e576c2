//! Rows of different lengths as one tensor.

/// The length of the longest row, and all rows padded to it with `fill`.
pub(crate) fn pad_rows<'a, T: Copy + 'a>(rows: impl Iterator<Item = &'a [T]> + Clone, fill: T) -> (usize, Vec<T>) {
    let width = rows.clone().map(<[T]>::len).max().unwrap_or(0);
    let mut values = Vec::with_capacity(width * rows.size_hint().0);
    for row in rows {
        values.extend_from_slice(row);
        values.resize(values.len() + width - row.len(), fill);
    }
    (width, values)
}
