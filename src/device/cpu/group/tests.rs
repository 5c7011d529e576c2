//! Workers on two simulated nodes exchange through shared memory and TCP.

use std::net::{IpAddr, Ipv4Addr};

use super::*;
use crate::FileExchange;
use crate::cpu::peers::Peers;
use crate::cpu::streams::StreamKind;

const ROUNDS: usize = 50;
const WIDTH: usize = 3000;

fn number(worker: usize, round: usize, index: usize) -> f32 {
    ((worker * 7919 + round * 104_729 + index) % 1013) as f32 / 7.0
}

/// The sum over all rounds on worker `me` of four, on nodes 0, 0, 0, 1. Each round needs more than one slot.
fn sums_of(me: u32, folder: &std::path::Path, prefix: &Prefix) -> Vec<f32> {
    let nodes = vec![0, 0, 0, 1];
    let place = TensorParallel { rank: me, size: 4 };
    let timeout = Duration::from_secs(60);
    let peers = Peers {
        me,
        num_stages: 1,
        // Loopback has several addresses: one is used for each node.
        addresses: vec![IpAddr::V4(Ipv4Addr::new(127, 0, 0, 1 + nodes[me as usize] as u8))],
        nodes,
        exchange: Arc::new(FileExchange::new(folder.to_owned(), place, timeout)),
        prefix: prefix.clone(),
        name: "group".to_owned(),
        timeout,
    };
    let mut streams = peers.connect().unwrap();
    let node = peers.nodes[me as usize];
    let name = format!("group_{node}");
    let config = GroupConfig { prefix: prefix.clone(), name, tensor_parallel: place, timeout, spin: false };
    let mut group = Group::join_node(config, me == 0 || me == 3, streams.take(StreamKind::Parts), 0).unwrap();
    let mut sums = Vec::new();
    for round in 0..ROUNDS {
        let rows = 1 + round % 3 * (SLOT / WIDTH);
        let mine: Vec<f32> = (0..rows * WIDTH).map(|index| number(me as usize, round, index)).collect();
        let each = |_: Range<usize>, parts: &[&[f32]]| {
            sums.push((0..parts[0].len()).map(|at| parts.iter().map(|part| part[at]).sum::<f32>()).sum());
        };
        group.exchange_rows("testing", &mine, WIDTH, each).unwrap();
    }
    sums
}

#[test]
fn workers_on_two_nodes_add_the_same_numbers_in_the_same_order() {
    let prefix: Prefix = format!("nodes{}_", std::process::id()).parse().unwrap();
    let folder = std::env::temp_dir().join(format!("group-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let workers: Vec<_> = (0..4)
        .map(|me| {
            let (folder, prefix) = (folder.clone(), prefix.clone());
            thread::spawn(move || sums_of(me, &folder, &prefix))
        })
        .collect();
    let sums: Vec<Vec<f32>> = workers.into_iter().map(|worker| worker.join().unwrap()).collect();
    let _ = std::fs::remove_dir_all(&folder);

    let mut expected = Vec::new();
    for round in 0..ROUNDS {
        let numbers = (1 + round % 3 * (SLOT / WIDTH)) * WIDTH;
        let summed: Vec<f32> =
            (0..numbers).map(|at| (0..4).map(|worker| number(worker, round, at)).sum::<f32>()).collect();
        expected.extend(summed.chunks(SLOT / WIDTH * WIDTH).map(|chunk| chunk.iter().sum::<f32>()));
    }
    for (worker, its) in sums.iter().enumerate() {
        assert_eq!(*its, expected, "worker {worker}");
    }
}
