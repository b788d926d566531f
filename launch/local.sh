#!/usr/bin/env bash
# One stage on the GPUs of this machine, one process each, without SLURM:
#   launch/local.sh 8 train domain=tau2 model=qwen3_30b_a3b ...
# `pivotrl run` needs no launcher where one process is enough.
set -euo pipefail
usage="usage: launch/local.sh PROCESSES STAGE [overrides]"
processes=${1:?$usage}
stage=${2:?$usage}
shift 2
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PIVOTRL_PYTHON:-$root/.venv/bin/python}
export PYTHONPATH=$root OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-120} # seconds to save in after a signal
PIVOTRL_STOP_FILE=$(mktemp)
export PIVOTRL_STOP_FILE
"$python" -m torch.distributed.run --standalone --nproc-per-node="$processes" \
  --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 -m launch.step "$stage" "$@" &
pid=$!
trap 'kill -TERM "$pid" 2>/dev/null || true' TERM INT
trap 'kill -USR1 "$pid" 2>/dev/null || true' USR1
code=0
while :; do # a signal ends `wait`, not the processes
  wait "$pid" && code=0 || code=$?
  kill -0 "$pid" 2>/dev/null || break
done
# torchrun says 1 for processes that were told to stop, and 138 or 143 where it was told before it could listen itself.
if [[ -s $PIVOTRL_STOP_FILE || $code == 138 || $code == 143 ]]; then code=75; fi
rm -f "$PIVOTRL_STOP_FILE"*
exit "$code"
