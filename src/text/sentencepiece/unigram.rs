use super::pieces::{Found, Pieces};

/// Difference between the lowest score of a piece and that of an unknown character.
const UNKNOWN_PENALTY: f32 = 10.0;
/// Score of a user-defined piece for each byte after the first, as in sentencepiece 0.2.3; its own score is not used.
const USER_DEFINED_SCORE: f32 = 0.1;

/// The best path to a position in the text.
#[derive(Clone, Copy)]
struct Best {
    score: f32,
    start: Option<usize>,
    id: Option<u32>,
}

/// The most likely pieces of a normalized text (Kudo 2018): the best path from left to right. Scores are added in the precision of
/// the published implementation, so that ties are resolved the same way.
pub(super) fn encode(text: &str, pieces: &Pieces, found: &mut Vec<Found>) {
    let mut best = vec![Best { score: 0.0, start: None, id: None }; text.len() + 1];
    let update = |best: &mut [Best], start: usize, end: usize, score: f32, id: Option<u32>| {
        if best[end].start.is_none() || score > best[end].score {
            best[end] = Best { score, start: Some(start), id };
        }
    };
    for (start, c) in text.char_indices() {
        let so_far = best[start].score;
        let mut has_character = false;
        for (len, id) in pieces.all.prefixes(&text.as_bytes()[start..]) {
            if pieces.is_unused(id) {
                continue;
            }
            let score = match pieces.is_user_defined(id) {
                true => USER_DEFINED_SCORE * (len - 1) as f32,
                false => pieces.scores[id as usize],
            };
            update(&mut best, start, start + len, score + so_far, Some(id));
            has_character |= len == c.len_utf8();
        }
        if !has_character {
            let score = pieces.min_score - UNKNOWN_PENALTY + so_far;
            update(&mut best, start, start + c.len_utf8(), score, None);
        }
    }
    let first = found.len();
    let mut end = text.len();
    while let Some(start) = best[end].start {
        found.push(Found { len: end - start, id: best[end].id });
        end = start;
    }
    found[first..].reverse();
}
