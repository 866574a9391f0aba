# shellcheck shell=bash disable=SC2154,SC2164 # the upper part sets the variables, and -e
# What a pod runs. The agent is no child of a shell that would keep SIGTERM from it: the shell passes it on.
mkdir -p "$RUN_DIR"
hosts=/tmp/hosts.txt
sed "s/\$/ $SLOTS/" /etc/volcano/node.host >"$hosts"
# A pod that came later, or a job that was resumed: from the newest checkpoint; while there is none, from a --resume DIR
# among the options.
[ ! -d "$RUN_DIR/attempts" ] || OPTIONS+=(--resume auto)
earlier=$(verdict) # the job was resumed after it
tc3 agent "$RECIPE" --nodes "$hosts" --host "$HOSTNAME.$JOB" --run-dir "$RUN_DIR" ${OPTIONS[@]+"${OPTIONS[@]}"} &
agent=$!
trap 'kill -TERM "$agent"' TERM INT
code=0
wait "$agent" || code=$?
while kill -0 "$agent" 2>/dev/null; do # a signal ended the wait, not the agent
    code=0
    wait "$agent" || code=$?
done
# 1 ends the job. A host that failed by itself (its disk is gone, say) is replaced instead.
if [ "$code" -eq 1 ] && [ "$(decision "$earlier")" != 'give up' ]; then
    code=75
fi
exit "$code"
