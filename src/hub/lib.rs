//! Models of a Hugging Face hub: finds, downloads, lists and removes them.
//!
//! [`pull()`] returns the directory of a [`ModelName`] in a cache that Python's `huggingface_hub` shares, and downloads what is missing.
//! [`Settings`] has the hub's address, the cache and the token, from the environment variables of that package.
//!
//! ```
//! use hub::{ModelName, Settings, pull};
//!
//! let name: ModelName = "Qwen/Qwen3-0.6B@main".parse()?;
//! let cache = std::env::temp_dir().join("hub-example");
//! let settings = Settings::of(|name| (name == "HF_HUB_CACHE").then(|| cache.display().to_string()))?.offline();
//! let error = pull(&name, &settings, |_| Ok(())).unwrap_err();
//! assert!(error.to_string().contains("HF_HUB_OFFLINE is set"));
//! # Ok::<(), hub::HubError>(())
//! ```
#![forbid(unsafe_code)]

mod cache;
mod commands;
mod digest;
mod download;
mod error;
mod http;
mod listing;
mod name;
mod needed;
mod progress;
mod pull;
mod settings;
mod stored;

pub use commands::{PullArgs, RmArgs, named, run_list, run_pull, run_rm};
pub use error::HubError;
pub use name::ModelName;
pub use pull::{Check, Looked, Pulled, look, pull};
pub use settings::Settings;
pub use stored::{Stored, list, remove, size};
