//! `launch sbatch`: writes a Slurm batch file that starts a world.

use std::ffi::OsString;
use std::fmt::Write;

use anyhow::{Result, bail};
use settings::DeviceKind;

use crate::command::quoted;
use crate::flags::BatchFlags;

/// Flags of the job, in contrast to those of the world. On the command line they may be abbreviated.
const JOB_FLAGS: [&str; 6] = ["partition", "account", "time", "nodes", "gpus-per-node", "drain-before"];

/// The batch file. `arguments` are those of this process; the world's flags among them are copied as they were typed.
pub(crate) fn file(batch: &BatchFlags, arguments: &[OsString]) -> Result<String> {
    let world = &batch.world;
    if world.detach || world.dry_run {
        bail!("a batch job ends with its script: leave out --detach and --dry-run");
    }
    crate::rank_flags::check(&world.rank_flags)?;
    let words: Vec<String> = arguments.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    if crate::keys::without_literals(&words).is_some() {
        bail!("a batch file is no place for a key: write it into a file of its own, and give @FILE in its place");
    }
    if !world.world_size.is_multiple_of(batch.nodes) {
        bail!(
            "{} ranks cannot be shared out among {} nodes; change --world_size or --nodes",
            world.world_size,
            batch.nodes
        );
    }
    if !world.elastic.is_empty() {
        bail!(
            "--elastic works through mpirun outside of Slurm; leave it out, the job goes back to the queue when it loses a node"
        );
    }
    let ranks_per_node = world.world_size / batch.nodes;
    let gpus = batch.gpus_per_node.unwrap_or(if world.device == DeviceKind::Cpu { 0 } else { ranks_per_node });
    let place = if batch.nodes == 1 { "one node".to_owned() } else { format!("{} nodes", batch.nodes) };
    let mut text = format!("#!/bin/bash\n# Serves {} on {place}.\n", world.model_repo.display());
    let mut option =
        |name: &str, value: &str| writeln!(text, "#SBATCH --{name}={value}").expect("text takes more text");
    option("job-name", "trireme");
    option("nodes", &batch.nodes.to_string());
    option("ntasks-per-node", &ranks_per_node.to_string());
    if gpus > 0 {
        option("gpus-per-node", &gpus.to_string());
    }
    for (name, value) in [("partition", &batch.partition), ("account", &batch.account)] {
        if let Some(value) = value {
            option(name, value);
        }
    }
    option("time", &batch.time);
    option("signal", &format!("B:USR1@{}", batch.drain_before));
    option("open-mode", "append");
    option("output", "trireme_%j.out");
    text.push_str("#SBATCH --requeue\n\n");
    write!(text, "\"${{LAUNCH:-target/release/launch}}\" {} &\n{WAIT}", world_line(arguments))
        .expect("text takes more text");
    Ok(text)
}

/// The rest of the batch file, after the line that starts the launcher.
const WAIT: &str = r#"launch=$!

# Requests in flight finish. Near the time limit the job then goes back to the queue.
trap 'again=yes; kill -TERM "$launch"' USR1
trap 'kill -TERM "$launch"' TERM

# A trapped signal interrupts `wait`, so it is repeated until the launcher has ended.
wait "$launch"
code=$?
while kill -0 "$launch" 2>/dev/null; do
    wait "$launch"
    code=$?
done
[[ ${again:-no} == yes ]] && scontrol requeue "$SLURM_JOB_ID"
exit "$code"
"#;

/// The arguments after `sbatch`, without the flags of the job.
fn world_line(arguments: &[OsString]) -> String {
    let words = arguments.iter().map(|word| word.to_string_lossy()).skip_while(|word| word != "sbatch").skip(1);
    let (mut kept, mut words, mut before_dashes) = (Vec::new(), words, true);
    while let Some(word) = words.next() {
        before_dashes &= word != "--";
        let name = word
            .strip_prefix("--")
            .filter(|_| before_dashes)
            .map(|flag| flag.split('=').next().unwrap_or_default().replace('_', "-"));
        let is_job_flag =
            name.is_some_and(|name| name.len() > 1 && JOB_FLAGS.iter().any(|flag| flag.starts_with(&name)));
        match is_job_flag {
            true if !word.contains('=') => drop(words.next()),
            true => {}
            false => kept.push(quoted(&word)),
        }
    }
    kept.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flags::{Action, Flags};

    fn file_of(line: &str) -> Result<String> {
        let words: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
        let flags = Flags::parse_from_line(std::iter::once("launch".into()).chain(words.iter().cloned()))?;
        let Some(Action::Sbatch(batch)) = flags.action else { panic!("{line}") };
        file(&batch, &words)
    }

    #[test]
    fn the_shipped_batch_file_of_one_node_is_what_the_launcher_writes() {
        let shipped = include_str!("../slurm/one_node.sbatch");
        assert_eq!(file_of("sbatch --world_size=8 --model_repo=model_repository").unwrap(), shipped);
    }

    #[test]
    fn the_shipped_batch_file_with_a_container_is_what_the_launcher_writes() {
        let shipped = include_str!("../slurm/container.sbatch");
        let line = "sbatch --world_size=8 --model_repo=model_repository --container-image=registry.example.com#team/trireme:1.0";
        assert_eq!(file_of(line).unwrap(), shipped);
    }

    #[test]
    fn flags_of_the_job_become_options_and_flags_of_the_world_are_passed_on() {
        let line = "sbatch --world_size 2 --part=gpu --account a1 --time=1:00:00 --device=cpu --drain_before=30 \
                    --model_repo=/m -- --time=x";
        let text = file_of(line).unwrap();
        for option in ["ntasks-per-node=2", "partition=gpu", "account=a1", "time=1:00:00", "signal=B:USR1@30"] {
            assert!(text.contains(&format!("#SBATCH --{option}\n")), "{option}: {text}");
        }
        assert!(!text.contains("gpus"), "{text}");
        let started =
            "\"${LAUNCH:-target/release/launch}\" --world_size 2 --device=cpu --model_repo=/m -- --time=x &\n";
        assert!(text.contains(started), "{text}");
        assert!(file_of("sbatch --detach").is_err());
        let with_key = file_of("sbatch -- --http-restricted-api=health:k=s3cret").unwrap_err().to_string();
        assert!(with_key.contains("no place for a key") && !with_key.contains("s3cret"), "{with_key}");
        let many = file_of("sbatch --world_size=16 --nodes=2 --network=ib0").unwrap();
        for option in ["nodes=2", "ntasks-per-node=8", "gpus-per-node=8"] {
            assert!(many.contains(&format!("#SBATCH --{option}\n")), "{option}: {many}");
        }
        assert!(many.contains("--world_size=16 --network=ib0 &\n"), "{many}");
        let refusal = file_of("sbatch --world_size=16 --nodes=2 --elastic=8").unwrap_err().to_string();
        assert!(refusal.contains("--elastic works through mpirun"), "{refusal}");
        assert!(file_of("sbatch --world_size=3 --nodes=2").is_err());
        assert!(file_of("sbatch -- --http-port=1").unwrap_err().to_string().contains("give --http_port before"));
    }
}
