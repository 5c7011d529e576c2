//! End-to-end tests of the launcher: the real binary and a real `mpirun`, with a fake rank that serves no model.

mod failure;
mod site;
mod start;
mod stop;
