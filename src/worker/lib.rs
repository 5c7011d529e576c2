//! Room `worker`.
