//! Tests of the scheduler. They are one program, so that the crate is optimised and linked once.

#[path = "../support/mod.rs"]
mod support;

mod agents;
mod agents_tiers;
mod constraints;
mod disk;
mod drafts;
mod drafts_ahead;
mod fairness;
mod host;
mod refusals;
mod scheduling;
mod scripted;
mod skipped_passes;
mod states;
mod step_size;
mod windows;
