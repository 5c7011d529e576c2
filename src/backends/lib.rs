//! Room `backends`.
