#!/bin/bash -l
# PivotRL from the pivots; whatever comes before and is not done yet is done first.
#   sbatch [sbatch flags] slurm/train_pivot.sh domain=tau2 model=qwen3_30b_a3b cluster=h100 ...
# Flags win over the lines below; `pivotrl launch train` takes them from cluster=... instead.
#SBATCH --job-name=pivotrl-train
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=04:00:00
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --export=HOME,USER,LANG,PATH,HF_HOME,WANDB_API_KEY,WANDB_BASE_URL,PIVOTRL_CACHE,PIVOTRL_PYTHON,PIVOTRL_ROOT
set -euo pipefail
stages=(turns warmup profile select train)
root=${PIVOTRL_ROOT:-$SLURM_SUBMIT_DIR} # SLURM runs a copy of this file: the checkout is where sbatch was called
# shellcheck source=slurm/common.sh
source "$root/slurm/common.sh"
