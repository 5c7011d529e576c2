//! Room `ipc`.
