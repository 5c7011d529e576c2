//! One call over HTTP/2: its answer and the answer's body, sent as far as the client has room.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use h2::server::SendResponse;
use h2::{Reason, SendStream};
use http::Response;
use hyper::body::Body;

/// Why an answer was not sent to its end.
type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Sends what `answer` resolves to. Both end when the client takes the call back, or has no room for longer than `patience`.
pub async fn send<B>(
    answer: impl Future<Output = Response<B>>,
    mut respond: SendResponse<Bytes>,
    patience: Option<Duration>,
) where
    B: Body<Data = Bytes, Error: Into<Failure>>,
{
    let mut answer = pin!(answer);
    let answer = poll_fn(|context| match answer.as_mut().poll(context) {
        Poll::Ready(answer) => Poll::Ready(Some(answer)),
        Poll::Pending => respond.poll_reset(context).map(|_| None),
    });
    let Some(answer) = answer.await else { return };
    let (head, body) = answer.into_parts();
    let is_whole = body.is_end_stream();
    match respond.send_response(Response::from_parts(head, ()), is_whole) {
        Ok(_) if is_whole => {}
        Ok(mut stream) => {
            if let Err(error) = send_body(body, &mut stream, patience).await {
                tracing::debug!("an answer broke off: {error}");
                stream.send_reset(Reason::INTERNAL_ERROR);
            }
        }
        Err(error) => {
            tracing::debug!("an answer could not begin: {error}");
            respond.send_reset(Reason::INTERNAL_ERROR);
        }
    }
}

/// Ends without an error, too, when the client takes the call back.
async fn send_body<B>(body: B, stream: &mut SendStream<Bytes>, patience: Option<Duration>) -> Result<(), Failure>
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
                if !data.is_empty() && room(stream, patience).await?.is_err() {
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

/// Waits for room, but no longer than `patience`.
async fn room(stream: &mut SendStream<Bytes>, patience: Option<Duration>) -> Result<Result<(), Gone>, Failure> {
    let mut room = poll_fn(|context| poll_room(stream, context));
    let Some(patience) = patience else { return Ok(room.await) };
    // Most answers find room at once, and need no timer.
    if let Poll::Ready(room) = futures::poll!(&mut room) {
        return Ok(room);
    }
    let in_time = tokio::time::timeout(patience, room).await;
    in_time.map_err(|_| format!("its client has made no room for it in {patience:?}").into())
}

/// The client has taken its call back, or is gone.
#[derive(Debug)]
pub struct Gone;

/// Ready when all that was sent is on its way and the client has room for more: what is sent then is kept until it leaves.
///
/// No more than a byte is asked for, and only for data that is there: streams share the connection's window, and what one
/// holds back the others lack.
pub fn poll_room(stream: &mut SendStream<Bytes>, context: &mut Context<'_>) -> Poll<Result<(), Gone>> {
    stream.reserve_capacity(1);
    while stream.capacity() == 0 {
        match ready!(stream.poll_capacity(context)) {
            Some(Ok(_)) => {}
            Some(Err(_)) | None => return Poll::Ready(Err(Gone)),
        }
    }
    Poll::Ready(Ok(()))
}
