# shellcheck shell=bash disable=SC2154
# The body of every job. slurm/*.sh source it; `pivotrl launch` copies it into the scripts that it renders.
# In: array `stages`, overrides as "$@", and the settings of launch.render (python, srun_flags, container, ...).
set -euo pipefail

hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=$(head -n 1 <<<"$hosts")
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
PIVOTRL_HOSTS=$(paste -sd, - <<<"$hosts")
# When this job ends, for checkpoint.stop_before_end_minutes; older SLURM does not say so itself.
: "${SLURM_JOB_START_TIME:=$(date +%s)}" "${SLURM_JOB_END_TIME:=$(date -d "$(squeue -h -j "$SLURM_JOB_ID" -o %e)" +%s 2>/dev/null || true)}"
PIVOTRL_STOP_FILE=$run_dir/.jobs/$SLURM_JOB_ID.stopped
export MASTER_ADDR MASTER_PORT PIVOTRL_HOSTS SLURM_JOB_START_TIME SLURM_JOB_END_TIME PIVOTRL_STOP_FILE
mkdir -p "$run_dir/.jobs" || exit 2
echo "job $SLURM_JOB_ID (start $((${SLURM_RESTART_COUNT:-0} + 1))): $SLURM_NTASKS processes on $PIVOTRL_HOSTS"

# Starts since one kept something: a job that always dies or is stopped before its first save would queue for ever.
starts_file=$run_dir/.jobs/$SLURM_JOB_ID.starts starts=0
if ((${SLURM_RESTART_COUNT:-0} > 0)) && [[ -e $starts_file && ! -e $PIVOTRL_STOP_FILE.kept ]]; then starts=$(<"$starts_file"); fi
rm -f "$PIVOTRL_STOP_FILE"*
echo "$((++starts))" >"$starts_file"

leave() { # leave CODE: this job does not start again
  rm -f "$PIVOTRL_STOP_FILE"* "$starts_file"
  exit "$1"
}

give_up() {
  echo "job $SLURM_JOB_ID: $1 starts in a row kept nothing (no step saved, no stage done): it is not queued again." \
    "See above what ended it; longer jobs (cluster.time_limit), or saving more often (checkpoint.every_minutes), may help." >&2
  leave 3
}
((starts <= max_fruitless_starts)) || give_up "$((starts - 1))" # SLURM queued it again by itself: a node was lost

step() { # one process per GPU on every node; all end when one fails, and none waits for another's end
  srun --export=ALL --kill-on-bad-exit=1 --wait=0 ${srun_flags[@]+"${srun_flags[@]}"} \
    ${container[@]+"${container[@]}"} "$python" -m "$@"
}

told=false # a warning to this shell alone (sbatch --signal=B:USR1@600) is passed on to the processes
trap 'told=true; scancel --signal=USR1 "$SLURM_JOB_ID" || true' USR1

finish() { # finish PID: waits for it through signals, and returns its code
  local code
  told=true
  while $told; do
    told=false code=0
    wait "$1" || code=$?
  done
  return "$code"
}

preempted() {
  local state
  state=$(scontrol show job "$SLURM_JOB_ID") || return 1
  [[ $state =~ JobState=RUNNING && $state =~ PreemptTime=[0-9] ]]
}

stopped() { # stopped CODE WHAT: ends the job where a process was told to stop; else returns
  # 138: a process had the signal before it could listen. srun gives other codes where it ended slower ones itself.
  if (($1 == 138)) && [[ ! -e $PIVOTRL_STOP_FILE ]]; then echo SIGUSR1 >"$PIVOTRL_STOP_FILE"; fi
  [[ -e $PIVOTRL_STOP_FILE ]] || return 0
  local why kept=false
  why=$(<"$PIVOTRL_STOP_FILE")
  [[ ! -e $PIVOTRL_STOP_FILE.kept ]] || kept=true
  rm -f "$PIVOTRL_STOP_FILE"*
  # A process that was killed (by the system, for memory) makes srun stop the others, too.
  if [[ $why == SIGTERM && $1 != 75 && $1 != 143 ]]; then leave "$1"; fi
  echo "job $SLURM_JOB_ID: $2 saved and stopped ($why)"
  if $kept; then echo 0 >"$starts_file"; fi
  # SIGTERM is scancel's, which wants no requeue, or a preemption's. SLURM requeues by itself only what a preemption had
  # to kill; a job that ends within the grace time (PreemptMode=REQUEUE) would be left FAILED.
  if [[ $why != SIGTERM ]] || preempted; then
    if ! $kept && ((starts >= max_fruitless_starts)); then give_up "$starts"; fi
    scontrol requeue "$SLURM_JOB_ID" || true
  fi
  exit 75
}

# A node that does not answer, or is slow or full, is named here, within a limit, before a model is loaded.
export PIVOTRL_CHECK_GPUS=$gpus_per_node PIVOTRL_CHECK_SECONDS=$check_seconds PIVOTRL_CHECK_DIR=$run_dir
check() { # srun itself waits for ever for a node whose daemon is lost
  step launch.node_check &
  local pid=$! end=$((SECONDS + check_seconds + 60)) code=0
  while kill -0 "$pid" 2>/dev/null; do
    if ((SECONDS > end)); then
      echo "node check: srun did not start on every node within $((check_seconds + 60)) s; see \`sinfo -N -l\` for $PIVOTRL_HOSTS" >&2
      kill -9 "$pid" 2>/dev/null || true
      leave 4
    fi
    sleep 1
  done
  finish "$pid" || code=$?
  stopped "$code" "the node check"
  ((code == 0)) || leave 4 # srun gives the code of a process that it ended itself
}
check

for stage in "${stages[@]}"; do
  code=0
  step launch.step "$stage" "$@" &
  finish "$!" || code=$?
  # The code of the first process that failed; srun then tells the others to stop, whose code is higher.
  if [[ -e $PIVOTRL_STOP_FILE.failed ]]; then leave "$(<"$PIVOTRL_STOP_FILE.failed")"; fi
  stopped "$code" "$stage"
  ((code == 0)) || leave "$code"
done
leave 0
