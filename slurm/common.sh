# shellcheck shell=bash
# Sourced by the scripts beside it: the settings of cluster=..., then the body that all jobs share.
: "${root:?source this from a script of slurm/}"
export PYTHONPATH=$root
settings=$("${PIVOTRL_PYTHON:-$root/.venv/bin/python}" -m launch.settings "$@")
eval "$settings"
# shellcheck source=launch/job.sh
source "$root/launch/job.sh"
