# A Slurm cluster on this machine, for tests: munged, slurmctld and a slurmd per node. Each node is a network namespace with its own
# host name. Sourced by scripts/test_slurm. All files are in $cluster, a scratch directory.

# Names of namespaces and links are global on this machine, so they contain this process's id; at most 15 characters.
readonly bridge=trb$$
# Shared memory is named by job id, and all tests on this machine share /dev/shm.
readonly first_job=$((100000 + RANDOM * 100))
nodes=()
daemons=()

# start_cluster N: starts N nodes with 8 CPUs and 8 GPUs each, which exist only in the configuration.
start_cluster() {
    local count=$1 i
    mkdir -p "$cluster"/{state,log}
    ip link add "$bridge" type bridge
    ip addr add 10.77.0.1/24 dev "$bridge"
    ip link set "$bridge" up
    for ((i = 1; i <= count; i++)); do add_node "$i"; done
    write_config
    export SLURM_CONF=$cluster/slurm.conf
    start_munged
    slurmctld -D -c -f "$SLURM_CONF" >"$cluster/log/slurmctld.out" 2>&1 &
    keep_daemon $!
    for i in "${nodes[@]}"; do start_slurmd "$i"; done
    await 20 "$count idle nodes" all_idle
}

# Disowned, so that bash does not report its end.
keep_daemon() {
    daemons+=("$1")
    disown "$1"
}

add_node() {
    local name=trn$1-$$
    ip netns add "$name"
    nodes+=("$1")
    ip link add "trv$1-$$" type veth peer name eth0 netns "$name"
    ip link set "trv$1-$$" master "$bridge" up
    ip -n "$name" addr add "10.77.0.1$1/24" dev eth0
    ip -n "$name" link set eth0 up
    ip -n "$name" link set lo up
    mkdir -p "$cluster/spool-n$1" "$cluster/tmp-n$1"
}

write_config() {
    local i
    # Each node has its own TmpFS, or their PMIx plugins would collide. config_overrides allows more CPUs than the machine has.
    cat >"$cluster/slurm.conf" <<CONF
ClusterName=trireme
SlurmctldHost=$(hostname -s)(10.77.0.1)
SlurmctldPort=16817
AuthType=auth/munge
AuthInfo=socket=$cluster/munge.sock
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$cluster/state
SlurmdSpoolDir=$cluster/spool-%n
SlurmctldPidFile=$cluster/slurmctld.pid
SlurmdPidFile=$cluster/slurmd-%n.pid
SlurmctldLogFile=$cluster/log/slurmctld.log
SlurmdLogFile=$cluster/log/slurmd-%n.log
TmpFS=$cluster/tmp-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
ReturnToService=2
MpiDefault=none
SlurmdParameters=config_overrides
KillWait=5
FirstJobId=$first_job
MinJobAge=300
GresTypes=gpu
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE OverTimeLimit=0 State=UP
CONF
    for i in "${nodes[@]}"; do
        echo "NodeName=n$i NodeHostname=n$i NodeAddr=10.77.0.1$i Port=17001 CPUs=8 Gres=gpu:8 State=UNKNOWN" >>"$cluster/slurm.conf"
    done
    {
        cat /etc/hosts
        for i in "${nodes[@]}"; do echo "10.77.0.1$i n$i"; done
    } >"$cluster/hosts"
    touch "$cluster"/gpu{0..7}
    echo "Name=gpu File=$cluster/gpu[0-7]" >"$cluster/gres.conf"
}

start_munged() {
    head -c 128 /dev/urandom >"$cluster/munge.key"
    chmod 600 "$cluster/munge.key"
    munged --force --foreground --key-file="$cluster/munge.key" --socket="$cluster/munge.sock" --pid-file="$cluster/munged.pid" \
        --log-file="$cluster/log/munged.log" --seed-file="$cluster/munge.seed" >"$cluster/log/munged.out" 2>&1 &
    keep_daemon $!
    await 5 'munged' test -S "$cluster/munge.sock"
}

# Does not use `ip netns exec`, which remounts /sys and so hides the cgroup mount that slurmd needs.
start_slurmd() {
    nsenter --net="/run/netns/trn$1-$$" unshare --uts bash -c \
        "hostname n$1; exec slurmd -D -N n$1 -f $cluster/slurm.conf" >"$cluster/log/slurmd-n$1.out" 2>&1 &
    keep_daemon $!
}

# on N COMMAND...: runs COMMAND on node N.
on() {
    local node=$1
    shift
    nsenter --net="/run/netns/trn$node-$$" -- "$@"
}

all_idle() { [[ $(sinfo --noheader --format='%T %D') == "idle ${#nodes[@]}" ]]; }

# Ends jobs and daemons in any state, and removes the network and shared memory. Can be called twice.
stop_cluster() {
    local i pid
    # All processes of a node belong to the cluster: slurmd, the steps, which outlive it, and their children.
    for i in "${nodes[@]}"; do
        for pid in $(ip netns pids "trn$i-$$" 2>/dev/null); do kill -KILL "$pid" 2>/dev/null || true; done
        ip netns del "trn$i-$$" 2>/dev/null || true
    done
    nodes=()
    # Killed, because their state is removed with $cluster.
    for pid in "${daemons[@]}"; do kill -KILL "$pid" 2>/dev/null || true; done
    daemons=()
    ip link del "$bridge" 2>/dev/null || true
    rm -f /dev/shm/prefix"${first_job%??}"??_* /dev/shm/vader_segment.n[12].*
}

