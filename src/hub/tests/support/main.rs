//! A hub with one model, for tests of clients in other languages: `hub_server ORG/NAME DIR` prints its address and serves until its
//! standard input ends.
#![forbid(unsafe_code)]

mod hub_server;

use std::io::Read as _;
use std::path::Path;

fn main() {
    let words: Vec<String> = std::env::args().collect();
    let [_, name, dir] = &words[..] else { panic!("usage: hub_server ORG/NAME DIR") };
    let server = hub_server::HubServer::start();
    server.add(name, hub_server::Model::of_dir(Path::new(dir)));
    println!("{}", server.url);
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
}
