#!/usr/bin/env bash
# Checks and measures on a machine with an NVIDIA GPU and torch with CUDA, in 25 minutes; nothing is downloaded.
#
#   benchmarks/gpu.sh OUTDIR [--from FOLDER] [--part doctor|step|linear|train|test|sanitize|tuned] [--rehearse]
#
# A call ends within 10 minutes; the same command again goes on where it stopped. Each part has a share of the 25
# minutes, in the order above; what is left then goes to the parts that were cut off. Every call first builds the
# kernels, unless the checkout's library loads. --from takes over an earlier call's files, where OUTDIR is a new one.
# --part runs one part, also one that has ended. --rehearse runs everything on the CPU with a few tiny cases.
# A Python package that is missing there is taken from its wheel in benchmarks/wheels/. OUTDIR gets 7 files at most.
set -euo pipefail

parts=(doctor step linear train test sanitize tuned)
declare -A share=([doctor]=120 [step]=300 [linear]=270 [train]=180 [test]=240 [sanitize]=150 [tuned]=150) # build: 90
call=540 most=480 least=20 # seconds: of a call, of a part in a call, and with which a part is worth beginning

usage() {
  echo "gpu.sh: $1; usage: benchmarks/gpu.sh OUTDIR [--from FOLDER] [--part ${parts[*]}] [--rehearse]" >&2
  exit 2
}

out="" from="" asked="" rehearse=""
while (($#)); do
  case $1 in
    --part)
      [[ -n ${2:-} && " ${parts[*]} " == *" $2 "* ]] || usage "there is no part '${2:-}'"
      asked=$2 && shift ;;
    --from)
      [[ -d ${2:-} ]] || usage "there is no folder '${2:-}'"
      from=$2 && shift ;;
    --rehearse) rehearse=yes ;;
    -*) usage "there is no option $1" ;;
    *) [[ -z $out ]] || usage "one OUTDIR, got $out and $1" && out=$1 ;;
  esac
  shift
done
[[ -n $out ]] || usage "OUTDIR is missing"
mkdir -p "$out" 2>/dev/null && [[ -w $out ]] || usage "$out can't be written"
[[ -z $from ]] || cp --no-preserve=mode "$from"/* "$out"
out=$(cd "$out" && pwd)
cd "$(dirname "$0")/.."
touch "$out/parts.txt"

# The device boundary: here, and nowhere below, a rehearsal differs.
device=cuda workers=$(nproc)
describe=(nvidia-smi)
target=cuda- kernels=(native triton) # of which those are tested that run
selected="cuda-native or cuda-triton or test_several_devices or test_cuda_never_waits or test_triton_pieces"
selected+=" or test_linear_act_triton or test_triton_addresses or the_device"
uses_device="def \w+\(.*\btarget\b|cuda\.is_available\(\)"
files=(tests/ops/test_cuda_graphs.py tests/amp/test_amp_steps.py $(grep -rlE "$uses_device" tests --include="test_*.py"))
sanitizer=(env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 9 --print-limit 20
  --kernel-name-exclude kns=at6native,kns=gemm,kns=cutlass --tool) # all but torch's own and cuBLAS's
tools=(memcheck racecheck synccheck)
step=("step*cuda*1x1e9" "update_scale_*cuda" "overflow_*cuda bf16" "grad_stats*cuda bf16" "unscale_*cuda bf16"
  "step*cuda" "grad_stats*cuda" "unscale_*cuda" "overflow_*cuda")
linear=("linear_act*cuda* 8192x" "linear_dact*cuda* 8192x" "linear_act*cuda" "linear_dact*cuda" "*_mlp*cuda")
ruled=() # all
train=("train*cuda*gpt2" "train*cuda")
tuned=("linear_act*cuda*compile" "*_mlp*cuda*compile" "train*cuda*compile")
if [[ -n $rehearse ]]; then
  device=cpu workers=1
  describe=(true)
  target=cpu- kernels=(reference)
  selected="cpu-reference and huge"
  files=(tests/ops/test_huge.py tests/ops/grads/test_grad_stats.py)
  sanitizer=(env -u) tools=(memcheck) # runs what comes behind the tool's name
  step=("unscale_ cpu-1 fp32 1x2^20")
  linear=("linear_act*bf16 64x768x3072*eager") ruled=(--only "linear_act silu 64x256x1024 bfloat16")
  train=("train cpu*mlp-6x512*default")
  tuned=("update_scale_ cpu-1")
fi

now() { date +%s; }
call_ends=$(($(now) + call))
ends=$call_ends # when what is at work has to be done

# Runs a command for as long as there is left, then interrupts it: what it has measured by then is kept.
limited() {
  local left=$((ends - $(now)))
  ((left > 5)) || return 124
  timeout --signal=INT --kill-after=15 "$left" "$@"
}

# Whether these kernels run here: a library that loads may have been built for other chips.
launches() {
  python3 -c "
import torch, mpkernels
print('kernels:', *mpkernels.backends('adamw_', '$device'))
found_inf, half = (torch.full((), it, device='$device') for it in (0.0, 0.5))
with mpkernels.backend('$1'):
    mpkernels.ops.unscale_([grad := torch.ones(8, device='$device')], found_inf, half)
assert grad.tolist() == [0.5] * 8
print('$1: runs')"
}

build() {
  "${describe[@]}"
  python3 -c 'import sys, torch; print("Python", sys.version, "torch", torch.__version__, "CUDA", torch.version.cuda)'
  python3 -c "
from importlib.util import find_spec
for module in ('pytest', 'hypothesis', 'expecttest', 'numpy', 'triton'):
    find_spec(module) or print('MISSING:', module, 'is not installed; put its wheel into benchmarks/wheels')"
  launches native || { limited python3 setup.py build_ext --inplace && launches native; }
}

# A process that loses the device to a kernel's illegal access ends, and another goes on behind that case.
bench() {
  local code tried
  while true; do
    code=0 tried=$(count_tried)
    limited python3 -m benchmarks --resume --json "$out/results.json" "$@" || code=$?
    ((code == 3 && $(count_tried) > tried)) || return $code
  done
}

count_tried() { { cat "$out/results.json" 2>/dev/null || true; } | grep -cE '"ours us"|"failed, ' || true; }

measure_linear() {
  local code=0
  # Torch, product and pass, Triton: the table of mpkernels/selector/table.py for this chip. Then all linear cases.
  limited python3 -m benchmarks.selector_table "$device" "${ruled[@]}" 2>&1 | tee "$out/rule.txt" || code=$?
  bench --only "${linear[@]}" --without compile || code=$?
  return $code
}

# A process for each file: an illegal access takes CUDA away from all that its process would do afterwards.
run_tests() {
  touch "$out/test.txt"
  if [[ -n $asked ]]; then sed -i '/^PASSED/!d' "$out/test.txt"; else sed -i '/^CUT OFF/d' "$out/test.txt"; fi
  python3 -c "import expecttest" 2>/dev/null || selected="($selected) and not test_opcheck" # which torch makes of it
  local file kernel required=""
  for kernel in "${kernels[@]}"; do ! launches "$kernel" || required+=",$target$kernel"; done
  for file in $(printf '%s\n' "${files[@]}" | awk '!seen[$0]++'); do
    ! grep -qE "^(PASSED|FAILED) $file" "$out/test.txt" || continue
    (($(jobs -rp | wc -l) < (workers < 8 ? workers : 8))) || wait -n || true
    run_file "$file" &
  done
  wait
  cat "$out/test.txt"
  ! grep -q "^CUT OFF" "$out/test.txt" || return 124
  ! grep -q "^FAILED" "$out/test.txt"
}

run_file() {
  local code=0 log part_ends=$ends
  ((ends - $(now) < 200)) || ends=$(($(now) + 200))
  log=$(limited python3 -m pytest -q --no-header --maxfail=5 -p no:cacheprovider "--require=${required#,}" -k "$selected" \
    "$1" 2>&1 | tail -60) || code=$?
  case $code in
    0 | 5) echo "PASSED $1: ${log##*$'\n'}" ;; # 5: it has nothing for a GPU
    124 | 137) if ((ends == part_ends)); then echo "CUT OFF $1"; else echo "FAILED $1: takes longer than 200 s"; fi ;;
    *) printf 'FAILED %s\n%s\n' "$1" "$log" ;;
  esac >>"$out/test.txt"
}

sanitize() {
  local tool code=0
  for tool in "${tools[@]}"; do
    ! grep -q "^PASSED $tool" "$out/sanitize.txt" || continue
    echo "== $tool"
    limited "${sanitizer[@]}" $tool python3 -m benchmarks.every_op "$device" && echo "PASSED $tool" || code=$?
  done
  return $code
}

run_part() {
  case $1 in
    doctor) limited python3 -m mpkernels doctor 2>&1 | tee "$out/doctor.txt" ;;
    step) bench --only "${step[@]}" ;;
    linear) measure_linear ;;
    train) bench --only "${train[@]}" --without compile ;;
    test) run_tests ;;
    sanitize) touch "$out/sanitize.txt" && sanitize 2>&1 | tee -a "$out/sanitize.txt" ;;
    tuned) bench --only "${tuned[@]}" ;;
  esac
}

has_ended() { grep -qE "^$1 (done|failed)" "$out/parts.txt"; }
seconds_of() { awk -v part="$1" '$1 == part { sum += $(NF - 1) } END { print sum + 0 }' "$out/parts.txt"; }

# A part, for so many seconds at most.
turn() {
  local started code=0
  started=$(now)
  ends=$((started + $2 < call_ends ? started + $2 : call_ends))
  ((ends - started >= least)) || return 0
  echo "== $1: $((ends - started)) s at most"
  set +e # or bash would ignore it in all that runs under an ||
  (set -e && run_part "$1")
  code=$?
  set -e
  case $code in
    0) code=done ;;
    124 | 137) code="cut off" ;;
    *) code="failed ($code)" ;;
  esac
  echo "$1 $code after $(($(now) - started)) s" | tee -a "$out/parts.txt"
}

if compgen -G "benchmarks/wheels/*.whl" >/dev/null; then
  python3 -m pip install -q --no-index --no-deps --upgrade --target build/wheels benchmarks/wheels/*.whl
  export PYTHONPATH="$PWD/build/wheels:${PYTHONPATH:-}" PATH="$PWD/build/wheels/bin:$PATH"
fi
ends=$(($(now) + 240))
build 2>&1 | tee "$out/build.txt" || echo "the library is missing: Triton's kernels run"
if [[ -n $asked ]]; then
  sed -i "/^$asked /d" "$out/parts.txt"
  turn "$asked" $most
else
  for part in "${parts[@]}"; do has_ended "$part" || turn "$part" $((share[$part] - $(seconds_of "$part"))); done
  for part in "${parts[@]}"; do has_ended "$part" || turn "$part" $most; done
fi
open=0
for part in "${parts[@]}"; do grep -q "^$part done" "$out/parts.txt" || open=1; done
exit $open
