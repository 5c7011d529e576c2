//! Loads weights from the checkpoint to the GPU: threads copy or compute chunks in pinned memory, from where the GPU
//! copies them.

use std::ops::Range;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use half::{bf16, f16};
use kernels::cuda::quantized_gemm::{PackedFormat, TILE};
use kernels::cuda::{CudaError, Event, Gpu, PinnedBuffer, Queue, Span};
use ops::{DType, DeviceError, HeadOrder, WeightData, WeightSlice};

/// Bytes of a chunk; each thread has two buffers.
const CHUNK_BYTES: usize = 4 << 20;
/// Maximum number of chunks that wait for a thread.
const MAX_WAITING: usize = 4096;

/// Rows of the checkpoint that become part of a matrix, converted to bf16.
#[derive(Debug, Clone)]
pub(crate) struct Part {
    pub(super) data: WeightData,
    dtype: DType,
    matrix_cols: usize,
    first_row: usize,
    rows: usize,
    first_col: usize,
    cols: usize,
    head_order: Option<HeadOrder>,
    /// An element `x` becomes `(x + offset) * factor`.
    offset: f32,
    factor: f32,
}

impl Part {
    pub(crate) fn new(slice: &WeightSlice<'_>) -> Result<Self, DeviceError> {
        let needed = slice.rows.end * slice.matrix_cols * slice.dtype.size();
        let num_bytes = match &slice.data {
            WeightData::Stored(bytes) => bytes.len(),
            WeightData::Computed(_) => needed,
        };
        if num_bytes < needed || slice.cols.end > slice.matrix_cols {
            return Err(DeviceError::Unsupported {
                what: format!("weight `{}`", slice.name),
                found: format!("{} bytes, columns up to {}", num_bytes, slice.cols.end),
                expected: format!("{needed} bytes, columns up to {}", slice.matrix_cols),
            });
        }
        Ok(Self {
            data: slice.data.clone(),
            dtype: slice.dtype,
            matrix_cols: slice.matrix_cols,
            first_row: slice.rows.start,
            rows: slice.rows.len(),
            first_col: slice.cols.start,
            cols: slice.cols.len(),
            head_order: slice.head_order,
            offset: 0.0,
            factor: 1.0,
        })
    }

    /// The same part, in which an element `x` becomes `(x + offset) * factor`.
    pub(crate) fn changed(self, offset: f32, factor: f32) -> Self {
        Self { offset, factor, ..self }
    }

    /// The elements of a vector as rows of one column.
    pub(crate) fn column(slice: &WeightSlice<'_>) -> Result<Self, DeviceError> {
        let row = Self::new(slice)?;
        let first_row = row.first_row * row.matrix_cols + row.first_col;
        Ok(Self { matrix_cols: 1, first_row, rows: row.cols, first_col: 0, cols: 1, ..row })
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// The columns of the stored matrix.
    pub(super) fn cols(&self) -> Range<usize> {
        self.first_col..self.first_col + self.cols
    }

    /// The row of the stored matrix that is row `row` of the part.
    pub(super) fn stored_row(&self, row: usize) -> usize {
        let row = self.first_row + row;
        self.head_order.map_or(row, |order| order.stored(row))
    }

    /// Writes row `row` as bf16 to `out` of `2 * cols` bytes.
    fn copy_row(&self, row: usize, out: &mut [u8]) {
        let size = self.dtype.size();
        let row = self.stored_row(row);
        let is_changed = self.offset != 0.0 || self.factor != 1.0;
        let mut computed = Vec::new();
        let from = match &self.data {
            WeightData::Stored(bytes) => {
                let start = (row * self.matrix_cols + self.first_col) * size;
                &bytes[start..start + self.cols * size]
            }
            WeightData::Computed(source) => {
                computed.resize(self.cols * size, 0);
                source.read_row(row, self.cols(), &mut computed);
                &computed[..]
            }
        };
        let convert = |out: &mut [u8], value: f32| {
            let value = if is_changed { (value + self.offset) * self.factor } else { value };
            out.copy_from_slice(&bf16::from_f32(value).to_le_bytes());
        };
        match self.dtype {
            DType::Bf16 if !is_changed => out.copy_from_slice(from),
            DType::Bf16 => {
                for (out, from) in out.chunks_exact_mut(2).zip(from.chunks_exact(2)) {
                    convert(out, bf16::from_le_bytes([from[0], from[1]]).to_f32());
                }
            }
            DType::F16 => {
                for (out, from) in out.chunks_exact_mut(2).zip(from.chunks_exact(2)) {
                    convert(out, f16::from_le_bytes([from[0], from[1]]).to_f32());
                }
            }
            DType::F32 => {
                for (out, from) in out.chunks_exact_mut(2).zip(from.chunks_exact(4)) {
                    convert(out, f32::from_le_bytes([from[0], from[1], from[2], from[3]]));
                }
            }
        }
    }
}

/// How the rows of several parts are ordered in one matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RowOrder {
    /// One part after the other.
    Stacked,
    /// Two parts with the same number of rows, in alternating groups of this number of rows.
    Interleaved(usize),
}

impl RowOrder {
    /// The part, and the row in it, of row `row` of the matrix; `sizes` are the numbers of rows of the parts.
    pub(super) fn source(self, sizes: &[usize], row: usize) -> (usize, usize) {
        match self {
            RowOrder::Interleaved(group) => {
                let (pair, within) = (row / (2 * group), row % (2 * group));
                (within / group, pair * group + within % group)
            }
            RowOrder::Stacked => {
                let mut row = row;
                for (index, &size) in sizes.iter().enumerate() {
                    if row < size {
                        return (index, row);
                    }
                    row -= size;
                }
                unreachable!("row {row} is beyond the parts of its matrix")
            }
        }
    }
}

/// What is loaded of the rows of a matrix.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Form {
    /// Their values in bf16.
    Values,
    /// Their codes.
    Codes(PackedFormat),
    /// The scales of whole tiles of rows.
    Scales(PackedFormat),
}

impl Form {
    /// Rows that are loaded together at least, and their bytes; each has `cols` columns.
    fn unit(self, cols: usize) -> (usize, usize) {
        match self {
            Form::Values => (1, 2 * cols),
            Form::Codes(format) => (1, format.row_bytes(cols)),
            Form::Scales(format) => (TILE, format.tile_meta_bytes(cols)),
        }
    }
}

struct Job {
    parts: Arc<[Part]>,
    /// Numbers of rows of the parts.
    sizes: Arc<[usize]>,
    order: RowOrder,
    form: Form,
    rows: Range<usize>,
    to: Span,
}

/// Threads that load weights while the rest of the model is prepared.
pub(crate) struct Loader {
    jobs: Option<SyncSender<Job>>,
    threads: Vec<JoinHandle<()>>,
    failure: Arc<Mutex<Option<CudaError>>>,
}

impl Loader {
    pub(crate) fn new(gpu: &Arc<Gpu>) -> Result<Self, CudaError> {
        let num_threads = std::thread::available_parallelism().map_or(4, |n| n.get()).clamp(1, 16);
        let (jobs, queue) = sync_channel(MAX_WAITING);
        let queue = Arc::new(Mutex::new(queue));
        let failure = Arc::new(Mutex::new(None));
        let threads = (0..num_threads)
            .map(|_| {
                let (gpu, queue, failure) = (gpu.clone(), queue.clone(), failure.clone());
                std::thread::spawn(move || {
                    if let Err(error) = run(&gpu, &queue) {
                        failure.lock().expect("no panic holds it").get_or_insert(error);
                    }
                })
            })
            .collect();
        Ok(Self { jobs: Some(jobs), threads, failure })
    }

    /// Queues the loading of the matrix of `parts`, all with the same columns, into `to`.
    pub(crate) fn load(&mut self, parts: Vec<Part>, order: RowOrder, form: Form, to: Span) -> Result<(), DeviceError> {
        let sizes: Arc<[usize]> = parts.iter().map(Part::rows).collect();
        let rows: usize = sizes.iter().sum();
        let (unit_rows, unit_bytes) = form.unit(parts.first().map_or(0, |part| part.cols));
        let parts: Arc<[Part]> = parts.into();
        let step = unit_rows * (CHUNK_BYTES / unit_bytes.max(1)).max(1);
        for first in (0..rows).step_by(step) {
            let rows = first..rows.min(first + step);
            let to = to.part(first / unit_rows * unit_bytes, rows.len().div_ceil(unit_rows) * unit_bytes);
            let job = Job { parts: parts.clone(), sizes: sizes.clone(), order, form, rows, to };
            let jobs = self.jobs.as_ref().expect("weights are loaded before the cache is allocated");
            if jobs.send(job).is_err() {
                return self.finish();
            }
        }
        Ok(())
    }

    /// Waits until all weights are on the device, and returns the first error. Nothing can be loaded afterwards.
    pub(crate) fn finish(&mut self) -> Result<(), DeviceError> {
        drop(self.jobs.take());
        for thread in self.threads.drain(..) {
            thread.join().expect("a loading thread does not panic");
        }
        match self.failure.lock().expect("no panic holds it").take() {
            Some(error) => Err(super::device_error(error)),
            None => Ok(()),
        }
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        // An error was already reported, or the device is being dropped anyway.
        let _ = self.finish();
    }
}

/// Processes chunks until there are none: fills one pinned buffer while the GPU copies the other.
fn run(gpu: &Arc<Gpu>, jobs: &Mutex<Receiver<Job>>) -> Result<(), CudaError> {
    gpu.bind()?;
    let queue = Queue::new(gpu)?;
    let mut buffers: Vec<(PinnedBuffer, Event)> = Vec::new();
    let mut turn = 0;
    loop {
        let job = jobs.lock().expect("no panic holds it").recv();
        let Ok(job) = job else { break };
        if buffers.len() < 2 {
            buffers.push((PinnedBuffer::new(gpu, CHUNK_BYTES.max(job.to.bytes()))?, Event::new(false)?));
            turn = buffers.len() - 1;
        }
        if buffers[turn].0.len() < job.to.bytes() {
            buffers[turn].1.wait()?;
            buffers[turn].0 = PinnedBuffer::new(gpu, job.to.bytes())?;
        }
        let (buffer, fetched) = &mut buffers[turn];
        fetched.wait()?;
        fill(&job, &mut buffer[..job.to.bytes()]);
        // SAFETY: the buffer is pinned and not written before `fetched` says that the copy has run.
        unsafe { queue.upload(job.to, buffer.as_ptr(), job.to.bytes())? };
        fetched.record(&queue)?;
        turn = (turn + 1) % 2;
    }
    queue.wait()
}

fn fill(job: &Job, out: &mut [u8]) {
    let cols = job.parts[0].cols;
    let (unit_rows, unit_bytes) = job.form.unit(cols);
    let mut codes = Vec::new();
    match job.form {
        Form::Values => {}
        Form::Codes(_) => codes.resize(cols, 0),
        // Rows that a tile lacks have scales of 0.
        Form::Scales(_) => out.fill(0),
    }
    for (index, row) in job.rows.clone().enumerate() {
        let (part, from) = job.order.source(&job.sizes, row);
        let part = &job.parts[part];
        let out = &mut out[index / unit_rows * unit_bytes..][..unit_bytes];
        match job.form {
            Form::Values => part.copy_row(from, out),
            Form::Codes(format) => part.pack_row(from, format, &mut codes, out),
            Form::Scales(format) => part.pack_scales(from, format, out, row % TILE),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(rows: usize, start: u16) -> Part {
        let values: Vec<u8> =
            (0..rows as u16 * 4).flat_map(|i| bf16::from_f32((start + i) as f32).to_le_bytes()).collect();
        let slice = WeightSlice {
            name: "w",
            data: WeightData::Stored(values.into()),
            dtype: DType::Bf16,
            matrix_cols: 4,
            rows: 0..rows,
            cols: 1..3,
            head_order: None,
        };
        Part::new(&slice).unwrap()
    }

    #[test]
    fn rows_come_from_the_requested_part_and_columns() {
        let parts = [part(3, 0), part(2, 100)];
        let mut out = [0; 4];
        let (index, row) = RowOrder::Stacked.source(&[3, 2], 4);
        parts[index].copy_row(row, &mut out);
        let values = [bf16::from_le_bytes([out[0], out[1]]), bf16::from_le_bytes([out[2], out[3]])];
        assert_eq!(values.map(bf16::to_f32), [105.0, 106.0]);
    }

    #[test]
    fn interleaving_takes_groups_of_both_parts_in_turn() {
        let order = RowOrder::Interleaved(2);
        let sources: Vec<_> = (0..8).map(|row| order.source(&[4, 4], row)).collect();
        assert_eq!(sources, [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]);
    }
}
