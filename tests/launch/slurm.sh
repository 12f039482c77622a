#!/usr/bin/env bash
# A SLURM cluster of its own on this machine: `slurm.sh start FOLDER [NODES]`, `slurm.sh stop FOLDER`; then SLURM_CONF=FOLDER/slurm.conf.
# Needs root, neither systemd nor cgroups. Debian's packages are installed where they are missing. Every node is this host on a port of its
# own, with 8 CPUs that need not exist and 8 GPUs that do not (null devices). Two partitions: main, and urgent, which preempts it.
set -euo pipefail
action=$1 folder=$2 nodes=${3:-2}
export SLURM_CONF=$folder/slurm.conf
daemons=(munged slurmctld slurmd)

install_packages() {
    local missing=()
    command -v slurmctld >/dev/null || missing+=(slurmctld)
    command -v slurmd >/dev/null || missing+=(slurmd)
    command -v sbatch >/dev/null || missing+=(slurm-client)
    command -v munged >/dev/null || missing+=(munge)
    [ ${#missing[@]} = 0 ] && return
    export DEBIAN_FRONTEND=noninteractive
    local policy=/usr/sbin/policy-rc.d
    # The packages would start daemons of their own; this file forbids it for as long as it stands
    [ -e "$policy" ] || { printf '#!/bin/sh\nexit 101\n' >"$policy"; chmod 755 "$policy"; trap "rm -f $policy" RETURN; }
    apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null 2>&1 || {
        apt-get update -qq >/dev/null && apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
    }
}

free_port() { # the first of a row of 20 that nobody listens on
    python3 - <<'PY'
import random, socket
while True:
    first = random.randrange(17000, 19900, 20)
    try:
        for port in range(first, first + 20):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        print(first)
        break
    except OSError:
        pass
PY
}

write_configuration() {
    local port=$1 host
    host=$(hostname -s)
    cat >"$SLURM_CONF" <<CONF
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# cred_expire is also how long a requeued job waits before it starts again (2 minutes by default)
AuthInfo=socket=$folder/munge.socket,cred_expire=5
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool.%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
LaunchParameters=disable_send_gids
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,bf_interval=1,sched_interval=1,sched_min_interval=0,requeue_delay=0
KillWait=20
SlurmctldTimeout=30
SlurmdTimeout=15
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
# Who is preempted gets the job's own warning signal too, not SIGTERM alone
SlurmctldParameters=preempt_send_user_signal
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
CONF
    : >"$folder/gres.conf"
    local i gpu
    for ((i = 1; i <= nodes; i++)); do
        echo "NodeName=node$i NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + i)) CPUs=8 RealMemory=8000 Gres=gpu:8 State=UNKNOWN" >>"$SLURM_CONF"
    done
    echo "PartitionName=main Nodes=ALL Default=YES MaxTime=UNLIMITED PriorityTier=1 PreemptMode=REQUEUE GraceTime=60" >>"$SLURM_CONF"
    echo "PartitionName=urgent Nodes=ALL MaxTime=UNLIMITED PriorityTier=2 PreemptMode=OFF" >>"$SLURM_CONF"
    mkdir -p "$folder/gpu"
    for ((gpu = 0; gpu < 8; gpu++)); do [ -e "$folder/gpu/$gpu" ] || mknod "$folder/gpu/$gpu" c 1 3; done
    echo "NodeName=node[1-$nodes] Name=gpu File=$folder/gpu/[0-7]" >"$folder/gres.conf"
}

name_nodes() { # the nodes' names must resolve; in place, since /etc/hosts may be a mount
    local kept
    kept=$(grep -v '# pdn_train test nodes$' /etc/hosts || true)
    { printf '%s\n' "$kept"; [ $# = 0 ] || echo "127.0.0.1 $* # pdn_train test nodes"; } >"$folder/hosts"
    cat "$folder/hosts" >/etc/hosts
}

start() {
    install_packages
    stop
    mkdir -p "$folder"/state
    chmod 755 "$folder"
    write_configuration "$(free_port)"
    mapfile -t names < <(seq -f 'node%.0f' "$nodes")
    name_nodes "${names[@]}"
    # munged wants a key that nobody else reads, and --force below a world-writable /tmp
    dd if=/dev/urandom of="$folder/munge.key" bs=1024 count=1 status=none
    chmod 400 "$folder/munge.key"
    munged --force --socket="$folder/munge.socket" --key-file="$folder/munge.key" --pid-file="$folder/munged.pid" \
        --log-file="$folder/munged.log" --seed-file="$folder/munge.seed"
    slurmctld -c
    for name in "${names[@]}"; do mkdir -p "$folder/spool.$name"; slurmd -N "$name"; done
    for _ in $(seq 300); do
        [ "$(sinfo -h -N -p main -t idle -o %N 2>/dev/null | wc -l)" = "$nodes" ] && return
        sleep 0.2
    done
    echo "the nodes did not come up within 60 s; the logs are in $folder" >&2
    exit 1
}

running() { # process of a pid file, if it is the daemon that wrote it
    local pid name
    pid=$(cat "$1" 2>/dev/null) || return 1
    name=$(cat "/proc/$pid/comm" 2>/dev/null) || return 1
    [[ " ${daemons[*]} " == *" $name "* ]] && ! grep -q '^State:.Z' "/proc/$pid/status" && echo "$pid"
}

stop() {
    [ -d "$folder" ] || return 0
    if running "$folder/slurmctld.pid" >/dev/null; then
        timeout 10 scancel -u root 2>/dev/null || true
        for _ in $(seq 150); do [ -z "$(timeout 5 squeue -h 2>/dev/null)" ] && break; sleep 0.2; done
    fi
    local file pid
    for file in "$folder"/slurmd.*.pid "$folder"/slurmctld.pid "$folder"/munged.pid; do
        pid=$(running "$file") || continue
        kill "$pid"
        for _ in $(seq 50); do running "$file" >/dev/null || break; sleep 0.2; done
        pid=$(running "$file") && kill -9 "$pid"
        rm -f "$file"
    done
    name_nodes
}

case $action in start) start ;; stop) stop ;; *) echo "slurm.sh: start or stop, not '$action'" >&2; exit 2 ;; esac
