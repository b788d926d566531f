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
PIVOTRL_STOP_FILE=$run_dir/.stopped-$SLURM_JOB_ID
export MASTER_ADDR MASTER_PORT PIVOTRL_HOSTS SLURM_JOB_START_TIME SLURM_JOB_END_TIME PIVOTRL_STOP_FILE
rm -f "$PIVOTRL_STOP_FILE"*
echo "job $SLURM_JOB_ID (start $((${SLURM_RESTART_COUNT:-0} + 1))): $SLURM_NTASKS processes on $PIVOTRL_HOSTS"

step() { # one process per GPU on every node; all end when one fails, and none waits for another's end
  srun --export=ALL --kill-on-bad-exit=1 --wait=0 ${srun_flags[@]+"${srun_flags[@]}"} \
    ${container[@]+"${container[@]}"} "$python" -m "$@"
}

# A node that does not answer, or is slow or full, is named here, within a limit, before a model is loaded.
export PIVOTRL_CHECK_GPUS=$gpus_per_node PIVOTRL_CHECK_SECONDS=$check_seconds PIVOTRL_CHECK_DIR=$run_dir
check() { # srun itself waits for ever for a node whose daemon is lost
  step launch.node_check &
  local pid=$! end=$((SECONDS + check_seconds + 60))
  while kill -0 "$pid" 2>/dev/null; do
    if ((SECONDS > end)); then
      echo "node check: srun did not start on every node within $((check_seconds + 60)) s; see \`sinfo -N -l\` for $PIVOTRL_HOSTS" >&2
      kill -9 "$pid" 2>/dev/null || true
      return 4
    fi
    sleep 1
  done
  wait "$pid" || return 4 # srun gives the code of a process that it ended itself
}
check

for stage in "${stages[@]}"; do
  code=0
  step launch.step "$stage" "$@" || code=$?
  if [[ -e $PIVOTRL_STOP_FILE.failed ]]; then # of one process; srun then tells the others to stop, whose code is higher
    code=$(<"$PIVOTRL_STOP_FILE.failed")
    rm -f "$PIVOTRL_STOP_FILE"*
    exit "$code"
  fi
  if [[ -e $PIVOTRL_STOP_FILE ]]; then # srun gives another code where it ended slower processes itself
    why=$(<"$PIVOTRL_STOP_FILE")
    rm -f "$PIVOTRL_STOP_FILE"
    # A process that was killed (by the system, for memory) makes srun stop the others, too.
    if [[ $why == SIGTERM && $code != 75 && $code != 143 ]]; then exit "$code"; fi
    echo "job $SLURM_JOB_ID: $stage saved and stopped ($why)"
    # SIGTERM is scancel's, which wants no requeue, or a preemption's, which requeues by itself.
    if [[ $why != SIGTERM ]]; then scontrol requeue "$SLURM_JOB_ID" || true; fi
    exit 75
  fi
  ((code == 0)) || exit "$code"
done
