//! Cost of text per generated token: `cargo bench -p text`.

use std::hint::black_box;
use std::path::Path;
use std::sync::Arc;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use text::{Detokenizer, StopText, Tokenizer};

const STORY: &str = "Once upon a time there was a small ship with three rows of oars. Every rower pulled on the same stroke, \
    and the ship flew over the wine-dark sea. \"Où allons-nous?\" asked the café owner. Nobody knew 😀. ";

fn per_token(criterion: &mut Criterion) {
    let checkpoint = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../model_repository/tensorrt_llm/1");
    let tokenizer = Arc::new(Tokenizer::from_dir(&checkpoint).expect("the demo checkpoint is part of the project"));
    let story = STORY.repeat(16);
    let ids = tokenizer.encode(&story, false).expect("the story is text");

    let mut group = criterion.benchmark_group("text");
    group.throughput(Throughput::Elements(ids.len() as u64));
    group.bench_function("push", |bencher| {
        bencher.iter(|| {
            let mut detokenizer = Detokenizer::new(Arc::clone(&tokenizer), true);
            ids.iter().for_each(|&id| drop(black_box(detokenizer.push(id))));
            detokenizer.finish()
        });
    });
    group.bench_function("push with two stop strings", |bencher| {
        bencher.iter(|| {
            let mut detokenizer = Detokenizer::new(Arc::clone(&tokenizer), true);
            let mut stop = StopText::new(["\n\nQ:".to_owned(), "The end, finally".to_owned()]);
            let (mut piece, mut out) = (String::new(), String::new());
            for &id in &ids {
                piece.clear();
                out.clear();
                detokenizer.push_into(id, &mut piece);
                black_box(stop.push(&piece, &mut out));
            }
        });
    });
    group.bench_function("encode", |bencher| bencher.iter(|| tokenizer.encode(black_box(&story), false)));
    group.finish();
}

criterion_group!(benches, per_token);
criterion_main!(benches);
