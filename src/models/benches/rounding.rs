//! Quantization at load: bytes of bf16 that one core rounds each second, with `cargo bench -p models --bench rounding`.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use models::{Rounding, rounded};
use ops::{DType, WeightData, WeightSlice};

/// Rows and columns of a matrix of Llama 3 8B's attention.
const SHAPE: [usize; 2] = [4096, 4096];

fn rows(criterion: &mut Criterion) {
    let [num_rows, cols] = SHAPE;
    let data: Vec<u8> = (0..num_rows * cols)
        .flat_map(|index| half::bf16::from_f32((index * 7919 % 2003) as f32 / 4e4 - 0.025).to_le_bytes())
        .collect();
    let mut group = criterion.benchmark_group("rounding");
    group.throughput(Throughput::Bytes(data.len() as u64)).sample_size(10);
    let data = WeightData::Stored(data.into());
    let forms = [("fp8", Rounding::Fp8Rows, cols), ("int8", Rounding::Int8Rows, cols), ("int4", Rounding::Int4, 128)];
    for (name, rounding, group_cols) in forms {
        let slice = WeightSlice {
            name: "w",
            data: data.clone(),
            dtype: DType::Bf16,
            matrix_cols: cols,
            rows: 0..num_rows,
            cols: 0..cols,
            head_order: None,
        };
        let WeightData::Computed(source) = rounded(slice, rounding).data else { unreachable!("rows are computed") };
        let rows = source.quantized().expect("the rows are quantized");
        // What a device does for each row: it reads the codes, then the scale of each group.
        group.bench_function(BenchmarkId::from_parameter(name), |bencher| {
            let mut codes = vec![0; cols];
            bencher.iter(|| {
                for row in 0..num_rows {
                    rows.read_codes(row, 0..cols, &mut codes);
                    black_box(&codes);
                    for col in (0..cols).step_by(group_cols) {
                        black_box(rows.scale(row, col));
                    }
                }
            });
        });
    }
    group.finish();
}

criterion_group!(benches, rows);
criterion_main!(benches);
