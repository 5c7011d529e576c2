//! The step plan, which rank 0 decides and every worker carries out, and the step output, which workers return.
//!
//! A plan is a delta against the rows that every worker keeps. It does not contain tokens that a device sampled: these
//! stay on the device between steps, so plan `n + 1` can be sent while step `n` runs.

use std::borrow::Cow;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::{AdapterSlot, BlockId, FilledSlot, HostSlot, RowId, SamplingParams, SequenceId, StateId, TokenId};

/// One forward pass, decided on rank 0. Every worker carries it out in this order: `left`, `adapters`, `joined`, `restored`, `host`,
/// `revised`, `copied`, `copied_states`, `grown`, then the forward pass over `work`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct StepPlan {
    /// Increases by one with each plan; a worker that sees a gap stops.
    pub step: u64,
    /// Rows whose sequence ended or was preempted: workers drop their state and the row is free.
    pub left: Vec<RowId>,
    /// Slots that receive the weights of an adapter. The weights were sent before the plan, in this order.
    pub adapters: Vec<FilledSlot>,
    /// Sequences that take a free row.
    pub joined: Vec<JoinedRow>,
    /// Copies between the device and the host.
    pub host: HostCopies,
    /// Rows whose tokens rank 0 replaces. All are replaced at once: each reads its parent as it was before any of them.
    pub revised: Vec<RevisedRow>,
    /// KV blocks that a row stops sharing. No block is both source and target.
    pub copied: Vec<CopiedBlock>,
    /// Recurrent states that are copied, one after the other.
    pub copied_states: Vec<CopiedState>,
    /// Rows whose recurrent state goes back, because drafts were rejected.
    pub restored: Vec<RestoredRow>,
    /// Blocks appended to a row's block tables, in order.
    pub grown: Vec<GrownTable>,
    /// Draft tokens: guesses at the tokens after the first of a row's work, in the order of `work`.
    pub drafts: Vec<(RowId, Vec<TokenId>)>,
    /// Recurrent states saved before the drafts of a row, in the order of `work`.
    pub saved_states: Vec<SavedState>,
    /// Whether what guesses drafts on the devices runs behind the step: over all tokens of the step, and again for further guesses.
    /// Without it no row has guesses, and the drafter lacks keys and values of these tokens.
    pub runs_drafter: bool,
    /// The rows of this step: prefill chunks first, then rows that verify drafts, then decodes of one token.
    pub work: Vec<RowWork>,
}

/// A sequence that takes a row, with all the state that a worker needs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JoinedRow {
    /// The row, which was free before.
    pub row: RowId,
    /// For logs and crash reports.
    pub sequence: SequenceId,
    /// The prompt, and after a preemption or restart the tokens generated so far.
    pub tokens: Vec<TokenId>,
    /// How many of `tokens` are the prompt; the rest counts as generated (penalties, `min_tokens`, seed position).
    pub num_prompt_tokens: u32,
    /// Positions `0..num_computed` are already in the KV blocks (prefix cache).
    pub num_computed: u32,
    /// The block tables so far, one for each KV group. They cover `num_computed` positions, as far as later positions
    /// can see them.
    pub tables: Vec<JoinedTable>,
    /// The slot of its recurrent state, if the model has such states. At position 0 the state is zero, whatever the slot holds.
    pub state: Option<StateId>,
    /// The slot of its adapter; `None` for the model itself.
    pub adapter: Option<AdapterSlot>,
    /// How its tokens are chosen.
    pub sampling: SamplingParams,
}

/// A worker carries out a plan only once all copies to the host of the plan that many plans before it are complete. So the output of a
/// step tells that they are: every worker has taken part in it, if it had work. What later plans store may be incomplete when a
/// worker dies.
pub const STORES_COMPLETE_AFTER: u64 = 2;

/// Copies of KV blocks and recurrent states between the device and slots of the host, in all layers. Those to the host come
/// before those from it, and all come before anything else that the plan writes to the device. No slot is in two entries.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct HostCopies {
    /// Blocks that are copied to slots for blocks.
    pub stored: Vec<(BlockId, HostSlot)>,
    /// Blocks that are copied from slots for blocks.
    pub loaded: Vec<(BlockId, HostSlot)>,
    /// States that are copied to slots for states.
    pub stored_states: Vec<(StateId, HostSlot)>,
    /// States that are copied from slots for states.
    pub loaded_states: Vec<(StateId, HostSlot)>,
}

impl HostCopies {
    /// Whether there is nothing to copy.
    pub fn is_empty(&self) -> bool {
        let Self { stored, loaded, stored_states, loaded_states } = self;
        stored.is_empty() && loaded.is_empty() && stored_states.is_empty() && loaded_states.is_empty()
    }
}

/// A block table of a row that joins.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct JoinedTable {
    /// Number of blocks before `blocks`, which no later position of the row sees.
    pub first: u32,
    /// The blocks from there on.
    pub blocks: Vec<BlockId>,
}

/// A block appended to a block table of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct GrownTable {
    /// The row.
    pub row: RowId,
    /// The KV group of the table.
    pub group: u32,
    /// The block.
    pub block: BlockId,
}

/// A row that continues from tokens chosen by rank 0: a beam, or a row whose drafts were verified. Tokens that a device
/// sampled for the row since then are ignored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RevisedRow {
    /// The row. If it was free before, it becomes a new beam.
    pub row: RowId,
    /// The row whose tokens, block table and sampling state it continues; may be the row itself.
    pub parent: RowId,
    /// Number of the parent's tokens to keep, prompt included.
    pub num_kept: u32,
    /// Tokens appended to those kept. All but the last are in the KV blocks.
    pub tokens: Vec<TokenId>,
}

/// A row's last block was shared. It is replaced by a copy, in all layers of its KV group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopiedBlock {
    /// The row whose block table changes.
    pub row: RowId,
    /// The KV group of the table.
    pub group: u32,
    /// The last block of that table.
    pub from: BlockId,
    /// The block that receives the copy and replaces `from`.
    pub to: BlockId,
}

/// A recurrent state is copied from one slot to another, in all layers that have one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopiedState {
    /// The slot that is read.
    pub from: StateId,
    /// The slot that is written.
    pub to: StateId,
}

/// The recurrent state of a row becomes a copy of one that was saved, and the row goes on from its position. Tokens of positions
/// that it computes again are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestoredRow {
    /// The row.
    pub row: RowId,
    /// The slot that is read.
    pub from: StateId,
    /// Number of positions that stay computed.
    pub position: u32,
}

/// A step saves the recurrent state of a row behind the first tokens of its work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedState {
    /// The row.
    pub row: RowId,
    /// How many tokens of its work come before.
    pub num_tokens: u32,
    /// The slot that is written.
    pub to: StateId,
}

/// The work of one row in a step: it computes positions `start..start + num_tokens`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowWork {
    /// The row.
    pub row: RowId,
    /// First position computed. Workers check that it equals the number of positions computed before.
    pub start: u32,
    /// 1 for a decode plus 1 for each draft; the chunk's length for a prefill.
    pub num_tokens: u32,
    /// Whether the last position's logits choose the row's next token (false for all but the last prefill chunk). With
    /// drafts, every position chooses one.
    pub samples: bool,
    /// If it samples: how many tokens the devices guess behind the last one that it chose. They may guess fewer.
    pub num_guesses: u32,
}

/// What a step produced, in the order of the plan's sampling rows.
///
/// On the wire, rows and tokens are two separate arrays that are decoded by one copy each. Log-probabilities follow,
/// only for the tokens that have them, then guesses.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(try_from = "Columns")]
pub struct StepOutput {
    /// The number of the plan.
    pub step: u64,
    /// One entry for each `RowWork` with `samples`, and one more for each of its drafts, in plan order.
    pub tokens: Vec<SampledToken>,
    /// For each row with [`RowWork::num_guesses`], guesses at the tokens behind its new ones, in plan order. Of a row that
    /// verified drafts the new tokens are those up to and including the first that is not its draft.
    pub guesses: Vec<(RowId, Vec<TokenId>)>,
}

/// A token chosen by a device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SampledToken {
    /// The row that chose it.
    pub row: RowId,
    /// The token.
    pub token: TokenId,
    /// Natural log-probability of `token` under the softmax of the raw logits, if the request has them.
    pub logprob: Option<f32>,
    /// The likeliest tokens and their log-probabilities, best first, if the request has them.
    pub top: Vec<(TokenId, f32)>,
}

/// The wire form of a [`StepOutput`]. It borrows the output's lists when it is written and owns them when it is read.
#[derive(Serialize, Deserialize)]
struct Columns<'a> {
    step: u64,
    rows: Words,
    tokens: Words,
    details: Vec<Detail<'a>>,
    guesses: Cow<'a, [(RowId, Vec<TokenId>)]>,
}

/// Index of the token in the output, its log-probability, and the likeliest tokens with theirs.
type Detail<'a> = (u32, Option<f32>, Cow<'a, [(TokenId, f32)]>);

/// An array of `u32`, serialized as little-endian bytes.
struct Words(Vec<u32>);

/// Serializes a list of words as little-endian bytes.
pub(crate) mod words {
    use serde::{Deserialize, Deserializer, Serializer};

    use super::Words;

    pub(crate) fn serialize<S: Serializer>(words: &[u32], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(bytemuck::cast_slice(words))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u32>, D::Error> {
        Ok(Words::deserialize(deserializer)?.0)
    }
}

impl Serialize for Words {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(bytemuck::cast_slice(&self.0))
    }
}

impl<'de> Deserialize<'de> for Words {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let bytes = <&[u8]>::deserialize(deserializer)?;
        Ok(Self(bytes.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect()))
    }
}

impl Serialize for StepOutput {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let rows = Words(self.tokens.iter().map(|sampled| sampled.row.0).collect());
        let tokens = Words(self.tokens.iter().map(|sampled| sampled.token.0).collect());
        let has_details = |sampled: &SampledToken| sampled.logprob.is_some() || !sampled.top.is_empty();
        let detailed = self.tokens.iter().enumerate().filter(|(_, sampled)| has_details(sampled));
        let details = detailed.map(|(index, sampled)| (index as u32, sampled.logprob, Cow::Borrowed(&*sampled.top)));
        let guesses = Cow::Borrowed(&*self.guesses);
        Columns { step: self.step, rows, tokens, details: details.collect(), guesses }.serialize(serializer)
    }
}

impl TryFrom<Columns<'_>> for StepOutput {
    type Error = &'static str;

    fn try_from(Columns { step, rows, tokens, details, guesses }: Columns<'_>) -> Result<Self, Self::Error> {
        if rows.0.len() != tokens.0.len() {
            return Err("rows and tokens differ in number");
        }
        let sampled =
            |(&row, &token)| SampledToken { row: RowId(row), token: TokenId(token), logprob: None, top: vec![] };
        let mut tokens: Vec<SampledToken> = rows.0.iter().zip(&tokens.0).map(sampled).collect();
        for (index, logprob, top) in details {
            let token = tokens.get_mut(index as usize).ok_or("details of a token that is not there")?;
            (token.logprob, token.top) = (logprob, top.into_owned());
        }
        Ok(Self { step, tokens, guesses: guesses.into_owned() })
    }
}

/// Why received bytes are not a valid plan or output.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // Fields are named in the messages.
pub enum PlanError {
    /// The checksum does not match: the bytes changed on the way.
    #[error("checksum of {} plan bytes is {found:08x}, expected {expected:08x}", .len)]
    Checksum { len: usize, expected: u32, found: u32 },
    /// The bytes cannot be decoded.
    #[error("cannot decode {len} plan bytes")]
    Decode { len: usize, source: postcard::Error },
}

/// Writes the bytes of `value` followed by their CRC-32 to `out`, which is cleared first.
pub fn encode<T: Serialize>(value: &T, out: &mut Vec<u8>) {
    out.clear();
    *out = postcard::to_extend(value, std::mem::take(out)).expect("plans hold nothing that cannot be serialized");
    let checksum = crc32fast::hash(out);
    out.extend_from_slice(&checksum.to_le_bytes());
}

/// Decodes what [`encode`] wrote.
///
/// # Errors
/// Returns an error if the checksum does not match or the bytes cannot be decoded.
pub fn decode<T: serde::de::DeserializeOwned>(bytes: &[u8]) -> Result<T, PlanError> {
    let (body, tail) = bytes.split_last_chunk::<4>().unwrap_or((&[], &[0; 4]));
    let (expected, found) = (u32::from_le_bytes(*tail), crc32fast::hash(body));
    if bytes.len() < 4 || expected != found {
        return Err(PlanError::Checksum { len: bytes.len(), expected, found });
    }
    postcard::from_bytes(body).map_err(|source| PlanError::Decode { len: body.len(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan() -> StepPlan {
        StepPlan {
            step: 7,
            left: vec![RowId(3)],
            adapters: vec![FilledSlot { slot: AdapterSlot(1), adapter: crate::AdapterId(5) }],
            joined: vec![JoinedRow {
                row: RowId(3),
                sequence: SequenceId(11),
                tokens: vec![TokenId(5), TokenId(31_999)],
                num_prompt_tokens: 2,
                num_computed: 0,
                tables: vec![JoinedTable { first: 0, blocks: vec![BlockId(9)] }],
                state: Some(StateId(2)),
                adapter: Some(AdapterSlot(1)),
                sampling: SamplingParams::default(),
            }],
            host: HostCopies {
                stored: vec![(BlockId(5), HostSlot(1))],
                loaded: vec![(BlockId(9), HostSlot(0))],
                stored_states: vec![(StateId(3), HostSlot(2))],
                loaded_states: vec![(StateId(2), HostSlot(4))],
            },
            revised: vec![RevisedRow { row: RowId(1), parent: RowId(2), num_kept: 6, tokens: vec![TokenId(8)] }],
            copied: vec![CopiedBlock { row: RowId(1), group: 0, from: BlockId(2), to: BlockId(3) }],
            copied_states: vec![CopiedState { from: StateId(1), to: StateId(2) }],
            restored: vec![RestoredRow { row: RowId(1), from: StateId(3), position: 5 }],
            grown: vec![GrownTable { row: RowId(1), group: 0, block: BlockId(4) }],
            drafts: vec![(RowId(2), vec![TokenId(8), TokenId(9)])],
            saved_states: vec![SavedState { row: RowId(2), num_tokens: 1, to: StateId(3) }],
            runs_drafter: true,
            work: vec![RowWork { row: RowId(3), start: 0, num_tokens: 2, samples: true, num_guesses: 3 }],
        }
    }

    #[test]
    fn a_plan_survives_the_wire() {
        let mut bytes = vec![1, 2, 3];
        encode(&plan(), &mut bytes);
        assert_eq!(decode::<StepPlan>(&bytes).unwrap(), plan());
    }

    #[test]
    fn an_output_survives_the_wire() {
        let token = |row, token, logprob, top: &[(u32, f32)]| SampledToken {
            row: RowId(row),
            token: TokenId(token),
            logprob,
            top: top.iter().map(|&(token, logprob)| (TokenId(token), logprob)).collect(),
        };
        let tokens = vec![
            token(3, 7, None, &[]),
            token(0, u32::MAX, Some(-0.5), &[]),
            token(2, 9, None, &[(9, -0.25), (1, -3.0)]),
            token(2, 1, Some(-1.0), &[(1, -1.0)]),
        ];
        let guesses = vec![(RowId(3), vec![TokenId(4), TokenId(5)]), (RowId(2), vec![])];
        let output = StepOutput { step: u64::MAX, tokens, guesses };
        let mut bytes = Vec::new();
        encode(&output, &mut bytes);
        assert_eq!(decode::<StepOutput>(&bytes).unwrap(), output);
        let odd =
            Columns { step: 1, rows: Words(vec![1]), tokens: Words(vec![]), details: vec![], guesses: vec![].into() };
        encode(&odd, &mut bytes);
        assert!(decode::<StepOutput>(&bytes).is_err());
    }

    #[test]
    fn an_output_has_the_bytes_of_its_columns() {
        let first = SampledToken { row: RowId(3), token: TokenId(513), logprob: None, top: vec![] };
        let top = vec![(TokenId(9), -0.25)];
        let second = SampledToken { row: RowId(1), token: TokenId(9), logprob: Some(-0.5), top };
        let mut bytes = Vec::new();
        encode(&StepOutput { step: 7, tokens: vec![first, second], guesses: vec![] }, &mut bytes);
        let rows = [8, 3, 0, 0, 0, 1, 0, 0, 0];
        let tokens = [8, 1, 2, 0, 0, 9, 0, 0, 0];
        let details = [1, 1, 1, 0, 0, 0, 0xbf, 1, 9, 0, 0, 0x80, 0xbe];
        let expected = [&[7][..], &rows, &tokens, &details, &[0]].concat();
        assert_eq!(bytes[..bytes.len() - 4], expected);
    }

    #[test]
    fn any_flipped_bit_is_found() {
        let mut bytes = Vec::new();
        encode(&plan(), &mut bytes);
        for bit in 0..bytes.len() * 8 {
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(matches!(decode::<StepPlan>(&bytes), Err(PlanError::Checksum { .. })), "bit {bit}");
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
    }
}
