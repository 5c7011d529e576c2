use std::ffi::OsString;

use super::*;
use crate::flags::Flags;

fn plan_of(line: &str) -> Result<String> {
    plan_in(None, line)
}

/// A job of one node, at a site with PMIx.
fn job_7(mpi: &str) -> Option<Allocation> {
    Some(Allocation { job: 7, nodes: Vec::new(), mpi_types: [mpi.to_owned()].into(), node: None })
}

fn plan_in(allocation: Option<Allocation>, line: &str) -> Result<String> {
    Ok(whole_plan_in(allocation, line)?.command.to_string())
}

fn whole_plan_in(allocation: Option<Allocation>, line: &str) -> Result<Plan> {
    let words = std::iter::once("launch").chain(line.split_whitespace());
    let flags = Flags::parse_from_line(words.map(OsString::from))?.world;
    let hosts = hosts::of_flags(&flags)?;
    let environment = ["NCCL_DEBUG", "HOME"].map(str::to_owned).to_vec();
    let shm_prefix = "prefix".to_owned();
    let mpirun = match &flags.mpirun {
        // The kind follows from the name, because the program does not exist.
        Some(name) if name.ends_with("mpirun.mpich") => Mpirun { program: name.clone(), kind: MpiKind::Mpich },
        Some(name) => Mpirun { program: name.clone(), kind: MpiKind::OpenMpi5 },
        None => Mpirun::default(),
    };
    let trireme = "/opt/trireme".into();
    let site = Site { trireme, num_cores: 4, shm_prefix, mpirun, allocation, hosts, environment, ..Site::default() };
    plan(&flags, &Site { work_dir: "/work".into(), run_dir: "/run/me".into(), ..site })
}

#[test]
fn ranks_run_on_the_named_hosts_with_the_environment_they_need() {
    let plan = whole_plan_in(None, "--world_size=3 --hosts=a:2,b:1 --network=eth1 --device=cuda").unwrap();
    assert_eq!(plan.placement.unwrap(), "placement: a: ranks 0-1; b: rank 2");
    let command = plan.command.to_string();
    let start = "mpirun --allow-run-as-root --bind-to none --mca btl_tcp_if_include eth1 --mca oob_tcp_if_include eth1 \
         -x NCCL_SOCKET_IFNAME=eth1 -x NCCL_DEBUG --host a:2 -n 1 /opt/trireme rank ";
    assert!(command.starts_with(start), "{command}");
    assert!(command.contains(" : --host b:1 -n 1 /opt/trireme rank "), "{command}");
    assert_eq!(command.matches("--network=eth1").count(), 3, "{command}");
}

#[test]
fn ranks_run_in_a_container_with_the_mounts_they_need() {
    let line = "--world_size=2 --model_repo=models --container-image=site#trireme:1 --container-mounts=/data,/a:/b";
    let pyxis = plan_in(job_7("pmix"), line).unwrap();
    let step = "srun --mpi=pmix --job-name=trireme-8000 --nodes=1 --ntasks=2 --kill-on-bad-exit=1 --cpu-bind=none \
         --unbuffered '--container-image=site#trireme:1' \
         --container-mounts=/work/models:/work/models,/work:/work,/run/me:/run/me,/data:/data,/a:/b \
         --container-workdir=/work sh -c 'exec \"$0\" rank \
         --backend-config=python,shm-region-prefix-name=prefix${SLURM_PROCID}_ \"$@\"' trireme --model-repository=models ";
    assert!(pyxis.starts_with(step), "{pyxis}");
    let refusal = plan_of(line).unwrap_err().to_string();
    assert!(refusal.contains("pyxis is a part of Slurm's srun"), "{refusal}");
    assert!(plan_of("--container-mounts=/data").unwrap_err().to_string().contains("needs --container-image"));

    let line = "--world_size=2 --model_repo=/m --device=cuda --container-image=t.sif --container-runtime=apptainer";
    let inside = "apptainer exec --nv --bind=/m,/work,/run/me --pwd=/work t.sif trireme";
    let local = plan_of(line).unwrap();
    let start = format!("mpirun --allow-run-as-root --bind-to none -n 1 {inside} rank --model-repository=/m ");
    assert!(local.starts_with(&start) && local.contains(&format!(" : -n 1 {inside} rank ")), "{local}");
    let step = plan_in(job_7("pmix"), line).unwrap();
    let script = "sh -c 'exec apptainer exec --nv --bind=/m,/work,/run/me --pwd=/work t.sif \"$0\" rank ";
    assert!(step.contains(script) && step.contains("' trireme --model-repository=/m "), "{step}");
    let one = plan_of("--container-image=t.sif --container-runtime=apptainer --device=cpu --trireme=/opt/t").unwrap();
    assert!(
        one.starts_with("apptainer exec --bind=/work/model_repository,/work,/run/me --pwd=/work t.sif /opt/t rank "),
        "{one}"
    );
}

#[test]
fn launchers_of_other_mpis_get_their_own_options() {
    let hydra = plan_of("--mpirun=mpirun.mpich --world_size=3 --hosts=a:2,b:1 --network=eth1 --bind=core").unwrap();
    let start =
        "mpirun.mpich -bind-to core:2 -iface eth1 -genv NCCL_SOCKET_IFNAME eth1 -hosts a:2,b:1 -n 1 /opt/trireme rank ";
    assert!(hydra.starts_with(start), "{hydra}");
    assert!(hydra.contains(" : -n 1 /opt/trireme rank ") && !hydra.contains("--host"), "{hydra}");
    assert!(plan_of("--mpirun=mpirun.mpich --world_size=9").unwrap().starts_with("mpirun.mpich -n 1 "));
    let error = plan_of("--mpirun=mpirun.mpich --world_size=2 --hosts=a,b --network=10.0.0.0/8").unwrap_err();
    assert!(error.to_string().contains("takes the name of an interface"), "{error}");
    let open_mpi_5 = plan_of("--mpirun=/opt/mpirun --world_size=2 --hosts=a,b --network=eth1").unwrap();
    let start =
        "/opt/mpirun --allow-run-as-root --bind-to none --mca btl_tcp_if_include eth1 --prtemca prte_if_include eth1 ";
    assert!(open_mpi_5.starts_with(start), "{open_mpi_5}");
    let by_pmi = plan_in(job_7("pmi2"), "--mpirun=mpirun.mpich --world_size=2").unwrap();
    assert!(by_pmi.starts_with("srun --mpi=pmi2 "), "{by_pmi}");
}

#[test]
fn ports_of_the_launcher_are_refused_behind_the_dashes() {
    let error = plan_of("-- --http_port=9000").unwrap_err().to_string();
    assert!(error.contains("give --http_port before"), "{error}");
}

#[test]
fn bound_ranks_get_their_share_of_cores() {
    let numa = plan_of("--world_size=2 --bind=numa").unwrap();
    assert!(numa.starts_with("mpirun --allow-run-as-root --map-by numa --bind-to numa -n 1 "), "{numa}");
    assert_eq!(numa.matches("--threads=2").count(), 2, "{numa}");
    let core = plan_of("--world_size=2 --bind=core").unwrap();
    assert!(core.starts_with("mpirun --allow-run-as-root --map-by slot:PE=2 --bind-to core -n 1 "), "{core}");
    let error = plan_of("--world_size=5 --bind=core").unwrap_err().to_string();
    assert!(error.contains("5 ranks on 4 cores take turns"), "{error}");
    let step = plan_in(job_7("pmix"), "--world_size=2 --bind=numa").unwrap();
    assert!(step.contains(" --cpu-bind=ldoms "), "{step}");
}

#[test]
fn one_rank_runs_without_mpirun() {
    let expected = "/opt/trireme rank --model-repository=/models --grpc-port=8001 --http-port=8000 \
         --metrics-port=8002 --device=auto --backend-config=python,shm-region-prefix-name=prefix0_";
    assert_eq!(plan_of("--model_repo=/models").unwrap(), expected);
    assert_eq!(plan_of("--model_repo=/models --no_mpi --tritonserver /opt/trireme").unwrap(), expected);
}

#[test]
fn each_rank_is_an_application_of_its_own_with_its_own_prefix_and_log_file() {
    let command = plan_of(
        "--world_size=3 --model_repo /models --http_port=9000 --grpc_port=9001 --metrics_port=9002 --log \
         --log-file=logs/world.txt --exit_timeout=7 --tensorrt_llm_model_name=llama,qwen --device=cpu -- --id=me",
    );
    let common = "/opt/trireme rank --model-repository=/models --grpc-port=9001 --http-port=9000 \
         --metrics-port=9002 --device=cpu";
    let rest = "--exit-timeout-secs=7 --log-verbose=3";
    let others = "--model-control-mode=explicit --load-model=llama --load-model=qwen --id=me";
    let expected = format!(
        "mpirun --allow-run-as-root --bind-to none \
         -n 1 {common} --backend-config=python,shm-region-prefix-name=prefix0_ {rest} --log-file=logs/world.txt \
         --backend-config=python,mpi-models=llama,qwen --id=me : \
         -n 1 {common} --backend-config=python,shm-region-prefix-name=prefix1_ {rest} --log-file=logs/world.rank1.txt {others} : \
         -n 1 {common} --backend-config=python,shm-region-prefix-name=prefix2_ {rest} --log-file=logs/world.rank2.txt {others}"
    );
    assert_eq!(command.unwrap(), expected);
}

#[test]
fn connections_are_kept_in_a_world_of_several_hosts_if_rank_0_is_on_this_one() {
    let here = nix::unistd::gethostname().unwrap().to_string_lossy().into_owned();
    let plan = whole_plan_in(None, &format!("--world_size=2 --hosts={here},b --keep-connections")).unwrap();
    assert!(plan.relay.is_some() && !plan.rank_0_may_be_elsewhere && !plan.is_one_node);
    let refusal = plan_of(&format!("--world_size=2 --hosts=b,{here} --keep-connections")).unwrap_err().to_string();
    assert!(refusal.contains("--keep-connections needs rank 0 on this machine"), "{refusal}");
    assert!(whole_plan_in(job_7("pmix"), "--world_size=2 --keep-connections").is_err());
}

#[test]
fn the_memory_plan_has_the_ranks_of_a_node_in_mind() {
    let of = |line: &str, hosts: Vec<Host>| {
        let flags = Flags::parse_from_line(line.split(' ').map(OsString::from)).unwrap().world;
        memory_command(&flags, &Site { num_cores: 64, hosts, ..Site::default() }).to_string()
    };
    let host = |name: &str| Host { name: name.to_owned(), slots: Some(8) };
    let two = of("launch --world_size=16", vec![host("a"), host("b")]);
    assert!(two.contains(" plan --world-size=16 --ranks-per-node=8 "), "{two}");
    let one = of("launch --world_size=8", Vec::new());
    assert!(one.contains(" plan --world-size=8 --model-repository="), "{one}");
}

#[test]
fn the_precision_of_weights_is_passed_to_every_rank_and_to_the_memory_plan() {
    let command = plan_of("--world_size=2 --weight_only_precision=int8").unwrap();
    assert_eq!(command.matches("--weight-only-precision=int8").count(), 2, "{command}");
    assert!(!plan_of("--world_size=2").unwrap().contains("precision"));
    let words = ["launch", "--weight-only-precision=int4"].map(OsString::from);
    let flags = Flags::parse_from_line(words).unwrap().world;
    let command = memory_command(&flags, &Site::default()).to_string();
    assert!(command.contains("--weight-only-precision=int4"), "{command}");
    let fp8 = plan_of("--quantization=fp8").unwrap();
    assert!(fp8.contains("--weight-only-precision=fp8"), "{fp8}");
    // TensorRT-LLM's two names.
    let usual = plan_of("--use_weight_only").unwrap();
    assert!(usual.contains("--weight-only-precision=int8"), "{usual}");
    let four = plan_of("--use_weight_only --weight_only_precision=int4").unwrap();
    assert!(four.contains("--weight-only-precision=int4") && !four.contains("int8"), "{four}");
    assert!(plan_of("--weight_only_precision=int2").is_err());
    let cache = plan_of("--world_size=2 --kv-cache-dtype=fp8_e4m3").unwrap();
    assert_eq!(cache.matches("--kv-cache-dtype=fp8 ").count(), 2, "{cache}");
    assert!(plan_of("--kv_cache_dtype=fp8_e5m2").is_err());
    let host = plan_of("--world_size=2 --kv-cache-host-memory=2GiB").unwrap();
    assert_eq!(host.matches("--kv-cache-host-memory=2147483648 ").count(), 2, "{host}");
    assert!(plan_of("--kv-cache-host-memory=2XiB").is_err());
    let disk = plan_of("--world_size=2 --kv-cache-disk=2GiB --kv-cache-disk-dir=/scratch").unwrap();
    assert_eq!(disk.matches("--kv-cache-disk=2147483648 --kv-cache-disk-dir=/scratch ").count(), 2, "{disk}");
    assert!(plan_of("--kv-cache-disk=2GiB").is_err(), "no directory");
}

#[test]
fn more_ranks_than_cores_oversubscribe() {
    let turns = "mpirun --allow-run-as-root --bind-to none --oversubscribe --mca mpi_yield_when_idle 1 -n 1 ";
    assert!(plan_of("--world_size=5").unwrap().starts_with(turns));
    assert!(plan_of("--world_size=2 --oversubscribe").unwrap().starts_with(turns));
    assert!(!plan_of("--world_size=4").unwrap().contains("oversubscribe"));
}

#[test]
fn in_a_slurm_allocation_srun_starts_one_step_whose_tasks_get_their_ranks() {
    let step = "srun --mpi=pmix --job-name=trireme-8000 --nodes=1 --ntasks=3 --kill-on-bad-exit=1 --cpu-bind=none \
         --unbuffered sh -c 'rank=${SLURM_PROCID#0}; exec \"$0\" rank \
         --backend-config=python,shm-region-prefix-name=prefix${SLURM_PROCID}_ \
         --log-file=logs/world${rank:+.rank$rank}.txt \"$@\"' /opt/trireme --model-repository=/models \
         --grpc-port=8001 --http-port=8000 --metrics-port=8002 --device=auto --id=me";
    let line = "--world_size=3 --model_repo=/models --log-file=logs/world.txt";
    for backend in ["", "--backend=srun"] {
        assert_eq!(plan_in(job_7("pmix"), &format!("{line} {backend} -- --id=me")).unwrap(), step);
    }
    let turns = plan_in(job_7("pmix"), "--world_size=5").unwrap();
    assert!(turns.contains("--overcommit --export=ALL,OMPI_MCA_mpi_yield_when_idle=1 sh"), "{turns}");
}

#[test]
fn the_backend_is_detected_and_one_that_cannot_work_is_refused() {
    let starts_with = |allocation, line, start: &str| {
        let command = plan_in(allocation, line).unwrap();
        assert!(command.starts_with(start), "{line}: {command}");
    };
    starts_with(None, "--world_size=2", "mpirun ");
    starts_with(job_7("pmi2"), "--world_size=2", "mpirun ");
    starts_with(job_7("pmix"), "--world_size=2 --backend=mpirun", "mpirun ");
    starts_with(job_7("pmix"), "", "/opt/trireme ");
    starts_with(None, "--backend=mpirun", "mpirun ");

    let refusal = |allocation, line| plan_in(allocation, line).unwrap_err().to_string();
    assert!(refusal(None, "--backend=srun").contains("needs a Slurm allocation"));
    assert!(refusal(job_7("pmi2"), "--backend=srun").contains("by pmi2, and Open MPI needs pmix"));
    assert!(refusal(None, "--backend=local --world_size=2").contains("--backend=local starts one rank"));
    let two_nodes = || job_7("pmix").map(|job| Allocation { nodes: vec!["n1".into(), "n2".into()], ..job });
    let spans =
        "srun --mpi=pmix --job-name=trireme-8000 --nodes=2 --ntasks=4 --ntasks-per-node=2 --distribution=block ";
    starts_with(two_nodes(), "--world_size=4", spans);
    let placement = whole_plan_in(two_nodes(), "--world_size=4").unwrap().placement.unwrap();
    assert_eq!(placement, "placement: n1: ranks 0-1; n2: ranks 2-3");
    let named = "srun --mpi=pmix --job-name=trireme-8000 --nodes=1 --ntasks=2 --ntasks-per-node=2 \
         --distribution=block --nodelist=n2 ";
    starts_with(two_nodes(), "--world_size=2 --hosts=n2", named);
}

#[test]
fn flags_that_contradict_each_other_are_refused_with_the_reason() {
    assert!(plan_of("--http_port=8001").unwrap_err().to_string().contains("port 8001 is given twice"));
    assert!(plan_of("--no_mpi --world_size=2").unwrap_err().to_string().contains("--no-mpi starts one rank"));
    assert!(plan_of("--world_size=2 --tensorrt_llm_model_name=a,,b").unwrap_err().to_string().contains("empty name"));
}

#[test]
fn a_world_that_sleeps_has_a_relay_and_the_servers_name_is_no_short_form() {
    let relay = |line: &str| whole_plan_in(None, line).unwrap().relay.map(|command| command.to_string());
    assert_eq!(relay("--world_size=1"), None);
    let asleep = relay("--idle_exit=60").unwrap();
    assert!(asleep.starts_with("/opt/trireme relay --relay-idle=60 --relay-wait=120 "), "{asleep}");
    let waits = relay("--idle-exit=60 --keep-connections=600").unwrap();
    assert!(waits.contains("--relay-idle=60 --relay-wait=600 "), "{waits}");
    assert!(!relay("--keep-connections").unwrap().contains("--relay-idle"));
    let elsewhere = plan_of("--idle-exit=60 --hosts=a:1").unwrap_err().to_string();
    assert!(elsewhere.starts_with("--idle-exit needs rank 0 on this machine"), "{elsewhere}");
    assert!(plan_of("--idle-exit=0").is_err());

    let named = whole_plan_in(None, "--id=me").unwrap();
    assert!(named.relay.is_none() && named.command.to_string().contains(" --id=me"), "{}", named.command);
}

#[test]
fn only_open_mpi_up_to_4_keeps_a_world_of_replicas_when_a_rank_dies() {
    let words = ["launch", "--world_size=2"].map(OsString::from);
    let flags = Flags::parse_from_line(words).unwrap().world;
    let plan_of = |kind: MpiKind, keeps_world: bool| {
        let mpirun = Mpirun { program: "mpirun".into(), kind };
        plan(&flags, &Site { num_cores: 4, mpirun, keeps_world, ..Site::default() }).unwrap()
    };
    for (kind, is_kept) in [(MpiKind::OpenMpi, true), (MpiKind::OpenMpi5, false), (MpiKind::Mpich, false)] {
        let plan = plan_of(kind, true);
        assert_eq!(plan.keeps_world, is_kept, "{kind:?}");
        assert_eq!(plan.command.to_string().contains("--enable-recovery"), is_kept, "{}", plan.command);
        assert!(!plan_of(kind, false).command.to_string().contains("--enable-recovery"));
    }
}
