//! Polling: the models that serve follow the repository.

use std::time::Duration;

use serving::ControlMode;

use crate::support::{ECHO, PIECES, TestRepository, eventually, index, request, text, with};

#[tokio::test]
async fn polling_follows_the_repository() {
    let repository = TestRepository::new(&[("echo", ECHO)]);
    let server = repository.server(ControlMode::Poll { interval: Duration::from_secs(1) });
    server.load_all().await.unwrap();
    repository.add("pieces", PIECES, &["1"]);
    std::fs::remove_dir_all(repository.root.path().join("echo")).unwrap();
    server.poll_repository().await.unwrap();
    assert_eq!(index(&server), ["pieces 1 READY"]);
    assert!(server.is_ready());
    assert_eq!(
        server.infer(request("echo", vec![])).unwrap_err().message,
        "Request for unknown model: 'echo' has no available versions"
    );

    repository.add("broken", &with(ECHO, "broken"), &["1"]);
    assert_eq!(server.poll_repository().await.unwrap_err()[0].model, "broken");
    assert!(server.is_ready(), "readiness does not require a model that never served");
    std::fs::remove_dir_all(repository.root.path().join("broken")).unwrap();

    repository.add("pieces", &PIECES.replace("TYPE_INT32", "TYPE_INT64"), &["2"]);
    server.poll_repository().await.unwrap();
    assert_eq!(server.model_metadata("pieces", "").unwrap().inputs[1].datatype.name(), "INT64");
    assert_eq!(server.infer(request("pieces", vec![text("text", "a")])).map(|_| ()), Ok(()));
}

#[tokio::test]
async fn an_interval_of_zero_polls_never() {
    let repository = TestRepository::new(&[("echo", ECHO)]);
    let server = repository.server(ControlMode::Poll { interval: Duration::ZERO });
    server.load_all().await.unwrap();
    tokio::time::timeout(Duration::from_secs(5), server.keep_polling()).await.expect("it returns at once");
}

#[tokio::test]
async fn polling_continues_until_the_server_drains() {
    let repository = TestRepository::new(&[("echo", ECHO)]);
    let server = repository.server(ControlMode::Poll { interval: Duration::from_millis(10) });
    server.load_all().await.unwrap();
    let polling = tokio::spawn({
        let server = server.clone();
        async move { server.keep_polling().await }
    });
    repository.add("broken", &with(ECHO, "broken"), &["1"]);
    eventually("the broken model is tried", || {
        index(&server).contains(&"broken 1 UNAVAILABLE Internal: broken on purpose".to_owned())
    })
    .await;
    assert!(server.model_is_ready("echo", "").unwrap());
    repository.add("broken", ECHO, &["1"]);
    eventually("the repaired model serves", || server.model_is_ready("broken", "").unwrap()).await;
    server.begin_drain();
    polling.await.unwrap();
}
