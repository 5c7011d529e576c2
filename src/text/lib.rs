//! Room `text`.
