//! Finds things by their names in a list, again and again in the same order.

use smallvec::SmallVec;

/// Remembers where each of them was the last time.
#[derive(Debug, Default)]
pub(crate) struct Finder(SmallVec<[u32; 6]>);

impl Finder {
    /// The place in `all` of the one that `is_it`, which is the `index`th that is looked for.
    pub fn find<T>(&mut self, index: usize, all: &[T], is_it: impl Fn(&T) -> bool) -> Option<usize> {
        if let Some(&last) = self.0.get(index)
            && all.get(last as usize).is_some_and(&is_it)
        {
            return Some(last as usize);
        }
        let found = all.iter().position(is_it);
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
    fn things_are_found_where_they_are_in_whatever_order() {
        let mut finder = Finder::default();
        let mut find = |names: &[&str]| -> Vec<Option<usize>> {
            let all = ["a", "b", "c"];
            names.iter().enumerate().map(|(index, name)| finder.find(index, &all, |it| it == name)).collect()
        };
        for _ in 0..2 {
            assert_eq!(find(&["c", "a"]), [Some(2), Some(0)]);
        }
        assert_eq!(find(&["x", "c", "b", "c"]), [None, Some(2), Some(1), Some(2)]);
        assert_eq!(find(&["c", "a"]), [Some(2), Some(0)]);
    }
}
