//! Responses of a text model.

use futures::future::join_all;
use generation::GenerateEvent;
use serving::{EventStream, InferError, InferRequest, InferResponse, ResponseSender, Tensor};

use super::row_text::RowText;
use super::{LOG_PROBS, Run, TextModel};
use crate::padding::pad_rows;

impl TextModel {
    /// A response with one piece of text for each prompt.
    fn response(&self, request: &InferRequest, rows: &[RowText], is_final: bool) -> InferResponse {
        let num_rows = rows.len() as i64;
        let shape = if self.is_nested { &[num_rows, 1][..] } else { &[num_rows] };
        let strings = |name: &str, of: fn(&RowText) -> &str| {
            Tensor::from_byte_strings(name, shape, &rows.iter().map(of).collect::<Vec<&str>>())
        };
        let is_declared = |name: &str| self.outputs.iter().any(|output| output == name);
        let mut outputs = vec![strings(&self.text_output, |row| &row.text)];
        if is_final && is_declared("finish_reason") {
            outputs.push(strings("finish_reason", RowText::finish_reason));
        }
        let (width, log_probs) = pad_rows(rows.iter().map(|row| row.log_probs.as_slice()), 0.0);
        if width > 0 {
            outputs.push(Tensor::from_f32(LOG_PROBS, &[num_rows, width as i64], &log_probs));
            if is_declared("cumulative_logprob") {
                let sums: Vec<f32> = rows.iter().map(|row| row.cum_log_prob).collect();
                outputs.push(Tensor::from_f32("cumulative_logprob", shape, &sums));
            }
        }
        outputs.retain(|output| request.wants_output(output.name.as_str()));
        InferResponse { outputs, is_final, id: request.id.clone(), ..InferResponse::default() }
    }

    /// Sends the responses to a request whose prompts the engine generates from.
    pub(super) async fn respond(
        self,
        request: InferRequest,
        mut runs: Vec<Run>,
        streaming: bool,
        sender: ResponseSender,
    ) {
        match (streaming, runs.pop()) {
            (true, Some((events, text))) => self.stream(request, events, text, sender).await,
            (_, last) => self.send_whole(request, runs.into_iter().chain(last).collect(), sender).await,
        }
    }

    /// Sends a response for each piece of text. The last one is final.
    async fn stream(self, request: InferRequest, mut events: EventStream, text: RowText, sender: ResponseSender) {
        let mut rows = [text];
        while let Some(event) = events.next_event().await {
            sender.mark_scheduled();
            report(&sender, &events);
            match event {
                Ok(GenerateEvent::Delta(delta)) => rows[0].push(delta),
                Ok(_) => continue,
                Err(error) => {
                    sender.send(Err(error)).await;
                    return;
                }
            }
            let is_final = rows[0].finished.is_some();
            if rows[0].text.is_empty() && !is_final {
                continue;
            }
            if !sender.send(Ok(self.response(&request, &rows, is_final))).await || is_final {
                return;
            }
            rows[0].clear();
        }
    }

    /// Sends one response with the whole text for every prompt.
    async fn send_whole(self, request: InferRequest, runs: Vec<Run>, sender: ResponseSender) {
        let sender = &sender;
        let whole = |(mut events, mut text): Run| async move {
            while let Some(event) = events.next_event().await {
                if let GenerateEvent::Delta(delta) = event? {
                    text.push(delta);
                }
            }
            report(sender, &events);
            Ok(text)
        };
        let texts: Vec<Result<RowText, InferError>> = join_all(runs.into_iter().map(whole)).await;
        sender.mark_scheduled();
        let rows: Result<Vec<_>, InferError> = texts.into_iter().collect();
        sender.send(rows.map(|rows| self.response(&request, &rows, true))).await;
    }
}

/// Reports the progress of the engine's request as that of this one.
fn report(sender: &ResponseSender, events: &EventStream) {
    events.generation().into_iter().for_each(|generation| sender.report(generation));
}
