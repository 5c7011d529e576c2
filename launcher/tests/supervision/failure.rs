//! Worlds, ranks and launchers that die or hang.

use std::fs;
use std::io::{Read, Write};
use std::process::Command;
use std::time::Duration;

use nix::sys::signal::Signal;

use crate::site::{TestSite, code, eventually, has_mpirun, is_alive, output, signal, text};

#[test]
fn a_world_that_loses_a_rank_is_started_again() {
    if has_mpirun() {
        loses_a_rank("");
    }
}

#[test]
fn a_world_of_mpich_that_loses_a_rank_is_started_again() {
    match Command::new("mpirun.mpich").arg("--version").output() {
        Ok(_) => loses_a_rank("--mpirun=mpirun.mpich"),
        Err(_) => println!("skipped: no mpirun.mpich on this machine"),
    }
}

fn loses_a_rank(flags: &str) {
    let site = TestSite::new();
    let launch = site.start(&format!("--world_size=2 --oversubscribe {flags}")).spawn().unwrap();
    eventually("serving, as recorded by the launcher", || site.has_recorded_serving());
    signal(site.starts(1)[0], Signal::SIGKILL);
    eventually("a second start", || site.starts(0).len() == 2 && site.starts(1).len() == 2);
    eventually("serving again", || site.is_serving());
    assert!(!is_alive(site.starts(0)[0]), "rank 0 of the first world lives on");

    signal(launch.id() as i32, Signal::SIGTERM);
    let output = output(launch);
    assert_eq!(code(output.status), 0, "{}", text(&output));
    site.assert_nothing_is_left();
}

#[test]
fn a_world_that_loses_a_rank_while_it_loads_is_started_again() {
    if has_mpirun() {
        loses_a_rank_while_it_loads("");
    }
    if Command::new("mpirun.mpich").arg("--version").output().is_ok() {
        loses_a_rank_while_it_loads("--mpirun=mpirun.mpich");
    }
}

/// A rank that a signal killed, for example for lack of memory, may succeed the next time; one that exited with an error would not.
fn loses_a_rank_while_it_loads(flags: &str) {
    let site = TestSite::new();
    let flags = format!("--world_size=2 --oversubscribe {flags}");
    let launch = site.start(&flags).env("FAKE_SLOW_MS", "1500").spawn().unwrap();
    eventually("a start of both", || site.starts(0).len() == 1 && site.starts(1).len() == 1);
    signal(site.starts(1)[0], Signal::SIGKILL);
    eventually("a second start", || site.starts(0).len() == 2 && site.starts(1).len() == 2);
    eventually("serving", || site.is_serving());
    signal(launch.id() as i32, Signal::SIGTERM);
    let output = output(launch);
    assert_eq!(code(output.status), 0, "{}", text(&output));
    assert!(text(&output).contains("the world died by itself"), "{}", text(&output));
    site.assert_nothing_is_left();
}

#[test]
fn a_world_that_dies_is_not_started_again_with_exit_on_failure() {
    let site = TestSite::new();
    let launch = site.start("--exit_on_failure").spawn().unwrap();
    eventually("serving, as recorded by the launcher", || site.has_recorded_serving());
    signal(site.starts(0)[0], Signal::SIGKILL);
    let output = output(launch);
    assert_eq!(code(output.status), 128 + 9, "{}", text(&output));
    assert_eq!(site.starts(0).len(), 1);
    site.assert_nothing_is_left();
}

#[test]
fn a_world_that_never_served_is_not_started_again() {
    let site = TestSite::new();
    let output = site.start("").env("FAKE_FAIL", "load").output().unwrap();
    assert_eq!(code(output.status), 1, "{}", text(&output));
    assert!(text(&output).contains("model `llama` has no weights"), "{}", text(&output));
    assert_eq!(site.starts(0).len(), 1);
    site.assert_nothing_is_left();
}

#[test]
fn a_world_ends_with_a_launcher_that_is_killed() {
    for args in ["", "--world_size=2 --oversubscribe"] {
        if !args.is_empty() && !has_mpirun() {
            return;
        }
        let site = TestSite::new();
        let mut launch = site.start(args).spawn().unwrap();
        eventually("serving", || site.is_serving());
        launch.kill().unwrap();
        launch.wait().unwrap();
        eventually("all ranks gone", || [0, 1].iter().all(|rank| !site.starts(*rank).iter().any(|pid| is_alive(*pid))));
        let listed = text(&site.launch("status").output().unwrap());
        assert_eq!(listed, "no world runs\n");
        site.assert_nothing_is_left();
    }
}

#[test]
fn a_world_that_dies_of_a_signal_while_it_loads_is_started_again_and_leaves_a_report() {
    let site = TestSite::new();
    let launch = site.start("").env("FAKE_SLOW_MS", "1500").spawn().unwrap();
    eventually("started", || site.starts(0).len() == 1);
    signal(site.starts(0)[0], Signal::SIGABRT);
    eventually("serving", || site.is_serving());
    let reports = fs::read_dir(site.dir.path().join("trireme/crashes")).unwrap();
    let reports: Vec<_> = reports.map(|entry| fs::read_to_string(entry.unwrap().path()).unwrap()).collect();
    assert!(reports.len() == 1 && reports[0].contains("ended: signal 6 (SIGABRT)"), "{reports:?}");
    signal(launch.id() as i32, Signal::SIGTERM);
    assert_eq!(code(output(launch).status), 0);
    site.assert_nothing_is_left();
}

#[test]
fn a_world_that_dies_again_and_again_while_it_loads_is_given_up_in_time() {
    let site = TestSite::new();
    let launch = output(site.start("--wait-ready=2").env("FAKE_FAIL", "abort").spawn().unwrap());
    assert_eq!(code(launch.status), 128 + Signal::SIGABRT as i32, "{}", text(&launch));
    assert!(text(&launch).contains("and the time of --wait-ready ends"), "{}", text(&launch));
    assert!(site.starts(0).len() > 1, "{}", text(&launch));
    site.assert_nothing_is_left();
}

#[test]
fn leftovers_of_a_killed_launcher_are_ended_by_the_next() {
    let site = TestSite::new();
    // It ignores SIGTERM, so it outlives the launcher that is killed.
    let mut launch = site.start("").env("FAKE_STUBBORN", "1").spawn().unwrap();
    eventually("serving", || site.is_serving());
    let stubborn = site.starts(0)[0];
    launch.kill().unwrap();
    launch.wait().unwrap();
    assert!(is_alive(stubborn));
    let next = site.start("").spawn().unwrap();
    eventually("the next world", || site.starts(0).len() == 2 && site.is_serving());
    assert!(!is_alive(stubborn));
    signal(next.id() as i32, Signal::SIGTERM);
    assert_eq!(code(output(next).status), 0);
    site.assert_nothing_is_left();
}

#[test]
fn a_rank_that_does_not_answer_is_killed_and_started_again() {
    let site = TestSite::new();
    let launch = site.start("--liveness-timeout=2").spawn().unwrap();
    let log = || text(&site.launch("logs").output().unwrap());
    eventually("serving", || log().contains("launch: serving after"));
    signal(site.starts(0)[0], Signal::SIGSTOP);
    eventually("a second start", || site.starts(0).len() == 2 && site.is_serving());
    assert!(log().contains("rank 0 has not answered for") && log().contains("T (stopped)"), "{}", log());
    signal(launch.id() as i32, Signal::SIGTERM);
    assert_eq!(code(output(launch).status), 0);
    site.assert_nothing_is_left();
}

#[test]
fn worlds_whose_ports_do_not_report_health_are_supervised_too() {
    for flags in ["--http-restricted-api=health:key=secret", "--allow-http=false"] {
        let site = TestSite::new();
        let port = site.ports[0];
        let started = site.start(&format!("--detach --wait-ready=30 -- {flags}")).output().unwrap();
        assert_eq!(code(started.status), 0, "{flags}: {}", text(&started));
        let status = text(&site.launch("status").output().unwrap());
        assert!(status.contains(&format!("http {port} ")) && status.contains(": ready, 1 rank(s)"), "{status}");
        let restarted = site.launch("restart").output().unwrap();
        assert_eq!(code(restarted.status), 0, "{flags}: {}", text(&restarted));
        assert_eq!(site.starts(0).len(), 2);
        let stopped = site.launch("stop").output().unwrap();
        assert_eq!(code(stopped.status), 0, "{flags}: {}", text(&stopped));
        site.assert_nothing_is_left();
    }
}

#[test]
fn clients_that_take_every_connection_do_not_end_a_world() {
    let site = TestSite::new();
    let mut start = site.start("--liveness-timeout=1");
    let launch = start.env("FAKE_SILENT", "1").spawn().unwrap();
    eventually("serving, as recorded by the launcher", || site.has_recorded_serving());
    let connect = || std::net::TcpStream::connect(("127.0.0.1", site.ports[0])).unwrap();
    let silent: Vec<_> = std::iter::repeat_with(connect).take(300).collect();
    // Longer than the launcher waits for an answer.
    std::thread::sleep(Duration::from_secs(4));
    assert_eq!(site.starts(0).len(), 1, "{}", site.events());
    drop(silent);
    signal(launch.id() as i32, Signal::SIGTERM);
    assert_eq!(code(output(launch).status), 0);
    site.assert_nothing_is_left();
}

#[test]
fn clients_get_the_cause_of_a_worlds_end_and_no_line_of_the_log() {
    let site = TestSite::new();
    let mut start = site.start("");
    start.env("FAKE_LINE", "E ends the world: your licence expired").env("FAKE_OFFER", "1").env("FAKE_SLOW_MS", "3000");
    let launch = start.spawn().unwrap();
    eventually("serving, as recorded by the launcher", || site.has_recorded_serving());
    let files = || fs::read_dir(site.dir.path().join("trireme")).unwrap().map(|entry| entry.unwrap().path());
    let causes = || files().filter(|path| path.extension().is_some_and(|ext| ext == "cause")).count();
    assert_eq!(causes(), 1);
    signal(site.starts(0)[0], Signal::SIGKILL);
    let get = || -> std::io::Result<String> {
        let mut stream = std::net::TcpStream::connect(("127.0.0.1", site.ports[0]))?;
        stream.set_read_timeout(Some(Duration::from_secs(1)))?;
        stream.write_all(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    };
    let answers = std::cell::RefCell::new(Vec::new());
    eventually("the reason", || {
        answers.borrow_mut().extend(get());
        answers.borrow().iter().any(|answer| answer.contains("the server died (signal 9 (SIGKILL"))
    });
    assert!(!answers.borrow().iter().any(|answer| answer.contains("licence")), "{answers:?}");
    signal(launch.id() as i32, Signal::SIGTERM);
    let output = output(launch);
    assert!(text(&output).contains("your licence expired"), "the line was logged");
    assert_eq!(causes(), 0);
}
