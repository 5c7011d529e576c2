# Tests on several hosts: functions that return 0 on success and 77 if skipped. scripts/test_multi_node sources this file and runs
# them with hosts n1, n2 and n3.

readonly story='Once upon a time'

# start ARGUMENT...: starts `launch` on host n1, with its output in world.log.
start() {
    : >world.log
    local words=("$LAUNCH" --model_repo="$repository" --device=cpu "$@")
    [[ " $* " == *' --network='* ]] || words+=(--network="$network")
    # $launch is the pid of the launcher itself, so that it can be signalled.
    XDG_RUNTIME_DIR=$place/run OMPI_MCA_plm_rsh_agent=$place/remote "$place/remote" n1 "exec ${words[*]@Q}" >world.log 2>&1 &
    launch=$!
    disown "$launch"
}

ready_times() { grep -c 'launch: serving' world.log || true; }
has_served() { [[ $(ready_times) -ge $1 ]]; }

# serve ARGUMENT...: starts `launch` and waits until the world serves.
serve() {
    start "$@"
    await 60 'the world serves' has_served 1 || { cat world.log; return 1; }
}

# generate TOKENS: prints greedy text.
generate() { timeout 60 "$TRIREME" client --quiet --url 10.78.0.11:8001 --max-tokens "$1" "$story"; }

pids() { for ((host = 1; host <= num_hosts; host++)); do ip netns pids "tmn$host-$$"; done; }
nothing_runs() { [[ -z $(pids) ]]; }
# Without that of libfaketime.
shared_memory() { ls "$place"/shm-n* | grep --invert-match --extended-regexp '^$|:$|faketime' || true; }

# Stops the world; fails if it leaves a process or shared memory on any host.
stop() {
    kill -TERM "$launch"
    await 30 'the launcher ends' eval '! kill -0 "$launch" 2>/dev/null' || return 1
    await 15 'all processes are gone' nothing_runs || { pids | xargs --no-run-if-empty ps -o pid,args; return 1; }
    [[ -z $(shared_memory) ]] || { echo 'left in /dev/shm:'; shared_memory; return 1; }
}

workers_on() {
    local pid
    for pid in $(ip netns pids "tmn$1-$$"); do tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null && echo; done | grep -c '^trireme: worker' || true
}

two_hosts_return_the_text_of_one() {
    local alone
    serve --world_size=1 || return 1
    alone=$(generate 48) && [[ -n $alone ]] || return 1
    stop || return 1
    serve --world_size=2 --hosts=n1:1,n2:1 || return 1
    grep -q 'placement: n1: rank 0; n2: rank 1' world.log || { cat world.log; return 1; }
    [[ $(workers_on 1) == 1 && $(workers_on 2) == 1 ]] || return 1
    [[ $(generate 48) == "$alone" ]] || { generate 48; return 1; }
    stop || return 1
    # More ranks than cores on the first host, and hosts from a file.
    printf 'n1 slots=3\nn2 slots=1 # the small one\n' >hosts
    serve --world_size=4 --hostfile=hosts || return 1
    [[ $(workers_on 1) == 3 && $(generate 48) == "$alone" ]] || return 1
    stop
}

# round_trip_ms: prints the round-trip time of one byte over TCP between the hosts, in milliseconds.
round_trip_ms() {
    : >round_trip.log
    on 2 python3 "$top/tests/multi_node/round_trip.py" serve 10.78.0.12 >round_trip.log 2>&1 &
    local serving=$!
    await 10 'it listens' grep -q listening round_trip.log || return 1
    on 1 python3 "$top/tests/multi_node/round_trip.py" ask 10.78.0.12
    wait "$serving"
}

twenty_ms_between_hosts_change_no_token() {
    local near far begun
    serve --world_size=2 --hosts=n1,n2 || return 1
    near=$(generate 24) || return 1
    slow_link 2 20 || return 1
    local measured
    measured=$(round_trip_ms) || return 1
    echo "20 ms of delay each way: $measured ms for a round trip"
    ((measured >= 40)) || return 1
    begun=$SECONDS
    far=$(generate 24)
    echo "24 tokens in $((SECONDS - begun)) s"
    [[ $near == "$far" ]] || { echo "$far"; return 1; }
    stop || return 1
    # Starts a world with pipeline stages over the slow link.
    with_parameters pp=2 || return 1
    serve --world_size=2 --hosts=n1,n2 || return 1
    begun=$SECONDS
    far=$(generate 24)
    echo "24 tokens in two stages in $((SECONDS - begun)) s"
    [[ $near == "$far" ]] || { echo "$far"; return 1; }
    fast_link 2
    stop
}

# with_parameters KEY=VALUE...: sets these parameters of the language model, and removes those of earlier tests.
with_parameters() {
    local word file=$repository/tensorrt_llm/config.pbtxt
    cp "$top/model_repository/tensorrt_llm/config.pbtxt" "$file"
    for word; do
        echo "parameters { key: \"${word%%=*}\" value: { string_value: \"${word#*=}\" } }" >>"$file"
    done
}

stages_and_replicas_on_two_hosts_return_the_text_of_one_rank() {
    local alone i
    serve --world_size=1 || return 1
    alone=$(generate 48) && [[ -n $alone ]] || return 1
    stop || return 1
    with_parameters pp=2
    serve --world_size=2 --hosts=n1,n2 || return 1
    grep -q 'placement: stage 2 of 2: workers 1 on `n2`' world.log || { cat world.log; return 1; }
    [[ $(generate 48) == "$alone" ]] || { generate 48; return 1; }
    # More requests than stages, so that micro-batches are in flight.
    local client=()
    for i in 1 2 3 4; do
        generate 48 >"answer$i.txt" &
        client+=($!)
    done
    wait "${client[@]}"
    for i in 1 2 3 4; do [[ $(cat "answer$i.txt") == "$alone" ]] || { cat "answer$i.txt"; return 1; }; done
    stop || return 1
    with_parameters tp=2 pp=2
    serve --world_size=4 --hosts=n1:2,n2:2 || return 1
    [[ $(workers_on 1) == 2 && $(generate 48) == "$alone" ]] || return 1
    stop || return 1
    with_parameters tp=1
    serve --world_size=2 --hosts=n1,n2 || return 1
    grep -q 'placement: replica 2 of 2, stage 1 of 1: workers 1 on `n2`' world.log || { cat world.log; return 1; }
    for i in 1 2 3 4; do [[ $(generate 48) == "$alone" ]] || return 1; done
    curl --silent --fail "http://10.78.0.11:8002/metrics" >metrics.txt || return 1
    for i in 0 1; do
        grep "trireme_llm_output_tokens_total{.*replica=\"$i\"" metrics.txt | grep -qv ' 0$' || { cat metrics.txt; return 1; }
    done
    stop
}

an_mpich_world_on_two_hosts_returns_the_text_of_one_rank() {
    if ! command -v mpirun.mpich >/dev/null; then
        echo 'skipped: no mpirun.mpich'
        return 77
    fi
    local alone
    serve --world_size=1 || return 1
    alone=$(generate 48) && [[ -n $alone ]] || return 1
    stop || return 1
    HYDRA_LAUNCHER_EXEC=$place/remote serve --mpirun=mpirun.mpich --network=eth0 --world_size=2 --hosts=n1,n2 || return 1
    [[ $(workers_on 1) == 1 && $(workers_on 2) == 1 && $(generate 48) == "$alone" ]] || return 1
    stop
}

a_link_cut_mid_stream_gives_one_error_and_the_world_starts_again() {
    serve --world_size=2 --hosts=n1,n2 -- --heartbeat-timeout=3 || return 1
    generate 1000 >answer.txt 2>error.txt &
    local client=$! begun=$SECONDS
    await 10 'the stream begins' test -s answer.txt || return 1
    ip link set "tmv2-$$" down
    ! wait "$client" || { echo 'the stream went on without its link'; return 1; }
    ((SECONDS - begun < 20)) || { echo "the error took $((SECONDS - begun)) s"; return 1; }
    [[ $(wc --lines <error.txt) == 1 ]] || { cat error.txt; return 1; }
    await 20 'the reason is in the log' grep -q 'on node n2 has not answered' world.log || { cat world.log; return 1; }
    ip link set "tmv2-$$" up
    await 60 'it serves again' has_served 2 || { cat world.log; return 1; }
    [[ -n $(generate 16) ]] || return 1
    stop
}

# tell [TOKENS]: prints the text of a stream over HTTP.
tell() {
    local body="{\"model\": \"ensemble\", \"prompt\": \"$story\", \"max_tokens\": ${1:-200}, \"temperature\": 0, \"stream\": true}"
    curl --silent --show-error --fail --max-time 60 --no-buffer http://10.78.0.11:8000/v1/completions --json "$body" >stream.txt || return 1
    grep --quiet 'data: \[DONE\]' stream.txt || return 1
    python3 -c 'import json, sys
print(*(json.loads(line[6:])["choices"][0]["text"] for line in sys.stdin if line.startswith("data: {")), sep="")' <stream.txt
}

# tell_again EXPECTED: requests one stream after the other until the file `enough` exists. Writes a line for each to answers.txt: `ok` if
# the text is EXPECTED, and the milliseconds that it took.
tell_again() {
    local begun text how
    : >answers.txt
    while [[ ! -e enough ]]; do
        begun=$(date +%s%N)
        text=$(tell 2>>ask_errors.txt) && how=ok || how=failed
        [[ $how == failed || $text == "$1" ]] || how=differs
        echo "$how $((($(date +%s%N) - begun) / 1000000))" >>answers.txt
    done
}

# logged TEXT: succeeds if the log has it.
logged() { grep -qF -e "$1" world.log; }
places() { [[ $(workers_on 1) == "$1" && $(workers_on 2) == "$2" ]]; }
lost_hosts() { XDG_RUNTIME_DIR=$place/run "$LAUNCH" status --json | tr -d '\n ' | sed -n 's/.*"hosts_lost":\[\([^]]*\)\].*/\1/p'; }

a_world_that_loses_a_host_goes_on_without_it_and_back_when_it_returns() {
    local alone begun asking slowest
    rm -f enough ask_errors.txt
    serve --world_size=2 --hosts=n1,n2 --elastic=1 --elastic_return=2 --elastic_wait=2 --exit_timeout=1 --keep-connections -- --heartbeat-timeout=3 || return 1
    alone=$(tell) && [[ -n $alone ]] || return 1
    tell_again "$alone" &
    asking=$!
    disown "$asking"
    sleep 0.5
    begun=$SECONDS
    cut_cable 2
    await 30 'it goes on with one host' has_served 2 || { cat world.log; return 1; }
    echo "served with one host $((SECONDS - begun)) s after the cable was cut"
    logged 'goes on with 1 of 2 ranks: lost: `n2`' && [[ $(lost_hosts) == '"n2"' && $(workers_on 1) == 1 ]] || { cat world.log; return 1; }
    restore_link 2
    begun=$SECONDS
    await 30 'it goes back' has_served 3 || { cat world.log; return 1; }
    echo "served with both $((SECONDS - begun)) s after the cable was back"
    logged 'goes on with 2 of 2 ranks: all hosts answer' && [[ -z $(lost_hosts) ]] && places 1 1 || { cat world.log; return 1; }
    sleep 0.5
    touch enough
    await 30 'the last answer' eval '! kill -0 "$asking" 2>/dev/null' || return 1
    # Clients saw pauses, and no error.
    ! grep -qv ^ok answers.txt || { cat answers.txt ask_errors.txt world.log; return 1; }
    slowest=$(sort -n -k 2 answers.txt | tail -1 | cut -d ' ' -f 2)
    echo "$(wc -l <answers.txt) requests, the slowest took $slowest ms"
    ((slowest > 3000 && slowest < 45000)) || { cat world.log; return 1; }
    stop
}

packets_lost_without_a_word_and_a_full_disk_are_losses_too() {
    local begun
    serve --world_size=2 --hosts=n1,n2 --elastic=1 --elastic_return=1 -- --heartbeat-timeout=3 || return 1
    lose_packets_to 2
    begun=$SECONDS
    await 30 'the loss is noticed' logged 'rank 1 on node n2 has not answered' || { cat world.log; return 1; }
    await 30 'it goes on with one host' has_served 2 || { cat world.log; return 1; }
    echo "served with one host $((SECONDS - begun)) s after packets to the other were lost"
    logged 'goes on with 1 of 2 ranks: lost: `n2`' && [[ -n $(generate 16) ]] || { cat world.log; return 1; }
    # Ranks could not start there now.
    mount -o remount,size=64k "$place/shm-n2"
    restore_link 2
    await 20 'the reason is logged' logged 'host `n2` is lost: it answers, but cannot take ranks' || { cat world.log; return 1; }
    mount -o remount,size=50% "$place/shm-n2"
    await 30 'it goes back' has_served 3 || { cat world.log; return 1; }
    places 1 1 && [[ -n $(generate 16) ]] || { cat world.log; return 1; }
    stop
}

# streams COUNT TOKENS: runs streams at the same time. Writes their longest pauses in milliseconds and their texts to streams.txt.
streams() { python3 "$top/tests/multi_node/streams.py" http://10.78.0.11:8000/v1/completions "$1" "$2" >streams.txt 2>&1; }

# begin_streams TOKENS: runs one stream, and then begins four. end_streams: waits for them; they have the text of the one.
begin_streams() {
    streams 1 "$1" && alone=$(sed -n 's/^[0-9]* //p' streams.txt) && [[ -n $alone ]] || { cat streams.txt; return 1; }
    rm streams.txt
    streams 4 "$1" &
    running=$!
    disown "$running"
    await 30 'the streams have tokens' grep -qs begun streams.txt || { cat streams.txt; return 1; }
}

end_streams() {
    await 120 'the streams end' eval '! kill -0 "$running" 2>/dev/null' || { cat streams.txt world.log; return 1; }
    [[ $(sed -n 's/^[0-9]* //p' streams.txt) == "$(printf '%s\n' "$alone" "$alone" "$alone" "$alone")" ]] || { cat streams.txt world.log; return 1; }
    echo "longest pauses of the streams in ms: $(sed -n 's/^\([0-9]*\) .*/\1/p' streams.txt | sort -n | tr '\n' ' ')"
}

replicas_on_other_hosts_go_on_while_one_is_lost_and_take_its_streams() {
    local alone running begun
    with_parameters tp=1
    serve --world_size=2 --hosts=n1,n2 --elastic=1 --elastic_return=2 --elastic_wait=2 --exit_timeout=5 -- --heartbeat-timeout=3 || return 1
    begin_streams 800 || return 1
    lose_packets 2
    begun=$SECONDS
    await 30 'it goes on without the host' logged 'goes on with 1 of 2 ranks: lost: `n2` (rank 1 is lost)' || { cat world.log; return 1; }
    echo "went on without the host $((SECONDS - begun)) s after its packets were lost"
    end_streams || return 1
    [[ $(lost_hosts) == '"n2"' && $(ready_times) == 1 && -n $(generate 16) ]] || { cat world.log; return 1; }
    curl --silent --fail http://10.78.0.11:8000/v2/health/ready && curl --silent http://10.78.0.11:8002/metrics >metrics.txt || return 1
    grep -q '^trireme_llm_replica_lost{.*replica="1"} 1' metrics.txt || { cat metrics.txt; return 1; }
    restore_link 2
    begun=$SECONDS
    await 30 'it goes back' has_served 2 || { cat world.log; return 1; }
    echo "served with both $((SECONDS - begun)) s after the host was back"
    logged 'goes on with 2 of 2 ranks: all hosts answer' && [[ -z $(lost_hosts) ]] && places 1 1 || { cat world.log; return 1; }
    # Nothing is left of a world that ends without a host.
    cut_cable 2
    await 30 'it goes on without the host again' eval '[[ $(lost_hosts) == "\"n2\"" ]]' || { cat world.log; return 1; }
    await 30 'the lost rank ends' places 1 0 || { cat world.log; return 1; }
    restore_link 2
    stop || { cat world.log; return 1; }
}

replicas_of_several_hosts_survive_one_loss_after_another() {
    local alone running
    # Replica 1 is on n1 and n2, replica 2 on n3.
    with_parameters tp=2
    serve --world_size=4 --hosts=n1:1,n2:1,n3:2 --elastic=2 --elastic_return=2 --elastic_wait=2 --exit_timeout=5 -- --heartbeat-timeout=3 --enable-sleep-mode || return 1
    begin_streams 200 || return 1
    lose_packets 2
    await 30 'it goes on without n2' logged 'goes on with 3 of 4 ranks: lost: `n2` (rank 1 is lost)' || { cat world.log; return 1; }
    end_streams || return 1
    # The replica that is left sleeps and wakes. There is no room for a second world.
    ask sleep && [[ $(ask is_sleeping) == *true* ]] && ask wake_up && [[ -n $(generate 16) ]] || { cat world.log; return 1; }
    XDG_RUNTIME_DIR=$place/run "$LAUNCH" restart --rolling >rolling.txt 2>&1 && { cat rolling.txt; return 1; }
    grep -q 'a rolling restart needs all hosts for the second world, and the world goes on without n2' rolling.txt || { cat rolling.txt; return 1; }
    # Without the other replica, too, no allowed world fits, until one of the hosts is back.
    lose_packets 3
    await 30 'it waits for a host' logged 'no world that --elastic allows fits the hosts that are left' || { cat world.log; return 1; }
    restore_link 2
    await 40 'it serves on n1 and n2' has_served 2 || { cat world.log; return 1; }
    [[ $(workers_on 2) == 1 && -n $(generate 16) ]] || { cat world.log; return 1; }
    restore_link 3
    await 40 'it goes back to all hosts' has_served 3 || { cat world.log; return 1; }
    [[ -z $(lost_hosts) && $(workers_on 3) == 2 && -n $(generate 16) ]] || { cat world.log; return 1; }
    stop || { cat world.log; return 1; }
}

# ask PATH: sends a POST, or a GET if the answer is only read; prints the answer.
ask() {
    local method=POST
    [[ $1 != is_* ]] || method=GET
    curl --silent --fail --max-time 20 -X "$method" "http://10.78.0.11:8000/$1"
}

# jump OFFSET: sets the clock of a world that runs with libfaketime.
jump() { echo "$1" >clock.new && mv clock.new clock; }

# hours_away: prints how far the clock of the server was away when it answered the last `tell`.
hours_away() {
    local created
    created=$(grep --max-count=1 --only-matching '"created":[0-9]*' stream.txt | head -1 | cut -d : -f 2)
    echo $(((created - $(date +%s)) / 3600))
}

a_clock_that_jumps_by_hours_disturbs_no_world_of_several_hosts() {
    local alone offset rank library
    library=$(compgen -G '/usr/lib/*/faketime/libfaketimeMT.so.1') || { echo 'skipped: no libfaketime'; return 77; }
    jump +0
    # Setting the clock does not change the monotonic one.
    LD_PRELOAD=$library FAKETIME_TIMESTAMP_FILE=$PWD/clock FAKETIME_CACHE_DURATION=0 FAKETIME_DONT_FAKE_MONOTONIC=1 DONT_FAKE_MONOTONIC=1 \
        serve --world_size=2 --hosts=n1,n2 --elastic=1 --elastic_return=2 --exit_timeout=1 --keep-connections -- --heartbeat-timeout=3 || return 1
    alone=$(tell 16) && [[ -n $alone && $(hours_away) == 0 ]] || return 1
    for offset in +7 -7; do
        # One stream while it jumps, and one after that.
        (sleep 0.2 && jump "${offset}h") &
        [[ $(tell 16) == "$alone" ]] && sleep 1.5 && [[ $(tell 16) == "$alone" ]] || { cat stream.txt world.log; return 1; }
        (($(hours_away) * ${offset/7/1} >= 6)) || { echo "the clock is $(hours_away) hours away"; return 1; }
        [[ $(ready_times) == 1 && -z $(lost_hosts) ]] && places 1 1 || { cat world.log; return 1; }
    done
    # What dies under such a clock is started again.
    rank=$(ip netns pids "tmn2-$$" | xargs ps -o pid=,args= | sed -n 's/^ *\([0-9]*\) trireme: rank 1.*/\1/p')
    kill -KILL "$rank" || return 1
    await 30 'it serves again' has_served 2 && [[ $(tell 16) == "$alone" ]] && places 1 1 || { cat world.log; return 1; }
    stop
}

what_elastic_cannot_do_is_refused_by_name() {
    refused '--elastic=2 lists the smaller worlds' --world_size=2 --hosts=n1,n2 --elastic=2 || return 1
    refused '--elastic needs rank 0 on this machine' --world_size=2 --hosts=n2,n1 --elastic=1 || return 1
    # Four workers share each layer, and cannot be fewer.
    with_parameters tp=4
    refused 'a world of 2 rank(s) could not serve these models, so leave 2 out; its plan:' --world_size=4 --hosts=n1:2,n2:2 --elastic=2
}

# refused MESSAGE ARGUMENT...: succeeds if the launcher ends with an error that contains MESSAGE.
refused() {
    local words=$1
    shift
    start "$@"
    await 60 'the launcher gives up' eval '! kill -0 "$launch" 2>/dev/null' || { cat world.log; return 1; }
    grep -qF -e "$words" world.log || { echo "expected: $words"; cat world.log; return 1; }
    await 15 'all processes are gone' nothing_runs
}

a_host_that_cannot_take_its_ranks_is_named_with_what_to_do() {
    refused 'host `n9` cannot be reached: could not resolve hostname n9; check its name' --world_size=2 --hosts=n1,n9 || return 1
    refused 'world_size is 4, but the hosts have room for 2' --world_size=4 --hosts=n1:1,n2:1 || return 1

    cp "$TRIREME" other_build && printf x >>other_build
    echo "$PWD/other_build $TRIREME" >"$place/instead-n2"
    refused 'host `n2` has another build of' --world_size=2 --hosts=n1,n2 || return 1
    mkdir -p empty
    echo "$PWD/empty $(dirname "$TRIREME")" >"$place/instead-n2"
    refused 'host `n2` has no ' --world_size=2 --hosts=n1,n2 || return 1
    echo "$PWD/empty $(dirname "$repository")" >"$place/instead-n2"
    refused 'host `n2` has no model repository at' --world_size=2 --hosts=n1,n2 || return 1
    rm "$place/instead-n2"

    on 1 env XDG_RUNTIME_DIR="$place/run" PATH="$place/no_ssh" "$LAUNCH" --model_repo="$repository" --world_size=2 --hosts=n1,n2 >world.log 2>&1 || true
    grep -q '`ssh` is not on this machine, and host `n2` is reached by it' world.log || { cat world.log; return 1; }
}

a_checkpoint_that_differs_between_hosts_is_named() {
    local file=tensorrt_llm/1/model.safetensors
    cp "$repository/$file" other_checkpoint
    printf '\1' | dd of=other_checkpoint bs=1 seek=$(($(stat --format=%s other_checkpoint) - 1)) conv=notrunc 2>/dev/null
    echo "$PWD/other_checkpoint $repository/$file" >"$place/instead-n2"
    refused 'differs between nodes `n2` and `n1`: `model.safetensors` has other bytes' --world_size=2 --hosts=n1,n2 || return 1
    # The same with replicas, which would generate different texts.
    with_parameters tp=1
    refused 'differs between nodes `n2` and `n1`: `model.safetensors` has other bytes' --world_size=2 --hosts=n1,n2 || return 1
    rm "$place/instead-n2"
}

a_build_that_differs_is_noticed_by_the_ranks_too() {
    cp "$TRIREME" other_build && printf x >>other_build
    echo "$PWD/other_build $TRIREME" >"$place/instead-n2"
    on 1 mpirun --allow-run-as-root --mca plm_rsh_agent "$place/remote" --mca oob_tcp_if_include "$network" --mca btl_tcp_if_include "$network" \
        --host n1:1,n2:1 -n 2 "$TRIREME" rank --model-repository="$repository" >world.log 2>&1
    rm "$place/instead-n2"
    grep -q 'rank 1 on node `n2` runs another build of this program than rank 0 on node `n1`' world.log || { cat world.log; return 1; }
}
