#!/usr/bin/env bash
# One call of a holding: run verbs of experiments.paper one after the other, until $MINUTES of this call are over.
#
#   experiments/paper/holding.sh 'designs --rows 12+12 "unshared KV" --train-only' 'steps'
#
# From the root of the repository. What was carried under runs/, weights/ and data/ is copied to $KEEP, where the verbs
# work and where it stays while the machine is held. Tokens are unpacked, or made once all photographs and the tokenizer
# are there. What comes back lies in $OUT.
set -u
repo=$PWD keep=${KEEP:-/tmp/paper} minutes=${MINUTES:-9}
export PYTHONPATH="$repo:$repo/src" PYTHONUNBUFFERED=1
mkdir -p "$keep"
for folder in runs weights data; do
  [ -d "$folder" ] && cp -rn "$folder" "$keep/"
done
cd "$keep" || exit 1
for packed in runs/carry-tokens/*/; do
  [ -d "$packed" ] && [ ! -f "runs/tokens/meadow-$(basename "$packed")/tokens.json" ] || continue
  python3 -c '
from pathlib import Path
from experiments.token_bits import unpack_tokens
for packed in Path("runs/carry-tokens").iterdir():
    unpack_tokens(packed, Path("runs/tokens", f"meadow-{packed.name}"))
' || exit 1
done
photographs=(data/meadow-*.zip)
if [ ${#photographs[@]} = 5 ] && [ -d weights/meadow-tokenizer ] && [ ! -f runs/tokens/meadow-test/tokens.json ]; then
  python3 -m experiments.meadow tokenize --tokenizer weights/meadow-tokenizer --views 3 || exit 1
fi
[ -d runs/meadow ] && ln -sfn runs/meadow meadow # `--model meadow`
common=(--features features)
[ -f weights/inception.safetensors ] && common+=(--inception weights/inception.safetensors)
[ -d weights/classifier ] && common+=(--classifier weights/classifier)
code=0
for verb in "$@"; do
  eval "set -- $verb"
  table=$1
  shift
  if [ "$table" = send ]; then
    python3 -m experiments.paper send --pieces "$OUT" "$@" || code=$?
    continue
  fi
  if ! left=$(awk -v m="$minutes" -v s="$SECONDS" 'BEGIN { m -= s / 60; printf "%.2f", m; exit m < 0.5 }'); then
    echo "== $verb: not begun, $left minutes left"
    continue
  fi
  echo "== $verb: $left minutes left"
  python3 -m experiments.paper "$table" "${common[@]}" --minutes "$left" --pieces "$OUT" "$@" || code=$?
  echo "== $SECONDS s"
done
exit "$code"
