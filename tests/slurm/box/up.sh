#!/usr/bin/env bash
# Start a throw-away SLURM cluster (munged + slurmctld + N slurmd) on loopback.
#   SLURMBOX_DIR=/tmp/sb ./up.sh && . /tmp/sb/env.sh && sbatch ... ; SLURMBOX_DIR=/tmp/sb ./down.sh
# Idempotent: does nothing if that cluster is already up; rebuilds it otherwise.
# Needs root and: apt-get install --no-install-recommends slurmctld slurmd slurm-client munge
set -euo pipefail
: "${SLURMBOX_DIR:?set SLURMBOX_DIR to the folder that holds all state}"
NODES=${SLURMBOX_NODES:-2}          # emulated nodes node1..nodeN
CPUS=${SLURMBOX_CPUS:-64}           # fake, per node (config_overrides)
MEM=${SLURMBOX_MEM:-512000}         # fake MiB per node
GPUS=${SLURMBOX_GPUS:-8}            # fake GPUs per node (null device nodes); 0 = none
GPU_TYPE=${SLURMBOX_GPU_TYPE:-}     # e.g. h100, for --gres=gpu:h100:8
FEATURES=${SLURMBOX_FEATURES:-}     # e.g. h100,ib for --constraint
PARTITIONS=${SLURMBOX_PARTITIONS:-main}   # space separated; the first is the default
PORT=${SLURMBOX_PORT:-16817}        # slurmctld; slurmd i listens on PORT+i
WAIT=${SLURMBOX_TIMEOUT:-30}        # seconds to wait for every node to be idle
KILLWAIT=${SLURMBOX_KILLWAIT:-5}    # SIGTERM -> SIGKILL gap (SLURM's own default is 30)
NS=${SLURMBOX_NS:-1}                # 1: own hostname and /etc/hosts per node (unshare -u -m)
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
mkdir -p "$SLURMBOX_DIR"; D=$(cd "$SLURMBOX_DIR" && pwd); export SLURMBOX_DIR=$D
[ "$(id -u)" = 0 ] || { echo "up.sh: must be root" >&2; exit 2; }
[ ${#D} -le 70 ] || { echo "up.sh: $D is too long for unix sockets (70 at most)" >&2; exit 2; }
case $D in *[[:space:]]*) echo "up.sh: no spaces in SLURMBOX_DIR" >&2; exit 2;; esac
for c in munged slurmctld slurmd sinfo; do
  command -v $c >/dev/null || { echo "up.sh: $c missing: apt-get install --no-install-recommends slurmctld slurmd slurm-client munge" >&2; exit 2; }
done
export SLURM_CONF=$D/slurm.conf
# shellcheck source=tests/slurm/box/lib.sh
. "$here/lib.sh"
ready() { # every node in a usable state
  local s; s=$(timeout 5 sinfo -h -N -p "${PARTITIONS%% *}" -o '%N %T' 2>/dev/null) || return 1
  local i; for ((i=1;i<=NODES;i++)); do alive "slurmd-node$i" || return 1; done
  [ "$(grep -cE ' (idle|mixed|allocated)$' <<<"$s")" = "$NODES" ]
}
if [ -f "$SLURM_CONF" ] && alive munged && alive slurmctld && ready; then echo "slurmbox: already up in $D"; exit 0; fi
"$here/down.sh"
H=$(hostname -s)
getent hosts "$H" | grep -q '^127\.' || { echo "up.sh: $H does not resolve to loopback" >&2; exit 2; }
for ((p=PORT; p<=PORT+NODES; p++)); do
  if (exec 3<>"/dev/tcp/127.0.0.1/$p") 2>/dev/null; then echo "up.sh: port $p is taken; set SLURMBOX_PORT" >&2; exit 2; fi
done
rm -rf "${D:?}"/{state,spool,run,dev}; mkdir -p "$D"/{state,spool,run,log,dev}; chmod 755 "$D/run"; rm -f "$D"/log/*
( umask 077; head -c 1024 /dev/urandom > "$D/munge.key" )
for ((i=1;i<=NODES;i++)); do  # each node's own name first, so that reverse look-ups (hostname -f, getfqdn) give it
  { echo "127.0.0.1 node$i localhost $H"; for ((j=1;j<=NODES;j++)); do [ "$j" = "$i" ] || echo "127.0.0.1 node$j"; done; } > "$D/hosts-node$i"
done
gres= ; : > "$D/gres.conf"
if [ "$GPUS" -gt 0 ]; then
  for ((i=0;i<GPUS;i++)); do mknod -m 666 "$D/dev/gpu$i" c 1 3; done
  if [ "$GPUS" = 1 ]; then f="$D/dev/gpu0"; else f="$D/dev/gpu[0-$((GPUS-1))]"; fi
  echo "Name=gpu ${GPU_TYPE:+Type=$GPU_TYPE }File=$f" > "$D/gres.conf"
  gres="Gres=gpu:${GPU_TYPE:+$GPU_TYPE:}$GPUS"
fi
{ cat <<CONF
ClusterName=slurmbox
SlurmctldHost=$H(127.0.0.1)
SlurmctldPort=$PORT
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$D/run/munge.sock,cred_expire=${SLURMBOX_CRED_EXPIRE:-5}
CredType=cred/munge
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation=$D/state
SlurmdSpoolDir=$D/spool/%n
SlurmctldPidFile=$D/run/slurmctld.pid
SlurmdPidFile=$D/run/slurmd-%n.pid
SlurmctldLogFile=$D/log/slurmctld.log
SlurmdLogFile=$D/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc=$D/log/jobcomp.txt
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
MinJobAge=86400
KillWait=$KILLWAIT
MailProg=/bin/true
GresTypes=gpu
${SLURMBOX_EXTRA_CONF:-}
CONF
  for ((i=1;i<=NODES;i++)); do
    if [ "$NS" = 1 ]; then nh=node$i; else nh=$H; fi
    echo "NodeName=node$i NodeHostname=$nh NodeAddr=127.0.0.1 Port=$((PORT+i)) CPUs=$CPUS RealMemory=$MEM $gres ${FEATURES:+Features=$FEATURES}"
  done
  d=YES; for p in $PARTITIONS; do echo "PartitionName=$p Nodes=ALL Default=$d MaxTime=INFINITE DefaultTime=60 DefMemPerCPU=1000 State=UP"; d=NO; done
} > "$SLURM_CONF"
printf 'export SLURM_CONF=%q SLURMBOX_DIR=%q\n' "$SLURM_CONF" "$D" > "$D/env.sh"
: > "$D/log/jobcomp.txt"
munged --force --socket="$D/run/munge.sock" --key-file="$D/munge.key" --log-file="$D/log/munged.log" \
       --pid-file="$D/run/munged.pid" --seed-file="$D/run/munged.seed" 2>>"$D/log/munged.stderr"
slurmctld -c -f "$SLURM_CONF" </dev/null >>"$D/log/slurmctld.stderr" 2>&1
for ((i=1;i<=NODES;i++)); do
  mkdir -p "$D/spool/node$i"
  if [ "$NS" = 1 ]; then
    # shellcheck disable=SC2016
    unshare --uts --mount --propagation private bash -ec \
      'hostname "$1"; mount --bind "$2/hosts-$1" /etc/hosts; exec slurmd -N "$1" -f "$2/slurm.conf"' _ "node$i" "$D"
  else slurmd -N "node$i" -f "$SLURM_CONF"; fi </dev/null >>"$D/log/slurmd.stderr" 2>&1
done
end=$((SECONDS+WAIT))
until ready; do
  if [ $SECONDS -ge $end ]; then
    echo "up.sh: not ready after ${WAIT}s" >&2; timeout 5 sinfo -N -l >&2 || true; tail -n 15 "$D"/log/*.log >&2; "$here/down.sh"; exit 1
  fi; sleep 0.1
done
echo "slurmbox: $NODES nodes up in $D (. $D/env.sh)"
