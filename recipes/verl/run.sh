#!/usr/bin/env bash
# R³ in verl: recipes/verl/run.sh deepscaler-1.5b [verl's overrides, key=value …]
#
# R3_VERL_DATA    folder with train.parquet and heldout.parquet (r3 data verl …), the same path on every node  [data]
# R3_VERL_OUT     folder for checkpoints, the same path on every node                                   [checkpoints]
# R3_VERL_TRAINER v1, or v0 for verl's older trainer (RayPPOTrainer)                                             [v1]
# NNODES, GPUS_PER_NODE   size of the Ray cluster                                                              [1, 8]
# RAY_ADDRESS     set it (e.g. auto) to use a cluster that is up; without it verl starts Ray on this machine
#
# The same command resumes: verl goes on from the newest checkpoint.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
recipe="${1:?which one: deepscaler-1.5b, deepscaler-7b or gsm8k-smollm2}"
shift
if [ ! -f "$here/$recipe.yaml" ]; then
  echo "$here/$recipe.yaml: no such recipe; there are deepscaler-1.5b, deepscaler-7b and gsm8k-smollm2" >&2
  exit 2
fi
data="$(realpath -m "${R3_VERL_DATA:-data}")"
out="$(realpath -m "${R3_VERL_OUT:-checkpoints}")"
# vLLM's sampler wants flashinfer, for nothing here: it cannot give the log-probs of what was drawn from.
export VLLM_USE_FLASHINFER_SAMPLER="${VLLM_USE_FLASHINFER_SAMPLER:-0}"
# verl keeps quiet about a plugin that does not load; this does not.
python -W ignore -m r3.integrations.verl
# Paths in full and here, not in the recipe: Ray may run the trainer on another node, in another folder.
case "${R3_VERL_TRAINER:-v1}" in
  v1) command=verl.trainer.main_ppo ;;
  v0) command=r3.integrations.verl.v0 ;;
  *) echo "R3_VERL_TRAINER=$R3_VERL_TRAINER: there are v1 and v0" >&2; exit 2 ;;
esac
exec python -m "$command" --config-path "$here" --config-name "$recipe" \
  data.train_files="$data/train.parquet" data.val_files="$data/heldout.parquet" \
  trainer.default_local_dir="$out/$recipe" \
  trainer.nnodes="${NNODES:-1}" trainer.n_gpus_per_node="${GPUS_PER_NODE:-8}" "$@"
