//! Starting worlds: plans, keys, ports, `--detach`, and what is refused.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;

use nix::sys::signal::Signal;

use crate::site::{TestSite, code, eventually, fake_rank, has_mpirun, output, signal, text};

#[test]
fn a_dry_run_prints_the_command_and_starts_nothing() {
    let site = TestSite::new();
    let output = site.start("--dry_run --world_size=2 --oversubscribe -- --id=me").output().unwrap();
    let (fake, [http, grpc, metrics]) = (fake_rank(), site.ports);
    let rank = |rank, rest| {
        format!(
            "-n 1 {} rank --model-repository=models --grpc-port={grpc} --http-port={http} --metrics-port={metrics} \
             --device=auto --backend-config=python,shm-region-prefix-name=prefix{http}_{rank}_ {rest}--id=me",
            fake.display()
        )
    };
    let expected = format!(
        "mpirun --allow-run-as-root --bind-to none --oversubscribe --mca mpi_yield_when_idle 1 {} : {}\n",
        rank(0, ""),
        rank(1, "--model-control-mode=explicit --load-model=tensorrt_llm ")
    );
    assert_eq!((text(&output), code(output.status)), (expected, 0));
    assert_eq!(site.events(), "");
}

#[test]
fn a_detached_world_can_be_listed_and_stopped_and_its_ports_are_taken() {
    let site = TestSite::new();
    let run_dir = site.dir.path().join("trireme");
    fs::create_dir(&run_dir).unwrap();
    fs::set_permissions(&run_dir, fs::Permissions::from_mode(0o755)).unwrap();
    let started = site.start("--detach").output().unwrap();
    assert_eq!(code(started.status), 0, "{}", text(&started));
    assert!(site.is_serving());
    assert!(text(&started).contains("other users could use"), "{}", text(&started));
    assert_eq!(fs::metadata(&run_dir).unwrap().permissions().mode() & 0o777, 0o700);

    let status = text(&site.launch("status").output().unwrap());
    let port = site.ports[0];
    assert!(status.contains(&format!("http {port} ")) && status.contains(": ready, 1 rank(s)"), "{status}");

    let alone = site.launch(&format!("status --http_port={port}")).output().unwrap();
    assert!(text(&alone).contains(&format!("http {port} ")), "{}", text(&alone));
    let nobody = site.launch("status --http_port=1").output().unwrap();
    assert!(code(nobody.status) == 1 && text(&nobody).contains("serves HTTP on port 1;"), "{}", text(&nobody));

    let logs = site.launch("logs --rank=9").output().unwrap();
    assert!(code(logs.status) == 1 && text(&logs).contains("has no rank 9: its last is 0"), "{}", text(&logs));

    let second = site.start("").output().unwrap();
    assert_eq!(code(second.status), 1);
    let refusal = text(&second);
    assert!(refusal.contains(&format!("a world already serves on port {port}")), "{refusal}");
    // A second world may run on other ports, with its own prefix of shared memory.
    let other = text(&site.launch("--dry_run --http_port=1 --grpc_port=2 --metrics_port=3").output().unwrap());
    assert!(other.contains("shm-region-prefix-name=prefix1_0_"), "{other}");

    let stopped = site.launch(&format!("stop --http_port={port}")).output().unwrap();
    assert_eq!(code(stopped.status), 0, "{}", text(&stopped));
    site.assert_nothing_is_left();
    assert_eq!(code(site.launch("stop").output().unwrap().status), 1);
    assert_eq!(code(site.launch("stop --all").output().unwrap().status), 0);
}

#[test]
fn without_slurm_the_actions_on_jobs_say_so() {
    let site = TestSite::new();
    for action in ["status --job=7", "stop --job=7"] {
        let refused = site.launch(action).env("PATH", site.dir.path()).output().unwrap();
        assert_eq!(code(refused.status), 1);
        let expected = "there is no Slurm on this machine: `squeue` is not in PATH";
        assert!(text(&refused).contains(expected), "{action}: {}", text(&refused));
    }
}

#[test]
fn an_empty_repository_is_refused_before_anything_starts() {
    let site = TestSite::new();
    fs::create_dir_all(site.dir.path().join("empty/.git")).unwrap();
    let refused = site
        .launch("--model_repo=empty --trireme=/bin/true --http_port=1 --grpc_port=2 --metrics_port=3")
        .output()
        .unwrap();
    assert_eq!(code(refused.status), 1);
    assert!(text(&refused).contains("empty holds no model: it has no folders"), "{}", text(&refused));
    site.assert_nothing_is_left();
}

#[test]
fn a_detached_world_that_cannot_start_says_why() {
    let site = TestSite::new();
    let output = site.start("--detach").env("FAKE_FAIL", "load").output().unwrap();
    assert_ne!(code(output.status), 0);
    assert!(text(&output).contains("model `llama` has no weights"), "{}", text(&output));
    site.assert_nothing_is_left();
}

#[test]
fn a_world_that_is_not_ready_in_time_is_ended() {
    for mode in ["", "--detach"] {
        let site = TestSite::new();
        let output = site.start(&format!("--wait-ready=1 {mode}")).env("FAKE_SLOW_MS", "60000").output().unwrap();
        assert_eq!(code(output.status), 1, "{}", text(&output));
        assert!(text(&output).contains("does not serve"), "{}", text(&output));
        site.assert_nothing_is_left();
    }
}

/// Processes, except those in `except`, whose `/proc` file `name` contains `word`.
fn processes_that_show(word: &str, name: &str, except: &[u32]) -> Vec<u32> {
    let pids = fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let shows = |pid: &u32| {
        let bytes = fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
        bytes.windows(word.len()).any(|part| part == word.as_bytes())
    };
    pids.filter(|pid| !except.contains(pid)).filter(shows).collect()
}

#[test]
fn keys_reach_rank_0_and_appear_in_no_command_line_and_no_other_environment() {
    for args in ["", "--world_size=2 --oversubscribe"] {
        if !args.is_empty() && !has_mpirun() {
            return;
        }
        let site = TestSite::new();
        let keys = ["literal", "variable", "api"].map(|name| format!("k3y-{}-of-{name}", site.ports[0]));
        let [literal, variable, api] = &keys;
        let rules = format!("--http-restricted-api=health:a={literal} --grpc_restricted_protocol infer:b=env:MY_KEY");
        let launch = site
            .start(&format!("{args} -- --id=me {rules}"))
            .env("MY_KEY", variable)
            .env("TRIREME_API_KEYS", api)
            .spawn()
            .unwrap();
        eventually("serving, as recorded by the launcher", || site.has_recorded_serving());
        for key in &keys {
            assert_eq!(processes_that_show(key, "cmdline", &[]), Vec::<u32>::new(), "{key}");
            assert_eq!(processes_that_show(key, "environ", &[launch.id()]), Vec::<u32>::new(), "{key}");
        }
        let events = site.events();
        let rank_0 = events.lines().find(|line| line.starts_with("rank 0 starts")).unwrap();
        for (flag, key) in [
            ("--http-restricted-api=health:a=@", literal),
            ("--grpc-restricted-protocol=infer:b=@", variable),
            ("--api-key-file=", api),
        ] {
            let file = rank_0.split(' ').find_map(|word| word.strip_prefix(flag)).unwrap_or_else(|| panic!("{events}"));
            assert_eq!(fs::read_to_string(file).unwrap(), format!("{key}\n"));
            assert_eq!(fs::metadata(file).unwrap().permissions().mode() & 0o777, 0o600);
        }
        let rank_1 = events.lines().find(|line| line.starts_with("rank 1 starts"));
        assert!(rank_1.is_none_or(|line| line.contains("--id=me") && !line.contains("=@")), "{events}");

        signal(launch.id() as i32, Signal::SIGTERM);
        let output = output(launch);
        assert_eq!(code(output.status), 0, "{}", text(&output));
        assert!(text(&output).contains("a key is on this command line"), "{}", text(&output));
        assert!(keys.iter().all(|key| !text(&output).contains(key)), "{}", text(&output));
        site.assert_nothing_is_left();
        let files = fs::read_dir(site.dir.path().join("trireme")).unwrap().flatten();
        assert!(files.into_iter().all(|file| !file.file_name().to_string_lossy().starts_with("keys-")));
    }
}

#[test]
fn a_dry_run_shows_where_keys_would_be_and_no_key() {
    let site = TestSite::new();
    let mut command = site.launch("--model_repo=models --dry_run -- --http-restricted-api=health:a=s3cret");
    let output = command.env("TRIREME_API_KEYS", "t0ps3cret").output().unwrap();
    let text = text(&output);
    assert!(text.contains("--http-restricted-api=health:a=@") && text.contains("--api-key-file="), "{text}");
    assert!(!text.contains("s3cret"), "{text}");
}

#[test]
fn a_port_in_use_by_another_program_is_refused_with_its_pid() {
    let site = TestSite::new();
    let _listener = TcpListener::bind(("127.0.0.1", site.ports[1])).unwrap();
    let output = site.start("").output().unwrap();
    let expected = format!("port {} is in use by process {}", site.ports[1], std::process::id());
    assert!(text(&output).contains(&expected), "{}", text(&output));
    assert_eq!((code(output.status), site.events()), (1, String::new()));
}

#[test]
fn a_missing_repository_or_server_program_is_named() {
    let site = TestSite::new();
    let no_repository = site.launch("--model_repo=nowhere").output().unwrap();
    assert!(text(&no_repository).contains("there is no model repository at nowhere"), "{}", text(&no_repository));
    let no_server = site.launch("--model_repo=models --trireme=nowhere").output().unwrap();
    assert!(text(&no_server).contains("there is no server program at nowhere"), "{}", text(&no_server));
}
