//! Compares copies of KV blocks with copies on the host, pair by pair.

mod gpu;

use gpu::{Random, open};
use kernels::cuda::copy_blocks::{AllBlocks, copy_blocks};
use kernels::cuda::{DeviceBuffer, Span};

#[test]
fn pairs_are_copied_in_their_order_and_nothing_else_changes() {
    let Some((gpu, q)) = open() else { return };
    let mut random = Random::new(31);
    for (num_layers, num_blocks, block_bytes, num_pairs, has_values) in
        [(1, 2, 16, 1, true), (3, 9, 4096, 5, true), (2, 40, 4112, 33, false), (5, 7, 65_536, 70, true)]
    {
        let words = num_layers * num_blocks * block_bytes / 8;
        let mut host: Vec<Vec<u64>> = (0..2).map(|_| (0..words).map(|_| random.next()).collect()).collect();
        let device: Vec<_> = host.iter().map(|values| DeviceBuffer::from_slice(&gpu, values).unwrap()).collect();
        // Includes chains and overwrites: a copy may read what the previous one wrote.
        let pairs: Vec<(u32, u32)> =
            (0..num_pairs).map(|_| (random.below(num_blocks) as u32, random.below(num_blocks) as u32)).collect();
        let v = if has_values { device[1].span() } else { Span::NULL };
        let blocks = AllBlocks { k: device[0].span(), v, num_layers, num_blocks, block_bytes };
        copy_blocks(&q, blocks, &pairs).unwrap();
        q.wait().unwrap();
        let size = block_bytes / 8;
        for (host, device) in host.iter_mut().zip(&device).take(if has_values { 2 } else { 1 }) {
            for (layer, &(from, to)) in (0..num_layers).flat_map(|layer| pairs.iter().map(move |pair| (layer, pair))) {
                let at = |block: u32| (layer * num_blocks + block as usize) * size;
                host.copy_within(at(from)..at(from) + size, at(to));
            }
            let found: Vec<u64> = device.span().read(words).unwrap();
            assert!(found == *host, "{num_layers} layers of {num_blocks} blocks of {block_bytes} bytes, {pairs:?}");
        }
        assert!(copy_blocks(&q, blocks, &[(0, num_blocks as u32)]).is_err(), "a block beyond the last is refused");
    }
}
