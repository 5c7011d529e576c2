//! A worker dies mid-stream; the stream goes on with the tokens that would have come.

mod support;

use nix::sys::signal::Signal;
use support::{TestWorld, signal};

const MAX_TOKENS: u32 = 160;

fn text_with_a_worker_killed(world: &mut TestWorld, victim: usize) -> String {
    let mut stream = world.stream("Once upon a time", MAX_TOKENS);
    let mut text: String = stream.by_ref().take(5).collect();
    signal(world.workers()[victim], Signal::SIGKILL);
    text.extend(stream);
    text
}

#[test]
fn a_killed_worker_comes_back_and_its_stream_ends_with_the_undisturbed_text() {
    let mut world = TestWorld::of(1);
    let undisturbed = world.generate("Once upon a time", MAX_TOKENS);
    assert_eq!(text_with_a_worker_killed(&mut world, 0), undisturbed);
    assert_eq!(world.metric("trireme_llm_worker_restarts"), 1.0);
    assert!(world.stop().success());
}

#[test]
fn any_worker_of_a_group_may_die() {
    let mut world = TestWorld::of(2);
    let undisturbed = world.generate("Once upon a time", MAX_TOKENS);
    assert_eq!(text_with_a_worker_killed(&mut world, 1), undisturbed);
    assert_eq!(text_with_a_worker_killed(&mut world, 0), undisturbed);
    assert_eq!(world.workers().len(), 2);
    assert!(world.stop().success());
}

#[test]
fn a_worker_killed_while_nothing_runs_is_replaced_before_the_next_request() {
    let mut world = TestWorld::of(1);
    let before = world.generate("The captain", 16);
    signal(world.workers()[0], Signal::SIGKILL);
    assert_eq!(world.generate("The captain", 16), before);
    assert!(world.stop().success());
}
