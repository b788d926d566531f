#!/bin/bash -l
# Success in the domain and retention outside it, for the policies that have been trained; then the report.
#   sbatch [sbatch flags] slurm/evaluate.sh domain=tau2 model=qwen3_30b_a3b cluster=h100 ...
# Flags win over the lines below; `pivotrl launch evaluate` takes them from cluster=... instead.
#SBATCH --job-name=pivotrl-evaluate
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=04:00:00
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --export=HOME,USER,LANG,PATH,HF_HOME,WANDB_API_KEY,WANDB_BASE_URL,PIVOTRL_CACHE,PIVOTRL_PYTHON,PIVOTRL_ROOT
set -euo pipefail
stages=(evaluate report)
root=${PIVOTRL_ROOT:-$SLURM_SUBMIT_DIR} # SLURM runs a copy of this file: the checkout is where sbatch was called
# shellcheck source=slurm/common.sh
source "$root/slurm/common.sh"
