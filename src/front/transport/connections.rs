//! The open connections of a port: the limit per client, and the eviction of idle connections in favour of new clients.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

/// Time between two searches for idle connections if the first found none: a search is linear in the connections.
const SEARCH_INTERVAL: Duration = Duration::from_millis(100);

/// A connection whose client has read nothing of a response for this long counts as idle.
const STALL: Duration = Duration::from_secs(10);

/// Value of `blocked_since_ms` while writes are not blocked.
const NOT_BLOCKED: u64 = u64::MAX;

/// All connections of one port.
#[derive(Debug)]
pub struct Connections {
    /// Idle connections are evicted beyond this many.
    eviction_threshold: usize,
    max_per_address: usize,
    epoch: Instant,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    open: BTreeMap<u64, Arc<Activity>>,
    next: u64,
    num_evicted: usize,
    /// When a search found no idle connection.
    failed_search: Option<Instant>,
    clients: HashMap<IpAddr, Client>,
}

/// The connections of one address.
#[derive(Debug, Default)]
struct Client {
    num_open: usize,
    num_evicted: usize,
    failed_search: Option<Instant>,
}

/// The current activity of a connection.
#[derive(Debug)]
pub struct Activity {
    address: IpAddr,
    /// Requests that are being read or answered.
    num_requests: AtomicU32,
    epoch: Instant,
    /// When the last request ended, in milliseconds since `epoch`.
    idle_since_ms: AtomicU64,
    /// Since when writes are blocked because the client does not read, or [`NOT_BLOCKED`].
    blocked_since_ms: AtomicU64,
    is_evicted: AtomicBool,
    eviction: Notify,
}

impl Default for Activity {
    fn default() -> Self {
        Self::new(Ipv4Addr::UNSPECIFIED.into(), Instant::now())
    }
}

impl Activity {
    fn new(address: IpAddr, epoch: Instant) -> Self {
        Self {
            address,
            num_requests: AtomicU32::new(0),
            epoch,
            idle_since_ms: AtomicU64::new(epoch.elapsed().as_millis() as u64),
            blocked_since_ms: AtomicU64::new(NOT_BLOCKED),
            is_evicted: AtomicBool::new(false),
            eviction: Notify::new(),
        }
    }

    /// Notes the start of a request, which ends when the guard is dropped.
    pub fn request(self: &Arc<Self>) -> BusyGuard {
        self.num_requests.fetch_add(1, Relaxed);
        BusyGuard(self.clone())
    }

    /// Notes whether writes are blocked because the client does not read.
    pub fn set_blocked(&self, is_blocked: bool) {
        self.blocked_since_ms.store(if is_blocked { self.now_ms() } else { NOT_BLOCKED }, Relaxed);
    }

    fn now_ms(&self) -> u64 {
        self.epoch.elapsed().as_millis() as u64
    }

    /// Whether the connection has neither a request nor a blocked write, or its write has been blocked for [`STALL`].
    pub fn is_idle(&self) -> bool {
        self.idle_since(self.now_ms()).is_some()
    }

    /// Since when the connection is idle, in milliseconds since `epoch`; `None` if it is not.
    fn idle_since(&self, now_ms: u64) -> Option<u64> {
        match self.blocked_since_ms.load(Relaxed) {
            NOT_BLOCKED => (self.num_requests.load(Relaxed) == 0).then(|| self.idle_since_ms.load(Relaxed)),
            since => (now_ms.saturating_sub(since) >= STALL.as_millis() as u64).then_some(since),
        }
    }

    /// Resolves when the connection is evicted in favour of another client.
    pub async fn evicted(&self) {
        self.eviction.notified().await;
    }
}

/// Keeps a connection from being idle while one or more of its requests are read or answered.
#[derive(Debug)]
pub struct BusyGuard(Arc<Activity>);

impl Drop for BusyGuard {
    fn drop(&mut self) {
        let activity = &self.0;
        if activity.num_requests.fetch_sub(1, Relaxed) == 1 {
            activity.idle_since_ms.store(activity.now_ms(), Relaxed);
        }
    }
}

impl Connections {
    /// A table for `max` connections, of which one address may have `max_per_address`; 0 is no limit.
    pub fn new(max: u32, max_per_address: u32) -> Self {
        let (max, max_per_address) = (max as usize, max_per_address as usize);
        Self {
            eviction_threshold: max - max / 5,
            max_per_address: if max_per_address == 0 { usize::MAX } else { max_per_address },
            epoch: Instant::now(),
            table: Mutex::default(),
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a connection. `None` when its address has the maximum and none of them is idle.
    pub fn admit(self: &Arc<Self>, address: IpAddr) -> Option<ConnectionSlot> {
        let address = client_of(address);
        let mut table = self.table();
        let client = table.clients.entry(address).or_default();
        if client.num_open - client.num_evicted >= self.max_per_address {
            if client.failed_search.is_some_and(|when| when.elapsed() < SEARCH_INTERVAL) {
                return None;
            }
            let count = (self.max_per_address / 20).max(1);
            if table.evict(count, |_, activity| activity.address == address) == 0 {
                table.clients.entry(address).or_default().failed_search = Some(Instant::now());
                return None;
            }
        }
        let activity = Arc::new(Activity::new(address, self.epoch));
        let id = table.next;
        table.next += 1;
        table.clients.entry(address).or_default().num_open += 1;
        table.open.insert(id, activity.clone());
        drop(table);
        Some(ConnectionSlot { connections: self.clone(), id, activity })
    }

    /// Evicts the connections that have been idle for longest if there are too many with `newest`.
    pub fn make_room(&self, newest: &ConnectionSlot) {
        let mut table = self.table();
        let num_kept = table.open.len() - table.num_evicted;
        if num_kept <= self.eviction_threshold
            || table.failed_search.is_some_and(|when| when.elapsed() < SEARCH_INTERVAL)
        {
            return;
        }
        // More than necessary, so that not every new client causes a search.
        let threshold = self.eviction_threshold;
        table.make_room(num_kept - threshold + threshold / 20, Some(newest.id));
    }

    /// Evicts a few idle connections, however many there are, because the process has no file descriptor left.
    pub fn make_room_for_files(&self) {
        let mut table = self.table();
        if table.num_evicted == 0 && table.failed_search.is_none_or(|when| when.elapsed() >= SEARCH_INTERVAL) {
            let count = table.open.len().div_ceil(20);
            table.make_room(count, None);
        }
    }
}

impl Table {
    fn make_room(&mut self, count: usize, newest: Option<u64>) {
        if self.evict(count, |id, _| Some(id) != newest) == 0 {
            self.failed_search = Some(Instant::now());
        }
    }

    /// Evicts up to `count` of the chosen connections, those that have been idle for longest. Returns how many.
    fn evict(&mut self, count: usize, is_chosen: impl Fn(u64, &Activity) -> bool) -> usize {
        let now_ms = self.open.values().next().map_or(0, |activity| activity.now_ms());
        let chosen = self.open.iter().filter(|(id, it)| !it.is_evicted.load(Relaxed) && is_chosen(**id, it));
        let mut idle: Vec<(u64, &Arc<Activity>)> =
            chosen.filter_map(|(_, activity)| Some((activity.idle_since(now_ms)?, activity))).collect();
        idle.sort_by_key(|(since, _)| *since); // Stable: of equally idle connections the oldest is first.
        idle.truncate(count);
        for (_, activity) in &idle {
            activity.is_evicted.store(true, Relaxed);
            activity.eviction.notify_one();
            self.num_evicted += 1;
            self.clients.entry(activity.address).or_default().num_evicted += 1;
        }
        idle.len()
    }
}

/// A connection's entry in the table, removed when dropped.
#[derive(Debug)]
pub struct ConnectionSlot {
    connections: Arc<Connections>,
    id: u64,
    /// Its current activity.
    pub activity: Arc<Activity>,
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        let mut table = self.connections.table();
        table.open.remove(&self.id);
        let was_evicted = usize::from(self.activity.is_evicted.load(Relaxed));
        table.num_evicted -= was_evicted;
        let address = self.activity.address;
        if let Some(client) = table.clients.get_mut(&address) {
            client.num_open -= 1;
            client.num_evicted -= was_evicted;
            if client.num_open == 0 {
                table.clients.remove(&address);
            }
        }
    }
}

/// The address by which a client is counted. IPv6 addresses of one /64 network count as one, because a client usually has the
/// whole network.
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

    fn is_evicted(slot: &ConnectionSlot) -> bool {
        slot.activity.evicted().now_or_never().is_some()
    }

    #[test]
    fn the_longest_idle_connections_are_evicted_and_busy_ones_are_kept() {
        let connections = Arc::new(Connections::new(10, 0));
        let open: Vec<ConnectionSlot> = (0..9).map(|_| connections.admit(ONE).unwrap()).collect();
        let _busy = open[0].activity.request();
        open[1].activity.set_blocked(true);
        connections.make_room(&open[8]);
        let left: Vec<bool> = open.iter().map(is_evicted).collect();
        assert_eq!(left, [false, false, true, false, false, false, false, false, false]);
        connections.make_room(&open[8]);
        assert!(!open.iter().any(is_evicted), "an evicted connection no longer counts");
        assert!(
            !open[1].activity.is_idle() && open[1].activity.idle_since(u64::MAX).is_some(),
            "a client that never reads"
        );
        // The most recently used connection is evicted last.
        std::thread::sleep(Duration::from_millis(5));
        drop(open[3].activity.request());
        let more = connections.admit(ONE).unwrap();
        connections.make_room(&more);
        assert!(is_evicted(&open[4]) && !is_evicted(&open[3]));
    }

    #[test]
    fn an_address_has_a_limit_and_its_own_idle_connections_are_evicted_first() {
        let connections = Arc::new(Connections::new(100, 2));
        let (first, second) = (connections.admit(ONE).unwrap(), connections.admit(ONE).unwrap());
        let _second = second.activity.request();
        let other = connections.admit(OTHER).unwrap();
        let third = connections.admit(ONE).expect("the first one is idle");
        assert!(is_evicted(&first) && !is_evicted(&other));
        let _third = third.activity.request();
        assert!(connections.admit(ONE).is_none(), "all of them are in use");
        assert!(connections.admit(OTHER).is_some());
        drop((first, second, third));
        assert!(connections.admit(ONE).is_some());
        drop(other);
        assert!(connections.table().clients.is_empty(), "clients without connections have no entry");
    }

    #[test]
    fn ipv6_addresses_of_one_network_are_one_client() {
        let of = |text: &str| client_of(text.parse().unwrap());
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:1"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_eq!(of("::ffff:192.0.2.1"), ONE);
    }
}
