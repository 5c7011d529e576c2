//! The TCP streams of a model, and which workers they connect.

use std::net::TcpStream;

/// The purpose of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StreamKind {
    /// Parts of sums and gathers, sent to another node of the same group.
    Parts,
    /// Activations, sent to the next stage.
    Hidden,
}

/// A stream between two workers of the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stream {
    pub(crate) from: u32,
    pub(crate) to: u32,
    pub(crate) kind: StreamKind,
}

/// The streams that begin or end at this worker.
#[derive(Default)]
pub(crate) struct Streams {
    pub(crate) outgoing: Vec<(Stream, TcpStream)>,
    pub(crate) incoming: Vec<(Stream, TcpStream)>,
}

impl Streams {
    /// Removes and returns the streams of one purpose.
    pub(crate) fn take(&mut self, kind: StreamKind) -> Streams {
        let taken = |all: &mut Vec<(Stream, TcpStream)>| {
            let (taken, kept) = std::mem::take(all).into_iter().partition(|(stream, _)| stream.kind == kind);
            *all = kept;
            taken
        };
        Streams { outgoing: taken(&mut self.outgoing), incoming: taken(&mut self.incoming) }
    }
}

/// All streams of a model. Parts go from every worker to one worker of each other node of its stage; the receivers take
/// turns. Activations go from each worker to the worker of the same rank in the next stage, unless both are on one
/// node.
pub(crate) fn streams(nodes: &[u32], num_stages: u32) -> Vec<Stream> {
    let tp_size = nodes.len() as u32 / num_stages;
    let mut streams = Vec::new();
    for stage in 0..num_stages {
        let workers = stage * tp_size..(stage + 1) * tp_size;
        let members = |node: u32| workers.clone().filter(move |&worker| nodes[worker as usize] == node);
        for from in workers.clone() {
            let own = nodes[from as usize];
            let place = members(own).position(|worker| worker == from).expect("a worker is on its node");
            let mut others: Vec<u32> = nodes[workers.start as usize..workers.end as usize].to_vec();
            others.sort_unstable();
            others.dedup();
            for node in others.into_iter().filter(|&node| node != own) {
                let receivers: Vec<u32> = members(node).collect();
                streams.push(Stream { from, to: receivers[place % receivers.len()], kind: StreamKind::Parts });
            }
            let next = from + tp_size;
            if stage + 1 < num_stages && nodes[next as usize] != own {
                streams.push(Stream { from, to: next, kind: StreamKind::Hidden });
            }
        }
    }
    streams
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_node_needs_no_stream() {
        assert_eq!(streams(&[0; 4], 1), []);
        assert_eq!(streams(&[0; 4], 2), []);
    }

    #[test]
    fn parts_reach_every_other_node_once_and_receivers_take_turns() {
        // Three workers on node 0, two on node 1.
        let streams = streams(&[0, 0, 0, 1, 1], 1);
        let pairs: Vec<_> = streams.iter().map(|stream| (stream.from, stream.to)).collect();
        assert_eq!(pairs, [(0, 3), (1, 4), (2, 3), (3, 0), (4, 1)]);
    }

    #[test]
    fn activations_cross_nodes_only_between_stages_that_do_not_share_one() {
        let hidden = |from, to| Stream { from, to, kind: StreamKind::Hidden };
        // Three stages of two workers: node 0 has the first, node 1 the other two.
        assert_eq!(streams(&[0, 0, 1, 1, 1, 1], 3), [hidden(0, 2), hidden(1, 3)]);
    }
}
