//! `GET /debug/ledger`: queue slots, rows and KV blocks of each sequence, as JSON.

use std::sync::Arc;

use backends::llm::{LlmFactory, LlmLedger};
use front::LedgerSource;
use futures::FutureExt as _;
use serde_json::{Value, json};

/// Reads the state of every loaded LLM at each request.
pub(crate) fn source(llm: Arc<LlmFactory>) -> LedgerSource {
    LedgerSource::new(move || {
        let ledgers = llm.ledgers();
        async move { json!({"models": ledgers.await.iter().map(model).collect::<Vec<_>>()}).to_string() }.boxed()
    })
}

fn model(model: &LlmLedger) -> Value {
    let LlmLedger { name, version, replica, scheduler, num_open_sequences, wrong } = model;
    let Some(ledger) = scheduler else {
        return json!({"name": name, "version": version, "replica": replica, "state": "not running"});
    };
    let sequences = ledger.holdings.iter().map(|holding| {
        json!({"sequence": holding.sequence.0, "queued": holding.queued, "row": holding.row.map(|row| row.0),
               "rows": holding.num_rows, "kv_blocks": holding.num_blocks, "tokens_in_flight": holding.num_in_flight})
    });
    json!({"name": name, "version": version, "replica": replica, "idle": ledger.is_zero() && *num_open_sequences == 0,
           "queue_slots": ledger.num_queued, "rows": ledger.num_rows, "kv_blocks": ledger.num_blocks,
           "kv_blocks_reserved": ledger.num_reserved_blocks, "steps_in_flight": ledger.num_in_flight,
           "sequences_listening": num_open_sequences, "wrong": wrong, "sequences": sequences.collect::<Vec<_>>()})
}
