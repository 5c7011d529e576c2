//! The open connections of a port: how many a client may have, and which idle ones make room for new clients.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

/// Time in which idle connections are not looked for again after none was found: a look is linear in the connections.
const PAUSE: Duration = Duration::from_millis(100);

/// A client that has read nothing of its answer for so long holds a connection as an idle one does.
const STALL: Duration = Duration::from_secs(10);

/// In place of a moment: the client reads what is written to it.
const NOT_BLOCKED: u64 = u64::MAX;

/// All connections of one port.
#[derive(Debug)]
pub struct Connections {
    /// Beyond this many, idle connections make room.
    crowded: usize,
    max_per_address: usize,
    began: Instant,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    open: BTreeMap<u64, Arc<Activity>>,
    next: u64,
    num_leaving: usize,
    /// When no idle connection was found.
    in_vain: Option<Instant>,
    clients: HashMap<IpAddr, Client>,
}

/// The connections of one address.
#[derive(Debug, Default)]
struct Client {
    num_open: usize,
    num_leaving: usize,
    in_vain: Option<Instant>,
}

/// What a connection does at the moment.
#[derive(Debug)]
pub struct Activity {
    address: IpAddr,
    /// Requests that are read or answered.
    num_requests: AtomicU32,
    began: Instant,
    /// When its last request ended, in milliseconds since `began`.
    idle_since_ms: AtomicU64,
    /// Since when the client takes nothing of what is written to it, or [`NOT_BLOCKED`].
    blocked_since_ms: AtomicU64,
    /// It has to make room.
    is_leaving: AtomicBool,
    leave: Notify,
}

impl Default for Activity {
    fn default() -> Self {
        Self::new(Ipv4Addr::UNSPECIFIED.into(), Instant::now())
    }
}

impl Activity {
    fn new(address: IpAddr, began: Instant) -> Self {
        Self {
            address,
            num_requests: AtomicU32::new(0),
            began,
            idle_since_ms: AtomicU64::new(began.elapsed().as_millis() as u64),
            blocked_since_ms: AtomicU64::new(NOT_BLOCKED),
            is_leaving: AtomicBool::new(false),
            leave: Notify::new(),
        }
    }

    /// A request begins; it ends when what is returned is dropped.
    pub fn request(self: &Arc<Self>) -> Busy {
        self.num_requests.fetch_add(1, Relaxed);
        Busy(self.clone())
    }

    /// The client takes nothing of what is written to it, or takes something again.
    pub fn set_blocked(&self, is_blocked: bool) {
        self.blocked_since_ms.store(if is_blocked { self.now_ms() } else { NOT_BLOCKED }, Relaxed);
    }

    fn now_ms(&self) -> u64 {
        self.began.elapsed().as_millis() as u64
    }

    /// Whether ending the connection takes nothing from a client that waits for it or reads.
    pub fn is_idle(&self) -> bool {
        self.idle_since(self.now_ms()).is_some()
    }

    /// Since when it is idle, in milliseconds since `began`.
    fn idle_since(&self, now_ms: u64) -> Option<u64> {
        match self.blocked_since_ms.load(Relaxed) {
            NOT_BLOCKED => (self.num_requests.load(Relaxed) == 0).then(|| self.idle_since_ms.load(Relaxed)),
            since => (now_ms.saturating_sub(since) >= STALL.as_millis() as u64).then_some(since),
        }
    }

    /// Resolves when it shall make room for another client.
    pub async fn told_to_leave(&self) {
        self.leave.notified().await;
    }
}

/// A request of a connection, or several, for as long as they are read or answered.
#[derive(Debug)]
pub struct Busy(Arc<Activity>);

impl Drop for Busy {
    fn drop(&mut self) {
        let activity = &self.0;
        if activity.num_requests.fetch_sub(1, Relaxed) == 1 {
            activity.idle_since_ms.store(activity.now_ms(), Relaxed);
        }
    }
}

impl Connections {
    /// Room for `max` connections, of which one address may have `max_per_address`; 0 is any number.
    pub fn new(max: u32, max_per_address: u32) -> Self {
        let (max, max_per_address) = (max as usize, max_per_address as usize);
        Self {
            crowded: max - max / 5,
            max_per_address: if max_per_address == 0 { usize::MAX } else { max_per_address },
            began: Instant::now(),
            table: Mutex::default(),
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a connection on. `None` when its address has too many, and needs all of them.
    pub fn admit(self: &Arc<Self>, address: IpAddr) -> Option<Admitted> {
        let address = client_of(address);
        let mut table = self.table();
        let client = table.clients.entry(address).or_default();
        if client.num_open - client.num_leaving >= self.max_per_address {
            if client.in_vain.is_some_and(|when| when.elapsed() < PAUSE) {
                return None;
            }
            let count = (self.max_per_address / 20).max(1);
            if table.evict(count, |_, activity| activity.address == address) == 0 {
                table.clients.entry(address).or_default().in_vain = Some(Instant::now());
                return None;
            }
        }
        let activity = Arc::new(Activity::new(address, self.began));
        let id = table.next;
        table.next += 1;
        table.clients.entry(address).or_default().num_open += 1;
        table.open.insert(id, activity.clone());
        drop(table);
        Some(Admitted { connections: self.clone(), id, activity })
    }

    /// Ends the connections that have been idle for longest, where the port is crowded with `newest`.
    pub fn make_room(&self, newest: &Admitted) {
        let mut table = self.table();
        let num_staying = table.open.len() - table.num_leaving;
        if num_staying <= self.crowded || table.in_vain.is_some_and(|when| when.elapsed() < PAUSE) {
            return;
        }
        // Some more than needed, so that not every new client takes a look at all others.
        table.make_room(num_staying - self.crowded + self.crowded / 20, Some(newest.id));
    }

    /// Ends a few of them, however many there are: the process may open no more files.
    pub fn make_room_for_files(&self) {
        let mut table = self.table();
        if table.num_leaving == 0 && table.in_vain.is_none_or(|when| when.elapsed() >= PAUSE) {
            let count = table.open.len().div_ceil(20);
            table.make_room(count, None);
        }
    }
}

impl Table {
    fn make_room(&mut self, count: usize, newest: Option<u64>) {
        if self.evict(count, |id, _| Some(id) != newest) == 0 {
            self.in_vain = Some(Instant::now());
        }
    }

    /// Ends up to `count` of the chosen connections, those that have been idle for longest; returns how many.
    fn evict(&mut self, count: usize, is_chosen: impl Fn(u64, &Activity) -> bool) -> usize {
        let now_ms = self.open.values().next().map_or(0, |activity| activity.now_ms());
        let chosen = self.open.iter().filter(|(id, it)| !it.is_leaving.load(Relaxed) && is_chosen(**id, it));
        let mut idle: Vec<(u64, &Arc<Activity>)> =
            chosen.filter_map(|(_, activity)| Some((activity.idle_since(now_ms)?, activity))).collect();
        idle.sort_by_key(|(since, _)| *since); // Stable: of those idle since the same moment, the oldest goes first.
        idle.truncate(count);
        for (_, activity) in &idle {
            activity.is_leaving.store(true, Relaxed);
            activity.leave.notify_one();
            self.num_leaving += 1;
            self.clients.entry(activity.address).or_default().num_leaving += 1;
        }
        idle.len()
    }
}

/// A connection's place in the table, given up when dropped.
#[derive(Debug)]
pub struct Admitted {
    connections: Arc<Connections>,
    id: u64,
    /// What it does.
    pub activity: Arc<Activity>,
}

impl Drop for Admitted {
    fn drop(&mut self) {
        let mut table = self.connections.table();
        table.open.remove(&self.id);
        let was_leaving = usize::from(self.activity.is_leaving.load(Relaxed));
        table.num_leaving -= was_leaving;
        let address = self.activity.address;
        if let Some(client) = table.clients.get_mut(&address) {
            client.num_open -= 1;
            client.num_leaving -= was_leaving;
            if client.num_open == 0 {
                table.clients.remove(&address);
            }
        }
    }
}

/// Addresses that one client has at its will count as one: IPv6 gives out networks of 64 bits.
fn client_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)).into(),
        address => address,
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    const ONE: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));
    const OTHER: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 2));

    fn is_told_to_leave(admitted: &Admitted) -> bool {
        admitted.activity.told_to_leave().now_or_never().is_some()
    }

    #[test]
    fn the_longest_idle_connections_make_room_and_busy_ones_stay() {
        let connections = Arc::new(Connections::new(10, 0));
        let open: Vec<Admitted> = (0..9).map(|_| connections.admit(ONE).unwrap()).collect();
        let _busy = open[0].activity.request();
        open[1].activity.set_blocked(true);
        connections.make_room(&open[8]);
        let left: Vec<bool> = open.iter().map(is_told_to_leave).collect();
        assert_eq!(left, [false, false, true, false, false, false, false, false, false]);
        connections.make_room(&open[8]);
        assert!(!open.iter().any(is_told_to_leave), "the one that leaves is counted as gone");
        assert!(
            !open[1].activity.is_idle() && open[1].activity.idle_since(u64::MAX).is_some(),
            "a client that never reads"
        );
        // What was used last stays longest.
        std::thread::sleep(Duration::from_millis(5));
        drop(open[3].activity.request());
        let more = connections.admit(ONE).unwrap();
        connections.make_room(&more);
        assert!(is_told_to_leave(&open[4]) && !is_told_to_leave(&open[3]));
    }

    #[test]
    fn an_address_has_its_share_and_its_own_idle_connections_go_first() {
        let connections = Arc::new(Connections::new(100, 2));
        let (first, second) = (connections.admit(ONE).unwrap(), connections.admit(ONE).unwrap());
        let _second = second.activity.request();
        let other = connections.admit(OTHER).unwrap();
        let third = connections.admit(ONE).expect("the first one is idle");
        assert!(is_told_to_leave(&first) && !is_told_to_leave(&other));
        let _third = third.activity.request();
        assert!(connections.admit(ONE).is_none(), "all of them are in use");
        assert!(connections.admit(OTHER).is_some());
        drop((first, second, third));
        assert!(connections.admit(ONE).is_some());
        drop(other);
        assert!(connections.table().clients.is_empty(), "nothing is kept of clients that have gone");
    }

    #[test]
    fn addresses_of_one_network_of_ipv6_are_one_client() {
        let of = |text: &str| client_of(text.parse().unwrap());
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:1"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_eq!(of("::ffff:192.0.2.1"), ONE);
    }
}
