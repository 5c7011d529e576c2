//! A trie: finds the strings of a set that a text starts with.
//!
//! Own code: `aho-corasick` refuses to list all the strings that start at one place (an anchored search with overlaps).

/// A set of byte strings, each with a value.
#[derive(Debug, Default)]
pub(crate) struct Trie {
    nodes: Vec<Node>,
    edges: Vec<(u8, u32)>, // byte and node, by node and byte
}

#[derive(Debug, Clone, Copy, Default)]
struct Node {
    first_edge: u32,
    num_edges: u32,
    value: Option<u32>,
}

impl Trie {
    /// Of two equal strings the first is kept. Empty strings are left out.
    pub(crate) fn new<'a>(strings: impl IntoIterator<Item = (&'a str, u32)>) -> Self {
        let mut strings: Vec<(&[u8], u32)> =
            strings.into_iter().map(|(string, value)| (string.as_bytes(), value)).collect();
        strings.retain(|(string, _)| !string.is_empty());
        strings.sort_by_key(|(string, _)| *string); // Stable, so the first of two equal ones stays first.
        strings.dedup_by_key(|(string, _)| *string);
        let mut trie = Self { nodes: vec![Node::default()], edges: Vec::new() };
        // Nodes to expand: index, range of the strings below the node, depth.
        let mut open = std::collections::VecDeque::from([(0usize, 0..strings.len(), 0usize)]);
        while let Some((node, range, depth)) = open.pop_front() {
            let first_edge = trie.edges.len();
            let mut start = range.start;
            if strings[range.clone()].first().is_some_and(|(string, _)| string.len() == depth) {
                trie.nodes[node].value = Some(strings[start].1);
                start += 1;
            }
            while start < range.end {
                let byte = strings[start].0[depth];
                let len = strings[start..range.end].partition_point(|(string, _)| string[depth] == byte);
                trie.edges.push((byte, trie.nodes.len() as u32));
                open.push_back((trie.nodes.len(), start..start + len, depth + 1));
                trie.nodes.push(Node::default());
                start += len;
            }
            trie.nodes[node].first_edge = first_edge as u32;
            trie.nodes[node].num_edges = (trie.edges.len() - first_edge) as u32;
        }
        trie
    }

    /// The strings of the set that `text` starts with, shortest first: length and value.
    pub(crate) fn prefixes<'a>(&'a self, text: &'a [u8]) -> impl Iterator<Item = (usize, u32)> + 'a {
        let mut node = self.nodes.first();
        let mut len = 0;
        std::iter::from_fn(move || {
            loop {
                node = self.child(node?, *text.get(len)?);
                len += 1;
                if let Some(value) = node?.value {
                    return Some((len, value));
                }
            }
        })
    }

    /// The longest string of the set that `text` starts with.
    pub(crate) fn longest(&self, text: &[u8]) -> Option<(usize, u32)> {
        self.prefixes(text).last()
    }

    fn child(&self, node: &Node, byte: u8) -> Option<&Node> {
        let edges = &self.edges[node.first_edge as usize..][..node.num_edges as usize];
        let found = edges.binary_search_by_key(&byte, |(byte, _)| *byte).ok()?;
        Some(&self.nodes[edges[found].1 as usize])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_prefixes_are_found_in_order() {
        let trie = Trie::new([("ab", 1), ("a", 2), ("abcd", 3), ("b", 4), ("", 5), ("ab", 6)]);
        assert_eq!(trie.prefixes(b"abcde").collect::<Vec<_>>(), [(1, 2), (2, 1), (4, 3)]);
        assert_eq!(trie.longest(b"abc"), Some((2, 1)));
        assert_eq!(trie.longest(b"c"), None);
        assert_eq!(Trie::new([]).longest(b"c"), None);
        assert_eq!(Trie::default().longest(b"c"), None);
    }
}
