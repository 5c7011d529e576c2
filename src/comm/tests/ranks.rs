//! Real ranks under a real `mpirun`: each test starts this binary again as the ranks of a world.

use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use comm::{CommError, Config, MpiKind, World};

const LONG: Duration = Duration::from_secs(30);

/// The launchers of the MPIs on this machine that this build supports, by Debian's names where there are two.
fn launchers() -> Vec<(MpiKind, String)> {
    let names = [(MpiKind::OpenMpi, "mpirun.openmpi"), (MpiKind::Mpich, "mpirun.mpich")];
    let version = |program: &str| Command::new(program).arg("--version").output().ok();
    let mut found: Vec<_> = names.map(|(kind, name)| (kind, name.to_owned())).into();
    found.retain(|(kind, name)| kind.is_built_in() && version(name).is_some());
    if found.is_empty()
        && let Some(version) = version("mpirun")
    {
        let is_open_mpi = String::from_utf8_lossy(&version.stdout).contains("Open MPI");
        found.push((if is_open_mpi { MpiKind::OpenMpi } else { MpiKind::Mpich }, "mpirun".to_owned()));
        found.retain(|(kind, _)| kind.is_built_in());
    }
    if found.is_empty() {
        println!("skipped: no MPI on this machine");
    }
    found
}

/// Runs `role` on `num_ranks` ranks.
fn run((kind, mpirun): &(MpiKind, String), role: &str, num_ranks: u32) -> Output {
    // Two concurrent launchers of Open MPI can fail because of the folder that they would share.
    let scratch = std::env::temp_dir().join(format!("comm-{}-{role}-{num_ranks}", std::process::id()));
    std::fs::create_dir_all(&scratch).unwrap();
    let options: &[&str] = match kind {
        MpiKind::OpenMpi => &["--allow-run-as-root", "--oversubscribe"],
        MpiKind::Mpich => &[],
    };
    let output = Command::new(mpirun)
        .args(options)
        .args(["-n", &num_ranks.to_string()])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "a_rank", "--nocapture"])
        .env("COMM_TEST_ROLE", role)
        .env("TMPDIR", &scratch)
        .env("OMPI_MCA_mpi_yield_when_idle", "1")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let _ = std::fs::remove_dir_all(&scratch);
    output
}

fn run_well(role: &str, num_ranks: u32) {
    for launcher in launchers() {
        let output = run(&launcher, role, num_ranks);
        let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{launcher:?}: `{role}` on {num_ranks} ranks: {}\n{text}", output.status);
        let num_done = text.matches(&format!("{role}: done")).count();
        assert_eq!(num_done, num_ranks as usize, "{launcher:?}\n{text}");
    }
}

/// Not a test by itself: the code of each rank that `run` starts.
#[test]
fn a_rank() {
    let Ok(role) = std::env::var("COMM_TEST_ROLE") else { return };
    let world = World::start(Config::from_env()).unwrap();
    match role.as_str() {
        "all to all" => all_to_all(&world),
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
fn all_to_all(world: &World) {
    let incoming = world.incoming().unwrap();
    assert!(world.incoming().is_none());
    assert_eq!(world.node_ranks(0), (0..world.size()).collect::<Vec<_>>(), "all on this machine");
    assert!(!world.hostname(world.size() - 1).is_empty());
    assert!(matches!(world.send(world.size(), vec![]), Err(CommError::NoSuchRank { .. })));

    for to in 0..world.size() {
        world.send(to, format!("{} to {to}", world.rank()).into_bytes()).unwrap();
    }
    // Rank 0 broadcasts once it has received all messages. The broadcast may overtake messages of other ranks, not its own.
    let is_first = world.rank() == 0;
    let num_messages = world.size() + u32::from(!is_first);
    let mut received: Vec<_> = (0..num_messages).map(|_| incoming.recv_timeout(LONG).unwrap()).collect();
    received.sort_by_key(|(from, _)| *from);
    let greeting = |from: u32| (from, format!("{from} to {}", world.rank()).into_bytes());
    let mut expected: Vec<_> = (0..world.size()).map(greeting).collect();
    if is_first {
        assert_eq!(received, expected);
        world.broadcast(b"to all".to_vec()).unwrap();
        (1..world.size()).for_each(|_| assert_eq!(incoming.recv_timeout(LONG).unwrap().1, b"received"));
    } else {
        expected.insert(1, (0, b"to all".to_vec()));
        assert_eq!(received, expected);
        world.send(0, b"received".to_vec()).unwrap();
    }
}

/// Each rank sends messages of 0 bytes to 8 MB to its neighbour. They arrive complete and in order, also those that are in transit when
/// the world ends.
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

/// Messages after pauses.
const ROUND_TRIPS: usize = 24;

/// After a pause a world uses almost no CPU time, and a message still arrives soon.
fn idle(world: &World) {
    let incoming = world.incoming().unwrap();
    std::thread::sleep(Duration::from_millis(1500));
    // The cost of a wake-up depends on the machine, the number does not. A rank that spins wakes up rarely but uses the core. Load on
    // the machine only adds to both, so the minimum of three pauses counts.
    let used = |_| {
        let before = (wake_ups(), cpu_time());
        std::thread::sleep(Duration::from_secs(2));
        (wake_ups() - before.0, cpu_time() - before.1)
    };
    let pauses: Vec<_> = (0..3).map(used).collect();
    let num_wake_ups = pauses.iter().map(|(num, _)| *num).min().expect("three pauses");
    let cpu = pauses.iter().map(|(_, cpu)| *cpu).min().expect("three pauses");
    println!("idle rank {}: {num_wake_ups} wake-ups, {:.3} % of a core", world.rank(), cpu.as_secs_f64() / 2.0 * 100.0);
    assert!(num_wake_ups < 50, "an idle rank woke up {num_wake_ups} times in 2 s");
    assert!(cpu < Duration::from_millis(200), "an idle rank used {cpu:?} of 2 s");
    if world.rank() > 0 {
        for _ in 0..ROUND_TRIPS {
            incoming.recv_timeout(LONG).unwrap();
            world.send(0, b"pong".to_vec()).unwrap();
        }
        return;
    }
    let round_trip = |_| {
        std::thread::sleep(Duration::from_millis(60));
        let start = Instant::now();
        world.send(1, b"ping".to_vec()).unwrap();
        incoming.recv_timeout(LONG).unwrap();
        start.elapsed()
    };
    let mut times: Vec<Duration> = (0..ROUND_TRIPS).map(round_trip).collect();
    times.sort_unstable();
    println!("round trip after a pause: {:?}, median {:?}", times[0], times[ROUND_TRIPS / 2]);
    // Polls are 250 ms apart, so without announcements half of the messages would wait for more than 125 ms. On a loaded machine
    // a single question to Open MPI takes tens of milliseconds, because it yields.
    let num_late = times.iter().filter(|time| **time > Duration::from_millis(125)).count();
    assert!(num_late <= 3, "messages after pauses wait for the next poll: {times:?}");
}

/// Number of voluntary context switches of all threads of this process.
fn wake_ups() -> u64 {
    let switches = |task: std::fs::DirEntry| {
        let status = std::fs::read_to_string(task.path().join("status")).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        line.and_then(|number| number.trim().parse::<u64>().ok()).unwrap_or(0)
    };
    std::fs::read_dir("/proc/self/task").unwrap().flatten().map(switches).sum()
}

fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[test]
fn the_plugin_is_embedded_where_it_can_be_built() {
    let found = |program: &str| Command::new(program).arg("--version").output().is_ok();
    let libclang = Command::new("sh").args(["-c", "ls /usr/lib/llvm-*/lib/libclang*.so*"]).output().unwrap();
    for (kind, compiler) in [(MpiKind::OpenMpi, "mpicc.openmpi"), (MpiKind::Mpich, "mpicc.mpich")] {
        if found(compiler) && libclang.status.success() {
            assert!(kind.is_built_in(), "{compiler} and libclang are here, but this build does not carry {kind:?}");
        } else {
            println!("skipped: no {compiler} or no libclang");
        }
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
fn more_messages_than_may_be_queued_are_refused() {
    let world = World::start(Config { max_queued: 2, ..Config::default() }).unwrap();
    (0..2).for_each(|_| world.send(0, vec![1]).unwrap());
    assert!(matches!(world.send(0, vec![1]), Err(CommError::Overloaded { queued: 2 })));
    let incoming = world.incoming().unwrap();
    incoming.recv().unwrap();
    world.send(0, vec![1]).unwrap();
}

#[test]
fn worlds_of_one_two_and_four_ranks_exchange_messages() {
    [1, 2, 4].into_iter().for_each(|num_ranks| run_well("all to all", num_ranks));
}

#[test]
fn long_messages_arrive_in_order() {
    [1, 2, 4].into_iter().for_each(|num_ranks| run_well("long and short", num_ranks));
}

#[test]
fn an_idle_world_uses_almost_no_cpu_time() {
    run_well("idle", 2);
}

#[test]
fn an_abort_ends_all_ranks_with_its_code() {
    for launcher in launchers() {
        let start = Instant::now();
        let output = run(&launcher, "abort", 3);
        assert_eq!(output.status.code(), Some(42), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(start.elapsed() < LONG / 2);
    }
}

#[test]
fn finalize_times_out_if_a_rank_does_not_take_part() {
    for launcher in launchers() {
        let start = Instant::now();
        let output = run(&launcher, "late", 2);
        assert!(String::from_utf8_lossy(&output.stdout).contains("gave up"), "{output:?}");
        // MPICH's launcher kills the other rank, and reports that.
        let expected: &[i32] = if launcher.0 == MpiKind::OpenMpi { &[3] } else { &[3, 9] };
        assert!(output.status.code().is_some_and(|code| expected.contains(&code)), "{output:?}");
        assert!(start.elapsed() < LONG / 2);
    }
}
