#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# From a clone to an answered question and a finetuned adapter, with the model's blocks streamed.
#
#   examples/quickstart.sh [--model DIR] [--cpu]
#
#   --model DIR  a Hugging Face folder of your own (default: SmolLM2-135M-Instruct, prepared in models/)
#   --cpu        do not use CUDA, whatever is here
set -euo pipefail

# What the main job does; the defaults end within 3 minutes on 2 cores.
QUESTION="Name three rivers in Europe."
PROMPT="And it came to pass in those days, that"
STORAGE=file        # blocks are read from the checkpoint itself while the model runs
PREFETCH=1          # 2 blocks resident: one computes, one is on its way
STEPS=10
BATCH=1
SEQ_LEN=256
LEARNING_RATE=1e-3
NEW_TOKENS=32

usage() {
  sed -n '3,8s/^# \{0,1\}//p' "$0"
  exit 2
}

model= device=()
while [ $# -gt 0 ]; do
  case $1 in
    --model) [ $# -ge 2 ] || usage; model=$(realpath "$2"); shift 2 ;;
    --cpu) device=(--device cpu); shift ;;
    *) usage ;;
  esac
done

cd "$(dirname "${BASH_SOURCE[0]}")/.."
. examples/setup.sh

setup_program
if [ -z "$model" ]; then
  model=$SETUP_ROOT/models/SmolLM2-135M-Instruct
  setup_model "$model"
fi

bin=build/release/bin/block-streamer
out=build/quickstart
data=examples/data
common=(--model "$model" --storage "$STORAGE" --prefetch-ahead "$PREFETCH" "${device[@]}")
mkdir -p "$out"

heading() { printf '\n--- %s\n' "$*"; }

describe_run() { # statistics file
  python3 - "$1" <<'PY'
import json, sys
s = json.load(open(sys.argv[1]))
mib = lambda key: s.get(key, 0) / 2**20
print(f"    {s.get('passes', 0)} passes, {s.get('visits', 0)} block visits; at most "
      f"{s.get('peak_resident_blocks', 0)} blocks ({mib('peak_resident_bytes'):.1f} MiB) resident"
      + (f", and {mib('bound_bytes'):.1f} MiB for the one that is converted" if s.get('bound_bytes') else ""))
print(f"    read {mib('bytes_read'):.0f} MiB for {mib('bytes_needed'):.0f} MiB needed; waited "
      f"{s.get('storage_wait_s', 0):.2f} s for storage, {s.get('device_wait_s', 0):.2f} s for the device")
PY
}

held_out_loss() { # name [arguments…]
  local name=$1
  shift
  "$bin" evaluate "${common[@]}" --data $data/genesis-held-out.txt --seq-len "$SEQ_LEN" --stats "$out/$name.json" "$@" |
    tee "$out/$name.txt" >&2
  grep -oE 'loss[^0-9]*[0-9]+\.[0-9]+' "$out/$name.txt" | head -1 | grep -oE '[0-9]+\.[0-9]+$'
}

continue_prompt() { # [arguments…]
  "$bin" generate "${common[@]}" --prompt "$PROMPT" --max-new-tokens "$NEW_TOKENS" "$@"
  echo
}

heading "CUDA backend: $(sed -n 's/^BLOCK_STREAMER_CUDA_STATUS:INTERNAL=//p' build/release/CMakeCache.txt)${device:+ (not used: --cpu)}"

heading "What is resident and what streams"
"$bin" inspect --model "$model"

heading "$QUESTION"
"$bin" generate "${common[@]}" --chat --prompt "$QUESTION" --max-new-tokens $((2 * NEW_TOKENS)) --stats "$out/answer.json"
echo
describe_run "$out/answer.json"

heading "Before finetuning: \"$PROMPT …\""
continue_prompt | tee "$out/before.txt"
before=$(held_out_loss loss-before)

heading "Finetuning on $data/genesis.txt ($STEPS steps of $BATCH × $SEQ_LEN tokens)"
"$bin" finetune "${common[@]}" --data $data/genesis.txt --output "$out/adapter" --overwrite \
  --steps "$STEPS" --batch "$BATCH" --seq-len "$SEQ_LEN" --lr "$LEARNING_RATE" --seed 1 --stats "$out/finetune.json"
describe_run "$out/finetune.json"

heading "After finetuning: \"$PROMPT …\""
continue_prompt --adapter "$out/adapter" | tee "$out/after.txt"
after=$(held_out_loss loss-after --adapter "$out/adapter")

heading "Held-out loss (chapters that were not trained on): $before before, $after after"
echo "Adapter: $out/adapter (PEFT's format)"
python3 -c 'import sys; sys.exit(not float(sys.argv[2]) < float(sys.argv[1]))' "$before" "$after" || {
  echo "The held-out loss did not fall." >&2
  exit 1
}
