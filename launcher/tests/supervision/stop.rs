//! Stopping and restarting worlds on request, and what systemd and the log show of it.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use nix::sys::signal::Signal;

use crate::site::{TIMEOUT, TestSite, code, eventually, has_mpirun, is_alive, output, signal, text};

#[test]
fn sigterm_reaches_a_lone_rank_at_once_and_the_launcher_exits_with_its_status() {
    let site = TestSite::new();
    let launch = site.start("").spawn().unwrap();
    eventually("serving", || site.is_serving());
    signal(launch.id() as i32, Signal::SIGTERM);
    let output = output(launch);
    assert_eq!(code(output.status), 0, "{}", text(&output));
    assert_eq!(site.events().matches("gets SIGTERM").count(), 1, "{}", site.events());
    site.assert_nothing_is_left();
}

#[test]
fn sigint_ends_a_world_under_mpirun_gracefully() {
    if !has_mpirun() {
        return;
    }
    let site = TestSite::new();
    let launch = site.start("--world_size=2 --oversubscribe --wait_ready=30").spawn().unwrap();
    eventually("serving", || site.is_serving());
    signal(launch.id() as i32, Signal::SIGINT);
    let output = output(launch);
    assert_eq!(code(output.status), 0, "{}", text(&output));
    let events = site.events();
    assert!(events.contains("rank 0 gets SIGTERM") && !events.contains("rank 1 gets"), "{events}");
    site.assert_nothing_is_left();
}

#[test]
fn a_second_signal_ends_a_world_at_once_and_a_third_kills_it() {
    let site = TestSite::new();
    let launch = site.start("").env("FAKE_STUBBORN", "1").spawn().unwrap();
    eventually("serving", || site.is_serving());
    let num_signals = || site.events().matches("gets SIGTERM").count();
    signal(launch.id() as i32, Signal::SIGTERM);
    eventually("the first SIGTERM", || num_signals() == 1);
    signal(launch.id() as i32, Signal::SIGINT);
    eventually("the second SIGTERM", || num_signals() == 2);
    signal(launch.id() as i32, Signal::SIGTERM);
    let output = output(launch);
    assert_eq!(code(output.status), 128 + 9, "{}", text(&output));
    site.assert_nothing_is_left();
}

#[test]
fn a_restart_keeps_the_launcher_and_its_flags() {
    let site = TestSite::new();
    let port = site.ports[0];
    let launch = site.start("-- --id=me").spawn().unwrap();
    eventually("serving, as recorded by the launcher", || site.has_recorded_serving());
    let restarted = site.launch("restart").output().unwrap();
    assert_eq!(code(restarted.status), 0, "{}", text(&restarted));
    let starts = site.starts(0);
    assert!(starts.len() == 2 && !is_alive(starts[0]) && is_alive(starts[1]), "{starts:?}");
    assert_eq!(site.events().matches("--id=me").count(), 2, "{}", site.events());

    let status = site.launch("status --json").output().unwrap();
    let status: serde_json::Value = serde_json::from_slice(&status.stdout).unwrap();
    assert_eq!((&status[0]["state"], &status[0]["num_restarts"]), (&"ready".into(), &1.into()), "{status}");
    assert_eq!(status[0]["num_failures"], 0, "a wanted restart is no failure");
    let shown = text(&site.launch("status").output().unwrap());
    assert!(shown.contains("1 restart, all wanted"), "{shown}");
    assert_eq!(status[0]["processes"][0]["pid"], launch.id(), "{status}");

    let logs = text(&site.launch(&format!("logs --http_port={port}")).output().unwrap());
    assert!(logs.contains("launch: SIGUSR1") || logs.contains("a restart is requested"), "{logs}");
    signal(launch.id() as i32, Signal::SIGTERM);
    let output = output(launch);
    assert_eq!(code(output.status), 0, "{}", text(&output));
    assert!(text(&output).contains("the world has ended (exit code 0)"), "the terminal shows the log");
    site.assert_nothing_is_left();
}

#[test]
fn a_followed_log_ends_with_its_world() {
    let site = TestSite::new();
    assert_eq!(code(site.start("--detach").output().unwrap().status), 0);
    let mut follower = site.launch("logs --follow").spawn().unwrap();
    let mut lines = BufReader::new(follower.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.contains("launch: serving after")), "earlier lines are shown");
    assert_eq!(code(site.launch("stop").output().unwrap().status), 0);
    assert!(lines.any(|line| line.contains("the world has ended")), "new lines are shown");
    assert_eq!(code(output(follower).status), 0);
}

#[test]
fn systemd_is_notified_of_readiness_and_of_the_end() {
    let site = TestSite::new();
    let path = site.dir.path().join("notify");
    let socket = std::os::unix::net::UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(TIMEOUT)).unwrap();
    let receive = || {
        let mut bytes = [0; 1024];
        let len = socket.recv(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes[..len]).into_owned()
    };
    let until = |word: &str| while !receive().contains(word) {};
    let mut start = site.start("");
    let launch = start.env("NOTIFY_SOCKET", &path).env("WATCHDOG_USEC", "3000000").spawn().unwrap();
    until("READY=1");
    until("WATCHDOG=1");
    signal(launch.id() as i32, Signal::SIGTERM);
    until("STOPPING=1");
    assert_eq!(code(output(launch).status), 0);
}

#[test]
fn session_files_of_open_mpi_are_in_a_directory_that_is_removed_with_the_world() {
    if !has_mpirun() {
        return;
    }
    let site = TestSite::new();
    let launch = site.start("--world_size=2 --oversubscribe").spawn().unwrap();
    let found = || -> Vec<PathBuf> {
        let paths = fs::read_dir("/dev/shm").unwrap().flatten().map(|entry| entry.path());
        paths.filter(|path| path.display().to_string().contains(&format!(".{}.", launch.id()))).collect()
    };
    eventually("serving, as recorded by the launcher", || site.has_recorded_serving());
    let dirs = found();
    assert!(dirs.len() == 1 && dirs[0].display().to_string().starts_with("/dev/shm/trireme-mpi."), "{dirs:?}");
    assert_eq!(fs::metadata(&dirs[0]).unwrap().permissions().mode() & 0o777, 0o700);
    assert!(fs::read_dir(&dirs[0]).unwrap().count() > 0, "mpirun has its session there");
    let environment = fs::read_to_string(format!("/proc/{}/environ", site.starts(1)[0])).unwrap();
    let has = |setting: &str| environment.split('\0').any(|entry| entry == setting);
    assert!(has("OMPI_MCA_pml=ob1") && has("OMPI_MCA_btl=self,vader"), "ranks would listen on networks");

    signal(launch.id() as i32, Signal::SIGTERM);
    eventually("all gone", || found().is_empty());
    assert_eq!(code(output(launch).status), 0);
}
