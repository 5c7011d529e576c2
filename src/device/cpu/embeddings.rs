//! Embeddings of tokens and positions.

use ops::DeviceError;

use super::{CpuDevice, CpuTensor, CpuWeight, out_of_range};

impl CpuDevice {
    pub(super) fn embed_tokens(
        &mut self,
        out: &mut CpuTensor,
        table: &CpuWeight,
        scale: f32,
    ) -> Result<(), DeviceError> {
        let (matrix, first_row) = table.matrix();
        let width = out.cols;
        let out = out.rows_mut(self.token_ids.len());
        for (out, token) in out.chunks_exact_mut(width).zip(&self.token_ids) {
            match (*token as usize).checked_sub(first_row).filter(|row| *row < matrix.rows()) {
                Some(row) => {
                    matrix.read_row(row, out);
                    out.iter_mut().for_each(|out| *out *= scale);
                }
                None => out.fill(0.0),
            }
        }
        let Some(group) = &mut self.group else { return Ok(()) };
        let mine = out.to_vec();
        group.exchange_rows("summing embeddings", &mine, width, |rows, parts| {
            let out = &mut out[rows.start * width..rows.end * width];
            for (index, out) in out.iter_mut().enumerate() {
                *out = parts.iter().map(|part| part[index]).sum();
            }
        })
    }

    pub(super) fn add_learned_positions(&mut self, out: &mut CpuTensor, table: &CpuWeight) -> Result<(), DeviceError> {
        let (matrix, _) = table.matrix();
        let width = out.cols;
        let mut row = vec![0.0; width];
        for (out, position) in out.data.chunks_exact_mut(width).zip(&self.inputs.positions) {
            if *position as usize >= matrix.rows() {
                return Err(out_of_range("position", *position, matrix.rows()));
            }
            matrix.read_row(*position as usize, &mut row);
            out.iter_mut().zip(&row).for_each(|(out, row)| *out += row);
        }
        Ok(())
    }
}
