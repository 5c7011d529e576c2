//! Access control: keys of clients over every protocol.

use crate::support::{TestFront, http, http_to, http_with};
use client::ClientError;
use client::proto::{ModelInferRequest, ModelInferResponse, ServerLiveRequest, ServerLiveResponse};
use front::{Api, Config, Restrictions};

const INFER: &[u8] = br#"{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1,2],"data":[0.5,2]}]}"#;

fn restricted(rules: &[&str]) -> Restrictions {
    let mut restrictions = Restrictions::default();
    for rule in rules {
        restrictions.add(rule, |key| Ok(vec![key.to_owned()])).unwrap();
    }
    restrictions
}

/// The status of a gRPC call with an additional header.
async fn grpc_status(front: &TestFront, path: &str, header: Option<(&str, &str)>) -> String {
    let address = front.running.as_ref().unwrap().addresses().grpc.unwrap();
    let socket = tokio::net::TcpStream::connect(address).await.unwrap();
    let (requests, driver) = h2::client::handshake(socket).await.unwrap();
    tokio::spawn(driver);
    let mut call = http::Request::post(format!("http://test{path}")).header("content-type", "application/grpc");
    if let Some((name, value)) = header {
        call = call.header(name, value);
    }
    let (answer, mut sending) = requests.ready().await.unwrap().send_request(call.body(()).unwrap(), false).unwrap();
    sending.send_data(bytes::Bytes::from_static(&[0; 5]), true).unwrap();
    let (head, mut body) = answer.await.unwrap().into_parts();
    if let Some(status) = head.headers.get("grpc-status") {
        return status.to_str().unwrap().to_owned();
    }
    while let Some(data) = body.data().await {
        data.unwrap();
    }
    body.trailers().await.unwrap().unwrap()["grpc-status"].to_str().unwrap().to_owned()
}

#[tokio::test]
async fn inference_requires_one_of_the_keys_over_every_protocol() {
    let keys = ["one".to_owned(), "two".to_owned()];
    let change = |config: &mut Config| {
        config.http_restrictions.add_keys(Api::Inference, &keys);
        config.grpc_restrictions.add_keys(Api::Inference, &keys);
    };
    let front = TestFront::start_with(change).await;
    let infer = "/v2/models/identity_fp32/infer";
    for (header, status) in [
        ("", 401),
        ("Authorization: Bearer three\r\n", 401),
        ("Authorization: Bearer one\r\n", 200),
        ("authorization: bearer two\r\n", 200),
        ("x-api-key: two\r\n", 200),
        ("x-api-key: three\r\n", 401),
    ] {
        let answer = http_with(&front, "POST", infer, header, INFER).await;
        assert_eq!((answer.status, answer.header("www-authenticate")), (status, (status == 401).then_some("Bearer")));
        let answer = http_with(&front, "POST", "/v1/completions", header, b"{}").await;
        assert_eq!(answer.status == 401, status == 401, "{header}: {}", answer.text());
        if status == 401 {
            assert_eq!(answer.header("www-authenticate"), Some("Bearer"));
            assert!(answer.text().contains(r#""code":"invalid_api_key""#), "{}", answer.text());
        }
    }
    assert_eq!(http(&front, "GET", "/v2/health/ready", b"").await.status, 200);

    let connection = front.grpc().await;
    let request = ModelInferRequest { model_name: "identity_fp32".into(), ..Default::default() };
    let refused = connection.unary::<ModelInferResponse>("ModelInfer", &request).await.unwrap_err();
    assert!(matches!(refused, ClientError::Refused { code: "UNAUTHENTICATED", .. }), "{refused}");
    connection.unary::<ServerLiveResponse>("ServerLive", &ServerLiveRequest {}).await.unwrap();
    let path = "/inference.GRPCInferenceService/ModelInfer";
    for header in [("authorization", "Bearer two"), ("x-api-key", "one")] {
        assert_eq!(
            grpc_status(&front, path, Some(header)).await,
            "5",
            "the key is valid, and the request names no model"
        );
    }
    for header in [("authorization", "Bearer twos"), ("x-api-key", "")] {
        assert_eq!(grpc_status(&front, path, Some(header)).await, "16");
    }
}

#[tokio::test]
async fn metrics_and_reflection_require_their_key() {
    let change = |config: &mut Config| {
        config.http_restrictions = restricted(&["metrics:k=v"]);
        config.grpc_restrictions = restricted(&["reflection:k=v"]);
    };
    let front = TestFront::start_with(change).await;
    let metrics = front.running.as_ref().unwrap().addresses().metrics.unwrap();
    for path in ["/metrics", "/debug/ledger"] {
        assert_eq!(http_to(metrics, "GET", path, "", Vec::new()).await.status, 403);
    }
    assert_eq!(http_to(metrics, "GET", "/metrics", "k: v\r\n", Vec::new()).await.status, 200);
    for version in ["v1", "v1alpha"] {
        let path = format!("/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo");
        assert_eq!(grpc_status(&front, &path, None).await, "14");
        assert_ne!(grpc_status(&front, &path, Some(("k", "v"))).await, "14");
    }
}
