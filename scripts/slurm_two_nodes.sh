#!/usr/bin/env bash
# A Slurm cluster of two nodes on this host, for tests: one slurmctld, two slurmd, one private munged.
#   scripts/slurm_two_nodes.sh up FOLDER     then: export SLURM_CONF=FOLDER/slurm.conf
#   scripts/slurm_two_nodes.sh down FOLDER   cancels what runs and ends all four
# Needs root, Debian's slurmctld, slurmd, slurm-client and munge, and the right to unshare. Everything
# lies in FOLDER; the ports are free ones. The nodes have the host names n1 and n2. Each sees FOLDER/n1/disk
# or FOLDER/n2/disk at FOLDER/disk, has no GPU, and claims 4 cores, however many there are.
set -euo pipefail
if [ $# -ne 2 ]; then
    echo "usage: $0 up|down FOLDER" >&2
    exit 2
fi
action=$1
mkdir -p "$2"
folder=$(cd "$2" && pwd)
export SLURM_CONF=$folder/slurm.conf
DAEMONS="slurmctld n1 n2 munged"

node() { # node NAME: runs its slurmd, which sees FOLDER/NAME/disk at FOLDER/disk
    unshare --mount --uts bash -ec '
        hostname "$1"
        mount --bind "$2/$1/disk" "$2/disk"
        mount --bind "$2/hosts" /etc/hosts
        exec slurmd -N "$1"' node "$1" "$folder"
}

ends() { # ends NAME: waits until the daemon is gone, kills it after 10 s
    local pid
    pid=$(cat "$folder/$1.pid" 2>/dev/null) || return 0
    kill "$pid" 2>/dev/null || return 0
    for _ in $(seq 100); do
        kill -0 "$pid" 2>/dev/null || return 0
        sleep 0.1
    done
    kill -9 "$pid" 2>/dev/null || true
}

down() {
    if [ -e "$SLURM_CONF" ] && scontrol ping >/dev/null 2>&1; then
        scancel --quiet --user=root || true
        for _ in $(seq 100); do
            [ -n "$(squeue --noheader 2>/dev/null)" ] || break
            sleep 0.1
        done
    fi
    for name in $DAEMONS; do # all at once; then each is waited for
        pid=$(cat "$folder/$name.pid" 2>/dev/null) && kill "$pid" 2>/dev/null || true
    done
    for name in $DAEMONS; do ends "$name"; done
}

if [ "$action" = down ]; then
    down
    exit 0
fi
if [ "$action" != up ] || [ "$(id -u)" -ne 0 ]; then
    echo "$0: up or down, as root" >&2
    exit 2
fi
for program in slurmctld slurmd munged sbatch srun; do
    PATH=$PATH:/usr/sbin command -v "$program" >/dev/null || {
        echo "$program is not installed: apt-get install slurmctld slurmd slurm-client munge" >&2
        exit 3
    }
done
unshare --mount --uts true 2>/dev/null || {
    echo "a node needs a host name and mounts of its own, which unshare --mount --uts refuses" >&2
    exit 3
}
PATH=$PATH:/usr/sbin
read -r controller first second < <(python3 - <<'PY'
import socket
held = [socket.socket() for _ in range(3)]
for one in held:
    one.bind(("", 0))
print(*(one.getsockname()[1] for one in held))
PY
)
chmod 755 "$folder"
mkdir -p "$folder"/{state,disk,n1/disk,n2/disk}
echo "127.0.0.1 localhost n1
127.0.0.2 n2" >"$folder/hosts"
(umask 077 && head -c 128 /dev/urandom >"$folder/munge.key")
munged --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" \
    --pid-file="$folder/munged.pid" --log-file="$folder/munged.log" --seed-file="$folder/munge.seed"
cat >"$SLURM_CONF" <<CONF
ClusterName=tpdet
SlurmctldHost=$(hostname)(127.0.0.1)
SlurmctldPort=$controller
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerType=sched/builtin
SelectType=select/linear
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=60
NodeName=n1 NodeAddr=127.0.0.1 Port=$first CPUs=4 State=UNKNOWN
NodeName=n2 NodeAddr=127.0.0.1 Port=$second CPUs=4 State=UNKNOWN
PartitionName=all Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
CONF
trap 'down; tail -n 5 "$folder"/*.log >&2' ERR
slurmctld -c
node n1
node n2
for _ in $(seq 100); do
    [ "$(sinfo --noheader --states=idle --format=%D 2>/dev/null)" = 2 ] && exit 0
    sleep 0.1
done
echo "the nodes did not come up: $(sinfo --noheader 2>&1)" >&2
false
