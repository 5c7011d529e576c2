//! A response source that sends deltas.

use std::task::{Context, Poll};

use serving::{
    DeltaInfo, InferError, InferResponse, Name, OutputDelta, ResponseSource, StreamItem, Tensor, TextOutput,
    TextOutputs, Timestamp,
};

/// Ten responses with a piece and a constant note. Responses 1 to 8 are deltas where the reader accepts them. Every second
/// delta has `is_drained` set.
pub struct Deltas {
    pub next: i32,
    /// The outputs of a text ensemble, whose text is the piece.
    pub outputs: Option<TextOutputs>,
}

impl ResponseSource for Deltas {
    fn poll_next(
        &mut self,
        accepts_deltas: bool,
        delta: &mut OutputDelta,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<StreamItem, InferError>>> {
        let i = self.next;
        self.next += 1;
        let piece = Tensor::from_byte_strings("output_ids", &[1], &[format!("#{i}")]);
        if let Some(outputs) = &mut self.outputs
            && i < 10
        {
            outputs.calls.count(1000);
        }
        if (1..9).contains(&i) && accepts_deltas {
            let is_text = |(_, output): &(Name, TextOutput)| matches!(output, TextOutput::Text);
            let text = self.outputs.as_ref().and_then(|text| text.outputs.iter().position(is_text));
            delta.set(text.unwrap_or(0), piece.data);
            let now = Timestamp::now();
            return Poll::Ready(Some(Ok(StreamItem::Delta(DeltaInfo {
                is_drained: i % 2 == 0,
                computed: now,
                observed: now,
            }))));
        }
        let note = Tensor::from_byte_strings("cum_log_probs", &[1], &["same"]);
        let outputs = match &self.outputs {
            None => vec![piece, note.clone(), Tensor { name: "sequence_length".into(), ..note }],
            Some(text) => {
                let output = |(name, output): &(Name, TextOutput)| match output {
                    TextOutput::Text => Tensor { name: name.clone(), ..piece.clone() },
                    TextOutput::Given(tensor) => Tensor { name: name.clone(), ..tensor.clone() },
                    TextOutput::Generated(_) => Tensor { name: name.clone(), ..note.clone() },
                };
                text.outputs.iter().map(output).collect()
            }
        };
        let response = InferResponse { outputs, is_final: i == 9, allows_delta: i < 9, ..InferResponse::default() };
        Poll::Ready((i < 10).then(|| Ok(response.into())))
    }
}
