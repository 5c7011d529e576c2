//! Shared memory between the processes of one node, and supervision of processes.
//!
//! - [`Region`]: a named piece of POSIX shared memory of fixed size. Its creator removes the name when dropped;
//!   [`sweep_stale`] removes those of killed creators.
//! - [`Ring`], [`RingSender`], [`RingReceiver`]: a queue of byte messages in a region, one sender, one receiver.
//!   A wait is a short spin, then a futex, so an idle receiver uses no CPU.
//! - [`ProcessWatch`]: detects the end of any process at once, by a pidfd.
//! - [`send_files`], [`receive_files`]: transfer of listening sockets from one world to the next.
//! - [`bind_to_parent`], [`close_descriptors`], [`withhold_secrets`]: child processes that end with this process and inherit neither
//!   its descriptors nor its secrets.
//! - [`essential_thread`]: a thread whose panic ends the process, with a reason.
//! - [`map_file`]: a file as memory, shared by the processes that map it.
//! - [`lock`]: locks a mutex also after its holder has panicked.
//! - [`answer_health`], [`ask_health`]: health checks of rank 0 by its launcher.
//!
//! The content of messages is opaque here. A region trusts every process that may open it (mode 0600, one user).
//!
//! ```
//! use ipc::{Prefix, Received, Ring, RingReceiver, RingSender};
//! use std::time::Duration;
//!
//! let prefix: Prefix = format!("doc{}_", std::process::id()).parse()?;
//! let ring = Ring::create(&prefix, "plans", 1 << 16)?; // removed from /dev/shm when dropped
//! let mut sender = RingSender::open(&prefix, "plans")?; // any process
//! let mut receiver = RingReceiver::open(&prefix, "plans")?; // any process
//!
//! sender.send(b"step 1", Duration::from_secs(1))?;
//! let mut message = Vec::new();
//! assert_eq!(receiver.recv(&mut message, Duration::from_secs(1))?, Received::Message);
//! assert_eq!(message, b"step 1");
//! # drop(ring);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod control;
mod descriptors;
mod error;
pub mod futex;
mod header;
mod heap;
mod inherit;
mod lock;
mod mapping;
mod mpi_segments;
mod output;
mod panics;
mod prefix;
mod process;
mod region;
mod relay_command;
mod ring;
mod shared_memory;
mod stacks;
mod sweep;
mod threads;
mod title;

pub use control::{Acceptor, Health, answer_health, ask_health, bind_private, connect_private};
pub use descriptors::{MAX_FILES, receive_files, send_files};
pub use error::{IpcError, RecvError, SendError};
pub use header::{REGION_MAGIC, pid_namespace, sees_all_processes};
pub use heap::give_memory_back;
pub use inherit::{close_descriptors, is_secret, withhold_also, withhold_secrets};
pub use lock::lock;
pub use mapping::map_file;
pub use mpi_segments::sweep_mpi_segments;
pub use output::end_with_the_reader;
pub use panics::{essential_thread, on_essential_panic, panic_words};
pub use prefix::Prefix;
pub use process::{ProcessId, ProcessWatch, bind_to_parent, describe_exit, die_with_parent};
pub use region::{Plain, Region};
pub use relay_command::{RELAY, RelayCommand, RelayReport};
pub use ring::{Backlog, Doorbell, Received, Ring, RingReceiver, RingSender};
pub use shared_memory::{MappedMemory, SharedMemory};
pub use stacks::{STACK_LINE, ask_for_stacks, with_names, write_stacks_on_faults};
pub use sweep::{sweep_all_stale, sweep_stale};
pub use threads::thread_states;
pub use title::{set_process_name, set_process_title};
