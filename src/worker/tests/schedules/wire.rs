//! Messages with delays and faults.

use std::collections::{BTreeMap, HashMap};

use crate::tokens::Random;

/// Longest delay of a message without a fault.
const MAX_DELAY: u32 = 6;

/// Longest delay of a message with a fault; longer than the watchdog's timeout.
const MAX_LATENESS: u32 = 800;

/// One of `n` messages has a fault, as long as faults are left.
const FAULT_RATE: u32 = 40;

/// A direction of messages between rank 0 and a worker of one start of the model. Messages without faults keep their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    ToWorker,
    FromWorker,
    /// Events of supervision.
    Agent,
}

/// A connection: direction, start, worker.
pub type Connection = (Direction, u64, u32);

/// What will happen, by virtual time and then in the order of its cause.
pub struct Timeline<Event> {
    pub now: u64,
    events: BTreeMap<(u64, u64), Event>,
    num_added: u64,
    /// Time of the last arrival on each connection.
    arrivals: HashMap<Connection, u64>,
    /// Faults that may still happen.
    pub faults_left: u32,
    pub num_faults: u64,
}

impl<Event: Clone> Timeline<Event> {
    pub fn new(faults_left: u32) -> Self {
        let (events, arrivals) = (BTreeMap::new(), HashMap::new());
        Self { now: 0, events, num_added: 0, arrivals, faults_left, num_faults: 0 }
    }

    pub fn after(&mut self, delay: u64, event: Event) {
        self.events.insert((self.now + delay, self.num_added), event);
        self.num_added += 1;
    }

    pub fn next(&mut self) -> Option<Event> {
        let ((time, _), event) = self.events.pop_first()?;
        self.now = time;
        Some(event)
    }

    /// Whether a fault happens now.
    pub fn has_fault(&mut self, random: &mut Random, rate: u32) -> bool {
        let happens = self.faults_left > 0 && random.one_in(rate);
        self.faults_left -= u32::from(happens);
        self.num_faults += u64::from(happens);
        happens
    }

    /// Sends the event that `arrival` makes of `bytes`: late, twice, changed, before earlier ones or not at all if there is a fault.
    pub fn send(
        &mut self,
        random: &mut Random,
        connection: Connection,
        mut bytes: Vec<u8>,
        arrival: impl Fn(Vec<u8>) -> Event,
    ) {
        let mut delay = u64::from(1 + random.below(MAX_DELAY));
        let mut count = 1;
        let mut keeps_order = true;
        if self.has_fault(random, FAULT_RATE) {
            match random.below(5) {
                0 => count = 0,
                1 => count = 2,
                2 => delay += u64::from(random.below(MAX_LATENESS)),
                3 => {
                    delay += u64::from(4 * MAX_DELAY);
                    keeps_order = false;
                }
                // A bit of an event of supervision cannot change: its bytes have no checksum.
                _ if connection.0 != Direction::Agent => {
                    let at = random.below(bytes.len() as u32) as usize;
                    bytes[at] ^= 1 << random.below(8);
                }
                _ => count = 0,
            }
        }
        let earliest = self.arrivals.get(&connection).copied().unwrap_or(0);
        let time = if keeps_order { (self.now + delay).max(earliest) } else { self.now + delay };
        if keeps_order {
            self.arrivals.insert(connection, time);
        }
        for _ in 0..count {
            self.after(time - self.now, arrival(bytes.clone()));
        }
    }
}
