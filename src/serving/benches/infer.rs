//! Overhead of serving: a request to an identity model, a response of a stream, a step of an ensemble, a request through
//! a queue (alone and with others), a response from the response cache.
//!
//! `cargo bench -p serving`

use std::collections::HashMap;
use std::sync::Arc;

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use futures::future::{BoxFuture, FutureExt as _};
use serving::{
    Backend, BackendFactory, BatchedRequest, InferError, InferRequest, InferResponse, LoadRequest, ResponseStream,
    Server, ServerConfig, Tensor,
};
use tokio::runtime::Runtime;

const STREAM_LENGTH: usize = 256;

/// Requests in flight at the same time, in the benches with batches.
const CONCURRENCY: usize = 64;

/// Returns its inputs; a decoupled model returns them `num_responses` times.
struct Echo {
    num_responses: usize,
    num_instances: usize,
}

fn echo(request: InferRequest) -> InferResponse {
    let outputs = request.inputs.into_iter().map(|tensor| Tensor { name: "OUTPUT0".into(), ..tensor }).collect();
    InferResponse { outputs, ..InferResponse::default() }
}

impl Backend for Echo {
    fn infer(&self, request: InferRequest) -> Result<ResponseStream, InferError> {
        let response = echo(request);
        if self.num_responses == 1 {
            return Ok(ResponseStream::ready(response));
        }
        let (sender, stream) = ResponseStream::channel(self.num_responses);
        for i in 1..=self.num_responses {
            let response = InferResponse { is_final: i == self.num_responses, ..response.clone() };
            // Unconstrained, because the runtime would otherwise suspend the task after 128 sends.
            let sent = tokio::task::unconstrained(sender.send(Ok(response))).now_or_never();
            assert_eq!(sent, Some(true), "the stream has room for all");
        }
        Ok(stream)
    }

    fn num_instances(&self) -> usize {
        self.num_instances
    }

    fn execute(&self, _instance: usize, batch: Vec<BatchedRequest>) -> BoxFuture<'_, ()> {
        async move {
            for BatchedRequest { request, responses } in batch {
                responses.send(Ok(InferResponse { is_final: true, ..echo(request) })).await;
            }
        }
        .boxed()
    }

    fn drain(&self) -> BoxFuture<'_, ()> {
        std::future::ready(()).boxed()
    }
}

struct EchoFactory;

impl BackendFactory for EchoFactory {
    fn load(&self, model: LoadRequest) -> BoxFuture<'static, Result<Arc<dyn Backend>, InferError>> {
        let num_responses = if model.config.is_decoupled() { STREAM_LENGTH } else { 1 };
        let num_instances = if model.config.scheduling_choice.is_some() { model.config.num_instances() } else { 0 };
        let backend: Arc<dyn Backend> = Arc::new(Echo { num_responses, num_instances });
        std::future::ready(Ok(backend)).boxed()
    }
}

fn server(runtime: &Runtime) -> Arc<Server> {
    let root = tempfile::tempdir().unwrap();
    let io = "input [ { name: \"INPUT0\" data_type: TYPE_UINT8 dims: [ -1 ] } ] \
              output [ { name: \"OUTPUT0\" data_type: TYPE_UINT8 dims: [ -1 ] } ]";
    let step = "{ model_name: \"echo\" input_map { key: \"INPUT0\" value: \"INPUT0\" } \
                output_map { key: \"OUTPUT0\" value: \"OUTPUT0\" } }";
    for (name, config) in [
        ("echo", format!("backend: \"echo\" {io}")),
        ("stream", format!("backend: \"echo\" model_transaction_policy {{ decoupled: true }} {io}")),
        ("batched", format!("backend: \"echo\" max_batch_size: 64 {io} dynamic_batching {{ }}")),
        ("cached", format!("backend: \"echo\" {io} response_cache {{ enable: true }}")),
        ("ensemble", format!("platform: \"ensemble\" {io} ensemble_scheduling {{ step [ {step} ] }}")),
    ] {
        std::fs::create_dir_all(root.path().join(name).join("1")).unwrap();
        std::fs::write(root.path().join(name).join("config.pbtxt"), config).unwrap();
    }
    let factories = HashMap::from([("echo".to_owned(), Arc::new(EchoFactory) as Arc<dyn BackendFactory>)]);
    let repositories = vec![root.path().to_owned()];
    let config = ServerConfig { repositories, response_cache_bytes: 1 << 20, ..ServerConfig::default() };
    let server = Server::new(config, factories).unwrap();
    runtime.block_on(server.load_all()).unwrap();
    server
}

fn request(model: &str) -> InferRequest {
    let data = vec![0; 16].into();
    let tensor = Tensor {
        name: "INPUT0".into(),
        datatype: serving::DataType::Uint8,
        shape: serving::Shape::from_slice(&[16]),
        data,
    };
    let tensor =
        if model == "batched" { Tensor { shape: serving::Shape::from_slice(&[1, 16]), ..tensor } } else { tensor };
    InferRequest { model_name: model.into(), inputs: vec![tensor], ..InferRequest::default() }
}

async fn read_all(server: &Server, request: InferRequest) -> usize {
    let mut stream = server.infer(request).unwrap();
    let mut num_responses = 0;
    while stream.next_response().await.is_some() {
        num_responses += 1;
    }
    num_responses
}

fn backend_alone(runtime: &Runtime, bench: &mut criterion::Bencher, backend: &Echo, model: &str) {
    bench.iter_batched(
        || request(model),
        |request| {
            runtime.block_on(async {
                let mut stream = backend.infer(request).unwrap();
                while stream.next_response().await.is_some() {}
            })
        },
        BatchSize::SmallInput,
    );
}

fn infer(criterion: &mut Criterion) {
    let runtime = Runtime::new().unwrap();
    // Instances are tasks. A runtime with one thread shows their cost without the cost of waking another thread.
    let one_thread = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let (server, local) = (server(&runtime), server(&one_thread));
    for (model, num_responses) in
        [("echo", 1), ("stream", STREAM_LENGTH), ("ensemble", 1), ("batched", 1), ("cached", 1)]
    {
        let mut group = criterion.benchmark_group(model);
        group.throughput(Throughput::Elements(num_responses as u64));
        group.bench_function("served", |bench| {
            bench.iter_batched(
                || request(model),
                |request| assert_eq!(runtime.block_on(read_all(&server, request)), num_responses),
                BatchSize::SmallInput,
            );
        });
        if ["ensemble", "batched"].contains(&model) {
            group.bench_function("served on one thread", |bench| {
                bench.iter_batched(
                    || request(model),
                    |request| assert_eq!(one_thread.block_on(read_all(&local, request)), num_responses),
                    BatchSize::SmallInput,
                );
            });
        } else if model != "cached" {
            group.bench_function("backend alone", |bench| {
                backend_alone(&runtime, bench, &Echo { num_responses, num_instances: 0 }, model)
            });
        }
        group.finish();
    }
    concurrent(criterion, &one_thread, &local);
}

/// Time of each request when many are in flight.
fn concurrent(criterion: &mut Criterion, runtime: &Runtime, server: &Server) {
    let mut group = criterion.benchmark_group("64 at once, on one thread");
    group.throughput(Throughput::Elements(CONCURRENCY as u64));
    for model in ["echo", "batched"] {
        group.bench_function(model, |bench| {
            bench.iter_batched(
                || (0..CONCURRENCY).map(|_| request(model)).collect::<Vec<_>>(),
                |requests| {
                    let all = requests.into_iter().map(|request| read_all(server, request));
                    runtime.block_on(futures::future::join_all(all))
                },
                BatchSize::SmallInput,
            );
        });
    }
    group.finish();
}

criterion_group!(benches, infer);
criterion_main!(benches);
