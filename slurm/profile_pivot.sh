#!/bin/bash -l
# Profile every turn with rollouts of the start policy, and select the pivots.
#   sbatch [sbatch flags] slurm/profile_pivot.sh domain=tau2 model=qwen3_30b_a3b cluster=h100 ...
#   sbatch --array=0-7 slurm/profile_pivot.sh ...   (docs/profiling.md: shards)
# Flags win over the lines below; `pivotrl launch profile` takes them from cluster=... instead.
#SBATCH --job-name=pivotrl-profile
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=04:00:00
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --export=HOME,USER,LANG,PATH,HF_HOME,WANDB_API_KEY,WANDB_BASE_URL,PIVOTRL_CACHE,PIVOTRL_PYTHON,PIVOTRL_ROOT
set -euo pipefail
stages=(turns warmup profile select)
if [[ -n ${SLURM_ARRAY_TASK_ID-} ]]; then # one shard of the profile; turns and warm-up are done before, merge and select after
  stages=(profile)
  set -- "$@" "profile.shard=$((SLURM_ARRAY_TASK_ID - ${SLURM_ARRAY_TASK_MIN:-0}))/$SLURM_ARRAY_TASK_COUNT"
fi
root=${PIVOTRL_ROOT:-$SLURM_SUBMIT_DIR} # SLURM runs a copy of this file: the checkout is where sbatch was called
# shellcheck source=slurm/common.sh
source "$root/slurm/common.sh"
