//! The queue of sequences that wait for a row.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use crate::SequenceId;
use crate::sequence::Sequence;
use crate::slot::Slot;

/// Sort key of the order of service: higher priority first, then those that are not delayed, then arrival.
pub(crate) type ServiceKey = (Reverse<u32>, bool, SequenceId);

pub(crate) fn service_key(sequence: &Sequence) -> ServiceKey {
    (Reverse(sequence.priority), sequence.is_delayed, sequence.id)
}

/// Number of new sequences that may begin before the one that has waited longest, one after another. The next one to begin
/// is then the one that has waited longest, whatever its priority, so that no priority starves.
const MAX_OVERTAKING: u32 = 16;

/// Sequences that ran before come first, because clients are already reading their streams.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    resumed: BTreeMap<ServiceKey, Slot>,
    new: BTreeMap<ServiceKey, Slot>,
    /// Number of sequences in `new` of each priority that has any.
    new_by_priority: BTreeMap<u32, usize>,
    /// Number of new sequences that have begun before the one that has waited longest, since that last began.
    num_overtaking: u32,
}

impl Queue {
    pub(crate) fn len(&self) -> usize {
        self.resumed.len() + self.new.len()
    }

    /// Number of sequences that never ran; only they count against the queue's bound.
    pub(crate) fn num_new(&self) -> usize {
        self.new.len()
    }

    /// Number of sequences of one priority that never ran.
    pub(crate) fn num_new_with_priority(&self, priority: u32) -> usize {
        self.new_by_priority.get(&priority).copied().unwrap_or(0)
    }

    /// Number of sequences that never ran, of each priority that has any.
    pub(crate) fn new_by_priority(&self) -> &BTreeMap<u32, usize> {
        &self.new_by_priority
    }

    /// The sequence to begin or to resume next.
    pub(crate) fn first(&self) -> Option<Slot> {
        if self.resumed.is_empty() && self.num_overtaking >= MAX_OVERTAKING {
            return self.oldest().map(|(_, slot)| slot).or_else(|| self.slots().next());
        }
        self.slots().next()
    }

    /// Removes a sequence that begins or resumes.
    pub(crate) fn take(&mut self, sequence: &Sequence) {
        if !sequence.started {
            let overtakes = self.new_by_priority.len() > 1 && self.oldest().is_some_and(|(id, _)| id != sequence.id);
            self.num_overtaking = if overtakes { self.num_overtaking + 1 } else { 0 };
        }
        self.remove(sequence);
    }

    /// The new sequence that has waited longest. Those that are to wait for others of their priority do not count.
    fn oldest(&self) -> Option<(SequenceId, Slot)> {
        let first_of = |&priority: &u32| {
            let from = (Reverse(priority), false, SequenceId(0));
            let (&(found, is_delayed, id), &slot) = self.new.range(from..).next()?;
            (found == Reverse(priority) && !is_delayed).then_some((id, slot))
        };
        self.new_by_priority.keys().filter_map(first_of).min_by_key(|&(id, _)| id)
    }

    /// The waiting sequences in the order of service.
    pub(crate) fn slots(&self) -> impl Iterator<Item = Slot> {
        self.resumed.values().chain(self.new.values()).copied()
    }

    pub(crate) fn insert(&mut self, sequence: &Sequence, slot: Slot) {
        let added = self.part(sequence).insert(service_key(sequence), slot).is_none();
        if added && !sequence.started {
            *self.new_by_priority.entry(sequence.priority).or_default() += 1;
        }
    }

    pub(crate) fn remove(&mut self, sequence: &Sequence) {
        let removed = self.part(sequence).remove(&service_key(sequence)).is_some();
        if let Some(count) = self.new_by_priority.get_mut(&sequence.priority).filter(|_| removed && !sequence.started) {
            *count -= 1;
            if *count == 0 {
                self.new_by_priority.remove(&sequence.priority);
            }
        }
    }

    fn part(&mut self, sequence: &Sequence) -> &mut BTreeMap<ServiceKey, Slot> {
        if sequence.started { &mut self.resumed } else { &mut self.new }
    }
}
