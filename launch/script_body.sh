# shellcheck shell=bash disable=SC2154,SC2164 # the upper part sets the variables, and -e
# ---- from here on the same in every script; the source is launch/script_body.sh

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

# The checkout: $TC3_ROOT, or where this script lies (launch/scripts), or the folder it was submitted or started from.
find_root() {
    local folder
    for folder in "${TC3_ROOT:-}" "$(dirname "${BASH_SOURCE[0]}")/../.." "${SLURM_SUBMIT_DIR:-}" "$PWD"; do
        if [ -n "$folder" ] && [ -f "$folder/launch/train.py" ]; then
            (cd "$folder" && pwd)
            return
        fi
    done
    fail "no launch/train.py here: start the script from the checkout, or set TC3_ROOT to it"
}

# This node's number: the argument, $NODE_RANK, $SLURM_NODEID, or the place of its name or address in HOSTS.
find_node_rank() {
    local rank=${1:-${NODE_RANK:-${SLURM_NODEID:-}}} name names
    if [ -z "$rank" ] && [ "$NODES" -eq 1 ]; then
        rank=0
    elif [ -z "$rank" ]; then
        read -ra names <<<"$HOSTNAME ${HOSTNAME%%.*} $(hostname -f 2>/dev/null || true) $(hostname -I 2>/dev/null || true)"
        for rank in "${!HOSTS[@]}" ''; do
            for name in "${names[@]}"; do
                [ -n "$rank" ] && [ "${name,,}" = "${HOSTS[rank],,}" ] && break 2
            done
        done
    fi
    [ -n "$rank" ] || fail "$HOSTNAME is not in HOSTS; give this node's number, 0 to $((NODES - 1)): ${0##*/} NODE_RANK"
    if ! [[ $rank =~ ^[0-9]+$ ]] || ((10#$rank >= NODES)); then
        fail "node rank $rank: want a number from 0 to $((NODES - 1))"
    fi
    echo "$((10#$rank))"
}

# Workers would look for the scheduler on themselves: Debian's /etc/hosts gives a host's own name as 127.0.1.1.
check_master() {
    local address
    address=$(getent ahostsv4 "$MASTER_ADDR" 2>/dev/null | awk 'NR == 1 { print $1 }' || true)
    [ "$NODES" -eq 1 ] || [[ $address != 127.* ]] ||
        fail "$MASTER_ADDR is $address on this node: set MASTER_ADDR to an address that the other nodes reach"
}

# Fail, and leave nothing of this start in RUN_DIR.
refuse() {
    [ -z "$LOCKED" ] || rm -f "$LOCKED/.lock"
    [ -z "$MADE" ] || rmdir "$RUN_DIR" 2>/dev/null || true
    fail "$@"
}

# Lock a folder as tc3 does (tools/files/locks.py): two runs that write one folder spoil each other. The lock is held until
# this script and msrun have ended, also when they are killed.
lock() {
    local folder=$1 key=$2 file=$1/.lock code pid='' host=''
    while true; do
        mkdir -p "$folder" 2>/dev/null || refuse "$folder: this folder cannot be made"
        { exec {LOCK}>>"$file"; } 2>/dev/null || refuse "$folder: nothing can be written into this folder"
        code=0
        flock -n "$LOCK" || code=$?
        [ "$code" -eq 1 ] || [ ! "$file" -ef "/proc/$$/fd/$LOCK" ] || break
        exec {LOCK}>&-
        [ "$code" -eq 1 ] || continue # a start that failed has removed the file meanwhile
        read -r pid host <"$file" || true
        [ "$host" != "$(uname -n)" ] || host=
        pid=${pid:+pid $pid${host:+ on $host}}
        refuse "$folder: a run is in progress in this folder (${pid:-agents of tc3 agent}); choose another $key"
    done
    [ "$code" -eq 0 ] ||
        echo "note: $folder: this folder cannot be locked here (flock: exit code $code): start no second run in it" >&2
    printf '%s %s' "$$" "$(uname -n)" 2>/dev/null >"$file" || refuse "$folder: nothing can be written into this folder"
    LOCKED=$folder
}

# Pids of everything below a process. Workers are in sessions of their own, so no process group reaches them.
# shellcheck disable=SC2329 # stop calls it
descendants() {
    local status pid
    while IFS= read -r status; do
        pid=${status#/proc/}
        pid=${pid%/status}
        descendants "$pid"
        echo "$pid"
    done < <(grep -slx "PPid:[[:space:]]*$1" /proc/[0-9]*/status || true)
}

# End msrun, its scheduler and its workers by pid: SIGTERM only to msrun would leave the workers running.
# shellcheck disable=SC2329 # the traps call it
stop() {
    local pids
    trap '' INT TERM HUP
    [ -n "$MSRUN_PID" ] || exit "$1"
    mapfile -t pids < <(descendants "$MSRUN_PID")
    pids+=("$MSRUN_PID")
    printf 'interrupted: ending %s processes\n' "${#pids[@]}" >&2
    kill -TERM "${pids[@]}" 2>/dev/null || true
    for _ in {1..20}; do
        kill -0 "${pids[@]}" 2>/dev/null || break
        sleep 0.1
    done
    kill -KILL "${pids[@]}" 2>/dev/null || true
    exit "$1"
}

ROOT=$(find_root)
# Slurm's nodes are those of the step, where srun started this: its $SLURM_NODEID counts from the first of them.
NODELIST=${SLURM_STEP_NODELIST:-${SLURM_JOB_NODELIST:-}}
if [ "$HOSTS_OF_SLURM" = yes ] && [ -n "$NODELIST" ]; then
    mapfile -t HOSTS < <(scontrol show hostnames "$NODELIST")
fi
NODES=${#HOSTS[@]}
[ "$((NODES * SLOTS))" -eq "$WORKERS" ] ||
    fail "$NODES hosts x $SLOTS workers = $((NODES * SLOTS)), the recipe needs $WORKERS: mend HOSTS"
RANK=$(find_node_rank "$@")
# One node looks for nobody else, and its own name may be an address that msrun does not know for its own (127.0.1.1).
MASTER_ADDR=${MASTER_ADDR:-$([ "$NODES" -eq 1 ] && echo 127.0.0.1 || echo "${HOSTS[0]}")}
check_master

cd "$ROOT" # relative paths in the recipe count from the checkout, as with tc3
[ -f "$RECIPE" ] || fail "no $RECIPE on this node: every node needs the recipe there"
# Checks of the shell come before the first folder is made.
# An activated environment comes first; without one, the checkout's own. msrun starts the first `python` on PATH.
command -v msrun >/dev/null || PATH=$ROOT/.venv/bin:$PATH
command -v msrun >/dev/null || fail "no msrun on PATH: activate the environment that has MindSpore, on every node"
# What MindSpore's graph kernels fuse, where the recipe has plugins.operator_fusion.
if [ -n "${FUSION_FLAGS:-}" ]; then
    [ "${MS_DEV_GRAPH_KERNEL_FLAGS:-$FUSION_FLAGS}" = "$FUSION_FLAGS" ] ||
        fail "MS_DEV_GRAPH_KERNEL_FLAGS is exported with other flags than plugins.operator_fusion: unset it"
    export MS_DEV_GRAPH_KERNEL_FLAGS=$FUSION_FLAGS
fi
if [ "$TARGET" = Ascend ] && [ -z "${ASCEND_HOME_PATH:-}" ]; then
    fail "CANN is not set up in this shell; source its set_env.sh first (/usr/local/Ascend/ascend-toolkit/set_env.sh)"
fi
MADE=$([ -d "$RUN_DIR" ] || echo yes)
mkdir -p "$RUN_DIR" 2>/dev/null || fail "$RUN_DIR: this folder cannot be made"
RUN_DIR=$(cd "$RUN_DIR" && pwd)
LOG_DIR=$RUN_DIR/logs/node_$RANK
# The first node locks for all nodes; any other one locks its logs, because its msrun would overwrite those of a run.
LOCKED=
if [ "$RANK" -eq 0 ]; then
    lock "$RUN_DIR" RUN_DIR
    if [ -z "${SAVE_PATH:-}" ]; then
        lock "$RUN_DIR/checkpoint" RUN_DIR
    elif ! [ "$SAVE_PATH" -ef "$RUN_DIR" ]; then
        lock "$SAVE_PATH" checkpoint.save_path
    fi
else
    lock "$LOG_DIR" RUN_DIR
fi
mkdir -p "$LOG_DIR"

# Plugins and tools are imported from the checkout.
export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
# A worker ends with msrun, even when msrun is killed (launch/workers/lifetime.py).
export TC3_SUPERVISED=1
# Cores for each worker of this node, by the plan of `tc3 affinity` (docs/affinity.md); without one msrun may choose.
BINDING=()
if [ "$BIND" != no ]; then
    PLANNED=$(python -m launch.run.cores "$SLOTS" "$TARGET" "$LOG_DIR/cores.json") || {
        echo 'note: no plan of cores for this node' >&2
        PLANNED=$([ "$TARGET" != Ascend ] || echo 'BINDING=(--bind_core=True)')
    }
    eval "$PLANNED"
fi
# The workers of a node share its cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(($(nproc) > SLOTS ? $(nproc) / SLOTS : 1))}
# MindSpore's errors only: its default, warnings, fills the logs of a large cluster.
export GLOG_v=${GLOG_v:-3}
# Lines reach the log when they are printed, also those before a crash.
export PYTHONUNBUFFERED=${PYTHONUNBUFFERED:-1}
# MindFormers' own log, beside msrun's; its default is ./output/log, one folder for all nodes of a shared disk.
export LOG_MF_PATH=${LOG_MF_PATH:-$LOG_DIR/mindformers}

# Checkpoints of all nodes go to one folder, and MindFormers refuses to save more workers than one node has unless it knows
# that folder's disk as shared: NFS and DPC it knows, of others (Lustre, GPFS, ...) it has to be told.
export DEVICE_NUM_PER_NODE=${DEVICE_NUM_PER_NODE:-$SLOTS}
export SHARED_PATHS=${SHARED_PATHS:-$RUN_DIR${SAVE_PATH:+,$SAVE_PATH}}

# --tail_worker_log: only the last worker, which holds the last pipeline stage and so the loss, prints to the terminal.
COMMAND=(
    msrun "--worker_num=$WORKERS" "--local_worker_num=$SLOTS" "--node_rank=$RANK"
    "--master_addr=$MASTER_ADDR" "--master_port=$MASTER_PORT"
    --join=True "--log_dir=$LOG_DIR" "--tail_worker_log=$((WORKERS - 1))"
)
if [ "$TARGET" = Ascend ]; then
    # Nodes start and stages compile minutes apart. 7200 s is what MindFormers' launcher waits for the cluster and the
    # most that CANN allows between devices; the defaults are 600 s (msrun) and 600 s (MindSpore; CANN's own is 120 s).
    export HCCL_CONNECT_TIMEOUT=${HCCL_CONNECT_TIMEOUT:-7200}
    # CANN's log; its default is ~/ascend/log, one folder for all nodes where homes are shared.
    export ASCEND_PROCESS_LOG_PATH=${ASCEND_PROCESS_LOG_PATH:-$LOG_DIR/ascend}
    # As many processes as the hard limit allows, as MindFormers' launcher does: compiling starts many.
    ulimit -S -u "$(ulimit -H -u)"
    COMMAND+=("--cluster_time_out=${CLUSTER_TIME_OUT:-7200}")
fi
COMMAND+=(${BINDING[@]+"${BINDING[@]}"} "$ROOT/launch/train.py" --config "$RECIPE" --run-dir "$RUN_DIR")
COMMAND+=(${SETTINGS[@]+"${SETTINGS[@]}"})
if [ -n "$RESUME" ]; then
    COMMAND+=(--resume "$RESUME")
fi

MSRUN_PID=
trap 'stop 130' INT
trap 'stop 143' TERM
trap 'stop 129' HUP
printf 'node %s of %s, logs in %s\n' "$RANK" "$NODES" "$LOG_DIR" >&2
printf '%q ' "${COMMAND[@]}" >&2
echo >&2
"${COMMAND[@]}" &
MSRUN_PID=$!
code=0
wait "$MSRUN_PID" || code=$?
if [ "$code" -ne 0 ]; then # msrun's last words are those of the scheduler; the first error is a worker's
    printf 'failed; what the workers of this node say (%s):\n' "$LOG_DIR" >&2
    grep -E '^(tc3: |[[:alnum:]_.]+(Error|Exception)(:|$))' "$LOG_DIR"/worker_*.log /dev/null | head -n 16 >&2 || true
fi
exit "$code"
