#!/usr/bin/env bash
# Every figure of README.md's section on one GPU, in the order of what is worth most if time runs out; some 25 minutes on
# an H200, by the times of its parts. Each script writes its JSON when it is through, so a run that is cut short keeps what was measured.
#
#   benchmarks/all.sh FOLDER [rollout] [step] [overhead] [update]      all of them by default
set -uo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
out="$(realpath -m "${1:?where to: a folder for the JSON files}")"
shift
mkdir -p "$out"
cd "$here/.."
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
today="$(date +%F)"
measure() { # name, script, options
  local name="$1" script="$2"
  shift 2
  python3 "benchmarks/$script.py" "$@" --out "$out/$name-$today.json" || echo "$name: failed" >&2
}
[ $# -gt 0 ] || set -- step rollout overhead update
for name in "$@"; do
  case "$name" in
    step) measure step step --mean 800 --limit 2560 --steps 3 --engines ours-grpo,ours-r3,trl-bf16 --timeout 300 ;;
    rollout)
      measure ragged rollout --engines native,vllm-logprobs --cases ragged --timeout 300
      measure decode rollout --engines native,vllm,vllm-logprobs --cases decode-256x512,decode-512x1024,decode-64x4096 --timeout 300 ;;
    overhead) measure overhead overhead --shape 1.5b --steps 4 --mean 600 --limit 2048 --timeout 200 ;;
    update) measure update update --engines ours,trl-fp32 --timeout 300 ;;
    *) echo "no benchmark $name; there are rollout, step, overhead and update" >&2; exit 2 ;;
  esac
done
