//! Statistics of the inputs of linear layers, which a program that quantizes their weights collects.

use super::{CpuDevice, CpuWeight};

/// Most inputs of a layer that are kept.
pub const MAX_SAMPLES: usize = 128;

/// Statistics of all linear layers, in the order in which they were loaded.
#[derive(Debug, Default)]
pub struct InputStatistics {
    layers: Vec<LayerInputs>,
}

/// Statistics of the inputs of one linear layer.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerInputs {
    /// The name of the first of the weights that the layer consists of.
    pub name: String,
    /// Number of inputs seen: tokens.
    pub count: u64,
    /// Some of these inputs, `[rows, columns]`: at most [`MAX_SAMPLES`], at equal distances.
    pub samples: Vec<f32>,
    /// The sum of the sizes of each column.
    pub sums: Vec<f64>,
    /// The sum of the squares of each column.
    pub squares: Vec<f64>,
    /// Distance between two samples, in inputs.
    distance: u64,
}

impl InputStatistics {
    /// Begins those of a layer, and returns its number.
    pub(super) fn begin(&mut self, name: &str, cols: usize) -> usize {
        let (sums, squares) = (vec![0.0; cols], vec![0.0; cols]);
        let (name, samples) = (name.to_owned(), Vec::new());
        self.layers.push(LayerInputs { name, count: 0, samples, sums, squares, distance: 1 });
        self.layers.len() - 1
    }

    /// Those of each layer.
    pub fn layers(&self) -> &[LayerInputs] {
        &self.layers
    }
}

impl LayerInputs {
    fn add(&mut self, x: &[f32]) {
        for row in x.chunks_exact(self.sums.len()) {
            self.sample(row);
            self.count += 1;
            for ((x, sum), square) in row.iter().zip(&mut self.sums).zip(&mut self.squares) {
                let x = f64::from(*x);
                *sum += x.abs();
                *square += x * x;
            }
        }
    }
}

impl LayerInputs {
    /// Statistics of these inputs, for tests of programs that use them.
    pub fn of_rows(name: &str, rows: &[Vec<f32>]) -> Self {
        let mut all = InputStatistics::default();
        all.begin(name, rows.first().map_or(0, Vec::len));
        rows.iter().for_each(|row| all.layers[0].add(row));
        all.layers.remove(0)
    }

    /// Keeps an input, if it is one of those at equal distances. Where there are too many, the distance doubles.
    fn sample(&mut self, row: &[f32]) {
        if !self.count.is_multiple_of(self.distance) {
            return;
        }
        if self.samples.len() == MAX_SAMPLES * row.len() {
            let kept = self.samples.chunks_exact(2 * row.len()).flat_map(|pair| &pair[..row.len()]).copied().collect();
            self.samples = kept;
            self.distance *= 2;
            if !self.count.is_multiple_of(self.distance) {
                return;
            }
        }
        self.samples.extend(row);
    }
}

impl CpuDevice {
    /// Collects statistics of the inputs of the linear layers that are loaded from now on, except experts and heads.
    pub fn collect_input_statistics(&mut self) {
        self.input_statistics = Some(InputStatistics::default());
    }

    /// The statistics, if they are collected.
    pub fn input_statistics(&self) -> Option<&InputStatistics> {
        self.input_statistics.as_ref()
    }

    pub(super) fn observe(&mut self, x: &[f32], weight: &CpuWeight) {
        if let (Some(all), CpuWeight::Linear { statistics: Some(index), .. }) = (&mut self.input_statistics, weight) {
            all.layers[*index].add(x);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_at_equal_distances_however_many_inputs_there_are() {
        let rows: Vec<Vec<f32>> = (0..1000).map(|row| vec![row as f32, -1.0]).collect();
        let inputs = LayerInputs::of_rows("w", &rows);
        let first: Vec<f32> = inputs.samples.chunks_exact(2).map(|row| row[0]).collect();
        assert_eq!(first, (0..1000).step_by(8).map(|row| row as f32).collect::<Vec<_>>());
        assert_eq!((inputs.count, inputs.sums[1], inputs.squares[1]), (1000, 1000.0, 1000.0));
    }
}
