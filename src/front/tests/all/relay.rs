//! The relay before real fronts: a world that ends in order loses no request to the next one.

use std::net::TcpListener;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use client::proto::{ModelInferResponse, ModelStreamInferResponse};
use front::relay::{Options, RankZero};
use tokio::sync::watch;

use crate::kserve_grpc::{add_input, stream_text};
use crate::support::{TestFront, any_ports, eventually, http_to};

const TEXT: &[u8] = br#"{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1,1],"data":[7]}]}"#;

/// A relay on free ports, and the sender that tells it where rank 0 is.
struct Relay {
    http: std::net::SocketAddr,
    grpc: String,
    rank_zero: watch::Sender<RankZero>,
}

impl Relay {
    async fn start(world: &Path) -> Self {
        let free = || TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let (http, grpc) = (free(), free());
        let address = |port: u16| Some(front::Address::new("127.0.0.1", port));
        let ports = front::Config { http: address(http.port()), grpc: address(grpc.port()), ..any_ports() };
        let (rank_zero, state) = watch::channel(serving(world));
        let options = Options { wait: Duration::from_secs(30), journals: None, idle: None };
        tokio::spawn(front::relay::run(ports, options, state, |_| ()));
        eventually("the relay listens", || std::net::TcpStream::connect(grpc).is_ok()).await;
        Self { http, grpc: grpc.to_string(), rank_zero }
    }
}

fn serving(world: &Path) -> RankZero {
    RankZero { sockets: Some(Arc::from(world)), ..RankZero::default() }
}

#[tokio::test]
async fn requests_that_a_world_refuses_because_it_ends_go_to_the_next() {
    let [old, new] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let worlds = [TestFront::start_behind_relay(old.path()).await, TestFront::start_behind_relay(new.path()).await];
    let relay = Relay::start(old.path()).await;
    // The launcher has asked the old world to end, and the relay does not know it yet.
    worlds[0].begin_drain();
    let direct = client::grpc::Connection::open(&relay.grpc).await.unwrap();
    let mut infer = stream_text("i", 1, 0);
    infer = client::proto::ModelInferRequest { model_name: "identity_fp32".into(), inputs: Vec::new(), ..infer };
    infer.raw_input_contents.clear();
    add_input(&mut infer, "INPUT0", "FP32", &[1, 1], &7f32.to_le_bytes());
    let over_http = http_to(relay.http, "POST", "/v2/models/identity_fp32/infer", "", TEXT.to_vec());
    let over_grpc = direct.unary::<ModelInferResponse>("ModelInfer", &infer);
    let over_stream = async {
        let mut replies = direct.call("ModelStreamInfer", client::grpc::frame(&stream_text("s", 2, 0))).await?;
        let mut texts = Vec::new();
        while let Some(reply) = replies.next::<ModelStreamInferResponse>().await? {
            assert_eq!(reply.error_message, "");
            texts.push(reply.infer_response.unwrap().raw_output_contents[0].clone());
        }
        Ok::<_, client::ClientError>(texts)
    };
    let switch = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        relay.rank_zero.send_replace(serving(new.path()));
    };
    let (http, grpc, stream, ()) = tokio::join!(over_http, over_grpc, over_stream, switch);
    assert_eq!((http.status, http.text().contains("[7.0]")), (200, true), "{}", http.text());
    assert_eq!(grpc.unwrap().raw_output_contents[0], 7f32.to_le_bytes().as_slice());
    assert_eq!(stream.unwrap().len(), 2);

    // No world follows one that is stopped for good, so its refusal is the answer.
    worlds[1].begin_drain();
    let asked = http_to(relay.http, "POST", "/v2/models/identity_fp32/infer", "", TEXT.to_vec());
    let stop = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        relay.rank_zero.send_modify(|state| state.is_last = true);
    };
    let (refused, ()) = tokio::join!(asked, stop);
    assert_eq!((refused.status, refused.text().contains(serving::STOPPING)), (503, true), "{}", refused.text());
}
