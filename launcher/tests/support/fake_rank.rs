//! A fake rank for the tests of the launcher: it starts, reports its health and ends, but serves no model.
//!
//! Environment variables control it: `FAKE_LOG` is a file to which each event is appended; `FAKE_FAIL=load` exits with code 1
//! at once, `FAKE_FAIL=abort` dies of a signal; `FAKE_STUBBORN=1` ignores SIGTERM; `FAKE_SLOW_MS` delays readiness;
//! `FAKE_SILENT=1` answers no HTTP client; `FAKE_LINE` is logged; `FAKE_OFFER=1` offers the HTTP port to the launcher.

use std::fs::OpenOptions;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ipc::{Acceptor, Health};
use nix::sys::signal::{SigSet, Signal};

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let rank = ["OMPI_COMM_WORLD_RANK", "PMI_RANK"].into_iter().find_map(|name| std::env::var(name).ok());
    let rank = rank.unwrap_or("0".to_owned());
    log_event(&format!("rank {rank} starts as {}: {}", std::process::id(), args[1..].join(" ")));
    match std::env::var("FAKE_FAIL").as_deref() {
        Ok("load") => {
            eprintln!("model `llama` has no weights");
            std::process::exit(1);
        }
        Ok("abort") => std::process::abort(),
        _ => {}
    }
    let signals = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT]);
    signals.thread_block().unwrap();
    // Real ranks announce the end of the world by MPI; here a file does.
    let end = format!("{}.end-{}", std::env::var("FAKE_LOG").unwrap(), std::os::unix::process::parent_id());
    if rank == "0" {
        let slow = std::env::var("FAKE_SLOW_MS").map_or(0, |text| text.parse().unwrap());
        let is_ready = Arc::new(AtomicBool::new(false));
        let ready = Arc::clone(&is_ready);
        let control = std::env::var_os("TRIREME_CONTROL").unwrap();
        let health = move || {
            let is_ready = ready.load(Ordering::SeqCst);
            Health { silent: Duration::ZERO, is_ready, num_requests: Some(0), lost: Vec::new() }
        };
        ipc::answer_health(Path::new(&control), health).unwrap();
        let port = args.iter().find_map(|arg| arg.strip_prefix("--http-port=")).unwrap().parse().unwrap();
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(slow));
            answer_clients(port, &args, &is_ready);
        });
    } else {
        let end = end.clone();
        std::thread::spawn(move || exit_with(&end));
    }
    if let Ok(line) = std::env::var("FAKE_LINE") {
        eprintln!("{line}");
    }
    loop {
        let signal = signals.wait().unwrap();
        log_event(&format!("rank {rank} gets {signal}"));
        if std::env::var("FAKE_STUBBORN").is_err() {
            break;
        }
    }
    std::fs::write(end, "").unwrap();
}

fn answer_clients(port: u16, args: &[String], is_ready: &AtomicBool) {
    let has = |start: &str| args.iter().any(|arg| arg.starts_with(start));
    if has("--allow-http=false") {
        is_ready.store(true, Ordering::SeqCst);
        return;
    }
    let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
    if std::env::var("FAKE_OFFER").is_ok() {
        let socket = listener.try_clone().unwrap();
        let path = std::env::var_os("TRIREME_HAND_OVER").unwrap();
        let acceptor = Acceptor::new(ipc::bind_private(Path::new(&path)).unwrap());
        std::thread::spawn(move || offer(acceptor, &socket));
    }
    is_ready.store(true, Ordering::SeqCst);
    let mut unanswered = Vec::new();
    for stream in listener.incoming() {
        let mut stream = stream.unwrap();
        if std::env::var("FAKE_SILENT").is_ok() {
            unanswered.push(stream);
            continue;
        }
        let _ = stream.read(&mut [0; 1024]);
        let status = if has("--http-restricted-api=health") { "403 Forbidden" } else { "200 OK" };
        let _ = write!(stream, "HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
    }
}

/// Offers copies of the listening socket, like rank 0.
fn offer(mut acceptor: Acceptor, socket: &TcpListener) {
    loop {
        let mut stream = acceptor.accept();
        ipc::send_files(&stream, b"h", &[socket.as_fd()]).unwrap();
        stream.read_exact(&mut [0]).unwrap();
    }
}

/// Waits for `file`, then exits.
fn exit_with(file: &str) {
    while !Path::new(file).exists() {
        std::thread::sleep(Duration::from_millis(20));
    }
    std::process::exit(0);
}

fn log_event(line: &str) {
    let path = std::env::var("FAKE_LOG").unwrap();
    let mut file = OpenOptions::new().create(true).append(true).open(path).unwrap();
    file.write_all(format!("{line}\n").as_bytes()).unwrap();
}
