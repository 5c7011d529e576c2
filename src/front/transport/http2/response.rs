//! Sending the response of a call over HTTP/2, within the client's flow-control window.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use h2::server::SendResponse;
use h2::{Reason, SendStream};
use http::Response;
use hyper::body::Body;

/// Why a response was not sent completely.
type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Sends the response that `response` resolves to. Stops when the client cancels the call, or when its window stays exhausted for
/// `timeout`.
pub async fn send<B>(
    response: impl Future<Output = Response<B>>,
    mut respond: SendResponse<Bytes>,
    timeout: Option<Duration>,
) where
    B: Body<Data = Bytes, Error: Into<Failure>>,
{
    let mut response = pin!(response);
    let response = poll_fn(|context| match response.as_mut().poll(context) {
        Poll::Ready(response) => Poll::Ready(Some(response)),
        Poll::Pending => respond.poll_reset(context).map(|_| None),
    });
    let Some(response) = response.await else { return };
    let (head, body) = response.into_parts();
    let is_whole = body.is_end_stream();
    match respond.send_response(Response::from_parts(head, ()), is_whole) {
        Ok(_) if is_whole => {}
        Ok(mut stream) => {
            if let Err(error) = send_body(body, &mut stream, timeout).await {
                tracing::debug!("a response was not sent completely: {error}");
                stream.send_reset(Reason::INTERNAL_ERROR);
            }
        }
        Err(error) => {
            tracing::debug!("a response could not be sent: {error}");
            respond.send_reset(Reason::INTERNAL_ERROR);
        }
    }
}

/// Returns without an error if the client cancels the call.
async fn send_body<B>(body: B, stream: &mut SendStream<Bytes>, timeout: Option<Duration>) -> Result<(), Failure>
where
    B: Body<Data = Bytes, Error: Into<Failure>>,
{
    let mut body = pin!(body);
    loop {
        let frame = poll_fn(|context| match stream.poll_reset(context) {
            Poll::Ready(_) => Poll::Ready(None),
            Poll::Pending => body.as_mut().poll_frame(context).map(Some),
        });
        let Some(frame) = frame.await else { return Ok(()) };
        let Some(frame) = frame.transpose().map_err(Into::into)? else {
            return Ok(stream.send_data(Bytes::new(), true)?);
        };
        match frame.into_data() {
            Ok(data) => {
                if !data.is_empty() && await_capacity(stream, timeout).await?.is_err() {
                    return Ok(());
                }
                let is_last = body.is_end_stream();
                stream.send_data(data, is_last)?;
                if is_last {
                    return Ok(());
                }
            }
            Err(frame) => {
                if let Ok(trailers) = frame.into_trailers() {
                    return Ok(stream.send_trailers(trailers)?);
                }
            }
        }
    }
}

/// Waits for capacity, at most `timeout`.
async fn await_capacity(
    stream: &mut SendStream<Bytes>,
    timeout: Option<Duration>,
) -> Result<Result<(), ClientGone>, Failure> {
    let mut capacity = poll_fn(|context| poll_capacity(stream, context));
    let Some(timeout) = timeout else { return Ok(capacity.await) };
    // Capacity is usually available at once, without a timer.
    if let Poll::Ready(capacity) = futures::poll!(&mut capacity) {
        return Ok(capacity);
    }
    let in_time = tokio::time::timeout(timeout, capacity).await;
    in_time.map_err(|_| format!("the flow-control window of the client was exhausted for {timeout:?}").into())
}

/// The client has cancelled the call or disconnected.
#[derive(Debug)]
pub struct ClientGone;

/// Ready when everything that was sent is written and the stream has capacity for more. Data beyond the capacity is buffered.
///
/// Reserves one byte only, and only if there is data to send: streams share the connection's window, so that a reservation of one
/// stream reduces the capacity of the others.
pub fn poll_capacity(stream: &mut SendStream<Bytes>, context: &mut Context<'_>) -> Poll<Result<(), ClientGone>> {
    stream.reserve_capacity(1);
    while stream.capacity() == 0 {
        match ready!(stream.poll_capacity(context)) {
            Some(Ok(_)) => {}
            Some(Err(_)) | None => return Poll::Ready(Err(ClientGone)),
        }
    }
    Poll::Ready(Ok(()))
}
