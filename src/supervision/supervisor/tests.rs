use std::fs::Permissions;
use std::net::UdpSocket;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};

use ipc::{RingReceiver, RingSender};
use nix::fcntl::{FcntlArg, FdFlag};

use super::*;
use crate::protocol::{DeviceChoice, KvMemory, PassedMemory, WorkerSettings};

fn spec() -> WorkerSpec {
    WorkerSpec {
        model: "m".into(),
        checkpoint: "/nowhere".into(),
        settings: WorkerSettings {
            device: DeviceChoice::Cpu { threads: 1, first_core: None },
            network: None,
            weight_precision: Default::default(),
            batch_invariant: false,
            sleep_mode: false,
            kv_cache_type: Default::default(),
            kv_host_memory_bytes: 0,
            kv_host_memory_is_share: false,
            step_timeout: Duration::from_secs(1),
            library_dirs: Vec::new(),
            cache_dir: None,
        },
        rank: 0,
        num_local_workers: 1,
        tp_rank: 0,
        tp_size: 1,
        stage: 0,
        num_stages: 1,
        expert_groups: 1,
        nodes: vec![0],
        node_names: Vec::new(),
        checkpoint_fingerprint: None,
        draft_fingerprint: None,
        group_region: ShmName::default(),
        host_memory: None,
        plan_ring: ShmName::default(),
        output_ring: ShmName::default(),
        ring_bytes: 4096,
        max_step_tokens: 1,
        max_rows: 1,
        max_drafts: 0,
        drafter: None,
        max_adapters: 0,
        max_adapter_rank: 0,
        max_sequence_len: 1,
        block_size: 1,
        kv_memory: KvMemory::Tokens(1),
        next_step: 0,
    }
}

/// Runs in the process that the test below starts.
#[test]
fn a_rank_with_secrets_starts_a_worker() {
    let Ok(dir) = std::env::var("AGENT_TEST_DIR") else { return };
    let program = PathBuf::from(dir).join("worker");
    std::fs::write(&program, "#!/bin/sh\nexec sleep 60\n").unwrap();
    std::fs::set_permissions(&program, Permissions::from_mode(0o700)).unwrap();
    // Inheritable, as the sockets of MPI are.
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    nix::fcntl::fcntl(&socket, FcntlArg::F_SETFD(FdFlag::empty())).unwrap();
    let inherited = std::fs::read_link(format!("/proc/self/fd/{}", socket.as_raw_fd())).unwrap();

    let prefix: Prefix = format!("agent_secrets_{}_", std::process::id()).parse().unwrap();
    let (events, received) = mpsc::channel();
    let supervisor = WorkerSupervisor::new(prefix, program, events);
    supervisor.handle(ToAgent::Start(WorkerId { instance: 1, tp_rank: 0 }, Box::new(spec())));
    let FromAgent::Started { pid, .. } = received.recv().unwrap() else { panic!("not started") };
    // It is empty for a moment while the shell becomes `sleep`.
    let deadline = Instant::now() + Duration::from_secs(10);
    let environment = loop {
        let environment = std::fs::read_to_string(format!("/proc/{pid}/environ")).unwrap();
        if !environment.is_empty() || Instant::now() > deadline {
            break environment;
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let names: Vec<&str> = environment.split('\0').filter_map(|pair| Some(pair.split_once('=')?.0)).collect();
    let listed = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    let open: Vec<PathBuf> = listed.filter_map(|entry| std::fs::read_link(entry.path()).ok()).collect();
    supervisor.end_all();
    assert!(names.contains(&"NCCL_NVLS_ENABLE") && names.contains(&"AGENT_TEST_DIR"), "{names:?}");
    for secret in SECRETS {
        assert!(std::env::var_os(secret).is_some() && !names.contains(&secret), "{names:?}");
    }
    assert!(!open.is_empty() && !open.contains(&inherited), "{open:?}");
}

const SECRETS: [&str; 3] = ["TRIREME_API_KEYS", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN"];

#[test]
fn a_worker_gets_no_secret_and_no_socket_of_its_rank() {
    let dir = std::env::temp_dir().join(format!("trireme-agent-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let mut rank = Command::new(std::env::current_exe().unwrap());
    rank.args(["supervisor::tests::a_rank_with_secrets_starts_a_worker", "--exact", "--nocapture"]);
    rank.env("AGENT_TEST_DIR", &dir).envs(SECRETS.map(|name| (name, "not to be seen")));
    let output = rank.output().unwrap();
    std::fs::remove_dir_all(&dir).unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && stdout.contains("1 passed"), "{output:?}");
}

#[test]
fn a_worker_that_does_not_read_its_spec_blocks_no_other_message() {
    let prefix: Prefix = format!("agent_deaf_{}_", std::process::id()).parse().unwrap();
    let (events, received) = mpsc::channel();
    // A shell that reads nothing: `sleep worker` would end at once.
    let folder = std::env::temp_dir().join(format!("agent-deaf-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let program = folder.join("program");
    std::fs::write(&program, "#!/bin/sh\nexec sleep 100\n").unwrap();
    std::fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let supervisor = WorkerSupervisor::new(prefix, program, events);
    let worker = WorkerId { instance: 1, tp_rank: 0 };
    // Larger than the buffer of a pipe.
    let spec = WorkerSpec { checkpoint_fingerprint: Some(vec![7; 1 << 20]), ..spec() };
    let began = Instant::now();
    supervisor.handle(ToAgent::Start(worker, Box::new(spec)));
    assert!(matches!(received.recv().unwrap(), FromAgent::Started { .. }));
    supervisor.handle(ToAgent::Kill(worker));
    assert!(matches!(received.recv().unwrap(), FromAgent::Ended { by_signal: true, .. }));
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn the_rings_of_a_worker_that_ended_at_once_stay_until_rank_0_has_read_them() {
    let prefix: Prefix = format!("agent_test_{}_", std::process::id()).parse().unwrap();
    let (events, received) = mpsc::channel();
    let supervisor = WorkerSupervisor::new(prefix.clone(), "/bin/false".into(), events);
    let worker = WorkerId { instance: 1, tp_rank: 0 };
    supervisor.handle(ToAgent::Start(worker, Box::new(spec())));
    let FromAgent::Started { plan_ring, output_ring, .. } = received.recv().unwrap() else { panic!("not started") };
    let FromAgent::Ended { reason, .. } = received.recv().unwrap() else { panic!("not ended") };
    assert_eq!(reason, "exit code 1");
    assert_eq!(supervisor.num_workers(), 0);

    let open = || (RingSender::open(&prefix, &plan_ring.name), RingReceiver::open(&prefix, &output_ring.name));
    let (plans, outputs) = open();
    assert!(plans.is_ok() && outputs.is_ok(), "{plans:?} {outputs:?}");
    supervisor.handle(ToAgent::Kill(worker));
    let (plans, outputs) = open();
    assert!(plans.is_err() && outputs.is_err(), "rings outlived their worker's group");
}

#[test]
fn host_memory_is_passed_from_a_worker_to_the_next_until_it_is_freed() {
    let prefix: Prefix = format!("agent_memory_{}_", std::process::id()).parse().unwrap();
    let (events, received) = mpsc::channel();
    let folder = std::env::temp_dir().join(format!("agent-memory-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let program = folder.join("program");
    std::fs::write(&program, "#!/bin/sh\nexec sleep 100\n").unwrap();
    std::fs::set_permissions(&program, Permissions::from_mode(0o755)).unwrap();
    let supervisor = WorkerSupervisor::new(prefix, program, events);
    // The file behind the memory of a new worker, which is then killed.
    let memory = |instance: u64, bytes: u64| {
        let worker = WorkerId { instance, tp_rank: 0 };
        let passed = Some(PassedMemory { id: 7, descriptor: -1 });
        let settings = WorkerSettings { kv_host_memory_bytes: bytes, ..spec().settings };
        supervisor.handle(ToAgent::Start(worker, Box::new(WorkerSpec { host_memory: passed, settings, ..spec() })));
        let pid = loop {
            match received.recv().unwrap() {
                FromAgent::Started { pid, .. } => break pid,
                FromAgent::Ended { reason, .. } => panic!("{reason}"),
                _ => {}
            }
        };
        let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten().map(|entry| entry.path());
        let is_memory = |path: &PathBuf| {
            std::fs::read_link(path).is_ok_and(|link| link.to_string_lossy().contains("memfd:trireme-kv-cache"))
        };
        let found: Vec<_> = descriptors.filter(is_memory).map(|path| std::fs::metadata(path).unwrap()).collect();
        assert!(found.len() == 1 && found[0].len() >= bytes, "{found:?}");
        supervisor.handle(ToAgent::Kill(worker));
        while !matches!(received.recv().unwrap(), FromAgent::Ended { .. }) {}
        found[0].ino()
    };
    let first = memory(1, 1 << 20);
    assert_eq!(memory(2, 1 << 20), first);
    let larger = memory(3, 2 << 20);
    assert_ne!(larger, first);
    supervisor.handle(ToAgent::FreeHostMemory { id: 7 });
    assert_ne!(memory(4, 2 << 20), larger);
    supervisor.end_all();
    std::fs::remove_dir_all(folder).unwrap();
}
