//! N ranks return the same results as one.

mod support;

use support::{Options, TestWorld};

const PROMPTS: [&str; 4] =
    ["Once upon a time", "Q: What colour is the sky?", "The captain of the ship", "One morning a"];

#[test]
fn one_two_and_four_ranks_return_the_same_greedy_text() {
    let texts = |world_size: u32| {
        let world = TestWorld::of(world_size);
        assert_eq!(world.workers().len(), world_size as usize, "one worker per rank");
        PROMPTS.map(|prompt| world.generate(prompt, 48))
    };
    let alone = texts(1);
    assert!(alone.iter().all(|text| !text.is_empty()), "{alone:?}");
    assert_eq!(texts(2), alone);
    assert_eq!(texts(4), alone);
}

#[test]
fn ranks_of_mpich_return_the_same_greedy_text() {
    if std::process::Command::new("mpirun.mpich").arg("--version").output().is_err() {
        println!("skipped: no mpirun.mpich on this machine");
        return;
    }
    let alone = TestWorld::of(1).generate(PROMPTS[0], 48);
    let mut world = TestWorld::start(Options { world_size: 2, mpirun: "mpirun.mpich", ..Options::default() });
    assert_eq!(world.workers().len(), 2, "one worker per rank");
    assert_eq!(world.generate(PROMPTS[0], 48), alone);
    assert!(world.stop().success());
}

#[test]
fn pipeline_stages_return_the_same_greedy_text_alone_and_with_many_requests_in_flight() {
    let alone = TestWorld::of(1);
    let texts = PROMPTS.map(|prompt| alone.generate(prompt, 48));
    for (world_size, parameters) in [(2, &[("pp", "2")][..]), (4, &[("tp", "2"), ("pp", "2")])] {
        let repository = support::copied_repository();
        support::set_parameters(&repository, "tensorrt_llm", parameters);
        let repository_path = repository.path().to_owned();
        let world = TestWorld::start(Options { world_size, repository: repository_path, ..Options::default() });
        assert_eq!(world.workers().len(), world_size as usize, "one worker per rank");
        assert_eq!(PROMPTS.map(|prompt| world.generate(prompt, 48)), texts, "{parameters:?}");
        let world = &world;
        std::thread::scope(|scope| {
            let answers = (0..12).map(|i| (i % 4, scope.spawn(move || world.generate(PROMPTS[i % 4], 48))));
            for (prompt, answer) in answers.collect::<Vec<_>>() {
                assert_eq!(answer.join().unwrap(), texts[prompt], "{parameters:?}");
            }
        });
    }
}

/// An adapter's tensors beside those of a checkpoint.
fn write_adapter(path: &std::path::Path) {
    let header = r#"{"base_model.model.lora_A.weight": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}}"#;
    let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 12]].concat();
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn tensors_that_no_worker_takes_are_named_once_whatever_the_workers_divide() {
    for (case, parameters) in
        [("qwen3_moe", &[][..]), ("qwen3_moe", &[("ep", "2")]), ("llama3_gqa", &[("pp", "2"), ("tp", "1")])]
    {
        let repository = support::golden_repository(case, parameters);
        let version = repository.path().join("tensorrt_llm/1");
        std::fs::rename(version.join("model.safetensors"), version.join("weights.safetensors")).unwrap();
        write_adapter(&version.join("adapter_model.safetensors"));
        let options = Options { world_size: 2, repository: repository.path().to_owned(), ..Options::default() };
        let mut world = TestWorld::start(options);
        let warning = "1 tensors of the checkpoint are not used, for example `base_model.model.lora_A.weight`";
        world.await_log(warning);
        assert_eq!(world.log_text().matches("of the checkpoint are not used").count(), 1, "{}", world.log_text());
    }
}

#[test]
fn pinned_threads_of_two_workers_run_on_different_cores() {
    let args = ["--pin-threads=true", "--threads=1"].map(str::to_owned).to_vec();
    let world = TestWorld::start(Options { world_size: 2, args, ..Options::default() });
    if world.log_text().contains("not pinned since") {
        println!("skipped: fewer than two cores of its own");
        return;
    }
    let cores: Vec<String> = world.workers().into_iter().map(allowed_cores).collect();
    assert!(cores.iter().all(|core| core.parse::<u32>().is_ok()), "one core each: {cores:?}");
    assert_ne!(cores[0], cores[1]);
}

/// The cores that a process's first thread may run on, from `/proc`.
fn allowed_cores(pid: u32) -> String {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("the worker runs");
    let line = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    line.expect("the system lists cores").trim().to_owned()
}

#[test]
fn idle_ranks_use_at_most_two_thousandths_of_a_core_each() {
    let mut world = TestWorld::of(2);
    world.generate("Once upon a time", 8);
    std::thread::sleep(std::time::Duration::from_millis(500));
    // Other load can only increase the cost of wake-ups, so the minimum of three measurements counts.
    let seconds = 5;
    let used_ms = |_| {
        let before = world.cpu_ms();
        std::thread::sleep(std::time::Duration::from_secs(seconds));
        world.cpu_ms() - before
    };
    let least_ms = (0..3).map(used_ms).min().expect("three silences");
    assert!(least_ms <= 2 * seconds * 2, "{least_ms} ms of CPU time of two ranks in {seconds} s without requests");
    assert!(world.stop().success());
}
