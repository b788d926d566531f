#!/bin/bash
# profile -> train and sft -> evaluate, each submitted now and started when those before it have ended well.
#   slurm/pipeline.sh [--dry-run] [sbatch flags, as --nodes=4] domain=tau2 model=qwen3_30b_a3b cluster=h100 ...
# Run it on the login node, from the checkout. --dry-run prints the commands.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

dry_run=false
flags=()
while [[ ${1-} == --* ]]; do
  if [[ $1 == --dry-run ]]; then dry_run=true; else flags+=("$1"); fi
  shift
done

submit() { # submit SCRIPT JOB_ID...: prints the new job's id
  local script=$1 after=()
  shift
  if (($#)); then after=("--dependency=afterok:$(IFS=: && echo "$*")" --kill-on-invalid-dep=yes); fi
  local command=(sbatch --parsable ${flags[@]+"${flags[@]}"} ${after[@]+"${after[@]}"} "slurm/$script" ${overrides[@]+"${overrides[@]}"})
  echo "${command[*]}" >&2
  if $dry_run; then echo "<${script%.sh}>"; else "${command[@]}" | cut -d ';' -f 1; fi
}

overrides=("$@")
profile=$(submit profile_pivot.sh)
train=$(submit train_pivot.sh "$profile")
sft=$(submit sft.sh "$profile")
evaluate=$(submit evaluate.sh "$train" "$sft")
echo "submitted: profile $profile, train $train, sft $sft, evaluate $evaluate"
