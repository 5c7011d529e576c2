//! The page at `/` and `/ui`: files, headers, status, keys, and that it can be turned off.

use crate::support::{TestFront, http, http_with};
use front::{Address, Api, Config, Restrictions, WorldFacts};
use serde_json::Value;

async fn status(front: &TestFront) -> Value {
    serde_json::from_slice(&http(front, "GET", "/ui/status.json", b"").await.body).unwrap()
}

#[tokio::test]
async fn the_page_may_load_files_of_this_server_only() {
    let front = TestFront::start().await;
    let page = http(&front, "GET", "/", b"").await;
    assert_eq!((page.status, page.header("content-type")), (200, Some("text/html; charset=utf-8")));
    assert_eq!(page.body, http(&front, "GET", "/ui", b"").await.body);
    let text = page.text();
    let names = text.split(['"', '\'']).filter(|word| word.starts_with("ui/")).map(str::to_owned);
    let names: Vec<String> = names.chain(["ui/status.json".to_owned()]).collect();
    assert!(names.len() > 4, "{names:?}");
    for name in names {
        let file = http(&front, "GET", &format!("/{name}"), b"").await;
        assert_eq!(file.status, 200, "{name}");
        let policy = file.header("content-security-policy").unwrap();
        for rule in ["default-src 'none'", "script-src 'self'", "connect-src 'self'", "frame-ancestors 'none'"] {
            assert!(policy.contains(rule), "{name}: {policy}");
        }
        assert!(!policy.contains("unsafe"), "{name}: {policy}");
        assert_eq!(file.header("x-content-type-options"), Some("nosniff"), "{name}");
        assert_eq!(file.header("referrer-policy"), Some("no-referrer"), "{name}");
    }
}

#[tokio::test]
async fn the_page_only_reads() {
    let front = TestFront::start().await;
    for path in ["/", "/ui", "/ui/main.js", "/ui/status.json"] {
        assert_eq!(http(&front, "POST", path, b"{}").await.status, 405, "{path}");
        assert_eq!(http(&front, "DELETE", path, b"").await.status, 405, "{path}");
        let head = http(&front, "HEAD", path, b"").await;
        assert_eq!((head.status, head.body.len()), (200, 0), "{path}");
    }
    let folder = http(&front, "GET", "/ui/", b"").await;
    assert_eq!((folder.status, folder.header("location")), (308, Some("../ui")));
    for path in ["/ui/nothing.js", "/ui/../Cargo.toml", "/uix"] {
        assert_eq!(http(&front, "GET", path, b"").await.status, 404, "{path}");
    }
}

#[tokio::test]
async fn without_the_page_its_paths_are_unknown_as_in_triton() {
    let front = TestFront::start_with(|config| config.serves_page = false).await;
    for path in ["/", "/ui", "/ui/", "/ui/main.js", "/ui/status.json"] {
        let answer = http(&front, "GET", path, b"").await;
        assert_eq!((answer.status, answer.text().as_str()), (404, r#"{"error":"Not Found"}"#), "{path}");
        assert_eq!(answer.header("content-security-policy"), None);
    }
}

#[tokio::test]
async fn the_status_has_the_world_the_models_and_the_figures_of_metrics() {
    let change = |config: &mut Config| {
        config.world = WorldFacts { hosts: vec!["a".into(), "b".into()], num_restarts: Some(3) };
    };
    let front = TestFront::start_with(change).await;
    let body = br#"{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1,2],"data":[0.5,2]}]}"#;
    assert_eq!(http(&front, "POST", "/v2/models/identity_fp32/infer", body).await.status, 200);
    let shown = status(&front).await;
    assert_eq!(shown["server"]["ranks"], serde_json::json!(["a", "b"]));
    assert_eq!(shown["server"]["world_restarts"], 3);
    assert_eq!(shown["server"]["is_ready"], true);
    let grpc = front.running.as_ref().unwrap().addresses().grpc.unwrap().port();
    assert_eq!(shown["server"]["grpc_port"], grpc);
    let names: Vec<&str> =
        shown["models"].as_array().unwrap().iter().filter_map(|model| model["name"].as_str()).collect();
    assert_eq!(names, ["identity_fp32", "slow", "stream_text"]);
    let successes = shown["metrics"]["nv_inference_request_success"].as_array().unwrap();
    let of_model = successes.iter().find(|sample| sample["labels"]["model"] == "identity_fp32").unwrap();
    assert_eq!(of_model["value"], 1.0);
    assert!(
        front.metrics().await.text().contains("nv_inference_request_success{model=\"identity_fp32\",version=\"1\"} 1")
    );
}

#[tokio::test]
async fn the_status_needs_the_keys_of_metadata_and_metrics_and_the_page_none() {
    for (rule, header, other) in
        [("metadata:k=v", "k: v\r\n", "k: w\r\n"), ("metrics:authorization=v", "Authorization: Bearer v\r\n", "")]
    {
        let mut restrictions = Restrictions::default();
        restrictions.add(rule, |key| Ok(vec![key.to_owned()])).unwrap();
        let front = TestFront::start_with(|config| config.http_restrictions = restrictions).await;
        assert_eq!(http(&front, "GET", "/", b"").await.status, 200);
        let refused = http_with(&front, "GET", "/ui/status.json", other, b"").await;
        assert!(matches!(refused.status, 401 | 403), "{rule}: {}", refused.status);
        assert!(refused.text().contains("expecting header"), "{}", refused.text());
        assert_eq!(http_with(&front, "GET", "/ui/status.json", header, b"").await.status, 200, "{rule}");
    }
}

#[tokio::test]
async fn the_status_says_whether_inference_needs_a_key_and_hides_what_others_may_not_list() {
    let mut restrictions = Restrictions::default();
    restrictions.add("model-repository:admin=x", |key| Ok(vec![key.to_owned()])).unwrap();
    restrictions.add_keys(Api::Inference, &["one".to_owned()]);
    let front = TestFront::start_with(|config| config.http_restrictions = restrictions).await;
    let shown = status(&front).await;
    assert_eq!(shown["server"]["needs_key"], true);
    assert!(shown["models"].as_array().unwrap().iter().all(|model| model["state"] == "READY"));
}

#[tokio::test]
async fn figures_of_a_metrics_service_that_is_off_or_elsewhere_are_not_shown() {
    let elsewhere = |config: &mut Config| config.metrics = Some(Address::new("127.0.0.2", 0));
    let front = TestFront::start_with(elsewhere).await;
    assert_eq!(status(&front).await["metrics"], Value::Null);
    let front = TestFront::start_with(|config| config.metrics = None).await;
    assert_eq!(status(&front).await["metrics"], Value::Null);
}
