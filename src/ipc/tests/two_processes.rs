//! Rings and regions between two real processes: the test binary starts itself again as the other one.

use std::fs;
use std::path::Path;
use std::process::{Child, Command};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use ipc::{
    IpcError, Prefix, ProcessWatch, Received, RecvError, Region, Ring, RingReceiver, RingSender, SendError,
    sweep_all_stale, sweep_stale,
};

const LONG: Duration = Duration::from_secs(20);
/// Locked by tests that need a stale region to stay, or that sweep all stale regions.
static SWEEPING: Mutex<()> = Mutex::new(());
const NUM_MESSAGES: u64 = 2_000_000;

/// A prefix that no other test uses.
fn prefix(test: &str) -> Prefix {
    format!("ipctest{}_{test}_", std::process::id()).parse().unwrap()
}

/// Starts this binary as the other process: it runs `role` with the ring or region `x` of `prefix`.
fn start(role: &str, prefix: &Prefix) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "the_other_process", "--nocapture"])
        .env("IPC_TEST_ROLE", role)
        .env("IPC_TEST_PREFIX", prefix.as_str())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap()
}

/// Not a test by itself: what the process started by `start` does.
#[test]
fn the_other_process() {
    let Ok(role) = std::env::var("IPC_TEST_ROLE") else { return };
    let prefix: Prefix = std::env::var("IPC_TEST_PREFIX").unwrap().parse().unwrap();
    match role.as_str() {
        "send all" => {
            let mut sender = RingSender::open(&prefix, "x").unwrap();
            (0..NUM_MESSAGES).for_each(|index| sender.send(&message(index), LONG).unwrap());
        }
        "send forever" => {
            let mut sender = RingSender::open(&prefix, "x").unwrap();
            (0..u64::MAX).for_each(|index| sender.send(&message(index), LONG).unwrap());
        }
        "receive forever" => {
            let mut receiver = RingReceiver::open(&prefix, "x").unwrap();
            let mut buffer = Vec::new();
            fs::write(format!("/dev/shm/{prefix}ready"), "").unwrap();
            while receiver.recv(&mut buffer, LONG).unwrap() != Received::TimedOut {}
        }
        "own a region" => {
            let _region = Region::create(&prefix, "x", 4096).unwrap();
            fs::write(format!("/dev/shm/{prefix}ready"), "").unwrap();
            std::thread::sleep(LONG);
        }
        "hold locks" => {
            let files: Vec<_> =
                LOCKED.iter().map(|name| fs::File::open(format!("/dev/shm/{prefix}{name}")).unwrap()).collect();
            files.iter().for_each(|file| file.lock().unwrap());
            fs::write(format!("/dev/shm/{prefix}ready"), "").unwrap();
            std::thread::sleep(LONG);
        }
        _ => panic!("unknown role `{role}`"),
    }
}

/// Message `index`. Its length and bytes are computed from the index, so that the receiver can check both.
fn message(index: u64) -> Vec<u8> {
    let mut state = index.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0xd1b5_4a32_d192_ed03;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    // Mostly short, sometimes as long as the ring allows, sometimes empty.
    let len = if index % 5000 == 4999 { 4096 - 8 - (next() % 64) } else { next() % 64 };
    (0..len.div_ceil(8)).flat_map(|_| next().to_le_bytes()).take(len as usize).collect()
}

fn wait_for(path: &str) {
    let start = Instant::now();
    while !Path::new(path).exists() {
        assert!(start.elapsed() < LONG, "{path} did not appear");
        std::thread::sleep(Duration::from_millis(5));
    }
    fs::remove_file(path).unwrap();
}

fn entries(prefix: &Prefix) -> Vec<String> {
    let names = fs::read_dir("/dev/shm").unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.starts_with(prefix.as_str())).collect()
}

#[test]
fn millions_of_messages_of_any_size_arrive_whole_and_in_order() {
    let prefix = prefix("millions");
    let ring = Ring::create(&prefix, "x", 4096).unwrap();
    let mut receiver = RingReceiver::open(&prefix, "x").unwrap();
    let mut child = start("send all", &prefix);

    let mut buffer = Vec::new();
    for index in 0..NUM_MESSAGES {
        assert_eq!(receiver.recv(&mut buffer, LONG).unwrap(), Received::Message);
        assert!(buffer == message(index), "message {index} differs");
    }
    let end = receiver.recv(&mut buffer, LONG);
    assert!(matches!(end, Err(RecvError::PeerGone { pid, .. }) if pid == child.id()), "{end:?}");
    assert!(child.wait().unwrap().success());
    drop(ring);
    assert_eq!(entries(&prefix), [""; 0]);
}

#[test]
fn the_death_of_a_sender_is_detected_and_no_message_is_torn() {
    let prefix = prefix("killed_sender");
    let ring = Ring::create(&prefix, "x", 1 << 16).unwrap();
    let mut receiver = ring.receiver().unwrap();
    let mut child = start("send forever", &prefix);
    let watch = ProcessWatch::new(child.id()).unwrap();

    let mut buffer = Vec::new();
    let mut num_received = 0;
    let end = loop {
        match receiver.recv(&mut buffer, Duration::from_millis(100)) {
            Ok(Received::Message) => assert!(buffer == message(num_received), "message {num_received} differs"),
            Ok(other) => {
                assert_eq!((other, num_received), (Received::TimedOut, 0), "a living sender stopped");
                continue;
            }
            Err(error) => break error,
        }
        num_received += 1;
        if num_received == 10_000 {
            child.kill().unwrap();
            assert!(watch.wait(LONG));
        }
    };
    assert!(matches!(end, RecvError::PeerGone { pid, .. } if pid == child.id()), "{end:?}");
    child.wait().unwrap();
    // A new process may take the end of one that has ended.
    drop(RingSender::open(&prefix, "x").unwrap());
}

#[test]
fn the_death_of_a_receiver_is_detected_by_the_sender() {
    let prefix = prefix("killed_receiver");
    let ring = Ring::create(&prefix, "x", 4096).unwrap();
    let mut sender = ring.sender().unwrap();
    let mut child = start("receive forever", &prefix);
    wait_for(&format!("/dev/shm/{prefix}ready"));
    (0..1000).for_each(|index| sender.send(&message(index), LONG).unwrap());

    child.kill().unwrap();
    child.wait().unwrap();
    let error = (0..1000).find_map(|index| sender.send(&message(index), Duration::from_millis(50)).err()).unwrap();
    assert!(matches!(error, SendError::PeerGone { pid, .. } if pid == child.id()), "{error:?}");
}

#[test]
fn an_idle_receiver_uses_no_cpu() {
    let prefix = prefix("idle");
    let ring = Ring::create(&prefix, "x", 4096).unwrap();
    let _sender = ring.sender().unwrap();
    let mut child = start("receive forever", &prefix);
    wait_for(&format!("/dev/shm/{prefix}ready"));
    let ticks = || {
        let stat = fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
        let fields: Vec<&str> = stat[stat.rfind(')').unwrap() + 2..].split(' ').collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    };
    std::thread::sleep(Duration::from_millis(100));
    let before = ticks();
    std::thread::sleep(Duration::from_secs(2));
    let used = ticks() - before;
    assert!(used <= 1, "used {used} of 200 clock ticks");
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn a_doorbell_wakes_a_blocked_receiver_and_is_not_lost_when_rung_early() {
    let prefix = prefix("doorbell");
    let ring = Ring::create(&prefix, "x", 4096).unwrap();
    let (mut sender, mut receiver) = (ring.sender().unwrap(), ring.receiver().unwrap());
    let mut buffer = Vec::new();

    receiver.doorbell().ring();
    receiver.doorbell().ring();
    sender.send(b"work", LONG).unwrap();
    assert_eq!(receiver.recv(&mut buffer, LONG).unwrap(), Received::Woken);
    assert_eq!(receiver.recv(&mut buffer, LONG).unwrap(), Received::Message);
    assert_eq!(receiver.recv(&mut buffer, Duration::from_millis(1)).unwrap(), Received::TimedOut);

    let doorbell = receiver.doorbell();
    let ringer = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(50));
        doorbell.ring();
    });
    assert_eq!(receiver.recv(&mut buffer, LONG).unwrap(), Received::Woken);
    ringer.join().unwrap();
}

#[test]
fn a_full_ring_and_a_message_too_long_are_refused_and_nothing_is_sent() {
    let prefix = prefix("full");
    let ring = Ring::create(&prefix, "x", 64).unwrap();
    let (mut sender, mut receiver) = (ring.sender().unwrap(), ring.receiver().unwrap());
    let mut buffer = Vec::new();

    let too_long = sender.send(&[0; 57], LONG).unwrap_err();
    assert!(matches!(too_long, SendError::TooLarge { len: 57, max: 56, .. }), "{too_long:?}");
    sender.send(&[1; 56], LONG).unwrap();
    let backlog = sender.backlog();
    assert_eq!(backlog.num_messages(), 1);
    let full = sender.send(&[2; 1], Duration::from_millis(5)).unwrap_err();
    assert!(matches!(full, SendError::Full { .. }), "{full:?}");
    assert!(receiver.try_recv(&mut buffer).unwrap());
    assert_eq!(buffer, [1; 56]);
    assert_eq!(backlog.num_messages(), 0);
    assert!(!receiver.try_recv(&mut buffer).unwrap());

    drop(receiver);
    let gone = sender.send(&[3; 1], LONG).unwrap_err();
    assert!(matches!(gone, SendError::PeerGone { .. }), "{gone:?}");
}

#[test]
fn a_ring_unlinked_early_goes_on_working() {
    let prefix = prefix("unlinked");
    let ring = Ring::create(&prefix, "x", 64).unwrap();
    let mut sender = RingSender::open(&prefix, "x").unwrap();
    let mut receiver = RingReceiver::open(&prefix, "x").unwrap();
    ring.unlink();
    assert_eq!(entries(&prefix), [""; 0]);
    let other = Ring::create(&prefix, "x", 64).unwrap();
    drop(ring);
    assert_eq!(entries(&prefix).len(), 1, "the name is the second ring's");
    drop(other);

    sender.send(b"still here", LONG).unwrap();
    let mut buffer = Vec::new();
    assert_eq!(receiver.recv(&mut buffer, LONG).unwrap(), Received::Message);
    assert_eq!(buffer, b"still here");
}

#[test]
fn each_end_of_a_ring_has_one_holder() {
    let prefix = prefix("holders");
    let ring = Ring::create(&prefix, "x", 64).unwrap();
    let first = ring.sender().unwrap();
    let second = RingSender::open(&prefix, "x").unwrap_err();
    assert!(matches!(second, IpcError::Taken { pid, .. } if pid == std::process::id()), "{second:?}");
    drop(first);
    RingSender::open(&prefix, "x").unwrap();
}

#[test]
fn a_region_of_a_running_process_is_refused_and_one_of_a_dead_process_is_replaced() {
    let _alone = SWEEPING.lock();
    let prefix = prefix("owner");
    let mut child = start("own a region", &prefix);
    wait_for(&format!("/dev/shm/{prefix}ready"));

    for error in [Region::create(&prefix, "x", 64).unwrap_err(), sweep_stale(&prefix).unwrap_err()] {
        assert!(matches!(error, IpcError::Owned { pid, .. } if pid == child.id()), "{error:?}");
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(entries(&prefix).len(), 1, "a killed owner cannot remove its region");

    let region = Region::create(&prefix, "x", 64).unwrap();
    assert_eq!(Region::open(&prefix, "x").unwrap().len(), 64);
    drop(region);
    assert_eq!(entries(&prefix), [""; 0]);
    assert!(matches!(Region::open(&prefix, "x"), Err(IpcError::Missing { .. })));
}

#[test]
fn a_sweep_removes_regions_of_ended_owners_and_nothing_else() {
    let _alone = SWEEPING.lock();
    let prefix = prefix("sweep");
    let mut child = start("own a region", &prefix);
    wait_for(&format!("/dev/shm/{prefix}ready"));
    child.kill().unwrap();
    child.wait().unwrap();
    let mine = Region::create(&prefix, "mine", 64).unwrap();
    let foreign = format!("/dev/shm/{prefix}foreign");
    fs::write(&foreign, "a file of another program").unwrap();

    let removed = sweep_all_stale().unwrap();
    assert!(removed.contains(&format!("{prefix}x")), "{removed:?}");
    let mut left = entries(&prefix);
    left.sort();
    assert_eq!(left, [format!("{prefix}foreign"), format!("{prefix}mine")]);
    let error = Region::create(&prefix, "foreign", 64).unwrap_err();
    assert!(matches!(error, IpcError::NotOurs { .. }), "{error:?}");
    fs::remove_file(foreign).unwrap();
    drop(mine);
}

/// Files that another process has locked while this one sweeps.
const LOCKED: [&str; 3] = ["theirs", "look_alike", "dead"];

#[test]
fn a_sweep_never_waits_and_skips_everything_but_regions_of_its_user() {
    let _alone = SWEEPING.lock();
    let prefix = prefix("locked");
    let path = |name: &str| format!("/dev/shm/{prefix}{name}");
    let mut owner = start("own a region", &prefix);
    wait_for(&path("ready"));
    owner.kill().unwrap();
    owner.wait().unwrap();
    fs::rename(path("x"), path("dead")).unwrap();
    fs::copy(path("dead"), path("others")).unwrap();
    fs::write(path("theirs"), [0; 200]).unwrap();
    fs::write(path("look_alike"), b"trireme\x01").unwrap();
    std::os::unix::fs::symlink(path("dead"), path("link")).unwrap();
    fs::create_dir(path("folder")).unwrap();
    assert!(Command::new("mkfifo").arg(path("pipe")).status().unwrap().success());
    let _socket = std::os::unix::net::UnixListener::bind(path("socket")).unwrap();
    // Only root can change the owner of a file.
    let is_others = std::os::unix::fs::chown(path("others"), Some(65534), None).is_ok();
    let mut holder = start("hold locks", &prefix);
    wait_for(&path("ready"));

    let began = Instant::now();
    let removed = sweep_all_stale().unwrap();
    assert!(began.elapsed() < LONG / 2, "the sweep took {:?}", began.elapsed());
    assert!(!removed.contains(&format!("{prefix}dead")), "a region that another process has locked was removed");
    assert_eq!(removed.contains(&format!("{prefix}others")), !is_others);
    // A name that is in use must not block either.
    for name in ["theirs", "look_alike", "link", "folder", "pipe", "socket"] {
        let error = Region::create(&prefix, name, 64).unwrap_err();
        assert!(matches!(error, IpcError::NotOurs { .. }), "{name}: {error:?}");
        let error = Region::open(&prefix, name).unwrap_err();
        assert!(matches!(error, IpcError::NotOurs { .. }), "{name}: {error:?}");
    }
    if is_others {
        assert!(matches!(Region::open(&prefix, "others"), Err(IpcError::NotOurs { .. })));
    }
    assert!(Region::create(&prefix, "dead", 64).is_err(), "its lock is held");
    assert!(began.elapsed() < LONG / 2);

    holder.kill().unwrap();
    holder.wait().unwrap();
    assert!(sweep_all_stale().unwrap().contains(&format!("{prefix}dead")));
    fs::remove_dir(path("folder")).unwrap();
    for name in entries(&prefix) {
        fs::remove_file(format!("/dev/shm/{name}")).unwrap();
    }
}

#[test]
fn a_full_dev_shm_is_an_error_at_creation() {
    let error = Region::create(&prefix("huge"), "x", 1 << 45).unwrap_err();
    assert!(matches!(error, IpcError::Full { .. }), "{error:?}");
    assert_eq!(entries(&prefix("huge")), [""; 0]);
}

#[test]
fn views_of_a_region_are_checked() {
    let prefix = prefix("views");
    let region = Region::create(&prefix, "x", 256).unwrap();
    let other = Region::open(&prefix, "x").unwrap();
    region.atomics_u32(4, 3).unwrap()[2].store(7, std::sync::atomic::Ordering::Release);
    assert_eq!(other.atomics_u32(12, 1).unwrap()[0].load(std::sync::atomic::Ordering::Acquire), 7);
    assert_eq!(region.raw::<f32>(0, 64).unwrap().len(), 64);
    assert_eq!(region.raw::<f32>(0, 1).unwrap().cast::<u8>().as_ptr().align_offset(128), 0);
    for wrong in [region.raw::<f32>(0, 65).err(), region.raw::<f32>(2, 1).err(), region.raw::<u8>(usize::MAX, 2).err()]
    {
        assert!(matches!(wrong, Some(IpcError::Range { .. })), "{wrong:?}");
    }
}
