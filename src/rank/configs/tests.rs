use super::*;

#[test]
fn every_ranks_prefix_is_known_from_rank_zeros() {
    assert_eq!(prefixes("prefix0_", 3), ["prefix0_", "prefix1_", "prefix2_"]);
    assert_eq!(prefixes("prefix7_1_0_", 2), ["prefix7_1_0_", "prefix7_1_1_"]);
    assert_eq!(prefixes("own", 1), ["own"]);
}
