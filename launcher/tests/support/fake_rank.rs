//! A server that does nothing but start, answer health, and end the way the tests of the launcher want.
//!
//! The environment says how: `FAKE_LOG` is a file to which each event is appended; `FAKE_FAIL=load` ends with code 1
//! at once; `FAKE_STUBBORN=1` ignores SIGTERM; `FAKE_SLOW_MS` delays readiness.

use std::fs::OpenOptions;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::Path;
use std::time::Duration;

use nix::sys::signal::{SigSet, Signal};

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let rank = ["OMPI_COMM_WORLD_RANK", "PMI_RANK"].into_iter().find_map(|name| std::env::var(name).ok());
    let rank = rank.unwrap_or("0".to_owned());
    note(&format!("rank {rank} starts as {}: {}", std::process::id(), args[1..].join(" ")));
    if std::env::var("FAKE_FAIL").is_ok_and(|how| how == "load") {
        eprintln!("model `llama` has no weights");
        std::process::exit(1);
    }
    let signals = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT]);
    signals.thread_block().unwrap();
    // A rank tells the others by MPI that the world ends; here a file does.
    let end = format!("{}.end-{}", std::env::var("FAKE_LOG").unwrap(), std::os::unix::process::parent_id());
    if rank == "0" {
        let port = args.iter().find_map(|arg| arg.strip_prefix("--http-port=")).unwrap().parse().unwrap();
        std::thread::spawn(move || answer_health(port));
    } else {
        let end = end.clone();
        std::thread::spawn(move || end_with(&end));
    }
    loop {
        let signal = signals.wait().unwrap();
        note(&format!("rank {rank} gets {signal}"));
        if std::env::var("FAKE_STUBBORN").is_err() {
            break;
        }
    }
    std::fs::write(end, "").unwrap();
}

fn answer_health(port: u16) {
    let slow = std::env::var("FAKE_SLOW_MS").map_or(0, |text| text.parse().unwrap());
    std::thread::sleep(Duration::from_millis(slow));
    let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
    for stream in listener.incoming() {
        let mut stream = stream.unwrap();
        let _ = stream.read(&mut [0; 1024]);
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
    }
}

fn end_with(file: &str) {
    while !Path::new(file).exists() {
        std::thread::sleep(Duration::from_millis(20));
    }
    std::process::exit(0);
}

fn note(line: &str) {
    let path = std::env::var("FAKE_LOG").unwrap();
    let mut file = OpenOptions::new().create(true).append(true).open(path).unwrap();
    file.write_all(format!("{line}\n").as_bytes()).unwrap();
}
