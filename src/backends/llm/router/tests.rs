//! Which replica gets which request.

use futures::FutureExt as _;

use super::*;

const BLOCK: usize = 4;

/// Ready replicas of four rows and 100 blocks.
fn router(num_replicas: usize, max_queue: usize) -> Arc<Router> {
    let replica = |_| {
        let shared = Arc::new(ReplicaState::default());
        shared.ready.store(true, Ordering::Release);
        shared.stats.lock().unwrap().num_blocks = 100;
        Replica { inbox: Inbox::new().0, shared }
    };
    Arc::new(Router::new((0..num_replicas).map(replica).collect(), 4, max_queue, BLOCK))
}

fn prompt(first: u32, len: usize) -> Vec<TokenId> {
    (first..).take(len).map(TokenId).collect()
}

fn assigned(router: &Arc<Router>, prompt: &[TokenId]) -> Reservation {
    match router.admit(prompt, 1, 0).unwrap() {
        Admission::Assigned(reservation) => reservation,
        Admission::Queued(_) => panic!("no replica has room"),
    }
}

fn queued(router: &Arc<Router>, priority: u32) -> Ticket {
    match router.admit(&prompt(9000, 3), 1, priority).unwrap() {
        Admission::Queued(ticket) => ticket,
        Admission::Assigned(_) => panic!("a replica has room"),
    }
}

#[test]
fn requests_go_to_the_least_loaded_replica_and_at_equal_loads_to_the_longest_cached_prefix() {
    let router = router(2, 10);
    let [a, b] = [prompt(0, 40), prompt(500, 40)];
    let (one, two) = (assigned(&router, &a), assigned(&router, &b));
    assert_eq!((one.replica, two.replica), (0, 1));
    drop((one, two));
    assert_eq!(assigned(&router, &b).replica, 1);
    assert_eq!(assigned(&router, &b).replica, 1, "although it was used last");
    let mut longer = a.clone();
    longer.extend(prompt(700, 8));
    assert_eq!(assigned(&router, &longer).replica, 0);
}

#[test]
fn a_long_prefix_outweighs_a_few_sequences_and_a_short_one_none() {
    let router = router(2, 10);
    let [short, long] = [prompt(0, 40), prompt(5000, 3 * TOKENS_PER_SEQUENCE - BLOCK)];
    assert_eq!(assigned(&router, &short).replica, 0);
    assert_eq!(assigned(&router, &long).replica, 1);
    assert_eq!(assigned(&router, &short).replica, 0);
    let _beside = [assigned(&router, &short), assigned(&router, &prompt(10_000, 40))];
    assert_eq!(_beside.each_ref().map(|reservation| reservation.replica), [0, 1]);
    let _third = assigned(&router, &short);
    assert_eq!(_third.replica, 0, "loads are equal");
    assert_eq!(assigned(&router, &short).replica, 1, "it runs fewer sequences");
    let _more = [assigned(&router, &long), assigned(&router, &long)];
    assert_eq!(
        _more.each_ref().map(|reservation| reservation.replica),
        [1, 1],
        "one more sequence weighs less than the prefix"
    );
}

#[test]
fn requests_without_room_are_queued_by_priority_and_arrival_up_to_the_bound() {
    let router = router(2, 3);
    let mut reservations: Vec<_> = (0..8).map(|_| assigned(&router, &prompt(0, 3))).collect();
    let [mut first, mut second, mut urgent] = [0, 0, 1].map(|priority| queued(&router, priority));
    assert!(matches!(router.admit(&prompt(0, 3), 1, 9), Err(QueueFull { max: 3 })));
    assert_eq!(router.num_waiting(), 3);

    let freed = reservations.pop().unwrap().replica;
    let reservation = urgent.reservation().now_or_never().expect("its turn");
    assert_eq!(reservation.replica, freed);
    first.delay();
    drop(reservation);
    let reservation = second.reservation().now_or_never().expect("the first is delayed");
    assert!(first.reservation().now_or_never().is_none());
    drop(reservation);
    let reservation = first.reservation().now_or_never().expect("its turn");
    drop((first, reservation));
    assert_eq!(router.num_waiting(), 0);
    assert!(matches!(router.admit(&prompt(0, 3), 1, 0), Ok(Admission::Assigned(_))));
}

#[test]
fn a_request_of_low_priority_is_assigned_after_sixteen_others() {
    let router = router(2, 99);
    let mut reservations: Vec<_> = (0..8).map(|_| assigned(&router, &prompt(0, 3))).collect();
    let mut low = queued(&router, 0);
    let mut urgent: Vec<_> = (0..20).map(|number| queued(&router, 1 + number % 2)).collect();
    let mut num_before = 0;
    while low.reservation().now_or_never().is_none() {
        drop(reservations.pop());
        let assigned = urgent.iter_mut().position(|ticket| ticket.reservation().now_or_never().is_some());
        if let Some(index) = assigned {
            drop(urgent.remove(index)); // Its place is free for the next one.
            num_before += 1;
        }
        assert!(num_before <= 16, "the oldest waits for {num_before} others");
    }
    assert!(num_before > 4, "priorities have no effect");
}

#[test]
fn those_who_give_up_leave_their_turn_and_their_place_to_others() {
    let router = router(2, 9);
    let mut reservations: Vec<_> = (0..8).map(|_| assigned(&router, &prompt(0, 3))).collect();
    let [first, second, mut third] = [0, 0, 0].map(|priority| queued(&router, priority));
    drop(first);
    reservations.pop();
    drop(second); // It has received a reservation.
    assert!(third.reservation().now_or_never().is_some());
    drop((third, reservations));
    assert_eq!(router.state.lock().unwrap().loads.iter().map(|load| load.num_sequences).sum::<usize>(), 0);
}

#[test]
fn a_replica_whose_workers_load_gets_no_requests_while_another_is_ready_and_loses_its_prefixes() {
    let router = router(2, 9);
    let a = prompt(0, 40);
    assert_eq!(assigned(&router, &a).replica, 0);
    let lost = &router.replicas[0].shared;
    lost.ready.store(false, Ordering::Release);
    lost.restarts.fetch_add(1, Ordering::Relaxed);
    let reservations: Vec<_> = (0..4).map(|_| assigned(&router, &a)).collect();
    assert!(reservations.iter().all(|reservation| reservation.replica == 1));
    let mut waits = queued(&router, 0);
    assert!(waits.reservation().now_or_never().is_none());
    lost.ready.store(true, Ordering::Release);
    router.dispatch();
    assert_eq!(waits.reservation().now_or_never().expect("there is room again").replica, 0);
    drop(reservations);
    assert_eq!(assigned(&router, &a).replica, 1);
}

#[test]
fn a_request_of_more_sequences_than_rows_needs_an_idle_replica() {
    let router = router(2, 9);
    let large = |router: &Arc<Router>| match router.admit(&prompt(0, 3), 6, 0).unwrap() {
        Admission::Assigned(reservation) => Some(reservation.replica),
        Admission::Queued(_) => None,
    };
    let reservation = assigned(&router, &prompt(0, 3));
    assert_eq!(large(&router), Some(1));
    let _second = assigned(&router, &prompt(0, 3));
    assert_eq!(large(&router), None);
    drop(reservation);
    assert_eq!(large(&router), Some(0));
}

#[test]
fn requests_of_a_lost_replica_go_to_the_others_before_those_that_came_later() {
    let router = router(2, 1);
    let mut reservations: Vec<_> = (0..8).map(|_| assigned(&router, &prompt(0, 3))).collect();
    let mut later = queued(&router, 0);
    router.replicas[1].shared.is_lost.store(true, Ordering::Release);
    let of_lost = reservations.iter().position(|reservation| reservation.replica == 1).unwrap();
    let of_lost = reservations.swap_remove(of_lost);
    // The queue is full, and takes it nevertheless.
    let mut moved = of_lost.move_on(&prompt(0, 9), 1, 0);
    drop(of_lost);
    assert!(moved.reservation().now_or_never().is_none() && later.reservation().now_or_never().is_none());
    let left = reservations.iter().position(|reservation| reservation.replica == 0).unwrap();
    drop(reservations.swap_remove(left));
    let reservation = moved.reservation().now_or_never().expect("its turn");
    assert_eq!(reservation.replica, 0);
    assert!(later.reservation().now_or_never().is_none());
    drop(reservation);
    assert_eq!(later.reservation().now_or_never().expect("its turn").replica, 0);
}
