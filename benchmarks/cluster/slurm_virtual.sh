#!/usr/bin/env bash
# A job under a real Slurm with three nodes, all on this machine and installed nowhere: Debian's packages are unpacked into
# FOLDER and laid over /usr in namespaces of their own, which end with this script and everything in them.
#   bash benchmarks/cluster/slurm_virtual.sh FOLDER JOB.sbatch [SIGNAL SECONDS]
# SIGNAL is sent to the job's step SECONDS after it started, once: KILL is what a crash does, TERM what a preemption does.
# Each node has a network of its own. Needs root, apt (3.5 MB), util-linux and iproute2. Prints Slurm's own log of the job and the job's output.
set -euo pipefail
folder=$(mkdir -p "$1" && cd "$1" && pwd)
job=$(realpath "$2")
signal=${3:-} seconds=${4:-0}
nodes=3

if [ -z "${IN_NAMESPACES:-}" ]; then
    if [ ! -e "$folder/root/usr/bin/sbatch" ]; then
        mkdir -p "$folder/packages" "$folder/root"
        apt-get install -y -qq --no-install-recommends --download-only -o Dir::Cache::archives="$folder/packages" \
            slurmctld slurmd slurm-client >/dev/null
        for package in "$folder"/packages/*.deb; do dpkg-deb -x "$package" "$folder/root"; done
        ln -sf slurmstepd-wlm "$folder/root/usr/sbin/slurmstepd"
    fi
    exec env IN_NAMESPACES=1 unshare --mount --propagation private --net --pid --fork --mount-proc bash "$0" "$@"
fi

mount -t overlay overlay -o "lowerdir=$folder/root/usr:/usr" /usr
state=$folder/state
rm -rf "$state"
mkdir -p "$state/log" "$state/ctld" /run/netns
mount -t tmpfs tmpfs /run/netns
ip link set lo up
ip link add nodes type bridge
ip address add 10.79.0.254/24 dev nodes
ip link set nodes up
echo '127.0.0.1 localhost' >"$state/hosts"
for ((n = 0; n < nodes; n++)); do
    ip netns add "n$n"
    ip link add "n$n" type veth peer name eth0 netns "n$n"
    ip link set "n$n" master nodes up
    ip -n "n$n" address add "10.79.0.$((n + 1))/24" dev eth0
    ip -n "n$n" link set eth0 up
    ip -n "n$n" link set lo up
    echo "10.79.0.$((n + 1)) n$n" >>"$state/hosts"
    mkdir "$state/spool-n$n"
done
mount --bind "$state/hosts" /etc/hosts
cat >"$state/slurm.conf" <<CONF
ClusterName=virtual
SlurmctldHost=localhost(10.79.0.254)
SlurmUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation=$state/ctld
SlurmctldPidFile=$state/ctld.pid
SlurmctldLogFile=$state/log/ctld.log
SlurmdSpoolDir=$state/spool-%n
SlurmdPidFile=$state/slurmd-%n.pid
SlurmdLogFile=$state/log/%n.log
# signals go to a task's process group, as proctrack/cgroup sends them only to tasks
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/linear
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdTimeout=30
ReturnToService=2
$(for ((n = 0; n < nodes; n++)); do
    echo "NodeName=n$n NodeHostname=localhost NodeAddr=10.79.0.$((n + 1)) Port=$((17001 + n)) CPUs=1"
done)
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
export SLURM_CONF=$state/slurm.conf
slurmctld-wlm -D 2>/dev/null &
sleep 2
for ((n = 0; n < nodes; n++)); do nsenter --net="/run/netns/n$n" slurmd-wlm -N "n$n" -D 2>/dev/null & done
sleep 3

sbatch --output="$state/log/job.out" "$job"
for ((waited = 0; waited < ${LIMIT:-540}; waited++)); do
    [ -n "$(squeue -h)" ] || break
    if [ -n "$signal" ] && [ "$(squeue -h -s -o %i | grep -c '\.0$')" -gt 0 ] && ((seconds-- <= 0)); then
        echo "$(date +%T) SIG$signal to the step"
        scancel --signal="$signal" "$(squeue -h -s -o %i | grep '\.0$')"
        signal=
    fi
    sleep 1
done
echo "-- Slurm's log"
grep -iE 'requeu|_job_complete|sched: allocate|_slurm_rpc_submit' "$state/log/ctld.log" || true
echo '-- the job'
cat "$state/log/job.out"
[ -z "$(squeue -h)" ] || { echo "still there after ${LIMIT:-540} s" && exit 1; }
