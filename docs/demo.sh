#!/usr/bin/env bash
# What `make demo` shows: a checkpoint that two ranks wrote, looked at and merged into a temporary folder.
set -euo pipefail
cd "$(dirname "$0")/.."

fsdp_ckpt=${FSDP_CKPT:-.venv/bin/fsdp-ckpt}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
checkpoint=$scratch/checkpoint-2000
merged=$scratch/merged
mkdir "$checkpoint"
cp -r fixtures/torch-2.13.0/fsdp2_sharded_w2/{pytorch_model_fsdp_0,optimizer_0} "$checkpoint"

say() { printf '\n# %s\n' "$*"; }
run() {
    printf '$ fsdp-ckpt %s\n' "$*"
    "$fsdp_ckpt" "$@"
}

say "A checkpoint folder as Accelerate's save_state leaves it: model and optimizer, written by two ranks with FSDP2."
run inspect "$checkpoint"

say "Which rank wrote how much?"
run inspect "$checkpoint" --shards

say "One safetensors file that from_pretrained, vLLM and everything else can load:"
run merge "$checkpoint" "$merged"

say "And what came out:"
run inspect "$merged"

cat <<END

# Now yours. Give it the folder of .distcp files, or any folder above it:
#   $fsdp_ckpt inspect PATH/TO/CHECKPOINT
#   $fsdp_ckpt merge PATH/TO/CHECKPOINT OUT --dry-run     says what would be written, and writes nothing
#   $fsdp_ckpt merge PATH/TO/CHECKPOINT OUT
END
