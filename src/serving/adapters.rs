//! The interface to the adapters (LoRA) of a model, which requests choose by name.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures::future::BoxFuture;

use crate::InferError;

/// The adapters of a model.
pub trait Adapters: Send + Sync {
    /// Whether requests may name this adapter.
    fn contains(&self, name: &str) -> bool;

    /// The adapters that requests may name, by name.
    fn list(&self) -> Vec<AdapterInfo>;

    /// Loads an adapter from a folder, which requests may name from then on.
    ///
    /// # Errors
    /// When the model takes no adapters, the name is taken, or the adapter does not fit the model.
    fn load(self: Arc<Self>, name: &str, path: &Path) -> BoxFuture<'static, Result<(), InferError>>;

    /// Removes an adapter: new requests do not find it. Resolves when no request uses it.
    ///
    /// # Errors
    /// When there is none of this name.
    fn unload(self: Arc<Self>, name: &str) -> BoxFuture<'static, Result<(), InferError>>;
}

/// An adapter of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdapterInfo {
    /// The name by which requests choose it.
    pub name: String,
    /// The folder that it was loaded from.
    pub path: PathBuf,
}
