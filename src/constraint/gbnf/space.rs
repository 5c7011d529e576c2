//! White space at the end of a part of a grammar.

use super::node::{Node, class, repeated};
use crate::lark::literal;

/// Nodes that a search for white space visits, and that its result may hold.
const MAX_VISITS: usize = 2_000;
/// Rules within rules that it follows.
const MAX_DEPTH: usize = 64;

/// What is left of a search.
struct Budget {
    visits: usize,
}

impl Budget {
    fn take(&mut self, depth: usize) -> bool {
        self.visits = self.visits.saturating_sub(1);
        self.visits > 0 && depth < MAX_DEPTH
    }
}

/// A part without recursion as what comes before its white space, and that white space. A part whose search is long stays whole.
pub(super) fn split(bodies: &[Node], node: &Node) -> (Option<Node>, Vec<Node>) {
    let mut budget = Budget { visits: MAX_VISITS };
    let (head, tail) = split_at(bodies, node, &mut budget, 0);
    match budget.visits {
        0 => (Some(node.clone()), Vec::new()),
        _ => (head, tail),
    }
}

fn split_at(bodies: &[Node], node: &Node, budget: &mut Budget, depth: usize) -> (Option<Node>, Vec<Node>) {
    if is_space(bodies, node, budget, depth) {
        return (None, vec![node.clone()]);
    }
    let whole = || (Some(node.clone()), Vec::new());
    if !budget.take(depth) {
        return whole();
    }
    match node {
        Node::Sequence(parts) => {
            let (mut head, mut tail) = (parts.clone(), Vec::new());
            while let Some(last) = head.pop() {
                let (before, spaces) = split_at(bodies, &last, budget, depth + 1);
                tail.splice(..0, spaces);
                if let Some(before) = before {
                    head.push(before);
                    break;
                }
            }
            (Some(Node::Sequence(head)), tail)
        }
        Node::Choice(parts) => {
            let mut splits = parts.iter().map(|part| split_at(bodies, part, budget, depth + 1));
            let Some((Some(first), tail)) = splits.next() else { return whole() };
            let mut heads = vec![first];
            for (head, other) in splits {
                match head.filter(|_| other == tail) {
                    Some(head) => heads.push(head),
                    None => return whole(),
                }
            }
            (Some(Node::Choice(heads)), tail)
        }
        Node::Rule(rule) => match split_at(bodies, &bodies[*rule], budget, depth + 1) {
            (_, tail) if tail.is_empty() => whole(),
            split => split,
        },
        _ => whole(),
    }
}

/// Whether all characters of a part are white space.
fn is_space(bodies: &[Node], node: &Node, budget: &mut Budget, depth: usize) -> bool {
    let is_blank = |char: char| matches!(char, ' ' | '\t' | '\n' | '\r');
    if !budget.take(depth) {
        return false;
    }
    match node {
        Node::Literal(text) => text.chars().all(is_blank),
        Node::Class { ranges, is_negated } => {
            let is_short = |(first, last): &(char, char)| *last as u32 - *first as u32 <= 4;
            !is_negated && ranges.iter().all(|range| is_short(range) && (range.0..=range.1).all(is_blank))
        }
        Node::Any => false,
        Node::Rule(rule) => is_space(bodies, &bodies[*rule], budget, depth + 1),
        Node::Sequence(parts) | Node::Choice(parts) => {
            parts.iter().all(|part| is_space(bodies, part, budget, depth + 1))
        }
        Node::Repeat { inner, .. } => is_space(bodies, inner, budget, depth + 1),
    }
}

/// White space as a part of a rule, with a terminal for each character. The budget of [`split`] bounds its size.
pub(super) fn by_character(bodies: &[Node], node: &Node) -> String {
    match node {
        Node::Literal(text) => {
            let chars: Vec<String> = text.chars().map(|char| literal(char.encode_utf8(&mut [0; 4]))).collect();
            format!("({})", chars.join(" "))
        }
        Node::Class { ranges, is_negated } => class(ranges, *is_negated),
        Node::Any => unreachable!("white space is not any character"),
        Node::Rule(rule) => by_character(bodies, &bodies[*rule]),
        Node::Sequence(parts) if parts.is_empty() => literal(""),
        Node::Sequence(parts) => {
            let texts: Vec<String> = parts.iter().map(|part| by_character(bodies, part)).collect();
            format!("({})", texts.join(" "))
        }
        Node::Choice(parts) => {
            let texts: Vec<String> = parts.iter().map(|part| by_character(bodies, part)).collect();
            format!("({})", texts.join(" | "))
        }
        Node::Repeat { inner, min, max } => repeated(&by_character(bodies, inner), *min, *max),
    }
}
