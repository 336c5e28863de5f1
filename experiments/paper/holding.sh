#!/usr/bin/env bash
# Run verbs of experiments.paper, $LANES at a time, on a remote machine that is held for several short calls.
#
#   experiments/paper/holding.sh                                                       # keep what was uploaded
#   experiments/paper/holding.sh 'designs --rows 12+12 "unshared KV"' 'peers'          # start the verbs, then wait
#   experiments/paper/holding.sh                                                       # wait on
#
# From the root of the repository. The verbs run in $KEEP, in the background, until $MINUTES are over. Every call waits
# for them, at most $WAIT minutes, and copies lines and figures of $RESULTS (the `--out` of the verbs) and the log so far
# to $OUT. What was uploaded as parts of a tar file in runs/carry is unpacked into $KEEP; with photographs but without
# tokens, the tokens and the statistics of the photographs are made first.
set -u
export KEEP=${KEEP:-/tmp/paper} MINUTES=${MINUTES:-25} LANES=${LANES:-1}

run_verbs() {
  cd "$KEEP" || return 1
  export PYTHONPATH="$KEEP/repository:$KEEP/repository/src" PYTHONUNBUFFERED=1
  [ -d carry ] && cat carry/* | tar x
  [ -d runs/meadow ] && ln -sfn runs/meadow meadow # as the bundled model, which is too large to come with the code
  common=(--features features)
  [ -f weights/inception.safetensors ] && common+=(--inception weights/inception.safetensors)
  [ -d weights/classifier ] && common+=(--classifier weights/classifier)
  photographs=(data/meadow-*.zip)
  if [ ${#photographs[@]} = 5 ] && [ ! -f runs/tokens/meadow-test/tokens.json ]; then
    python3 -m experiments.paper reference "${common[@]}" & # both wait for CPUs that decode images
    python3 -m experiments.meadow tokenize --tokenizer meadow --views 3 || return 1
    wait
    echo "== tokens and statistics: $SECONDS s"
  fi
  if [ "$LANES" -gt 1 ]; then # without MPS, processes take turns on the GPU, which is slower than one after the other
    export CUDA_MPS_PIPE_DIRECTORY=$KEEP/mps CUDA_MPS_LOG_DIRECTORY=$KEEP/mps
    mkdir -p "$KEEP/mps"
    nvidia-cuda-mps-control -d || return 1
  fi
  number=0
  for verb in "$@"; do
    while [ "$(jobs -rp | wc -l)" -ge "$LANES" ]; do wait -n; done
    number=$((number + 1))
    run_verb "$verb" 2>&1 | sed -u "s/^/$number  /" &
  done
  wait
  [ "$LANES" -gt 1 ] && echo quit | nvidia-cuda-mps-control
}

run_verb() {
  if ! left=$(awk -v m="$MINUTES" -v s="$SECONDS" 'BEGIN { m -= s / 60; printf "%.2f", m; exit m < 0.5 }'); then
    echo "== $1: not begun, $left minutes left"
    return
  fi
  echo "== $1: $left minutes left"
  eval "set -- $1"
  python3 -m experiments.paper "$1" "${common[@]}" --minutes "$left" "${@:2}"
  echo "== $SECONDS s"
}

if [ "${1:-}" = --run ]; then
  shift
  trap 'touch "$KEEP/finished"' EXIT
  run_verbs "$@"
  exit
fi
mkdir -p "$KEEP/repository"
[ -d runs/carry ] && cp -r runs/carry "$KEEP/"
if [ $# -gt 0 ]; then
  cp -r src experiments "$KEEP/repository/" # the next call replaces the files of this one
  rm -f "$KEEP/finished"
  : >"$KEEP/log"
  setsid "$KEEP/repository/experiments/paper/holding.sh" --run "$@" >"$KEEP/log" 2>&1 </dev/null &
fi
if [ ! -f "$KEEP/log" ]; then
  echo "== nothing runs here; parts of the upload: $(ls "$KEEP/carry" 2>/dev/null | wc -l)"
  exit 0
fi
last=$(awk -v m="${WAIT:-9.5}" -v s="$SECONDS" 'BEGIN { print int(s + 60 * m) }')
while [ ! -f "$KEEP/finished" ] && [ "$SECONDS" -lt "$last" ]; do
  sleep 1
done
results=$KEEP/${RESULTS:-runs/paper/results}
ls "$results"/lines/*.jsonl >/dev/null 2>&1 && cat "$results"/lines/*.jsonl >"$OUT/$(date -u +%Y%m%d-%H%M%S).jsonl"
cp "$results"/*.png "$OUT/" 2>/dev/null
cp "$KEEP/log" "$OUT/"
tail -n 60 "$KEEP/log"
[ -f "$KEEP/finished" ] || echo "== not finished; call again without verbs"
