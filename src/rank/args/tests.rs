use super::*;

fn rank_args(line: &str) -> Result<(RankArgs, Vec<&'static str>), clap::Error> {
    let args = with_dashes(line.split_whitespace().map(OsString::from));
    parse(&command().try_get_matches_from(args)?)
}

#[test]
fn a_line_of_tritons_launch_script_parses() {
    let line = "rank --model-repository=/m --grpc_port=9001 --http-port 9000 --metrics-port=9002 --log-verbose=3 \
                --log-file=t.txt --disable-auto-complete-config \
                --backend-config=python,shm-region-prefix-name=prefix3_ --pinned-memory-pool-byte-size=0";
    let (args, ignored) = rank_args(line).unwrap();
    assert_eq!((args.grpc_port, args.http_port, args.metrics_port), (9001, 9000, 9002));
    assert_eq!(args.shm_prefix(), Some("prefix3_"));
    assert!(args.disable_auto_complete_config);
    assert_eq!(ignored, ["pinned-memory-pool-byte-size"]);
}

#[test]
fn the_response_cache_has_a_size() {
    assert_eq!(rank_args("rank --model-repo=/m --cache-config=local,size=1048576").unwrap().0.cache_config, 1 << 20);
    assert_eq!(rank_args("rank --model-repo=/m").unwrap().0.cache_config, 0);
    let error = rank_args("rank --model-repo=/m --cache-config=redis,host=x").unwrap_err().to_string();
    assert!(error.contains("expected `local,size=BYTES`"), "{error}");
}

#[test]
fn models_get_further_names() {
    let (args, _) = rank_args("rank --model-repo=/m --served_model_name=org/a=b=m --served-model-name a=m").unwrap();
    let name = |index: usize| (args.served_model_name[index].0.as_str(), args.served_model_name[index].1.as_str());
    assert_eq!([name(0), name(1)], [("org/a=b", "m"), ("a", "m")]);
    for wrong in ["a", "=m", "a="] {
        assert!(rank_args(&format!("rank --model-repo=/m --served-model-name={wrong}")).is_err(), "{wrong}");
    }
}

#[test]
fn unambiguous_prefixes_and_numbers_for_booleans_parse() {
    let (args, _) = rank_args("rank --model-repo=/m --allow-grpc=1 --exit-on=false").unwrap();
    assert!(args.allow_grpc && !args.exit_on_error);
}

#[test]
fn times_and_threads_have_bounds() {
    for flag in ["repository-poll-secs", "exit-timeout-secs", "step-timeout", "heartbeat-timeout", "write-timeout"] {
        rank_args(&format!("rank --model-repo=/m --{flag}=2147483647")).unwrap();
        let error = rank_args(&format!("rank --model-repo=/m --{flag}=2147483648")).unwrap_err().to_string();
        assert!(error.contains(flag) && error.contains("..=2147483647"), "{error}");
    }
    assert_eq!(rank_args("rank --model-repo=/m --threads=4096").unwrap().0.threads, Some(4096));
    let error = rank_args("rank --model-repo=/m --threads=4097").unwrap_err().to_string();
    assert!(error.contains("--threads") && error.contains("0..=4096"), "{error}");
}

#[test]
fn limits_of_the_front_have_flags() {
    let front = |line: &str| {
        let (args, _) = rank_args(&format!("rank --model-repo=/m {line}")).map_err(|error| error.to_string())?;
        let mut config = front::Config::default();
        args.front.apply(&mut config).map(|()| config)
    };
    let config = front("").unwrap();
    let default = front::Config::default();
    let bounds =
        |config: &front::Config| (config.max_grpc_message_bytes, config.max_grpc_streams, config.min_body_rate);
    assert_eq!(bounds(&config), bounds(&default));
    let line =
        "--grpc-max-message-bytes=2147483647 --grpc-max-streams=7 --min-body-rate=0 --http-allowed-origins=http://a";
    let config = front(line).unwrap();
    assert_eq!(bounds(&config), (i32::MAX as usize, 7, 0));
    assert_eq!(config.http_origins, "http://a".parse().unwrap());
    for refused in ["--grpc-max-message-bytes=2147483648", "--grpc-max-streams=0", "--http-allowed-origins=a"] {
        let error = front(refused).unwrap_err();
        assert!(error.contains(refused.split_once('=').unwrap().0), "{error}");
    }
}

#[test]
fn every_limit_has_a_flag() {
    for limit in Limit::all() {
        let (args, _) = rank_args(&format!("rank --model-repo=/m --{}=7", limit.name())).unwrap();
        assert_eq!(args.limits.get(limit), 7, "{}", limit.name());
    }
    assert_eq!(rank_args("rank --model-repo=/m").unwrap().0.limits, Limits::default());
}

#[test]
fn every_limit_is_in_the_documentation() {
    let document = include_str!("../../../docs/protocol.md");
    for limit in Limit::all() {
        let row = format!("| `--{}` | {} | {} |", limit.name(), limit.default_value(), limit.help());
        assert!(document.contains(&row), "docs/protocol.md lacks {row}");
    }
}

#[test]
fn an_unknown_option_and_a_missing_repository_are_refused() {
    assert!(rank_args("rank --model-repository=/m --no-such-option=1").is_err());
    assert!(rank_args("rank").is_err());
}

/// The options of `tritonserver --help`, version 24.10.
const TRITONS: &str = "allow-cpu-metrics allow-gpu-metrics allow-grpc allow-http allow-metrics allow-sagemaker allow-vertex-ai \
    backend-config backend-directory buffer-manager-thread-count cache-config cache-directory \
    cuda-memory-pool-byte-size cuda-virtual-address-size disable-auto-complete-config enable-peer-access \
    exit-on-error exit-timeout-secs grpc-address grpc-header-forward-pattern grpc-http2-max-ping-strikes \
    grpc-http2-max-pings-without-data grpc-http2-min-recv-ping-interval-without-data \
    grpc-infer-allocation-pool-size grpc-infer-response-compression-level grpc-keepalive-permit-without-calls \
    grpc-keepalive-time grpc-keepalive-timeout grpc-max-connection-age grpc-max-connection-age-grace grpc-port \
    grpc-restricted-protocol grpc-root-cert grpc-server-cert grpc-server-key grpc-use-ssl grpc-use-ssl-mutual \
    host-policy http-address http-header-forward-pattern http-port http-restricted-api http-thread-count id \
    load-model log-error log-file log-format log-info log-verbose log-warning metrics-address metrics-config \
    metrics-interval-ms metrics-port min-supported-compute-capability model-config-name model-control-mode \
    model-load-gpu-limit model-load-retry-count model-load-thread-count model-namespacing model-repository \
    model-store pinned-memory-pool-byte-size rate-limit rate-limit-resource repoagent-directory \
    repository-poll-secs response-cache-byte-size reuse-grpc-port reuse-http-port sagemaker-port \
    sagemaker-safe-port-range sagemaker-thread-count strict-model-config strict-readiness trace-config trace-count \
    trace-file trace-level trace-log-frequency trace-rate vertex-ai-default-model vertex-ai-port \
    vertex-ai-thread-count";

#[test]
fn every_option_of_tritonserver_is_known() {
    let command = command();
    let known: Vec<&str> = command
        .get_arguments()
        .flat_map(|arg| arg.get_long().into_iter().chain(arg.get_all_aliases().into_iter().flatten()))
        .collect();
    let missing: Vec<&str> = TRITONS.split_whitespace().filter(|name| !known.contains(name)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

#[test]
fn underscores_in_values_stay() {
    let args = with_dashes(["--load_model=my_model".into(), "a_b".into()]);
    assert_eq!(args, ["--load-model=my_model", "a_b"]);
}
