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
exec "$python" -m torch.distributed.run --standalone --nproc-per-node="$processes" -m launch.step "$stage" "$@"
