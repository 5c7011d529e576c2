//! Recordings of a server's work: requests with their replies and times, and the steps of language models, in a file of JSON lines.
//!
//! A server writes one with a [`Recorder`]; `trireme replay` and `trireme bench report` read it as a [`Recording`]. `docs/replay.md`
//! describes the file.
//!
//! The recorder does no work for a request but to put it into a queue of bounded length and bytes. A thread of its own writes. What
//! does not fit into the queue is counted as dropped. When the window has passed or the files have their most bytes, it stops.
//!
//! ```
//! use record::{Options, Recorder, Recording, RequestItem};
//!
//! let dir = std::env::temp_dir().join(format!("record-example-{}", std::process::id()));
//! let recorder = Recorder::start(&Options::new(&dir))?;
//! recorder.request(RequestItem { path: "/v1/completions".into(), status: 200, ..RequestItem::new(recorder.arrival().unwrap()) });
//! recorder.finish();
//!
//! let recording = Recording::open(&dir)?;
//! assert_eq!(recording.requests[0].path, "/v1/completions");
//! # std::fs::remove_dir_all(dir)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod error;
mod format;
mod items;
mod options;
mod reader;
mod recorder;
mod redact;
mod writer;

pub use error::RecordError;
pub use format::{Body, Contents, End, Entry, GRPC_SERVICE, Head, Request, Step, VERSION};
pub use items::{Arrival, Redact, RequestItem, StepItem};
pub use options::{Options, RecordArgs};
pub use reader::Recording;
pub use recorder::Recorder;
pub use redact::{TOKEN, covered, is_token_list};
