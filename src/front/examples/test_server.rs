//! Serves fixture models for clients in other languages and load tests: `test_server REPOSITORY [PORT] [MODEL…]`.
//!
//! HTTP uses PORT (default 8000), gRPC the next port, metrics the one after. If models are named, only these are loaded, and clients
//! can load others.

#[path = "../tests/all/support/mod.rs"]
mod support;

use std::path::PathBuf;
use std::time::Duration;

use front::{Address, Config};
use serving::ControlMode;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let repository = PathBuf::from(arguments.next().ok_or("usage: test_server REPOSITORY [PORT] [MODEL…]")?);
    let port: u16 = arguments.next().map_or(Ok(8000), |port| port.parse())?;
    let load: Vec<String> = arguments.collect();
    let control_mode = if load.is_empty() { ControlMode::None } else { ControlMode::Explicit { load } };
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(async {
        let (server, _) = support::serve(&repository, control_mode).await;
        let config = Config {
            http: Some(Address::new("127.0.0.1", port)),
            grpc: Some(Address::new("127.0.0.1", port + 1)),
            metrics: Some(Address::new("127.0.0.1", port + 2)),
            ..Config::default()
        };
        let running = front::start(config, server, Vec::new()).await?;
        println!("{:?}", running.addresses());
        tokio::signal::ctrl_c().await?;
        running.shutdown(Duration::from_secs(10)).await;
        Ok(())
    })
}
