//! Which shape comes next, and when a world grows back.

use super::*;
use crate::mpi::MpiKind;

fn elastic(sizes: &[u32]) -> Elastic {
    let here = nix::unistd::gethostname().unwrap().to_string_lossy().into_owned();
    let shapes = Shapes::of(sizes, &[(&here, 2), ("b", 2)]);
    let other = Other { name: "b".to_owned(), probe: None, answers_since: None, num_silent: 0, why: String::new() };
    Elastic {
        shapes,
        starter: Starter::Mpirun(MpiKind::OpenMpi),
        script: String::new(),
        shape: None,
        lost_ranks: Vec::new(),
        others: vec![other],
        asked: None,
        num_losses: 0,
        num_failed_starts: 0,
        grows_after: Instant::now(),
        grows_before: None,
        return_after: Duration::from_secs(30),
    }
}

fn lost() -> Result<(), String> {
    Err("no route".to_owned())
}

/// `b` has answered for so long.
fn answers_for(elastic: &mut Elastic, seconds: u64) {
    elastic.others[0].heard(Ok(()));
    let past = |now: Instant| now.checked_sub(Duration::from_secs(seconds)).unwrap();
    elastic.others[0].answers_since = Some(past(Instant::now()));
    elastic.grows_after = past(elastic.grows_after);
}

fn size(elastic: &Elastic) -> u32 {
    elastic.shape().unwrap().world_size
}

#[test]
fn a_world_grows_back_once_the_host_has_answered_for_long_enough() {
    let mut elastic = elastic(&[4, 2]);
    elastic.others[0].heard(Ok(()));
    assert!(elastic.choose() && size(&elastic) == 4);
    elastic.others[0].heard(lost());
    assert!(elastic.choose() && size(&elastic) == 2);
    assert_eq!(elastic.lost(), ["`b` (no route)"]);

    answers_for(&mut elastic, 29);
    // Another death of the smaller world does not bring the host back early.
    assert!(elastic.larger().is_none() && elastic.choose() && size(&elastic) == 2);
    answers_for(&mut elastic, 31);
    assert_eq!(elastic.larger().unwrap().world_size, 4);
    elastic.others[0].heard(lost());
    assert!(elastic.larger().is_none(), "it is lost again");
    answers_for(&mut elastic, 31);
    assert!(elastic.choose() && size(&elastic) == 4);

    // The next loss in a row doubles the time, and a long time with all ranks ends the row.
    elastic.others[0].heard(lost());
    assert!(elastic.choose() && elastic.return_time() == Duration::from_secs(60));
    answers_for(&mut elastic, 61);
    assert!(elastic.choose() && size(&elastic) == 4);
    elastic.has_run(Some(STEADY_AFTER), false);
    assert_eq!(elastic.return_time(), Duration::from_secs(30));
    elastic.num_losses = 1000;
    assert_eq!(elastic.return_time(), MAX_RETURN);
}

#[test]
fn a_world_that_does_not_serve_becomes_smaller_though_its_hosts_answer() {
    let mut elastic = elastic(&[4, 2]);
    elastic.others[0].heard(Ok(()));
    assert!(elastic.choose() && size(&elastic) == 4);
    elastic.has_run(None, false);
    assert!(elastic.choose() && size(&elastic) == 4, "once may be chance");
    elastic.has_run(None, false);
    assert!(elastic.choose() && size(&elastic) == 2);
    answers_for(&mut elastic, 29);
    assert!(elastic.larger().is_none(), "it does not go back at once");
    // There is no smaller one, so it is tried again.
    elastic.has_run(None, false);
    elastic.has_run(None, false);
    assert!(elastic.choose() && size(&elastic) == 2);
}

#[test]
fn a_world_that_goes_on_without_lost_ranks_grows_back_like_a_smaller_one() {
    let mut elastic = elastic(&[4, 2]);
    elastic.others[0].heard(Ok(()));
    assert!(elastic.choose() && elastic.size() == 4 && !elastic.note_lost(&[]));
    assert!(elastic.note_lost(&[3]) && !elastic.note_lost(&[3]));
    assert_eq!((elastic.size(), elastic.serves_on("b")), (3, false));
    assert_eq!(elastic.lost(), ["`b` (rank 3 is lost)"]);
    answers_for(&mut elastic, 29);
    assert!(elastic.larger().is_none());
    answers_for(&mut elastic, 31);
    assert_eq!(elastic.larger().unwrap().world_size, 4);
    assert!(elastic.choose() && elastic.size() == 4 && elastic.serves_on("b"));

    // It dies before the host is back.
    assert!(elastic.note_lost(&[2, 3]));
    elastic.others[0].heard(lost());
    assert!(elastic.choose() && size(&elastic) == 2);
}

#[test]
fn a_world_with_fewer_ranks_than_any_allowed_size_starts_again_as_it_was() {
    let mut elastic = elastic(&[4, 3]);
    elastic.others[0].heard(Ok(()));
    assert!(elastic.choose() && elastic.note_lost(&[1, 2]));
    elastic.others[0].heard(Ok(()));
    assert!(elastic.choose() && size(&elastic) == 4);
}

#[test]
fn without_a_shape_that_fits_there_is_no_start() {
    let mut elastic = elastic(&[4, 3]);
    elastic.others[0].heard(lost());
    assert!(!elastic.choose() && elastic.shape().is_none());
    elastic.others[0].heard(Ok(()));
    assert!(elastic.choose() && size(&elastic) == 4);
}
