#!/usr/bin/env bash
# Run commands on a remote machine that is kept for several short calls, $LANES at a time.
#
#   experiments/remote_job.sh                                                             # keep what was uploaded
#   experiments/remote_job.sh 'paper designs --rows 12+12 "unshared KV"' 'pytest -m gpu'  # start the commands, then wait
#   experiments/remote_job.sh                                                             # wait on
#
# From the root of the repository. The commands run in a copy of it in $KEEP, in the background; none begins after
# $MINUTES. `paper VERB ...` is `python3 -m experiments.paper VERB ...` with the options that all verbs share.
# Every call waits for the commands, at most $WAIT minutes, and copies to $OUT: lines and figures of $RESULTS (the `--out`
# of the verbs), the files that commands wrote to out/, and the log so far.
#
# What travels in runs/: carry/, parts of a tar file that is unpacked in the copy; site-packages/, Python packages that the
# machine lacks (large ones in the tar file); git/, a `.git` folder, for records that name the commit. With photographs
# but without tokens, the tokens and the statistics of the photographs are made first.
set -u
export KEEP=${KEEP:-/tmp/remote-job} MINUTES=${MINUTES:-25} LANES=${LANES:-1}
COPY=$KEEP/repository

run_all() {
  cd "$COPY" || return 1
  export PYTHONPATH="$COPY:$COPY/src:$KEEP/start" PYTHONUNBUFFERED=1
  mkdir -p out "$KEEP/start"
  echo "import site; site.addsitedir('$COPY/runs/site-packages')" >"$KEEP/start/sitecustomize.py" # with `.pth` files
  [ -d "$KEEP/carry" ] && cat "$KEEP"/carry/* >"$KEEP/carry.tar" && tar xf "$KEEP/carry.tar" # compressed or not
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
  for command in "$@"; do
    while [ "$(jobs -rp | wc -l)" -ge "$LANES" ]; do wait -n; done
    number=$((number + 1))
    run_one "$command" 2>&1 | sed -u "s/^/$number  /" &
  done
  wait
  [ "$LANES" -gt 1 ] && echo quit | nvidia-cuda-mps-control
}

run_one() {
  if ! left=$(awk -v m="$MINUTES" -v s="$SECONDS" 'BEGIN { m -= s / 60; printf "%.2f", m; exit m < 0.5 }'); then
    echo "== $1: not begun, $left minutes left"
    return
  fi
  echo "== $1: $left minutes left"
  eval "$1"
  echo "== exit code $?, $SECONDS s"
}

paper() {
  python3 -m experiments.paper "$1" "${common[@]}" --minutes "$left" "${@:2}"
}

if [ "${1:-}" = --run ]; then
  shift
  trap 'touch "$KEEP/finished"' EXIT
  run_all "$@"
  exit
fi
mkdir -p "$COPY"
[ -d runs/carry ] && cp -r runs/carry "$KEEP/"
if [ $# -gt 0 ]; then
  tar c --exclude ./runs --exclude ./.git --exclude ./.venv . | tar x -C "$COPY" # the next call replaces the files here
  [ -d runs/site-packages ] && mkdir -p "$COPY/runs" && cp -r runs/site-packages "$COPY/runs/"
  [ -d runs/git ] && cp -rT runs/git "$COPY/.git"
  rm -f "$KEEP/finished"
  : >"$KEEP/log"
  setsid "$COPY/experiments/remote_job.sh" --run "$@" >"$KEEP/log" 2>&1 </dev/null &
fi
if [ ! -f "$KEEP/log" ]; then
  echo "== nothing runs here; parts of the upload: $(ls "$KEEP/carry" 2>/dev/null | wc -l)"
  exit 0
fi
last=$(awk -v m="${WAIT:-9.5}" -v s="$SECONDS" 'BEGIN { print int(s + 60 * m) }')
while [ ! -f "$KEEP/finished" ] && [ "$SECONDS" -lt "$last" ]; do
  sleep 1
done
results=$COPY/${RESULTS:-runs/paper/results}
ls "$results"/lines/*.jsonl >/dev/null 2>&1 && cat "$results"/lines/*.jsonl >"$OUT/$(date -u +%Y%m%d-%H%M%S).jsonl"
for file in "$results"/*.png "$COPY"/out/*; do [ -f "$file" ] && cp "$file" "$OUT/"; done
cp "$KEEP/log" "$OUT/"
tail -n 60 "$KEEP/log"
[ -f "$KEEP/finished" ] || echo "== not finished; call again without commands"
