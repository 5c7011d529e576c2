//! Events that the step thread sends to a request.

use engine::{BlockUsage, DraftUsage, MovedSequence, RowId, SampledToken, SequenceId, TokenEvent, TokenId};
use serving::{InferError, Timestamp};
use smallvec::smallvec;
use supervision::LogitsPiece;

/// One event of a request.
#[derive(Debug)]
pub(crate) enum RequestEvent {
    /// The ids of its sequences, which are queued.
    Accepted(Vec<SequenceId>),
    /// Logits of a sequence, before the tokens chosen from them.
    Logits(Box<LogitsPiece>),
    /// A sequence is scheduled: for the first time, or again after a preemption or a loss of workers. `start` is the number of the
    /// workers' start.
    Joined { sequence: SequenceId, at: Timestamp, start: u64 },
    /// One token of a running sequence: the most frequent event.
    Token(OneToken),
    /// Tokens of a sequence, or its end, with the time when their step was settled.
    Tokens(Box<TokenEvent>, Timestamp),
    /// A sequence's replica is lost. Another one is to go on with it.
    Moved(SequenceId, MovedSequence),
    /// Its client stopped it.
    Stop,
    /// It failed.
    Failed(InferError),
}

/// One token of a running sequence. It is small, because it passes through memory that is no longer cached.
#[derive(Debug)]
pub(crate) struct OneToken {
    pub(crate) sequence: SequenceId,
    pub(crate) row: RowId,
    pub(crate) token: TokenId,
    pub(crate) logprob: Option<f32>,
    pub(crate) blocks: BlockUsage,
    pub(crate) drafts: DraftUsage,
    /// When its step was settled.
    pub(crate) at: Timestamp,
}

impl RequestEvent {
    /// The event of a sequence's new tokens. `at` is the time when their step was settled.
    pub(crate) fn of(mut event: TokenEvent, at: Timestamp) -> Self {
        let TokenEvent { sequence, tokens, finished, blocks, drafts, beams, error: _ } = &mut event;
        match tokens.as_slice() {
            &[SampledToken { row, token, logprob, ref top }]
                if finished.is_none() && beams.is_empty() && top.is_empty() =>
            {
                let (sequence, blocks, drafts) = (*sequence, *blocks, *drafts);
                RequestEvent::Token(OneToken { sequence, row, token, logprob, blocks, drafts, at })
            }
            _ => RequestEvent::Tokens(Box::new(event), at),
        }
    }
}

impl OneToken {
    /// The engine's event, and the time when its step was settled.
    pub(crate) fn open(self) -> (TokenEvent, Timestamp) {
        let Self { sequence, row, token, logprob, blocks, drafts, at } = self;
        let tokens = smallvec![SampledToken { row, token, logprob, top: Vec::new() }];
        (TokenEvent { sequence, tokens, finished: None, blocks, drafts, beams: Vec::new(), error: None }, at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_convert_without_loss_and_are_small() {
        assert!(size_of::<RequestEvent>() <= 64, "{} bytes", size_of::<RequestEvent>());
        let token = SampledToken { row: RowId(3), token: TokenId(7), logprob: Some(-0.5), top: Vec::new() };
        let one = TokenEvent {
            sequence: SequenceId(9),
            tokens: smallvec![token.clone()],
            finished: None,
            blocks: BlockUsage { num_reused: 1, num_allocated: 2 },
            drafts: DraftUsage { num_drafted: 4, num_accepted: 3 },
            beams: Vec::new(),
            error: None,
        };
        let likely = SampledToken { top: vec![(TokenId(7), -0.5)], ..token.clone() };
        let others = [
            TokenEvent { finished: Some(engine::FinishReason::Length), ..one.clone() },
            TokenEvent { tokens: smallvec![token.clone(), token], ..one.clone() },
            TokenEvent { tokens: smallvec![likely], ..one.clone() },
            TokenEvent { tokens: smallvec![], ..one.clone() },
        ];
        let now = Timestamp::now();
        for (sent, is_small) in [(one, true)].into_iter().chain(others.map(|event| (event, false))) {
            let (came, at, is_one) = match RequestEvent::of(sent.clone(), now) {
                RequestEvent::Token(one) => (one.open().0, now, true),
                RequestEvent::Tokens(event, at) => (*event, at, false),
                other => panic!("{other:?}"),
            };
            assert_eq!((came, at, is_one), (sent, now, is_small));
        }
    }
}
