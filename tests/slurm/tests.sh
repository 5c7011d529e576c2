# What users of Slurm are promised, as functions that return 0 when the promise holds. Sourced by scripts/test_slurm,
# run with a cluster of two nodes up, in a scratch directory that looks like a checkout.

readonly story='Once upon a time'

# submit ARGUMENT...: sbatch with options for this small cluster; sets $job.
submit() { job=$(sbatch --parsable --ntasks-per-node=2 --gpus-per-node=2 "$@") && [[ $job =~ ^[0-9]+$ ]]; }

state_of() { squeue --noheader --states=all --jobs="$1" --format=%T 2>/dev/null; }
node_of() { squeue --noheader --jobs="$1" --format=%N; }
has_state() { [[ $(state_of "$1") == "$2" ]]; }
# A job array has a state per element.
is_over() { ! state_of "$1" | grep --quiet --invert-match --extended-regexp '^(CANCELLED|COMPLETED|FAILED|TIMEOUT|NODE_FAIL)$'; }

# Runs a command where the names of nodes are known, as they are on a login node.
on_login() {
    unshare --mount bash -c 'mount --bind "$0/hosts" /etc/hosts && exec "$@"' "$cluster" "$@"
}

is_ready() { curl --silent --fail --max-time 2 "http://10.77.0.1$1:8000/v2/health/ready"; }

await_ready() {
    await 10 "job $job runs" has_state "$job" RUNNING || return 1
    at=$(node_of "$job") at=${at#n}
    await 40 "job $job is ready" is_ready "$at"
}

# ask MAX_TOKENS: an answer of the model of job $job.
ask() { "$TRIREME" client --quiet --url "10.77.0.1$at:8001" --max-tokens "$1" "$story"; }

processes_of_node() {
    local pid
    for pid in $(ip netns pids "trn$1-$$"); do
        tr '\0' ' ' <"/proc/$pid/cmdline" && echo
    done 2>/dev/null | grep --extended-regexp '^([^ ]*/)?(trireme|launch|srun|mpirun|orted)[ :-]' || true
}

# process_of_node N TITLE: the pid of the process whose title begins so.
process_of_node() {
    local pid
    for pid in $(ip netns pids "trn$1-$$"); do
        if [[ $(tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null) == "$2"* ]]; then echo "$pid"; fi
    done
}

shared_memory() { ls /dev/shm | grep --extended-regexp "^(prefix$1|vader_segment\.n[12]\.)" || true; }
nothing_runs() { [[ -z $(processes_of_node "$1") ]]; }

# No process and no shared memory of job $1 on node $2.
leaves_nothing() {
    await 15 "the processes of job $1 are gone" nothing_runs "$2" || { processes_of_node "$2"; return 1; }
    [[ -z $(shared_memory "$1") ]] || { echo "left in /dev/shm:"; shared_memory "$1"; return 1; }
}

# Both halves of the world ended well: no rank was killed, and the job says so.
ended_well() {
    scontrol show job "$job" | grep -q 'ExitCode=0:0' || { scontrol show job "$job"; return 1; }
}

a_job_of_two_ranks_answers_and_scancel_leaves_nothing() {
    submit slurm/trireme.sub "$repository" --device=cpu || return 1
    await_ready || return 1
    local answer
    answer=$(ask 16) && [[ -n $answer ]] || return 1
    [[ $(ls "logs/${job}_0.out" "logs/${job}_1.out" | wc -l) == 2 ]] || return 1
    scancel "$job"
    await 30 'the job ends' is_over "$job" || return 1
    grep -q 'Signal (15) received' "logs/${job}_0.out" || return 1
    leaves_nothing "$job" "$at"
}

a_stream_in_flight_ends_well_when_every_process_of_the_job_gets_sigterm() {
    submit slurm/trireme.sub "$repository" --device=cpu || return 1
    await_ready || return 1
    # Held while it is signalled, or the answer would be there before.
    local worker asking
    worker=$(process_of_node "$at" 'trireme: worker 1 ') && kill -STOP "$worker" || return 1
    ask 200 >answer.txt &
    asking=$!
    sleep 0.5
    scancel --signal=TERM "$job"
    await 5 'the signal arrives' grep -q 'Signal (15) received' "logs/${job}_0.out" "logs/${job}_1.out"
    kill -CONT "$worker"
    wait "$asking" || { echo 'the stream was cut off'; return 1; }
    [[ $(wc --chars <answer.txt) -gt 200 ]] || return 1
    await 30 'the job ends' is_over "$job" || return 1
    ended_well || return 1
    leaves_nothing "$job" "$at"
}

launch_serves_in_a_job_and_ends_it_from_the_login_node() {
    "$LAUNCH" sbatch --world_size=2 --model_repo="$repository" --device=cpu --log_file=logs/world.txt >serve.sbatch || return 1
    submit --gpus-per-node=0 serve.sbatch || return 1
    await_ready || return 1
    # By srun, found out and not said.
    squeue --noheader --steps --jobs="$job" --format=%j | grep -qx 'trireme-8000' || return 1
    [[ -n $(ask 16) && -s logs/world.txt && -e logs/world.rank1.txt ]] || return 1
    says_ready() { on_login "$LAUNCH" status --job="$job" | grep -q "job $job: RUNNING on .* ready on http 8000"; }
    says_ready || return 1
    "$LAUNCH" stop --job="$job" || return 1
    ended_well || return 1
    grep -q 'Signal (15) received' logs/world.txt || return 1
    leaves_nothing "$job" "$at"
}

launch_starts_a_world_again_that_lost_a_rank() {
    "$LAUNCH" sbatch --world_size=2 --model_repo="$repository" --device=cpu >serve.sbatch || return 1
    submit --gpus-per-node=0 serve.sbatch || return 1
    await_ready || return 1
    await 5 'the launcher has seen it serve' grep -q 'launch: serving' "trireme_$job.out" || return 1
    local rank_0
    rank_0=$(process_of_node "$at" 'trireme: rank 0') && kill -KILL "$rank_0" || return 1
    await 20 'the launcher starts it again' grep -q 'starts it again' "trireme_$job.out" || return 1
    serves_again() { [[ $(grep -c 'launch: serving' "trireme_$job.out") == 2 ]]; }
    await 30 'it serves again' serves_again || { cat "trireme_$job.out"; return 1; }
    [[ -n $(ask 16) ]] || return 1
    "$LAUNCH" stop --job="$job" || return 1
    leaves_nothing "$job" "$at"
}

a_job_near_its_time_limit_drains_and_goes_back_to_the_queue() {
    submit --time=1 --signal=B:USR1@20 slurm/trireme.sub "$repository" --device=cpu || return 1
    await_ready || return 1
    requeued() { scontrol show job "$job" | grep -q 'Restarts=1'; }
    await 60 'the job is requeued' requeued || { scontrol show job "$job"; return 1; }
    grep -q 'Signal (15) received' "logs/${job}_0.out" || return 1
    leaves_nothing "$job" "$at" || return 1
    scancel "$job"
}

a_world_over_two_nodes_says_what_one_node_says_and_leaves_nothing() {
    local alone
    submit slurm/trireme.sub "$repository" --device=cpu || return 1
    await_ready || return 1
    alone=$(ask 48) && [[ -n $alone ]] || return 1
    scancel "$job"
    await 30 'the job ends' is_over "$job" || return 1

    # Rank 0 is on the first node.
    submit --nodes=2 --ntasks-per-node=1 --gpus-per-node=1 slurm/trireme.sub "$repository" --device=cpu || return 1
    await 10 "job $job runs" has_state "$job" RUNNING || return 1
    at=1
    await 40 "job $job is ready" is_ready "$at" || return 1
    [[ -n $(process_of_node 1 'trireme: worker 0 ') && -n $(process_of_node 2 'trireme: worker 1 ') ]] || return 1
    [[ $(ask 48) == "$alone" ]] || return 1
    scancel "$job"
    await 30 'the job ends' is_over "$job" || return 1
    leaves_nothing "$job" 1 && leaves_nothing "$job" 2
}

launch_serves_over_two_nodes_and_ends_from_the_login_node() {
    "$LAUNCH" sbatch --nodes=2 --world_size=2 --gpus-per-node=0 --model_repo="$repository" --device=cpu >serve.sbatch || return 1
    job=$(sbatch --parsable serve.sbatch) || return 1
    await 10 "job $job runs" has_state "$job" RUNNING || return 1
    at=1
    await 40 "job $job is ready" is_ready "$at" || return 1
    grep -q 'launch: placement: n1: rank 0; n2: rank 1' "trireme_$job.out" || { cat "trireme_$job.out"; return 1; }
    [[ -n $(process_of_node 1 'trireme: worker 0 ') && -n $(process_of_node 2 'trireme: worker 1 ') ]] || return 1
    [[ -n $(ask 16) ]] || return 1
    "$LAUNCH" stop --job="$job" || return 1
    ended_well || return 1
    leaves_nothing "$job" 1 && leaves_nothing "$job" 2
}

launch_starts_ranks_of_mpich_by_slurms_pmi() {
    if ! command -v mpirun.mpich >/dev/null; then
        echo 'skipped: no mpirun.mpich'
        return 77
    fi
    "$LAUNCH" sbatch --nodes=2 --world_size=2 --gpus-per-node=0 --mpirun=mpirun.mpich --model_repo="$repository" --device=cpu >serve.sbatch || return 1
    job=$(sbatch --parsable serve.sbatch) || return 1
    await 10 "job $job runs" has_state "$job" RUNNING || return 1
    at=1
    await 40 "job $job is ready" is_ready "$at" || { cat "trireme_$job.out"; return 1; }
    [[ -n $(process_of_node 2 'trireme: worker 1 ') && -n $(ask 16) ]] || return 1
    "$LAUNCH" stop --job="$job" || return 1
    leaves_nothing "$job" 1 && leaves_nothing "$job" 2
}

a_world_outlives_a_killed_slurmd_and_ends_with_a_reason_when_a_node_dies() {
    submit --nodes=2 --ntasks-per-node=1 --gpus-per-node=1 slurm/trireme.sub "$repository" --device=cpu --heartbeat-timeout=6 || return 1
    await 10 "job $job runs" has_state "$job" RUNNING || return 1
    at=1
    await 40 "job $job is ready" is_ready "$at" || return 1
    local before daemon
    before=$(ask 24) && [[ -n $before ]] || return 1
    daemon=$(process_of_node 2 'slurmd -D') && kill -KILL $daemon || return 1
    [[ $(ask 24) == "$before" ]] || { echo 'it does not serve without the slurmd of a node'; return 1; }

    # The node with all that runs there.
    kill -KILL $(ip netns pids "trn2-$$") || return 1
    says_why() { grep -qE 'on node n2 has not answered|on node n2.*(exited|lost|killed|failed)|Node failure on n2' "logs/${job}_0.out" "trireme_$job.out"; }
    local ended=1
    await 60 'rank 0 ends' nothing_of_trireme 1 || ended=0
    start_slurmd 2
    await 30 'the job ends' is_over "$job" || { scancel "$job"; await 30 'the job is cancelled' is_over "$job"; }
    await 30 'both nodes are back' all_idle || return 1
    ((ended)) || return 1
    says_why || { cat "logs/${job}_0.out" "trireme_$job.out"; return 1; }
    leaves_nothing "$job" 1
}

nothing_of_trireme() { ! processes_of_node "$1" | grep -q trireme; }

replicas_of_a_job_array_share_a_node_and_answer() {
    local array http pid
    array=$(sbatch --parsable --array=0-1 --nodelist=n1 slurm/replicas.sub "$repository" --device=cpu) || return 1
    for http in 8000 8010; do
        await 40 "the replica on port $http is ready" curl --silent --fail --max-time 2 "http://10.77.0.11:$http/v2/health/ready" || return 1
    done
    grep -qx 'http=n1:8010 grpc=n1:8011 metrics=n1:8012' "logs/replicas/${array}_1" || return 1
    scancel "$array"
    await 30 'the array ends' is_over "$array" || return 1
    leaves_nothing "$array" 1 && [[ -z $(ls logs/replicas) ]]
}
