#!/bin/bash -l
# A checkpoint into another format (docs/checkpoints.md). It needs no GPU; its arguments are those of checkpoint_tools.convert.
#   sbatch [sbatch flags] slurm/convert.sh hf-to-megatron /models/Qwen3-30B-A3B /data/megatron
#SBATCH --job-name=pivotrl-convert
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --export=HOME,USER,LANG,PATH,HF_HOME,WANDB_API_KEY,WANDB_BASE_URL,PIVOTRL_CACHE,PIVOTRL_PYTHON,PIVOTRL_ROOT
set -euo pipefail
root=${PIVOTRL_ROOT:-$SLURM_SUBMIT_DIR} # SLURM runs a copy of this file: the checkout is where sbatch was called
export PYTHONPATH=$root
exec "${PIVOTRL_PYTHON:-$root/.venv/bin/python}" -m checkpoint_tools.convert "$@"
