//! The interface to models that give up the memory of their devices for a time, as in vLLM's sleep mode.

use futures::future::BoxFuture;

use crate::InferError;

/// What becomes of the weights of a model that sleeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum SleepLevel {
    /// They stay in host memory, from where they return fast: vLLM's level 1.
    Keep,
    /// They are dropped, and read from the checkpoint again: vLLM's level 2.
    Drop,
}

/// A model that can sleep. Requests that arrive while it sleeps wait in its queue.
pub trait Sleeper: Send + Sync {
    /// Frees the memory of the devices. Resolves when it is free: requests that have begun end before. A model that sleeps already
    /// goes on to sleep, with the weights dropped if one of both levels drops them.
    ///
    /// # Errors
    /// When host memory does not suffice for the weights, the model is woken or unloaded meanwhile, or its workers fail.
    fn sleep(&self, level: SleepLevel) -> BoxFuture<'static, Result<(), InferError>>;

    /// Takes the memory again. Resolves when requests are served; at once if the model does not sleep.
    ///
    /// # Errors
    /// When the workers of the model cannot be started, for example because others use the memory.
    fn wake(&self) -> BoxFuture<'static, Result<(), InferError>>;

    /// Whether the model sleeps.
    fn is_sleeping(&self) -> bool;
}
