# Hosts for tests: network namespaces of this machine, each with its own host name and address, joined by a bridge. Sourced by
# scripts/test_multi_node. All files are in $place, a scratch directory.

readonly num_hosts=3
# Names of namespaces and links are global on this machine, so they contain this process's id; at most 15 characters.
readonly bridge=tmb$$
readonly network=10.78.0.0/24

# Creates hosts n1 to n3.
make_hosts() {
    local i
    # With an address of its own; otherwise it has that of a host, and changes it when that host loses its link.
    ip link add "$bridge" address 02:00:00:00:00:01 type bridge
    ip addr add 10.78.0.1/24 dev "$bridge"
    ip link set "$bridge" up
    for ((i = 1; i <= num_hosts; i++)); do
        ip netns add "tmn$i-$$"
        ip link add "tmv$i-$$" type veth peer name eth0 netns "tmn$i-$$"
        ip link set "tmv$i-$$" master "$bridge" up
        ip -n "tmn$i-$$" addr add "10.78.0.1$i/24" dev eth0
        ip -n "tmn$i-$$" link set eth0 up
        ip -n "tmn$i-$$" link set lo up
        mkdir "$place/shm-n$i"
        mount -t tmpfs "trireme-n$i" "$place/shm-n$i"
    done
    # A replacement for ssh. A host has the files of this machine, except its own /dev/shm and the replacements listed in
    # `instead-HOST`.
    cat >"$place/remote" <<AGENT
#!/bin/bash
while [[ \$1 == -* ]]; do [[ \$1 == -o ]] && shift; shift; done
host=\$1
shift
if [[ ! -e /run/netns/tm\$host-$$ ]]; then
    echo "could not resolve hostname \$host" >&2
    exit 255
fi
# Like ssh, it needs the network: an answer of the host, even if it is that nothing listens on the port.
answer=\$(timeout 3 bash -c ": </dev/tcp/10.78.0.1\${host#n}/22" 2>&1)
if [[ \$? == 124 || \$answer == *'No route'* || \$answer == *'timed out'* || \$answer == *unreachable* ]]; then
    echo "connect to host \$host port 22: Connection timed out" >&2
    exit 255
fi
exec nsenter --net=/run/netns/tm\$host-$$ unshare --uts --mount bash -c '
    hostname "\$0"
    unset FAKETIME_SHARED # It names a semaphore in the other /dev/shm.
    mount --bind "$place/shm-\$0" /dev/shm
    [[ ! -e $place/instead-\$0 ]] || while read -r other file; do mount --bind "\$other" "\$file"; done <$place/instead-\$0
    exec bash -c "\$1"' "\$host" "\$*"
AGENT
    chmod +x "$place/remote"
}

# on N COMMAND...: runs COMMAND on host N.
on() {
    local host=$1
    shift
    "$place/remote" "n$host" "exec $(printf '%q ' "$@")"
}

# slow_link N MILLISECONDS: delays everything that host N sends and receives from now on. Does the same as netem, which not every
# kernel has.
slow_link() {
    ip link add "tmx-$$" type veth peer name "tmy-$$"
    ip link set "tmx-$$" master "$bridge" up
    ip link set "tmy-$$" up
    ip link set "tmv$1-$$" nomaster
    : >"$place/slow_link.log"
    python3 "$top/tests/multi_node/slow_link.py" "$2" "tmy-$$" "tmv$1-$$" >"$place/slow_link.log" 2>&1 &
    echo $! >"$place/slow_link.pid"
    disown
    await 10 'the slow link is there' grep -q joined "$place/slow_link.log" || { cat "$place/slow_link.log"; return 1; }
}

# fast_link N: removes the delay, if there is one.
fast_link() {
    [[ -e $place/slow_link.pid ]] || return 0
    kill "$(<"$place/slow_link.pid")" 2>/dev/null || true
    rm "$place/slow_link.pid"
    ip link del "tmx-$$"
    ip link set "tmv$1-$$" master "$bridge"
}

# Kills all processes on the hosts and removes the hosts. Can be called twice.
remove_hosts() {
    local i
    for ((i = 1; i <= num_hosts; i++)); do
        kill_all_on "$i"
        ip netns del "tmn$i-$$" 2>/dev/null || true
        umount "$place/shm-n$i" 2>/dev/null || true
    done
    fast_link 2
    ip link del "$bridge" 2>/dev/null || true
}

# cut_cable N: host N has no link any more. lose_packets N: the link is there, and everything that host N sends and receives is lost
# without a word. lose_packets_to N: only what host n1 sends to it is lost, and what it sends arrives. restore_link N: ends all three.
cut_cable() { ip link set "tmv$1-$$" down; }
lose_packets() { ip link set "tmv$1-$$" nomaster; }
lose_packets_to() { ip -n "tmn1-$$" neigh replace "10.78.0.1$1" lladdr 02:00:00:00:00:fe dev eth0 nud permanent; }
restore_link() {
    ip -n "tmn1-$$" neigh del "10.78.0.1$1" dev eth0 2>/dev/null || true
    ip link set "tmv$1-$$" master "$bridge" up
}

kill_all_on() {
    local pid
    for pid in $(ip netns pids "tmn$1-$$" 2>/dev/null); do kill -KILL "$pid" 2>/dev/null || true; done
}

