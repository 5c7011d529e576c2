//! Ends the world after a panic of an essential thread of a rank.

use std::sync::Weak;

use comm::World;

/// The exit code for a death by SIGABRT. After a signal, a launcher starts the world again.
const EXIT_CODE: u8 = 128 + 6;

/// Makes the panic of an essential thread of this rank end `world`.
pub(crate) fn end_world(world: Weak<World>) {
    ipc::on_essential_panic(move |reason| {
        if let Some(world) = world.upgrade() {
            world.abort(EXIT_CODE, reason);
        }
    });
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::sync::Arc;

    use super::*;

    /// Runs in the process that the test below starts.
    #[test]
    fn a_thread_of_a_rank_panics() {
        if std::env::var_os("PANICS_TEST").is_none() {
            return;
        }
        let world = Arc::new(World::start(comm::Config::from_env()).unwrap());
        end_world(Arc::downgrade(&world));
        let _ = ipc::essential_thread("relay", || panic!("first\nsecond")).unwrap().join();
        unreachable!("the world has ended");
    }

    #[test]
    fn a_panic_ends_the_world_and_is_its_cause() {
        let file = std::env::temp_dir().join(format!("trireme-panics-{}", std::process::id()));
        std::fs::write(&file, "").unwrap();
        let mut rank = Command::new(std::env::current_exe().unwrap());
        rank.args(["panics::tests::a_thread_of_a_rank_panics", "--exact", "--nocapture"]);
        let output = rank.env("PANICS_TEST", "1").env("TRIREME_CAUSE_FILE", &file).output().unwrap();
        let cause = std::fs::read_to_string(&file).unwrap();
        std::fs::remove_file(&file).unwrap();
        assert_eq!(output.status.code(), Some(EXIT_CODE.into()), "{output:?}");
        assert_eq!(cause.trim_end(), "the thread `relay` panicked: first\\nsecond");
    }
}
