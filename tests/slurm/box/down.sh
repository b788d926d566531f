#!/usr/bin/env bash
# Stop the cluster of $SLURMBOX_DIR: cancel its jobs, then end its own daemons by pid file. Idempotent.
# Logs and job files stay; SLURMBOX_PURGE=1 removes the folder.
set -euo pipefail
: "${SLURMBOX_DIR:?set SLURMBOX_DIR to the folder that holds all state}"
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[ -d "$SLURMBOX_DIR" ] || { echo "slurmbox: nothing in $SLURMBOX_DIR"; exit 0; }
SLURMBOX_DIR=$(cd "$SLURMBOX_DIR" && pwd); export SLURMBOX_DIR SLURM_CONF=$SLURMBOX_DIR/slurm.conf
# shellcheck source=tests/slurm/box/lib.sh
. "$here/lib.sh"
if alive slurmctld && alive munged; then
  live=$(timeout 5 squeue -h -o %A 2>/dev/null | sort -u) || live=
  # shellcheck disable=SC2086
  [ -z "$live" ] || timeout 10 scancel --signal=KILL --full $live 2>/dev/null || true
  # shellcheck disable=SC2086
  [ -z "$live" ] || timeout 10 scancel $live 2>/dev/null || true
  for _ in $(seq 100); do [ -n "$(timeout 5 squeue -h 2>/dev/null)" ] || break; sleep 0.1; done
fi
stop() { # stop NAME
  alive "$1" || return 0
  kill "$ALIVE_PID" 2>/dev/null || return 0
  for _ in $(seq 100); do alive "$1" || return 0; sleep 0.1; done
  alive "$1" && kill -9 "$ALIVE_PID" 2>/dev/null; return 0
}
for f in "$SLURMBOX_DIR"/run/slurmd-*.pid; do [ -e "$f" ] || continue; n=${f##*/}; stop "${n%.pid}"; done
# proctrack/linuxproc loses what a job detached (setsid, nohup): end whatever still carries a job id of this cluster
for e in /proc/[0-9]*/environ; do
  v=$( { tr '\0' '\n' < "$e"; } 2>/dev/null ) || continue
  grep -qxF -- "SLURM_CONF=$SLURM_CONF" <<<"$v" || continue
  grep -q '^SLURM_JOB_ID=' <<<"$v" || continue
  p=${e#/proc/}; p=${p%/environ}; [ "$p" = $$ ] || kill -9 "$p" 2>/dev/null || true
done
stop slurmctld
stop munged
rm -f "$SLURMBOX_DIR"/run/*.pid
if [ "${SLURMBOX_PURGE:-0}" = 1 ] && [ -f "$SLURMBOX_DIR/slurm.conf" ]; then rm -rf "$SLURMBOX_DIR"; fi
echo "slurmbox: down"
