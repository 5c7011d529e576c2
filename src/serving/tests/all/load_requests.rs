//! Configurations and files that a load request gives instead of the repository's.

use std::sync::atomic::Ordering;

use serving::{ErrorKind, LoadOverrides};

use crate::support::{ECHO, TestRepository, eventually, floats, one, request};

#[tokio::test]
async fn the_configuration_of_a_load_request_is_used() {
    let repository = TestRepository::new(&[("echo", ECHO)]);
    let server = repository.explicit(&["echo"]).await;
    let config = r#"{"backend": "echo", "max_batch_size": 2,
                     "input": [{"name": "INPUT0", "data_type": "TYPE_STRING", "dims": [-1]}],
                     "output": [{"name": "OUTPUT0", "data_type": "TYPE_STRING", "dims": [-1]}]}"#;
    let overrides = LoadOverrides { config: Some(config.into()), ..LoadOverrides::default() };
    server.load_model("echo", overrides).await.unwrap();
    let metadata = server.model_metadata("echo", "").unwrap();
    assert_eq!((metadata.platform.as_str(), metadata.inputs[0].shape.as_slice()), ("echo", [-1, -1].as_slice()));
    assert_eq!(metadata.inputs[0].datatype.name(), "BYTES");
    eventually("the old load is dropped", || repository.script.dropped.load(Ordering::SeqCst) == 1).await;
}

#[tokio::test]
async fn the_files_of_a_load_request_replace_the_directory() {
    let repository = TestRepository::new(&[("echo", ECHO)]);
    let server = repository.explicit(&[]).await;
    let files = [("7/model.py".to_owned(), bytes::Bytes::from_static(b"x"))].into();
    let config = Some(r#"{"backend": "echo", "version_policy": {"all": {}}}"#.to_owned());
    let alone = LoadOverrides { files, ..LoadOverrides::default() };
    let error = server.load_model("echo", alone.clone()).await.unwrap_err();
    assert!(error.message.starts_with("failed to load 'echo', failed to poll from model repository"), "{error}");
    let outside = LoadOverrides { config: config.clone(), files: [("../x".to_owned(), bytes::Bytes::new())].into() };
    assert!(server.load_model("echo", outside).await.unwrap_err().message.contains("`file:../x`"));
    // A model that is not in the repository can be loaded too.
    server.load_model("new", LoadOverrides { config, ..alone }).await.unwrap();
    assert_eq!(server.model_metadata("new", "").unwrap().versions, ["7"]);
}

#[tokio::test]
async fn names_and_files_of_a_load_request_cannot_leave_their_directory() {
    let repository = TestRepository::new(&[("echo", ECHO)]);
    let server = repository.explicit(&["echo"]).await;
    let outside = tempfile::tempdir().unwrap();
    let dir = outside.path().to_str().unwrap();
    let above = format!("..{}", "/..".repeat(20)) + dir;
    let load = |file: &str| LoadOverrides {
        config: Some(r#"{"backend": "echo"}"#.into()),
        files: [(file.to_owned(), "x".into())].into(),
    };
    let long = "a".repeat(300);
    for name in ["..", ".", "", "a/b", "a\0b", ".hidden", dir, above.as_str(), long.as_str()] {
        let error = server.load_model(name, load("1/x")).await.unwrap_err();
        let message = format!("failed to load '{name}', failed to poll from model repository");
        assert_eq!((error.kind, error.message), (ErrorKind::Internal, message));
        server.unload_model(name, true).await.unwrap();
    }
    for file in ["../x", "/x", "", "1/../../x", &format!("{dir}/x"), &format!("{above}/x")] {
        let error = server.load_model("echo", load(file)).await.unwrap_err();
        assert!(error.message.contains(&format!("`file:{file}` is not of the form")), "{file}: {}", error.message);
    }
    let twice = [("1/x", "a"), ("1/./x", "b")].map(|(path, text)| (path.to_owned(), text.into()));
    let error = server.load_model("echo", LoadOverrides { files: twice.into(), ..load("1/x") }).await.unwrap_err();
    assert!(error.message.contains("cannot keep the given files"), "{}", error.message);
    let many = (0..2000).map(|index| (format!("1/{index}"), "a".into())).collect();
    let error = server.load_model("echo", LoadOverrides { files: many, ..load("1/x") }).await.unwrap_err();
    assert!(error.message.contains("--max-request-parameters"), "{}", error.message);
    let error = server.load_model(&"a".repeat(5000), load("1/x")).await.unwrap_err();
    assert!(error.message.contains("--max-name-bytes"), "{}", error.message);
    assert_eq!(std::fs::read_dir(outside.path()).unwrap().count(), 0, "nothing was written");
    one(server.infer(request("echo", vec![floats("INPUT0", &[1.0])])).unwrap()).await;
}
