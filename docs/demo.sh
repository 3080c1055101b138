#!/usr/bin/env bash
# What `make demo` shows: a training run that is killed while it saves, goes on with another number of ranks, and whose
# checkpoint is looked at, merged and asked. On two CPU cores; everything is in a temporary folder.
set -euo pipefail

fsdp_ckpt=$(realpath -s "${FSDP_CKPT:-$(dirname "$0")/../.venv/bin/fsdp-ckpt}")
export OMP_NUM_THREADS=1
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"

say() { printf '\n# %s\n' "$*"; }
run() {
    printf '$ fsdp-ckpt %s\n' "$*"
    "$fsdp_ckpt" "$@" 2>&1
}

say "A configuration: FSDP2, each layer of the model one unit. \`config init\` without --yes asks for it."
run config init fsdp.yaml --yes -n 2
run config check fsdp.yaml

say "Train a small decoder to sort digits, on 2 ranks. Every rank is killed with SIGKILL while step 200 is being saved."
code=0
run train run --config fsdp.yaml --kill-at 200 || code=$?
[ "$code" -eq 137 ] || { echo "exit code $code, not 137: killed"; exit 1; }
echo "(exit code 137: killed)"

say "What is left: step 100 is whole, and there is no step 200. A checkpoint appears complete, or not at all."
printf '$ ls run\n' && ls run

say "Go on where it was, on 4 ranks instead of 2: model, optimizer and scheduler are cut anew, each rank reads its part."
run train run --config fsdp.yaml --resume auto --nproc 4

say "What is in the last checkpoint? Nothing in it is run to find out."
run inspect run/step-400

say "One safetensors file that from_pretrained, vLLM and everything else can load, every checksum compared:"
run merge run/step-400 merged

say "Has it learned, across the kill? It sorts numbers that it has never seen:"
run generate merged 31415926 27182818 16180339 --held-out 500

cat <<END

# Now yours:
#   fsdp-ckpt inspect PATH/TO/CHECKPOINT                  what is in it, and is it whole?
#   fsdp-ckpt merge PATH/TO/CHECKPOINT OUT --dry-run      what would be written? Nothing is.
#   fsdp-ckpt launch --config fsdp.yaml train.py          your script, made for accelerate launch or torchrun
# In your own loop: docs/training.md
END
