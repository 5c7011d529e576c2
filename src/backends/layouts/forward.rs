//! Forwards the responses of a stream.

use serving::{InferResponse, ResponseSender, ResponseStream};

/// The responses of `stream`, each changed by `change`.
pub(super) fn mapped(
    stream: ResponseStream,
    change: impl Fn(InferResponse) -> InferResponse + Send + 'static,
) -> ResponseStream {
    ResponseStream::from_future(|sender| async move { forward(stream, &sender, change).await })
}

/// Sends the responses of `stream` to `sender`, until the stream ends or the client disconnects.
pub(super) async fn forward(
    mut stream: ResponseStream,
    sender: &ResponseSender,
    mut change: impl FnMut(InferResponse) -> InferResponse,
) {
    sender.report_progress_of(&stream);
    loop {
        let item = tokio::select! {
            item = stream.next_response() => item,
            () = sender.cancelled() => return,
        };
        let Some(item) = item else { return };
        sender.mark_scheduled();
        let ends = item.as_ref().map_or(true, |response| response.is_final);
        if !sender.send(item.map(&mut change)).await || ends {
            return;
        }
    }
}
