//! The model repository: finds models and versions, and reads their `config.pbtxt`.
//!
//! [`Repository`] finds models. A [`ModelSource`] is one model with its [`ModelConfig`], read, completed with defaults and
//! validated. `serving` loads and serves models.
//!
//! ```
//! let root = std::env::temp_dir().join(format!("repository-example-{}", std::process::id()));
//! std::fs::create_dir_all(root.join("echo/1"))?;
//! std::fs::write(root.join("echo/config.pbtxt"), r#"
//!     backend: "identity"
//!     input [ { name: "INPUT0" data_type: TYPE_STRING dims: [ -1 ] } ]
//!     output [ { name: "OUTPUT0" data_type: TYPE_STRING dims: [ -1 ] } ]
//! "#)?;
//!
//! let repository = repository::Repository::open(&[root.clone()])?;
//! let echo = repository.model("echo")?;
//! assert_eq!(repository.model_names()?, ["echo"]);
//! assert_eq!(echo.versions, [1]);
//! assert_eq!(echo.config.input[0].dims, [-1]);
//! # std::fs::remove_dir_all(root)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod config;
mod defaults;
mod detect;
mod error;
mod json;
pub mod proto;
mod scan;
mod syntax;
mod text_format;
mod validate;

pub use config::recheck;
pub use error::RepositoryError;
pub use json::{from_json, to_json};
pub use proto::ModelConfig;
pub use scan::{ModelSource, Repository};
