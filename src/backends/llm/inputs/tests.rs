use serving::Tensor;

use super::super::check_request::check;
use super::sampling::effective_temperature;
use super::*;

#[test]
fn requests_are_greedy_where_tensorrt_llms_are() {
    // Temperature, top-k, top-p; what their decoder makes of it, 0 where it is greedy.
    for (temperature, top_k, top_p, expected) in [
        (None, 0, 0.0, 0.0),
        (Some(0.7), 0, 0.0, 0.0),
        (Some(0.7), 1, 0.0, 0.0),
        (Some(0.7), 1, 0.9, 0.0),
        (None, 0, 0.9, 1.0),
        (None, 0, 1.0, 1.0),
        (None, 50, 0.0, 1.0),
        (Some(0.7), 50, 0.0, 0.7),
        (Some(0.7), 0, 1.0, 0.7),
        (Some(0.0), 50, 0.9, 0.0),
    ] {
        let found = effective_temperature(temperature, top_k, top_p);
        assert_eq!(found, expected, "temperature {temperature:?}, top-k {top_k}, top-p {top_p}");
    }
}

/// A request with these numbers; `None` leaves an input out.
fn request(values: &[(&str, Option<i64>)]) -> InferRequest {
    let mut inputs = vec![Tensor::from_i32("input_ids", &[1, 3], &[1, 2, 3])];
    let given = values.iter().filter_map(|&(name, value)| Some((name, value?)));
    inputs.extend(given.map(|(name, value)| Tensor::from_i64(name, &[1, 1], &[value])));
    InferRequest { inputs, ..InferRequest::default() }
}

/// Every number that a client may send.
const NUMBERS: [&str; 12] = [
    "request_output_len",
    "beam_width",
    "num_return_sequences",
    "runtime_top_k",
    "min_tokens",
    "end_id",
    "seed",
    "input_lengths",
    "runtime_top_p_reset_ids",
    "top_k",
    "min_length",
    "random_seed",
];

const EXTREMES: [i64; 11] = [i64::MIN, -1, 0, 1, 2, 8, 9, i32::MAX as i64, u32::MAX as i64, 1 << 40, i64::MAX];

/// Checks that the sizes of a parsed request are within the model's bounds.
fn check_size(config: &LlmConfig, request: &InferRequest) {
    let Ok(Command::Generate(parsed)) = parse(config, request) else { return };
    let (max_rows, max_len) = (config.engine.max_rows, config.engine.max_sequence_len);
    let beams = parsed.generate.sequence.beams.map_or(1, |beams| beams.width as usize);
    assert!(parsed.generate.num_sequences <= max_rows && beams <= max_rows, "{parsed:?}");
    let responses = super::super::outputs::Responses::new(config, "1", request, &parsed, None);
    assert!(responses.num_sequences() <= max_rows);
    let Ok(logits_bytes) = check(config, &parsed.generate) else { return };
    assert!(logits_bytes <= (1 + max_rows as u64) * (max_len * config.vocab_size * 4) as u64, "{parsed:?}");
    assert!(parsed.generate.into_sequences().len() <= max_rows);
}

#[test]
fn no_single_number_sizes_memory_beyond_the_models_bounds() {
    let config = super::super::config::tests::llm_config();
    for name in NUMBERS {
        for value in EXTREMES {
            check_size(&config, &request(&[("request_output_len", Some(4)), (name, Some(value))]));
            let logits = [("return_context_logits", true), ("return_generation_logits", true)];
            let mut logits_too = request(&[("request_output_len", Some(i64::from(u32::MAX))), (name, Some(value))]);
            logits_too.inputs.extend(logits.map(|(flag, is_on)| Tensor::from_bool(flag, &[1, 1], &[is_on])));
            check_size(&config, &logits_too);
        }
    }
    let refused = |values: &[_]| match parse(&config, &request(values)) {
        Err(error) => error.message,
        Ok(_) => panic!("{values:?} was taken"),
    };
    let width = |width| [("request_output_len", Some(4)), ("beam_width", Some(width))];
    assert_eq!(refused(&width(2_000_000_000)), "beam width is 2000000000; it must be 2 to 8");
    assert_eq!(refused(&width(9)), "beam width is 9; it must be 2 to 8");
    let sequences = [("request_output_len", Some(4)), ("num_return_sequences", Some(i64::MAX))];
    assert!(refused(&sequences).starts_with("`num_return_sequences` is 9223372036854775807, expected 1 to 8"));
}

proptest::proptest! {
    #[test]
    fn numbers_together_size_no_memory_beyond_the_models_bounds(choices in proptest::collection::vec(0..=EXTREMES.len(), NUMBERS.len())) {
        let config = super::super::config::tests::llm_config();
        let value = |choice: usize| EXTREMES.get(choice).copied();
        let values: Vec<_> = NUMBERS.iter().zip(choices).map(|(name, choice)| (*name, value(choice))).collect();
        check_size(&config, &request(&values));
    }
}

#[test]
fn lists_of_words_are_bounded_in_number_and_length() {
    let config = super::super::config::tests::llm_config();
    let words = |lens: &[usize]| {
        let ids: usize = lens.iter().sum();
        let ends = lens.iter().scan(0, |end, len| {
            *end += *len as i32;
            Some(*end)
        });
        let mut values = vec![1; ids];
        values.extend(ends.chain(std::iter::repeat(-1)).take(ids));
        let mut request = request(&[("request_output_len", Some(4))]);
        request.inputs.push(Tensor::from_i32("stop_words_list", &[1, 2, ids as i64], &values));
        match parse(&config, &request).map_err(|error| error.message)? {
            Command::Generate(parsed) => check(&config, &parsed.generate).map(drop).map_err(|error| error.message),
            Command::Stop => panic!("the request stops nothing"),
        }
    };
    assert_eq!(words(&[2; 3072]), Ok(()));
    assert!(words(&[1; 3073]).unwrap_err().contains("--max-request-words"));
    assert_eq!(words(&[4098, 1]), Ok(()));
    assert!(words(&[4099, 1]).unwrap_err().contains("--max-word-bytes"));
    assert_eq!(words(&[4000; 5]).unwrap_err(), "stop words have 20000 tokens; at most 16384 are taken");
}
