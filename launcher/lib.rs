//! Room `launcher`.
