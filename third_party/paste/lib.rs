//! The macro of `paste`, as its maintained successor `pastey` has it.
#![no_std]

pub use pastey::paste;
