//! Converts grammars of llama.cpp's format (GBNF) to Lark.
//!
//! A part of the grammar without recursion is a regular language: it becomes one terminal, which matches exactly what the part matches. Recursive
//! rules become rules. Between the terminals of a rule the lexer is greedy, as in every Lark grammar here: where one terminal could also stop
//! earlier, the terminal continues. White space at the end of a terminal is matched character by character, so that a rule may demand a line break behind
//! optional white space. Every text that the result allows is one of the grammar.

mod node;
mod read;
mod space;

use std::collections::BTreeMap;

use crate::ConstraintError;
use crate::lark::literal;
use crate::limits::Limits;
use node::{Node, class, repeated};

/// Whether a grammar is in GBNF: its first rule is `name ::= …`.
pub(crate) fn is_gbnf(text: &str) -> bool {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let start: String = lines.take(2).collect::<Vec<_>>().join(" ");
    let rest = start.trim_start_matches(|char: char| char.is_ascii_alphanumeric() || "-_".contains(char));
    rest.len() < start.len() && rest.trim_start().starts_with("::=")
}

/// The grammar in Lark's syntax.
///
/// # Errors
/// When the grammar is not valid, or has a part that has no equivalent; the error names the line.
pub(crate) fn lark(text: &str, limits: &Limits) -> Result<String, ConstraintError> {
    let rules = read::rules(text, limits)?;
    let recursive = recursive(&rules.bodies);
    let mut writer = Writer { bodies: &rules.bodies, recursive, terminals: BTreeMap::new(), lines: Vec::new() };
    let root = match writer.recursive[rules.root] {
        true => format!("r{}", rules.root),
        false => format!("R{}", rules.root),
    };
    for (number, body) in rules.bodies.iter().enumerate() {
        let line = match writer.recursive[number] {
            true => format!("r{number}: {}", writer.rule(body)),
            false => format!("R{number}: {}", writer.terminal(body)),
        };
        writer.lines.push(line);
    }
    let terminals = writer.terminals.iter().map(|(body, number)| format!("T{number}: {body}"));
    let lines: Vec<String> = [format!("start: {root}")].into_iter().chain(writer.lines).chain(terminals).collect();
    Ok(lines.join("\n"))
}

/// For each rule, whether it reaches a rule that reaches itself. Such a rule is no regular expression.
fn recursive(bodies: &[Node]) -> Vec<bool> {
    let mut users: Vec<Vec<usize>> = vec![Vec::new(); bodies.len()];
    let mut num_open: Vec<usize> = Vec::with_capacity(bodies.len());
    for (rule, body) in bodies.iter().enumerate() {
        let used = references(body);
        used.iter().for_each(|&other| users[other].push(rule));
        num_open.push(used.len());
    }
    // A rule whose rules are all regular is regular, too; what is left reaches a circle.
    let mut is_recursive = vec![true; bodies.len()];
    let mut regular: Vec<usize> = (0..bodies.len()).filter(|&rule| num_open[rule] == 0).collect();
    while let Some(rule) = regular.pop() {
        is_recursive[rule] = false;
        for &user in &users[rule] {
            num_open[user] -= 1;
            if num_open[user] == 0 {
                regular.push(user);
            }
        }
    }
    is_recursive
}

fn references(node: &Node) -> Vec<usize> {
    match node {
        Node::Rule(rule) => vec![*rule],
        Node::Sequence(parts) | Node::Choice(parts) => parts.iter().flat_map(references).collect(),
        Node::Repeat { inner, .. } => references(inner),
        Node::Literal(_) | Node::Class { .. } | Node::Any => Vec::new(),
    }
}

struct Writer<'a> {
    bodies: &'a [Node],
    recursive: Vec<bool>,
    /// Terminals of parts of recursive rules, with their numbers.
    terminals: BTreeMap<String, usize>,
    lines: Vec<String>,
}

impl Writer<'_> {
    fn is_recursive(&self, node: &Node) -> bool {
        references(node).iter().any(|&rule| self.recursive[rule])
    }

    /// A part of a recursive rule.
    fn rule(&mut self, node: &Node) -> String {
        if !self.is_recursive(node) {
            return self.regular(node);
        }
        match node {
            Node::Rule(rule) => format!("r{rule}"),
            Node::Choice(parts) => {
                // Alternatives without recursion are one terminal, so that the longest of them is found.
                let (recursive, regular): (Vec<&Node>, Vec<&Node>) =
                    parts.iter().partition(|part| self.is_recursive(part));
                let regular: Vec<Node> = regular.into_iter().cloned().collect();
                let mut texts = Vec::new();
                if !regular.is_empty() {
                    texts.push(self.regular(&Node::Choice(regular)));
                }
                texts.extend(recursive.into_iter().map(|part| self.rule(part)));
                format!("({})", texts.join(" | "))
            }
            Node::Sequence(parts) => {
                let (mut texts, mut run) = (Vec::new(), Vec::new());
                for part in parts {
                    if !self.is_recursive(part) {
                        run.push(part.clone());
                        continue;
                    }
                    if !run.is_empty() {
                        texts.push(self.regular(&Node::Sequence(std::mem::take(&mut run))));
                    }
                    texts.push(self.rule(part));
                }
                if !run.is_empty() {
                    texts.push(self.regular(&Node::Sequence(run)));
                }
                format!("({})", texts.join(" "))
            }
            Node::Repeat { inner, min, max } => repeated(&self.rule(inner), *min, *max),
            Node::Literal(_) | Node::Class { .. } | Node::Any => self.regular(node),
        }
    }

    /// A part without recursion in a recursive rule: one terminal, then its white space.
    fn regular(&mut self, node: &Node) -> String {
        let (head, tail) = space::split(self.bodies, node);
        let spaces: Vec<String> = tail.iter().map(|part| space::by_character(self.bodies, part)).collect();
        match head {
            Some(head) => format!("({} {})", self.named_terminal(&head), spaces.join(" ")),
            None => format!("({})", spaces.join(" ")),
        }
    }

    /// The name of the terminal that matches a part without recursion.
    fn named_terminal(&mut self, node: &Node) -> String {
        if let Node::Rule(rule) = node {
            return format!("R{rule}");
        }
        let next = self.terminals.len();
        let body = self.terminal(node);
        format!("T{}", self.terminals.entry(body).or_insert(next))
    }

    /// The body of a terminal.
    fn terminal(&self, node: &Node) -> String {
        match node {
            Node::Literal(text) => literal(text),
            Node::Class { ranges, is_negated } => class(ranges, *is_negated),
            Node::Any => "/(?s:.)/".to_owned(),
            Node::Rule(rule) => format!("R{rule}"),
            Node::Sequence(parts) if parts.is_empty() => literal(""),
            Node::Sequence(parts) => {
                let texts: Vec<String> = parts.iter().map(|part| self.terminal(part)).collect();
                format!("({})", texts.join(" "))
            }
            Node::Choice(parts) => {
                let texts: Vec<String> = parts.iter().map(|part| self.terminal(part)).collect();
                format!("({})", texts.join(" | "))
            }
            Node::Repeat { inner, min, max } => repeated(&self.terminal(inner), *min, *max),
        }
    }
}
