use super::*;

const A: [TokenId; 2] = [TokenId(1), TokenId(2)];
const B: [TokenId; 2] = [TokenId(3), TokenId(4)];

fn filled(pool: &mut BlockPool, parent: ContentId, tokens: &[TokenId]) -> (BlockId, ContentId) {
    let block = pool.allocate(0).unwrap();
    let content = pool.register(block, parent, tokens).unwrap();
    pool.set_ready(block, 0);
    (block, content)
}

#[test]
fn content_is_found_only_after_the_same_parent_and_from_its_step_on() {
    let mut pool = BlockPool::new(4, 2, 1, false);
    let (first, parent) = filled(&mut pool, ContentId::ROOT, &A);
    let second = pool.allocate(0).unwrap();
    pool.register(second, parent, &B);
    assert_eq!(pool.find(ContentId::ROOT, &A, 0), Lookup::Ready(first));
    assert_eq!(pool.find(ContentId::ROOT, &B, 9), Lookup::Missing);
    assert!(matches!(pool.find(parent, &B, 9), Lookup::BeingComputed(_)));
    pool.set_ready(second, 5);
    assert!(matches!(pool.find(parent, &B, 4), Lookup::BeingComputed(_)));
    assert_eq!(pool.find(parent, &B, 5), Lookup::Ready(second));
}

#[test]
fn the_block_released_longest_ago_is_taken_first_and_its_content_is_gone() {
    let mut pool = BlockPool::new(2, 2, 1, false);
    let (a, _) = filled(&mut pool, ContentId::ROOT, &A);
    let (b, _) = filled(&mut pool, ContentId::ROOT, &B);
    pool.release(b);
    pool.release(a);
    assert_eq!((pool.num_cached(), pool.num_available(), pool.num_used()), (2, 2, 0));
    assert_eq!(pool.allocate(0), Some(b));
    assert_eq!(pool.find(ContentId::ROOT, &B, 0), Lookup::Missing);
    pool.share(a);
    assert_eq!(pool.allocate(0), None);
    pool.release(a);
    assert_eq!(pool.find(ContentId::ROOT, &A, 0), Lookup::Ready(a));
}

#[test]
fn content_under_a_colliding_hash_is_not_taken_for_another() {
    let mut pool = BlockPool::new(4, 2, 1, false);
    let (first, parent) = filled(&mut pool, ContentId::ROOT, &A);
    pool.contents.insert(hash(parent, &A), first);
    pool.contents.insert(hash(ContentId::ROOT, &B), first);
    assert_eq!(pool.find(parent, &A, 0), Lookup::Missing);
    assert_eq!(pool.find(ContentId::ROOT, &B, 0), Lookup::Missing);
    let second = pool.allocate(0).unwrap();
    assert_eq!(pool.register(second, parent, &A), None);
    pool.release(second);
    assert_eq!((pool.num_cached(), pool.num_unused()), (0, 3));
}

#[test]
fn equal_content_keeps_its_first_block() {
    let mut pool = BlockPool::new(2, 2, 1, false);
    let (first, content) = filled(&mut pool, ContentId::ROOT, &A);
    let second = pool.allocate(0).unwrap();
    assert_eq!(pool.register(second, ContentId::ROOT, &A), Some(content));
    pool.release(second);
    assert_eq!((pool.num_cached(), pool.num_unused()), (0, 1));
    pool.release(first);
    assert_eq!((pool.num_cached(), pool.num_unused()), (1, 1));
}

#[test]
fn blocks_after_an_evicted_one_are_found_if_its_content_is_kept() {
    let mut pool = BlockPool::new(2, 2, 1, true);
    let (first, parent) = filled(&mut pool, ContentId::ROOT, &A);
    let (second, content) = filled(&mut pool, parent, &B);
    pool.release(first);
    assert_eq!(pool.allocate(0), Some(first));
    assert_eq!(pool.find(ContentId::ROOT, &A, 0), Lookup::Evicted(parent));
    assert_eq!(pool.find(parent, &B, 0), Lookup::Ready(second));
    // The same content gets the same name again.
    assert_eq!(pool.register(first, ContentId::ROOT, &A), Some(parent));
    assert!(matches!(pool.find(ContentId::ROOT, &A, 0), Lookup::BeingComputed(_)));
    assert_eq!(pool.content(second), Some(content));
    for _ in 0..10 * EVICTED_PER_BLOCK {
        pool.set_ready(first, 0);
        pool.release(first);
        pool.allocate(0).unwrap();
        pool.register(first, parent, &A);
    }
    assert_eq!((pool.evicted.len(), pool.eviction_order.len()), (0, 2 * EVICTED_PER_BLOCK));
    assert_eq!(pool.find(ContentId::ROOT, &A, 0), Lookup::Missing);
}
