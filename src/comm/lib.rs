//! Room `comm`.
