//! A text model's responses.

use futures::future::join_all;
use serving::{InferError, InferRequest, InferResponse, ResponseSender, ResponseStream, Tensor};

use super::super::text_values::{Answer, RunningText};
use super::{LOG_PROBS, Run, TextModel};

impl TextModel {
    fn response(&self, request: &InferRequest, rows: &[Answer], is_final: bool) -> InferResponse {
        let shape = if self.is_nested { vec![rows.len() as i64, 1] } else { vec![rows.len() as i64] };
        let asked =
            |name: &str| request.requested_outputs.is_empty() || request.requested_outputs.iter().any(|it| it == name);
        let declared = |name: &str| self.outputs.iter().any(|output| output == name);
        let texts: Vec<&str> = rows.iter().map(|row| row.text.as_str()).collect();
        let mut outputs = vec![Tensor::from_byte_strings(&self.text_output, &shape, &texts)];
        if is_final && declared("finish_reason") {
            let reasons: Vec<&str> = rows.iter().map(|row| row.finish_reason).collect();
            outputs.push(Tensor::from_byte_strings("finish_reason", &shape, &reasons));
        }
        let longest = rows.iter().map(|row| row.log_probs.len()).max().unwrap_or(0);
        if longest > 0 {
            // Rows that are shorter end in zeros.
            let mut values = Vec::with_capacity(rows.len() * longest);
            for row in rows {
                values.extend(&row.log_probs);
                values.resize(values.len() + longest - row.log_probs.len(), 0.0);
            }
            outputs.push(Tensor::from_f32(LOG_PROBS, &[rows.len() as i64, longest as i64], &values));
            if declared("cumulative_logprob") {
                let sums: Vec<f32> = rows.iter().map(|row| row.cumulative).collect();
                outputs.push(Tensor::from_f32("cumulative_logprob", &shape, &sums));
            }
        }
        outputs.retain(|output| asked(&output.name));
        InferResponse { outputs, is_final, id: request.id.clone(), ..InferResponse::default() }
    }

    pub(super) async fn respond(
        self,
        request: InferRequest,
        mut runs: Vec<Run>,
        streaming: bool,
        sender: ResponseSender,
    ) {
        match (streaming, runs.pop()) {
            (true, Some((engine, text))) => self.stream(request, engine, text, sender).await,
            (_, last) => self.answer(request, runs.into_iter().chain(last).collect(), sender).await,
        }
    }

    /// A response for each piece of text, the last of them final.
    async fn stream(
        self,
        request: InferRequest,
        mut engine: ResponseStream,
        mut text: RunningText,
        sender: ResponseSender,
    ) {
        loop {
            let item = engine.next_response().await;
            sender.mark_scheduled();
            engine.generation().into_iter().for_each(|told| sender.report(told));
            let response = match item {
                None => return,
                Some(Err(error)) => {
                    sender.send(Err(error)).await;
                    return;
                }
                Some(Ok(response)) => response,
            };
            text.push(&response);
            if text.piece.is_empty() && !response.is_final {
                continue;
            }
            let told = self.response(&request, &[text.take()], response.is_final);
            if !sender.send(Ok(told)).await || response.is_final {
                return;
            }
        }
    }

    /// One response with the whole text of every prompt.
    async fn answer(self, request: InferRequest, runs: Vec<Run>, sender: ResponseSender) {
        let report = |engine: &ResponseStream| engine.generation().into_iter().for_each(|told| sender.report(told));
        let whole = |(mut engine, mut text): Run| async move {
            while let Some(item) = engine.next_response().await {
                text.push(&item?);
            }
            report(&engine);
            Ok(text.take())
        };
        let texts: Vec<Result<Answer, InferError>> = join_all(runs.into_iter().map(whole)).await;
        sender.mark_scheduled();
        let rows: Result<Vec<_>, InferError> = texts.into_iter().collect();
        sender.send(rows.map(|rows| self.response(&request, &rows, true))).await;
    }
}
