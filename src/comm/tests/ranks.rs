//! Real ranks under a real `mpirun`: each test starts this binary again as the ranks of a world.

use std::process::{Command, Output};
use std::time::{Duration, Instant};

use comm::{CommError, Config, World};

const LONG: Duration = Duration::from_secs(30);

/// Runs `role` on `num_ranks` ranks; None where there is no MPI to run it with.
fn run(role: &str, num_ranks: u32) -> Option<Output> {
    if !comm::has_mpi() || Command::new("mpirun").arg("--version").output().is_err() {
        println!("skipped: no MPI on this machine");
        return None;
    }
    // Two of Open MPI's launchers that start and end at once can fail over the folder they would share.
    let scratch = std::env::temp_dir().join(format!("comm-{}-{role}-{num_ranks}", std::process::id()));
    std::fs::create_dir_all(&scratch).unwrap();
    let output = Command::new("mpirun")
        .args(["--allow-run-as-root", "--oversubscribe", "-n", &num_ranks.to_string()])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "a_rank", "--nocapture"])
        .env("COMM_TEST_ROLE", role)
        .env("TMPDIR", &scratch)
        .env("OMPI_MCA_mpi_yield_when_idle", "1")
        .output()
        .unwrap();
    let _ = std::fs::remove_dir_all(&scratch);
    Some(output)
}

fn run_well(role: &str, num_ranks: u32) {
    let Some(output) = run(role, num_ranks) else { return };
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "`{role}` on {num_ranks} ranks: {}\n{text}", output.status);
    let num_done = text.matches(&format!("{role}: done")).count();
    assert_eq!(num_done, num_ranks as usize, "{text}");
}

/// Not a test by itself: what each rank started by `run` does.
#[test]
fn a_rank() {
    let Ok(role) = std::env::var("COMM_TEST_ROLE") else { return };
    let world = World::start(Config::from_env()).unwrap();
    match role.as_str() {
        "everyone meets" => everyone_meets(&world),
        "long and short" => long_and_short(&world),
        "idle" => idle(&world),
        "abort" if world.rank() == world.size() - 1 => world.abort(42, "the test says so"),
        "abort" => std::thread::sleep(LONG),
        "late" if world.rank() == 0 => {
            let error = world.finalize(Duration::from_millis(200)).unwrap_err();
            assert!(matches!(error, CommError::FinalizeTimeout { .. }), "{error:?}");
            println!("gave up");
            std::process::exit(3);
        }
        "late" => std::thread::sleep(LONG),
        _ => panic!("unknown role `{role}`"),
    }
    world.finalize(LONG).unwrap();
    println!("{role}: done");
}

/// Every rank sends to every rank, itself included; rank 0 broadcasts.
fn everyone_meets(world: &World) {
    let incoming = world.incoming().unwrap();
    assert!(world.incoming().is_none());
    assert_eq!(world.node_ranks(0), (0..world.size()).collect::<Vec<_>>(), "all on this machine");
    assert!(!world.hostname(world.size() - 1).is_empty());
    assert!(matches!(world.send(world.size(), vec![]), Err(CommError::NoSuchRank { .. })));

    for to in 0..world.size() {
        world.send(to, format!("{} to {to}", world.rank()).into_bytes()).unwrap();
    }
    let mut heard: Vec<_> = (0..world.size()).map(|_| incoming.recv_timeout(LONG).unwrap()).collect();
    heard.sort();
    let expected = (0..world.size()).map(|from| (from, format!("{from} to {}", world.rank()).into_bytes()));
    assert_eq!(heard, expected.collect::<Vec<_>>());

    if world.rank() == 0 {
        world.broadcast(b"to all".to_vec()).unwrap();
        // Each answers, so that no broadcast overtakes a greeting of another rank.
        (1..world.size()).for_each(|_| assert_eq!(incoming.recv_timeout(LONG).unwrap().1, b"heard"));
    } else {
        assert_eq!(incoming.recv_timeout(LONG).unwrap(), (0, b"to all".to_vec()));
        world.send(0, b"heard".to_vec()).unwrap();
    }
}

/// Each rank sends its neighbour messages of 0 bytes to 8 MB in turn; they arrive whole and in order, also those
/// that are still on their way when the world ends.
fn long_and_short(world: &World) {
    const LENGTHS: [usize; 5] = [0, 1, 5_000, 8_000_000, 70_000];
    const NUM_MESSAGES: usize = 40;
    let neighbour = (world.rank() + 1) % world.size();
    let from = (world.rank() + world.size() - 1) % world.size();
    let incoming = world.incoming().unwrap();
    let content = |rank: u32, index: usize| vec![(rank as usize * 31 + index) as u8; LENGTHS[index % LENGTHS.len()]];

    (0..NUM_MESSAGES).for_each(|index| world.send(neighbour, content(world.rank(), index)).unwrap());
    world.finalize(LONG).unwrap();
    for index in 0..NUM_MESSAGES {
        let (sender, bytes) = incoming.try_recv().unwrap();
        assert!(sender == from && bytes == content(from, index), "message {index} differs");
    }
    assert!(incoming.try_recv().is_err());
    assert!(matches!(world.send(neighbour, vec![1]), Err(CommError::Left)) || world.size() == 1);
}

/// After a pause a world uses next to no CPU, and a message still arrives soon.
fn idle(world: &World) {
    let incoming = world.incoming().unwrap();
    std::thread::sleep(Duration::from_millis(1500));
    // A busy machine only adds to what waking up costs, so the calmest of three pauses counts.
    let used = |_| {
        let before = cpu_time();
        std::thread::sleep(Duration::from_secs(2));
        cpu_time() - before
    };
    let least = (0..3).map(used).min().expect("three pauses");
    println!("idle rank {}: {:.3} % of a core", world.rank(), least.as_secs_f64() / 2.0 * 100.0);
    assert!(least < Duration::from_millis(12), "an idle rank used {least:?} of 2 s");
    if world.rank() == 0 {
        let start = Instant::now();
        world.send(1, b"ping".to_vec()).unwrap();
        incoming.recv_timeout(LONG).unwrap();
        println!("round trip after a pause: {:?}", start.elapsed());
    } else {
        incoming.recv_timeout(LONG).unwrap();
        world.send(0, b"pong".to_vec()).unwrap();
    }
}

fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[test]
fn the_plugin_is_embedded_where_it_can_be_built() {
    let found = |program: &str| Command::new(program).arg("--version").output().is_ok();
    let libclang = Command::new("sh").args(["-c", "ls /usr/lib/llvm-*/lib/libclang*.so*"]).output().unwrap();
    if found("mpicc") && libclang.status.success() {
        assert!(comm::has_mpi(), "mpicc and libclang are here, but this build carries no MPI");
    } else {
        println!("skipped: no mpicc or no libclang");
    }
}

#[test]
fn a_world_without_a_launcher_has_one_rank() {
    let world = World::start(Config::default()).unwrap();
    assert_eq!((world.rank(), world.size(), world.node_ranks(0)), (0, 1, vec![0]));
    world.broadcast(vec![1]).unwrap();
    world.finalize(Duration::ZERO).unwrap();
}

#[test]
fn more_messages_than_may_wait_are_refused() {
    let world = World::start(Config { max_queued: 2, ..Config::default() }).unwrap();
    (0..2).for_each(|_| world.send(0, vec![1]).unwrap());
    assert!(matches!(world.send(0, vec![1]), Err(CommError::Overloaded { queued: 2 })));
    let incoming = world.incoming().unwrap();
    incoming.recv().unwrap();
    world.send(0, vec![1]).unwrap();
}

#[test]
fn ranks_of_one_two_and_four_talk_to_each_other() {
    [1, 2, 4].into_iter().for_each(|num_ranks| run_well("everyone meets", num_ranks));
}

#[test]
fn long_messages_pass_and_keep_their_order() {
    [1, 2, 4].into_iter().for_each(|num_ranks| run_well("long and short", num_ranks));
}

#[test]
fn an_idle_world_uses_next_to_no_cpu() {
    run_well("idle", 2);
}

#[test]
fn an_abort_ends_all_ranks_with_its_code() {
    let start = Instant::now();
    let Some(output) = run("abort", 3) else { return };
    assert_eq!(output.status.code(), Some(42), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(start.elapsed() < LONG / 2);
}

#[test]
fn finalize_gives_up_on_a_rank_that_does_not_come() {
    let start = Instant::now();
    let Some(output) = run("late", 2) else { return };
    assert!(String::from_utf8_lossy(&output.stdout).contains("gave up"), "{output:?}");
    assert_eq!(output.status.code(), Some(3));
    assert!(start.elapsed() < LONG / 2);
}
