//! Remembers positions in a list, for repeated searches in the same order.

use smallvec::SmallVec;

/// The position that each search found the last time.
#[derive(Debug, Default)]
pub(crate) struct IndexMemo(SmallVec<[u32; 6]>);

impl IndexMemo {
    /// The position in `items` of the first that `matches`. `index` numbers the search: its last result is tried first.
    pub fn find<T>(&mut self, index: usize, items: &[T], matches: impl Fn(&T) -> bool) -> Option<usize> {
        if let Some(&last) = self.0.get(index)
            && items.get(last as usize).is_some_and(&matches)
        {
            return Some(last as usize);
        }
        let found = items.iter().position(matches);
        if self.0.len() <= index {
            self.0.resize(index + 1, u32::MAX);
        }
        self.0[index] = found.map_or(u32::MAX, |found| found as u32);
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_are_found_in_any_order() {
        let mut memo = IndexMemo::default();
        let mut find = |names: &[&str]| -> Vec<Option<usize>> {
            let items = ["a", "b", "c"];
            names.iter().enumerate().map(|(index, name)| memo.find(index, &items, |item| item == name)).collect()
        };
        for _ in 0..2 {
            assert_eq!(find(&["c", "a"]), [Some(2), Some(0)]);
        }
        assert_eq!(find(&["x", "c", "b", "c"]), [None, Some(2), Some(1), Some(2)]);
        assert_eq!(find(&["c", "a"]), [Some(2), Some(0)]);
    }
}
