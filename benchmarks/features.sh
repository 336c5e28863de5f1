#!/usr/bin/env bash
# Test and measure the kernel features that are off (docs/performance/measure.md), in at most nine minutes on one GPU.
#
#   benchmarks/features.sh OUT
#
# From the root of the repository. Each command has a time limit, and the next one runs whatever became of it. OUT gets
# the records and features.log with all that was printed; a summary is printed at the end.
set -u
out=${1:?usage: benchmarks/features.sh OUT}
mkdir -p "$out"
export PYTHONPATH="$PWD:$PWD/src" PYTHONUNBUFFERED=1
summary=()

run() { # NAME SECONDS COMMAND...
  local name=$1 limit=$2 began=$SECONDS code=0
  shift 2
  echo "== $name: $*"
  timeout --kill-after=10 "$limit" "$@" 2>&1 | tee -a "$out/features.log"
  code=${PIPESTATUS[0]}
  summary+=("$name: exit $code after $((SECONDS - began)) s")
}

run "tests of folded norms" 100 python3 -m pytest -m gpu tests/gpu/test_folded_norms.py
run "folded norms" 120 python3 benchmarks/engine.py --rows "L, 32 steps" "L, 64 steps" "XL, 32 steps" \
  --switch folded_norms --out "$out/folded-norms.json"
run "tests of captured steps" 60 python3 -m pytest -m gpu tests/decode/test_continuous.py
run "captured steps" 70 python3 -m benchmarks.continuous --model arpg-l --random --images 512 --running 64
run "tests of pixels" 60 python3 -m pytest -m gpu tests/gpu/test_fused_pixels.py tests/decode/test_pixels.py
run "pixels" 130 python3 benchmarks/pixels.py --batch 64 --tokenizer vq-16 --tiles --jobs 16 --model arpg-l \
  --out "$out/pixels-vq-16.json"
printf '%s\n' "${summary[@]}"
