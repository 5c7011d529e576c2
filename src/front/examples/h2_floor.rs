//! Measures the cost of the HTTP/2 library alone: many streams on few connections send small messages at regular intervals. It is a
//! lower bound for every server with this library. `scripts/bench_tokens --floor` runs it.
//!
//!     h2_floor serve PORT BYTES EVERY_MS COUNT   sends COUNT messages on each stream; runs until killed
//!     h2_floor ask PORT STREAMS CONNECTIONS      reads all messages, then exits

use std::error::Error;
use std::time::Duration;

use bytes::Bytes;
use h2::{SendStream, client, server};
use http::{Request, Response};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

type Failure = Box<dyn Error + Send + Sync>;

const WINDOW_BYTES: u32 = 16 << 20;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number =
        |index: usize| arguments.get(index).and_then(|it| it.parse::<usize>().ok()).ok_or("a number is missing");
    match arguments.first().map(String::as_str) {
        Some("serve") => {
            let every = Duration::from_millis(number(3)? as u64);
            serve(number(1)? as u16, number(2)?, every, number(4)?).await
        }
        Some("ask") => ask(number(1)? as u16, number(2)?, number(3)?).await,
        _ => Err("`serve` or `ask`".into()),
    }
}

async fn serve(port: u16, num_bytes: usize, every: Duration, count: usize) -> Result<(), Failure> {
    let listener = TcpListener::bind(("127.0.0.1", port)).await?;
    let (tick, ticks) = watch::channel(());
    tokio::spawn(async move {
        let mut interval = tokio::time::interval(every);
        loop {
            interval.tick().await;
            let _ = tick.send(());
        }
    });
    let message = vec![b'x'; num_bytes];
    loop {
        let (socket, _) = listener.accept().await?;
        socket.set_nodelay(true)?;
        let (ticks, message) = (ticks.clone(), message.clone());
        tokio::spawn(async move {
            if let Err(error) = answer(socket, ticks, &message, count).await {
                eprintln!("{error}");
            }
        });
    }
}

/// Serves one connection: each tick sends a message on every stream.
async fn answer(
    socket: TcpStream,
    mut ticks: watch::Receiver<()>,
    message: &[u8],
    count: usize,
) -> Result<(), Failure> {
    let mut connection = server::Builder::new().initial_window_size(WINDOW_BYTES).handshake(socket).await?;
    let mut streams: Vec<(SendStream<Bytes>, usize)> = Vec::new();
    loop {
        tokio::select! {
            request = connection.accept() => {
                let Some(request) = request else { return Ok(()) };
                let (_, mut respond) = request?;
                streams.push((respond.send_response(Response::new(()), false)?, count));
            }
            _ = ticks.changed() => {
                for (stream, left) in &mut streams {
                    *left -= 1;
                    stream.send_data(Bytes::copy_from_slice(message), *left == 0)?;
                }
                streams.retain(|(_, left)| *left > 0);
            }
        }
    }
}

async fn ask(port: u16, num_streams: usize, num_connections: usize) -> Result<(), Failure> {
    let mut reading = JoinSet::<Result<(), Failure>>::new();
    for connection in 0..num_connections {
        let socket = TcpStream::connect(("127.0.0.1", port)).await?;
        socket.set_nodelay(true)?;
        let mut builder = client::Builder::new();
        builder.initial_window_size(WINDOW_BYTES).initial_connection_window_size(WINDOW_BYTES);
        let (mut requests, driver) = builder.handshake::<_, Bytes>(socket).await?;
        tokio::spawn(async move { driver.await.inspect_err(|error| eprintln!("{error}")) });
        for _ in (connection..num_streams).step_by(num_connections) {
            requests = requests.ready().await?;
            let (response, _) = requests.send_request(Request::post("http://floor/").body(())?, true)?;
            reading.spawn(async move {
                let mut body = response.await?.into_body();
                while let Some(data) = body.data().await {
                    let len = data?.len();
                    body.flow_control().release_capacity(len)?;
                }
                Ok(())
            });
        }
    }
    while let Some(read) = reading.join_next().await {
        read??;
    }
    Ok(())
}
