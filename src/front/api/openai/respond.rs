//! Sends an answer: at once, or as server-sent events. The form of both is that of an [`AnswerFormat`].

use bytes::Bytes;
use futures::StreamExt as _;
use futures::stream::{BoxStream, unfold};
use http::StatusCode;
use serving::InferError;

use super::choices::Piece;
use super::error::ApiError;
use crate::api::triton::http::reply::{EVENTS, JSON, Reply, reply};
use crate::transport::body::ReplyBody;
use crate::transport::budget::Charge;
use crate::transport::large_work::block_in_place_in_turn;

/// Pieces of all choices, in the order in which they are generated.
pub(crate) type Pieces = BoxStream<'static, Result<Piece, InferError>>;

/// The form of the answers of one endpoint.
pub(crate) trait AnswerFormat: Send {
    /// The whole answer as JSON. `choices` has one piece for each choice.
    fn whole(&mut self, choices: Vec<Piece>) -> Vec<u8>;

    /// The events before the first piece.
    fn begin(&mut self) -> Bytes;

    /// The events of one piece.
    fn piece(&mut self, piece: Piece) -> Bytes;

    /// The events after the last piece. `has_failed`: an error was sent before.
    fn end(&mut self, has_failed: bool) -> Bytes;

    /// The event of an error that ends the answer.
    fn error(&mut self, error: &ApiError) -> Bytes;
}

/// Sends the answer. `charge` is held until it is complete.
///
/// # Errors
/// The model's error, where it comes before the first piece.
pub(super) async fn respond(
    pieces: Pieces,
    count: usize,
    format: Box<dyn AnswerFormat>,
    is_stream: bool,
    charge: Charge,
) -> Result<Reply, ApiError> {
    if is_stream { stream(pieces, format, charge).await } else { whole(pieces, count, format).await }
}

async fn whole(mut pieces: Pieces, count: usize, mut format: Box<dyn AnswerFormat>) -> Result<Reply, ApiError> {
    let mut choices: Vec<Piece> = (0..count).map(Piece::empty).collect();
    while let Some(piece) = pieces.next().await {
        let piece = piece?;
        choices[piece.index].join(piece);
    }
    let num_bytes = choices.iter().map(Piece::num_bytes).sum();
    let answer = block_in_place_in_turn(num_bytes, || format.whole(choices)).await;
    Ok(reply(StatusCode::OK, JSON, answer))
}

/// Which events come next.
enum Step {
    Begin(Option<Piece>),
    Pieces,
    End { has_failed: bool },
    Done,
}

/// The events of one piece. One with the log-probabilities of a long prompt is written beside other requests.
async fn write_piece(format: &mut Box<dyn AnswerFormat>, piece: Piece) -> Bytes {
    block_in_place_in_turn(piece.num_bytes(), || format.piece(piece)).await
}

/// The first piece decides the status.
async fn stream(mut pieces: Pieces, format: Box<dyn AnswerFormat>, charge: Charge) -> Result<Reply, ApiError> {
    let first = pieces.next().await.transpose()?;
    let state = (Step::Begin(first), pieces, format, charge);
    let events = unfold(state, |(step, mut pieces, mut format, charge)| async move {
        let (events, next) = match step {
            Step::Begin(first) => {
                let mut events = format.begin().to_vec();
                if let Some(piece) = first {
                    events.extend_from_slice(&write_piece(&mut format, piece).await);
                }
                (events.into(), Step::Pieces)
            }
            Step::Pieces => match pieces.next().await {
                Some(Ok(piece)) => (write_piece(&mut format, piece).await, Step::Pieces),
                Some(Err(error)) => (format.error(&error.into()), Step::End { has_failed: true }),
                None => (format.end(false), Step::Done),
            },
            Step::End { has_failed } => (format.end(has_failed), Step::Done),
            Step::Done => return None,
        };
        Some((events, (next, pieces, format, charge)))
    });
    // An empty chunk would end an HTTP/1.1 body.
    let events = events.filter(|events| std::future::ready(!events.is_empty()));
    Ok(reply(StatusCode::OK, EVENTS, ReplyBody::Events(Box::pin(events))))
}
