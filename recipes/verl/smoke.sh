#!/usr/bin/env bash
# Does R³ in verl work on this machine? Three real steps of a small model on one GPU, a checkpoint, and a resume.
#
#   R3_DATA=… recipes/verl/smoke.sh MODEL [verl's overrides, key=value …]
#
# MODEL is the folder that recipes/sft-gsm8k-smollm2.yaml wrote. 32 problems, so that a step is an epoch and replay and
# reflection have a past from the second step on. Everything goes to verl-smoke/; the last line says how it went.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
model="$(realpath "${1:?which model: the folder of the warm start}")"
shift
work="$(realpath -m verl-smoke)"
if [ -e "$work" ]; then
  echo "$work is there already: remove it, or start from another folder" >&2
  exit 2
fi
mkdir -p "$work"
python -W ignore -m r3 data verl "$here/../gsm8k-smollm2.yaml" 'task.rows=[3764,3828]' task.heldout=32 --to "$work/data"

steps() { # name, steps in all, overrides
  local name="$1" until="$2"
  shift 2
  echo "$name: until step $until; its log: $work/$name.log"
  VERL_FILE_LOGGER_PATH="$work/$name.jsonl" R3_VERL_DATA="$work/data" R3_VERL_OUT="$work/checkpoints" GPUS_PER_NODE=1 \
    "$here/run.sh" gsm8k-smollm2 actor_rollout_ref.model.path="$model" trainer.total_training_steps="$until" "$@" \
    >"$work/$name.log" 2>&1 || { tail -40 "$work/$name.log" >&2; return 1; }
}
cd "$work" # verl and Ray leave files where they are started
steps first 3 "$@"
steps resumed 4 "$@"
exec python "$here/smoke.py" "$work"
