use engine::{BlockUsage, DraftUsage, FinishReason, RowId, SampledToken};

use super::*;

const OUTPUTS: [&str; 9] = [
    "output_ids",
    "sequence_length",
    "cum_log_probs",
    "output_log_probs",
    "sequence_index",
    "sequence_end",
    "num_output_tokens",
    "kv_cache_reused_blocks",
    "context_phase_params",
];

const MORE_OUTPUTS: [&str; 12] = [
    "batch_index",
    "num_input_tokens",
    "kv_cache_alloc_new_blocks",
    "kv_cache_alloc_total_blocks",
    "total_draft_tokens",
    "total_accepted_draft_tokens",
    "acceptance_rate",
    "arrival_time_ns",
    "first_scheduled_time_ns",
    "first_token_time_ns",
    "last_token_time_ns",
    "kv_cache_reused_blocks",
];

/// Of one sequence, where a delta may follow a response.
pub(crate) fn streaming() -> Responses {
    let responses = responses(ResponseMode::Streaming, 1, &[]);
    Responses { changing: changing(&responses.outputs), ..responses }
}

fn generated(name: &str) -> Option<(Name, Value)> {
    Some((name.into(), Value::Generated(OutputKind::of(name)?)))
}

/// The response that a delta completes, where no deltas are accepted.
fn push(responses: &mut Responses, mut delta: Delta) -> Option<InferResponse> {
    match responses.push(&mut delta, false, &mut OutputDelta::default())? {
        OutputItem::Response(response) => Some(*response),
        OutputItem::Delta(_) => panic!("none was accepted"),
    }
}

fn responses(mode: ResponseMode, num_sequences: usize, prompt: &[u32]) -> Responses {
    Responses {
        changing: None,
        delta_base: None,
        id: "a".into(),
        model_name: "llm".into(),
        model_version: "1".into(),
        parameters: Arc::default(),
        outputs: OUTPUTS.iter().filter_map(|name| generated(name)).collect(),
        texts: None,
        mode,
        prompt: prompt.iter().map(|&id| TokenId(id)).collect(),
        num_input_tokens: 2,
        padding: TokenId(9),
        logits_form: LogitsForm { datatype: serving::DataType::Fp32, vocab_size: 1 },
        sequences: smallvec![Output::default(); num_sequences],
        num_open: num_sequences,
        arrived: (Timestamp::now(), SystemTime::now()),
    }
}

fn delta(index: usize, tokens: &[(u32, f32)], ends: bool) -> Delta {
    let token = |&(id, logprob): &(u32, f32)| SampledToken {
        row: RowId(0),
        token: TokenId(id),
        logprob: Some(logprob),
        top: Vec::new(),
    };
    let blocks = BlockUsage { num_reused: 2, num_allocated: 1 };
    let drafts = DraftUsage { num_drafted: 4, num_accepted: tokens.len() as u32 };
    let (tokens, at) = (tokens.iter().map(token).collect(), Timestamp::now());
    let finished = ends.then_some(FinishReason::Length);
    Delta { tokens, finished, blocks, drafts, ..Delta::new(index, at) }
}

fn output<'a>(response: &'a InferResponse, name: &str) -> &'a Tensor {
    response.outputs.iter().find(|tensor| tensor.name == name).unwrap()
}

fn ids(response: &InferResponse) -> Vec<i32> {
    output(response, "output_ids").to_i32().unwrap()
}

#[test]
fn a_stream_gets_each_token_once_and_is_final_when_all_sequences_have_ended() {
    let mut responses = responses(ResponseMode::Streaming, 2, &[]);
    let first = push(&mut responses, delta(1, &[(5, -0.5)], false)).unwrap();
    assert_eq!((ids(&first), first.is_final), (vec![5], false));
    assert_eq!(output(&first, "sequence_index").to_i32().unwrap(), [1]);
    assert_eq!(output(&first, "sequence_end").to_bool().unwrap(), [false]);
    assert!(push(&mut responses, delta(1, &[], false)).is_none());
    let second = push(&mut responses, delta(1, &[(6, -0.25), (7, -1.0)], true)).unwrap();
    assert_eq!((ids(&second), second.is_final), (vec![6, 7], false));
    assert_eq!(output(&second, "sequence_end").to_bool().unwrap(), [true]);
    assert_eq!(output(&second, "cum_log_probs").to_f32().unwrap(), [-1.75]);
    assert_eq!(output(&second, "output_log_probs").to_f32().unwrap(), [-0.25, -1.0]);
    let last = push(&mut responses, delta(0, &[], true)).unwrap();
    assert_eq!((ids(&last), last.is_final), (vec![], true));
    assert_eq!(output(&last, "output_ids").shape[..], [1, 1, 0]);
}

#[test]
fn deltas_lead_to_the_same_responses() {
    let arrived = (Timestamp::now(), SystemTime::now());
    let streaming = || {
        let mut streaming = responses(ResponseMode::Streaming, 2, &[]);
        streaming.outputs.extend(MORE_OUTPUTS.iter().filter_map(|name| generated(name)));
        streaming.outputs.push(("given".into(), Value::Given(Tensor::from_i32("other", &[1], &[7]))));
        streaming.changing = changing(&streaming.outputs);
        streaming.arrived = arrived;
        streaming
    };
    let (mut whole, mut in_deltas, mut last) = (streaming(), streaming(), InferResponse::default());
    let tokens = [(0, 1, false), (0, 1, false), (0, 1, false), (1, 1, false), (1, 1, false), (0, 2, false)];
    let (mut num_deltas, ends) = (0, [(0, 1, false), (0, 1, false), (0, 1, true), (1, 1, false), (1, 0, true)]);
    for (round, (index, count, ends)) in (10..).zip(tokens.into_iter().chain(ends)) {
        let at = Timestamp::now();
        let next = || Delta { at, ..delta(index, &vec![(round, -0.5); count], ends) };
        let response = push(&mut whole, next()).unwrap();
        let mut changes = OutputDelta::default();
        match in_deltas.push(&mut next(), true, &mut changes).unwrap() {
            OutputItem::Response(response) => last = *response,
            OutputItem::Delta(_) => {
                assert!(last.allows_delta && !response.is_final);
                changes.iter().for_each(|(index, elements)| last.outputs[index].data = elements.to_data());
                num_deltas += 1;
            }
        }
        assert_eq!((&last.outputs, last.is_final), (&response.outputs, response.is_final), "{round}");
    }
    assert_eq!(num_deltas, 4);
    let logits = [generated("output_ids").unwrap(), generated("generation_logits").unwrap()];
    assert!(changing(&logits).is_none(), "logits are taken, not copied");
}

#[test]
fn without_streaming_each_sequence_gets_one_response_at_its_end() {
    let mut responses = responses(ResponseMode::PerSequence, 2, &[3, 4]);
    assert!(push(&mut responses, delta(0, &[(5, -0.5)], false)).is_none());
    let first = push(&mut responses, delta(1, &[(8, -0.5)], true)).unwrap();
    assert_eq!((ids(&first), first.is_final), (vec![3, 4, 8], false));
    let second = push(&mut responses, delta(0, &[(6, -0.5)], true)).unwrap();
    assert_eq!((ids(&second), second.is_final), (vec![3, 4, 5, 6], true));
    assert_eq!(output(&second, "sequence_length").to_i32().unwrap(), [4]);
    assert_eq!(output(&second, "num_output_tokens").to_i32().unwrap(), [2]);
    assert_eq!(output(&second, "kv_cache_reused_blocks").to_i32().unwrap(), [2]);
    assert!(second.outputs.iter().all(|tensor| tensor.name != "context_phase_params"));
}

#[test]
fn a_model_that_is_not_decoupled_sends_one_response_with_padded_sequences() {
    let mut responses = responses(ResponseMode::Once, 2, &[3]);
    assert!(push(&mut responses, delta(1, &[(5, -0.5)], true)).is_none());
    let all = push(&mut responses, delta(0, &[(6, -0.5), (7, -0.25)], true)).unwrap();
    assert!(all.is_final);
    assert_eq!(output(&all, "output_ids").shape[..], [1, 2, 3]);
    assert_eq!(ids(&all), [3, 6, 7, 3, 5, 9]);
    assert_eq!(output(&all, "sequence_length").to_i32().unwrap(), [3, 2]);
    assert_eq!(output(&all, "cum_log_probs").to_f32().unwrap(), [-0.75, -0.5]);
    assert_eq!(output(&all, "output_log_probs").to_f32().unwrap(), [-0.5, -0.25, -0.5, 0.0]);
}
