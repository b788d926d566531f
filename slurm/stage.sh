#!/bin/bash -l
# One stage by its name (`pivotrl --help` lists them).
#   sbatch [sbatch flags] slurm/stage.sh STAGE domain=tau2 model=qwen3_30b_a3b cluster=h100 ...
# Flags win over the lines below; `pivotrl launch STAGE` takes them from cluster=... instead.
#SBATCH --job-name=pivotrl-stage
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=04:00:00
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --export=HOME,USER,LANG,PATH,HF_HOME,WANDB_API_KEY,WANDB_BASE_URL,PIVOTRL_CACHE,PIVOTRL_PYTHON,PIVOTRL_ROOT
set -euo pipefail
stages=("${1:?usage: sbatch slurm/stage.sh STAGE [overrides]}")
shift
root=${PIVOTRL_ROOT:-$SLURM_SUBMIT_DIR} # SLURM runs a copy of this file: the checkout is where sbatch was called
# shellcheck source=slurm/common.sh
source "$root/slurm/common.sh"
