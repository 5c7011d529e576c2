use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Wake, Waker};

use futures::channel::mpsc::{UnboundedReceiver, UnboundedSender, unbounded};
use futures::future::{BoxFuture, FutureExt as _};
use serving::{
    Backend, BackendFactory, DeltaInfo, LoadRequest, ResponseSource, Server, ServerConfig, Tensor, Timestamp,
};

use super::*;

/// A model that sends each number that the test gives it: the first as a response, further ones as deltas.
#[derive(Clone, Default)]
struct Numbers {
    /// One sender per request.
    senders: Arc<Mutex<Vec<UnboundedSender<i32>>>>,
    num_polls: Arc<AtomicUsize>,
}

struct NumberSource {
    numbers: UnboundedReceiver<i32>,
    next: Option<i32>,
    num_polls: Arc<AtomicUsize>,
}

impl Numbers {
    fn give(&self, request: usize, number: i32) {
        self.senders.lock().unwrap()[request].unbounded_send(number).unwrap();
    }
}

impl BackendFactory for Numbers {
    fn load(&self, _: LoadRequest) -> BoxFuture<'static, Result<Arc<dyn Backend>, InferError>> {
        std::future::ready(Ok(Arc::new(self.clone()) as Arc<dyn Backend>)).boxed()
    }
}

impl Backend for Numbers {
    fn infer(&self, _: serving::InferRequest) -> Result<ResponseStream, InferError> {
        let (senders, numbers) = unbounded();
        self.senders.lock().unwrap().push(senders);
        let source = NumberSource { numbers, next: None, num_polls: self.num_polls.clone() };
        Ok(ResponseStream::from_source(|_| Box::new(source)))
    }

    fn drain(&self) -> BoxFuture<'_, ()> {
        std::future::ready(()).boxed()
    }
}

impl ResponseSource for NumberSource {
    fn poll_next(
        &mut self,
        accepts_deltas: bool,
        delta: &mut OutputDelta,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<StreamItem, InferError>>> {
        assert!(accepts_deltas);
        self.num_polls.fetch_add(1, Ordering::SeqCst);
        let number = match self.next.take() {
            Some(number) => number,
            None => match ready!(self.numbers.poll_next_unpin(context)) {
                Some(number) => number,
                None => return Poll::Ready(None),
            },
        };
        if number == 0 {
            let outputs = vec![Tensor::from_i32("number", &[1], &[number])];
            let response = InferResponse { outputs, allows_delta: true, ..InferResponse::default() };
            return Poll::Ready(Some(Ok(response.into())));
        }
        delta.set(0, number.to_le_bytes());
        let next = self.numbers.poll_next_unpin(context);
        let is_drained = next.is_pending();
        if let Poll::Ready(next) = next {
            self.next = next;
        }
        let now = Timestamp::now();
        Poll::Ready(Some(Ok(StreamItem::Delta(DeltaInfo { is_drained, computed: now, observed: now }))))
    }
}

#[derive(Default)]
struct Woken(AtomicUsize);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

fn request(id: &str) -> ModelInferRequest {
    ModelInferRequest { model_name: "numbers".into(), id: id.into(), ..Default::default() }
}

/// A stream of requests for [`Numbers`], and the sender of these.
async fn stream_for(model: &Numbers) -> (InferStream, UnboundedSender<ModelInferRequest>) {
    let root = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(root.path().join("numbers/1")).unwrap();
    let config = r#"backend: "numbers" model_transaction_policy { decoupled: true }
        output [ { name: "number" data_type: TYPE_INT32 dims: [ 1 ] } ]"#;
    std::fs::write(root.path().join("numbers/config.pbtxt"), config).unwrap();
    let factories = HashMap::from([("numbers".to_owned(), Arc::new(model.clone()) as Arc<dyn BackendFactory>)]);
    let repositories = vec![root.path().to_owned()];
    let server = Server::new(ServerConfig { repositories, ..ServerConfig::default() }, factories).unwrap();
    server.load_all().await.unwrap();
    let state = Arc::new(State::new(crate::Config::default(), server, Vec::new()).unwrap());

    let (sender, arriving) = unbounded();
    let of_stream = state.clone();
    let requests = arriving
        .map(move |message| Ok(StreamRequest { message, charge: of_stream.budget.charge(), recorded: None }))
        .boxed();
    (InferStream::new(state, requests, false, None), sender)
}

#[tokio::test]
async fn many_requests_at_once_leave_time_to_other_tasks() {
    const COUNT: usize = 500;
    let model = Numbers::default();
    let (mut stream, requests) = stream_for(&model).await;
    (0..COUNT).for_each(|index| requests.unbounded_send(request(&index.to_string())).unwrap());
    let mut num_polls = 0;
    let mut most = 0;
    std::future::poll_fn(|context| {
        let before = model.senders.lock().unwrap().len();
        assert!(Pin::new(&mut stream).poll_next(context).is_pending());
        let started = model.senders.lock().unwrap().len();
        (num_polls, most) = (num_polls + 1, most.max(started - before));
        if started == COUNT { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    assert!(num_polls > 1 && most <= 16, "{num_polls} polls, the longest of which started {most} requests");
}

#[tokio::test]
async fn a_drained_stream_is_not_polled_until_a_response_or_request_wakes_it() {
    let model = Numbers::default();
    let (mut stream, requests_sender) = stream_for(&model).await;
    let woken = Arc::<Woken>::default();
    let waker = Waker::from(woken.clone());
    let mut poll = || {
        let reply = Pin::new(&mut stream).poll_next(&mut Context::from_waker(&waker));
        (reply.map(|reply| reply.unwrap().unwrap()).is_ready(), stream.is_drained())
    };
    let num_woken = || woken.0.swap(0, Ordering::SeqCst);
    let num_polls = || model.num_polls.swap(0, Ordering::SeqCst);

    requests_sender.unbounded_send(request("a")).unwrap();
    assert_eq!(poll(), (false, false));
    model.give(0, 0);
    assert_eq!((poll(), poll()), ((true, false), (false, false)));
    num_woken();
    num_polls();
    for number in 1..20 {
        model.give(0, number);
        assert_eq!(num_woken(), 1, "the wake-up for {number} was lost");
        assert_eq!(poll(), (true, true));
    }
    assert_eq!(num_polls(), 19, "one poll per number");
    model.give(0, 20);
    model.give(0, 21);
    assert_eq!((poll(), poll()), ((true, false), (true, true)));

    num_woken();
    requests_sender.unbounded_send(request("b")).unwrap();
    assert_eq!(num_woken(), 1, "a request wakes a drained stream");
    assert_eq!(poll(), (false, false));
    model.give(1, 0);
    model.give(0, 22);
    model.give(0, 23);
    assert!(num_woken() > 0);
    assert_eq!(
        (poll(), poll(), poll()),
        ((true, false), (true, false), (true, false)),
        "with two requests it is not known whether the stream is drained"
    );
    assert_eq!(poll(), (false, false));
}
