# shellcheck shell=bash disable=SC2016,SC2154,SC2164 # the upper part sets the variables, and -e
# ---- from here on the same in every file; the source is launch/agent/slurm_body.sh

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

cd "${TC3_ROOT:-$SLURM_SUBMIT_DIR}"
ROOT=$PWD
[ -f launch/train.py ] || fail "no launch/train.py in $ROOT: submit from the checkout, or set TC3_ROOT to it"
# An activated environment comes first; without one, the checkout's own.
command -v tc3 >/dev/null || export PATH=$ROOT/.venv/bin:$PATH
command -v tc3 >/dev/null || fail "no tc3 on PATH: activate the environment that has MindSpore, then submit"
mkdir -p "$RUN_DIR"
RUN_DIR=$(cd "$RUN_DIR" && pwd)

# The nodes that Slurm gave this time. A requeued job gets others, and goes on from the newest checkpoint; while there
# is none, from the one that the job was told to begin with (a --resume DIR among the options stays).
HOSTS=$RUN_DIR.slurm-$SLURM_JOB_ID.hosts
scontrol show hostnames "$SLURM_JOB_NODELIST" | sed "s/\$/ $SLOTS/" >"$HOSTS"
[ "${SLURM_RESTART_COUNT:-0}" -eq 0 ] || OPTIONS+=(--resume auto)
printf 'start %s of job %s: %s\n' "$((${SLURM_RESTART_COUNT:-0} + 1))" "$SLURM_JOB_ID" "$SLURM_JOB_NODELIST" >&2

earlier=$(verdict) # of another job, or of this one before it was requeued
# One agent a node. A lost node, or an agent that ended, ends no other one: what follows is the agents' own decision.
# --host, from each node: the name in the list of nodes, which need not be that of `hostname`.
code=0
srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 --wait=0 --label \
    bash -c 'exec "$@" --host "$SLURMD_NODENAME"' agent \
    tc3 agent "$RECIPE" --nodes "$HOSTS" --run-dir "$RUN_DIR" ${OPTIONS[@]+"${OPTIONS[@]}"} || code=$?

# srun's code is the highest of all agents, also of those whose node was lost on the way.
last=$(decision "$earlier")
printf 'agents ended with %s, their last decision: %s\n' "$code" "${last:-none}" >&2
if [ "$last" = "done" ]; then
    exit 0
elif [ "$code" -eq 0 ] || [ "$code" -eq 2 ] || [ "$code" -eq 130 ]; then
    exit "$code" # complete before it began; to mend first; interrupted by hand
elif [ "${SLURM_RESTART_COUNT:-0}" -ge "$REQUEUES" ]; then
    printf 'requeued %s times: that is all\n' "$REQUEUES" >&2
    exit "$code"
fi
# The last resort: other nodes, and the place in the queue again. Slurm starts the job two minutes later at the earliest.
printf 'requeued: start %s of at most %s\n' "$((${SLURM_RESTART_COUNT:-0} + 2))" "$((REQUEUES + 1))" >&2
scontrol requeue "$SLURM_JOB_ID" || exit "$code"
sleep 60 # Slurm ends this script
exit "$code"
