//! Requests of several rows, for an engine that takes one row per request.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use futures::future::join_all;
use futures::stream::{SelectAll, StreamExt as _};
use repository::ModelConfig;
use serving::{
    Backend, DataType, InferError, InferRequest, InferResponse, ResponseSender, ResponseStream, Shape, Tensor,
};

use super::adapter::Adapter;

/// Splits a request into its rows, and joins their responses. A decoupled model sends each row's responses as they arrive, with their
/// `batch_index`. Any other model sends one response for all rows.
pub(super) struct Rows {
    engine: Arc<dyn Backend>,
    is_batched: bool,
    is_decoupled: bool,
}

impl Rows {
    pub(super) fn new(engine: Arc<dyn Backend>, config: &ModelConfig) -> Self {
        Self { engine, is_batched: config.max_batch_size > 0, is_decoupled: config.is_decoupled() }
    }
}

impl Adapter for Rows {
    fn model(&self) -> &Arc<dyn Backend> {
        &self.engine
    }

    fn infer(&self, request: InferRequest) -> Result<ResponseStream, InferError> {
        let num_rows = request.inputs.first().and_then(|tensor| tensor.shape.first()).copied().unwrap_or(1);
        if !self.is_batched || num_rows <= 1 {
            return self.engine.infer(request);
        }
        let padding = padding(&request);
        let streams: Result<Vec<ResponseStream>, InferError> =
            split(request, num_rows)?.into_iter().map(|row| self.engine.infer(row)).collect();
        let streams = streams?;
        Ok(match self.is_decoupled {
            true => ResponseStream::from_future(|sender| each_row(streams, sender)),
            false => ResponseStream::from_future(|sender| all_rows(streams, sender, padding)),
        })
    }
}

/// The padding of shorter rows: `pad_id`, or else `end_id`, or else 0.
fn padding(request: &InferRequest) -> i32 {
    let id = |name: &str| request.input(name).and_then(|tensor| tensor.to_i32()?.first().copied());
    id("pad_id").or_else(|| id("end_id")).unwrap_or(0)
}

fn split(request: InferRequest, num_rows: i64) -> Result<Vec<InferRequest>, InferError> {
    let mut rows: Vec<InferRequest> =
        (0..num_rows).map(|_| InferRequest { inputs: Vec::new(), ..request.clone() }).collect();
    for tensor in &request.inputs {
        for (row, part) in rows.iter_mut().zip(tensor_rows(tensor, num_rows)?) {
            row.inputs.push(part);
        }
    }
    Ok(rows)
}

/// A tensor's rows, each with a batch dimension of 1.
fn tensor_rows(tensor: &Tensor, num_rows: i64) -> Result<Vec<Tensor>, InferError> {
    let wrong = || InferError::invalid(format!("input `{}` has no {num_rows} rows as others do", tensor.name));
    if tensor.shape.first() != Some(&num_rows) {
        return Err(wrong());
    }
    let count = usize::try_from(num_rows).map_err(|_| wrong())?;
    let mut shape = tensor.shape.clone();
    shape[0] = 1;
    let part = |data: Bytes| Tensor { shape: shape.clone(), data, ..tensor.clone() };
    if tensor.datatype == DataType::Bytes {
        let texts = tensor.to_byte_strings().ok_or_else(wrong)?;
        let per_row = texts.len() / count;
        let row = |row: usize| {
            Tensor::from_byte_strings(tensor.name.clone(), &shape, &texts[row * per_row..(row + 1) * per_row])
        };
        return Ok((0..count).map(row).collect());
    }
    let per_row = tensor.data.len() / count;
    Ok((0..count).map(|row| part(tensor.data.slice(row * per_row..(row + 1) * per_row))).collect())
}

/// Sends each row's responses as they arrive. The last of all is final.
async fn each_row(streams: Vec<ResponseStream>, sender: ResponseSender) {
    let numbered = |(row, stream): (usize, ResponseStream)| stream.map(move |item| (row, item)).boxed();
    let mut open = streams.len();
    let mut all: SelectAll<_> = streams.into_iter().enumerate().map(numbered).collect();
    loop {
        let Some((row, item)) = all.next().await else { return };
        sender.mark_scheduled();
        let item = item.map(|mut response| {
            open -= usize::from(response.is_final);
            response.is_final = open == 0;
            if let Some(index) = response.outputs.iter_mut().find(|tensor| tensor.name == "batch_index") {
                *index = Tensor::from_i32("batch_index", &[1, 1], &[i32::try_from(row).unwrap_or(i32::MAX)]);
            }
            response
        });
        let ends = item.as_ref().map_or(true, |response| response.is_final);
        if !sender.send(item).await || ends {
            return;
        }
    }
}

/// Sends one response for all rows, or the first error.
async fn all_rows(streams: Vec<ResponseStream>, sender: ResponseSender, padding: i32) {
    let responses = join_all(streams.into_iter().map(|mut stream| async move {
        stream.next_response().await.unwrap_or_else(|| Err(InferError::internal("a row was not answered")))
    }));
    let responses: Vec<Result<InferResponse, InferError>> = responses.await;
    sender.mark_scheduled();
    let joined = responses.into_iter().collect::<Result<Vec<_>, _>>().map(|rows| join(&rows, padding));
    sender.send(joined).await;
}

fn join(rows: &[InferResponse], padding: i32) -> InferResponse {
    let Some(first) = rows.first() else { return InferResponse::default() };
    let output = |tensor: &Tensor| {
        let parts: Vec<&Tensor> =
            rows.iter().filter_map(|row| row.outputs.iter().find(|other| other.name == tensor.name)).collect();
        let fill = if tensor.name == "output_ids" { padding } else { 0 };
        stack(&parts, fill)
    };
    InferResponse { outputs: first.outputs.iter().map(output).collect(), is_final: true, ..first.clone() }
}

/// Concatenates tensors of one row each. All dimensions are padded to the largest with `fill`.
fn stack(parts: &[&Tensor], fill: i32) -> Tensor {
    let num_rows = parts.len() as i64;
    let sizes = |at: usize| parts.iter().map(|part| part.shape[at]).max().unwrap_or(0);
    let shape: Shape = std::iter::once(num_rows).chain((1..parts[0].shape.len()).map(sizes)).collect();
    let size = parts[0].datatype.size().unwrap_or(0);
    let mut data = BytesMut::new();
    for part in parts {
        // Each row and sequence has one text, so there is nothing to pad.
        if size == 0 || part.shape[1..] == shape[1..] {
            data.extend_from_slice(&part.data);
        } else {
            fill_row(&part.data, &part.shape[1..], &shape[1..], &fill.to_le_bytes()[..size.min(4)], size, &mut data);
        }
    }
    Tensor { name: parts[0].name.clone(), datatype: parts[0].datatype, shape, data: data.freeze() }
}

fn fill_row(data: &[u8], from: &[i64], to: &[i64], fill: &[u8], size: usize, out: &mut BytesMut) {
    let count = |sizes: &[i64]| usize::try_from(sizes.iter().product::<i64>()).unwrap_or(0);
    let (Some((&from_size, inner_from)), Some((&to_size, inner_to))) = (from.split_first(), to.split_first()) else {
        return out.extend_from_slice(data);
    };
    let part = count(inner_from) * size;
    for index in 0..usize::try_from(from_size).unwrap_or(0) {
        fill_row(&data[index * part..(index + 1) * part], inner_from, inner_to, fill, size, out);
    }
    let missing = usize::try_from(to_size - from_size).unwrap_or(0) * count(inner_to) * size;
    out.extend(fill.iter().copied().cycle().take(missing));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shorter_rows_are_filled_in_every_dimension() {
        let one = Tensor::from_i32("output_ids", &[1, 2, 1], &[1, 2]);
        let two = Tensor::from_i32("output_ids", &[1, 1, 3], &[3, 4, 5]);
        let all = stack(&[&one, &two], 9);
        assert_eq!(all.shape[..], [2, 2, 3]);
        assert_eq!(all.to_i32().unwrap(), [1, 9, 9, 2, 9, 9, 3, 4, 5, 9, 9, 9]);
    }

    #[test]
    fn rows_of_numbers_and_of_texts_are_split() {
        let numbers = tensor_rows(&Tensor::from_i32("a", &[2, 2], &[1, 2, 3, 4]), 2).unwrap();
        assert_eq!(numbers[1].to_i32().unwrap(), [3, 4]);
        let texts = tensor_rows(&Tensor::from_byte_strings("b", &[2, 1], &["x", "yz"]), 2).unwrap();
        assert_eq!(
            (texts[1].shape.as_slice(), texts[1].to_byte_strings().unwrap()),
            (&[1, 1][..], vec![Bytes::from("yz")])
        );
        assert!(tensor_rows(&Tensor::from_i32("c", &[1, 2], &[1, 2]), 2).is_err());
    }
}
