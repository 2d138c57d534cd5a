#!/usr/bin/env bash
# Builds, tests, checks and measures on a machine with an NVIDIA GPU and torch with CUDA; nothing is downloaded.
#
#   benchmarks/gpu.sh OUTDIR [--part build|test|sanitize|step|linear|train|tune] [--force] [--rehearse]
#
# Without --part: all, in this order. Each part ends within 9 minutes, cut short if need be: the same command then goes
# on where it stopped. A part that is done is not done again, unless forced. --rehearse runs everything on the CPU with a
# few tiny cases, to see that the script works. OUTDIR gets 8 files at most; parts.txt says what is done.
set -euo pipefail

usage() {
  echo "gpu.sh: $1; usage: benchmarks/gpu.sh OUTDIR [--part ${parts[*]}] [--force] [--rehearse]" >&2
  exit 2
}

parts=(build test sanitize step linear train tune)
out="" chosen=("${parts[@]}") force="" rehearse=""
while (($#)); do
  case $1 in
    --part)
      [[ -n ${2:-} && " ${parts[*]} " == *" $2 "* ]] || usage "there is no part '${2:-}'"
      chosen=("$2") && shift ;;
    --force) force=yes ;;
    --rehearse) rehearse=yes ;;
    -*) usage "there is no option $1" ;;
    *) [[ -z $out ]] || usage "one OUTDIR, got $out and $1" && out=$1 ;;
  esac
  shift
done
[[ -n $out ]] || usage "OUTDIR is missing"
mkdir -p "$out" 2>/dev/null && [[ -w $out ]] || usage "$out can't be written"
out=$(cd "$out" && pwd)
cd "$(dirname "$0")/.."

# The device boundary: here, and nowhere below, a rehearsal differs.
device=cuda seconds=500 workers=4
describe=(nvidia-smi)
install=(python3 -m pip install -v --no-index --no-build-isolation --no-deps -e .)
targets=cuda-native,cuda-triton
tests=(-k "not (cpu-reference or cpu-native or cpu-triton or cpu-cuda)" tests)
without_waiting=(tests/ops/test_cuda_graphs.py tests/amp/test_amp_steps.py tests/optim/test_step_costs.py)
sanitizer=(compute-sanitizer --error-exitcode 9 --print-limit 20 --tool)
step=("step*cuda" "grad_stats*cuda" "unscale_*cuda")
linear=("linear_act*cuda*eager" "linear_act*cuda*autotune")
train=("train*cuda*gpt2*fused" "train*cuda*mlp-20*fused" "train*cuda")
if [[ -n $rehearse ]]; then
  device=cpu seconds=400 workers=1
  describe=(true)
  install=(echo "Successfully rehearsed")
  targets=cpu-reference
  tests=(-k "cpu-reference and huge" tests/ops/test_huge.py tests/ops/grads/test_grad_stats.py)
  without_waiting=(-k cpu-native tests/ops/test_cuda_graphs.py)
  sanitizer=(env -u) # runs what comes behind the tool's name
  step=("unscale_ cpu-1 fp32 1x2^20")
  linear=("linear_act*bf16 64x768x3072*eager")
  train=("train cpu*mlp-6x512*default")
fi

started=$SECONDS
# Runs a command for as long as the part has left, or for $most seconds, then interrupts it: what it has measured by
# then is kept.
limited() {
  local left=$((seconds - SECONDS + started))
  ((left > 5)) || return 124
  ((left <= ${most:-$left})) || left=$most
  timeout --signal=INT --kill-after=15 "$left" "$@"
}

build() {
  "${describe[@]}"
  python3 -c 'import sys, torch; print("Python", sys.version, "torch", torch.__version__, "CUDA", torch.version.cuda)'
  if compgen -G "benchmarks/wheels/*.whl" >/dev/null; then
    python3 -m pip install -q --no-index --no-deps benchmarks/wheels/*.whl
  fi
  local module carry="put its wheel into benchmarks/wheels"
  for module in setuptools pytest hypothesis expecttest numpy triton; do
    python3 -c "import $module" 2>/dev/null || echo "MISSING: $module is not installed; $carry"
  done
  command -v ninja || echo "MISSING: ninja is not installed; $carry"
  limited "${install[@]}" | grep -E "mpkernels:|rror|Successfully"
  python3 -c "import mpkernels; print('kernels:', *mpkernels.backends('adamw_', '$device'))"
}

# File by file: one that hangs or crashes costs its own time only, and what has passed is not run again.
run_tests() {
  touch "$out/test.txt"
  sed -i '/^PASSED/!d' "$out/test.txt"
  local file found
  found=$(limited python3 -m pytest -q --collect-only --continue-on-collection-errors "${tests[@]}" 2>&1) ||
    printf 'FAILED to collect all\n%s\n' "$(tail -30 <<<"$found")" >>"$out/test.txt"
  found=$(grep -- "${targets%%-*}-" <<<"$found" || true)$'\n'$found # first those that name a kernel on this device
  for file in $(grep -oE '^tests/[a-z_0-9/]+\.py' <<<"$found" | awk '!seen[$0]++'); do
    ! grep -q "^PASSED $file" "$out/test.txt" || continue
    while (($(jobs -rp | wc -l) >= workers)); do sleep 0.2; done
    run_file "$file" &
  done
  wait
  cat "$out/test.txt"
  [[ -s $out/test.txt ]] && ! grep -qv "^PASSED" "$out/test.txt"
}

run_file() {
  local code=0 log
  log=$(most=200 limited python3 -m pytest -q --no-header --maxfail=5 -p no:cacheprovider \
    "--require=$targets" "${tests[@]:0:2}" "$1" 2>&1 | tail -60) || code=$?
  case $code in
    0) echo "PASSED $1: ${log##*$'\n'}" ;;
    124 | 130 | 137) echo "OUT OF TIME $1" ;;
    *) printf 'FAILED %s\n%s\n' "$1" "$log" ;;
  esac >>"$out/test.txt"
}

sanitize() {
  local tool code=0
  for tool in memcheck racecheck; do
    echo "== $tool"
    limited "${sanitizer[@]}" $tool python3 -m benchmarks.every_op "$device" || code=$?
  done
  return $code
}

bench() {
  local file=$1 pattern code=0
  shift
  for pattern; do
    limited python3 -m mpkernels bench --resume --json "$out/$file.json" --only "$pattern" || code=$?
  done
  return $code
}

measure_step() {
  local code=0
  limited python3 -m pytest -q -p no:cacheprovider "${without_waiting[@]}" || code=$?
  bench step "${step[@]}" || code=$?
  return $code
}

run_part() {
  case $1 in
    build) build 2>&1 | tee "$out/build.txt" ;;
    test) run_tests ;;
    sanitize) sanitize 2>&1 | tee "$out/sanitize.txt" ;;
    step) measure_step ;;
    linear) bench linear "${linear[@]}" ;;
    train) bench train "${train[@]}" ;;
    tune) limited python3 -m benchmarks.tune "$out/tune.json" "$device" ;;
  esac
}

touch "$out/parts.txt"
failed=0
for part in "${chosen[@]}"; do
  if [[ -n $force ]]; then
    sed -i "/^$part done/d" "$out/parts.txt"
    rm -f "$out/$part.json" "$out/$part.txt"
  elif grep -q "^$part done" "$out/parts.txt"; then
    echo "== $part: done before"
    continue
  fi
  echo "== $part"
  started=$SECONDS code=0
  set +e # or bash would ignore it in all that runs under an ||
  (set -e && run_part "$part")
  code=$?
  set -e
  if ((code == 0)); then
    echo "$part done in $((SECONDS - started)) s" | tee -a "$out/parts.txt"
  else
    echo "$part ended with $code after $((SECONDS - started)) s: run it again to go on" | tee -a "$out/parts.txt"
    failed=1
  fi
done
exit $failed
